// The memory of another object as a buffer: of text and arrays as bytes to send, of a new object to receive into, and
// of what the engine has received.

#pragma once

#include <nanobind/nanobind.h>

#include "base/result_memory.hpp"

namespace unisono {

// _native.BlobMemory. Throws nanobind::python_error.
PyTypeObject* blob_type();

// A buffer of `bytes` at `data`, which `owner` keeps. Takes the reference to `owner`, also if it fails: null, with the
// exception set.
PyObject* make_blob(PyObject* owner, void* data, Py_ssize_t bytes, bool is_writable);

// The object whose memory a BlobMemory is, borrowed; null for any other object.
PyObject* owner_of_blob(PyObject* object);

// Memory of a result as a buffer of `nbytes` that may be written to, and that gives it back. Throws
// nanobind::python_error.
nanobind::object memory_object(engine::ResultMemory memory, uint64_t nbytes);

}  // namespace unisono
