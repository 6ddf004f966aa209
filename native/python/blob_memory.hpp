// The memory of another object as a buffer: of text and arrays as bytes to send, of a new object to receive into, and
// of what the engine has received.

#pragma once

#include <Python.h>

namespace unisono {

// _native.BlobMemory. Throws nanobind::python_error.
PyTypeObject* blob_type();

// A buffer of `bytes` at `data`, which `owner` keeps. Takes the reference to `owner`, also if it fails: null, with the
// exception set.
PyObject* make_blob(PyObject* owner, void* data, Py_ssize_t bytes, bool is_writable);

}  // namespace unisono
