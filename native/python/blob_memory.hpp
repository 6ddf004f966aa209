// The memory of another object as a buffer: of text and arrays as bytes to send, of a new object to receive into, and
// of what the engine has received. And memory for new objects: that of a long bytes object is used again once the
// program has dropped it, because fresh memory costs a page fault every 4 KiB, which takes longer than receiving 4 KiB.

#pragma once

#include <nanobind/nanobind.h>

#include "base/result_memory.hpp"
#include "base/types.hpp"

namespace unisono {

// _native.BlobMemory. Throws nanobind::python_error.
PyTypeObject* blob_type();

// A buffer of `bytes` at `data`, which `owner` keeps. Takes the reference to `owner`, also if it fails: null, with the
// exception set.
PyObject* make_blob(PyObject* owner, void* data, Py_ssize_t bytes, bool is_writable);

// The object whose memory a BlobMemory is, borrowed; null for any other object.
PyObject* owner_of_blob(PyObject* object);
// Where the memory of a BlobMemory begins.
engine::byte* data_of_blob(PyObject* blob);

// What a blob becomes, and so what it is received into: `array` is memory of any kind. `detached` is what holds several
// values in one piece.
enum class BlobKind : uint8_t { array, bytes, bytearray, ascii, detached };

// UTF-8 of other text is read, as the elements of an array are: memory of any kind will do.
BlobKind kind_of_blob(PyObject* owner);

// Memory of a new object without other references, as a BlobMemory; null with an exception set.
PyObject* memory_for(BlobKind kind, size_t bytes);

// A bytes object that the caller fills before any other code sees it; null with an exception set.
PyObject* new_bytes_to_fill(size_t bytes);

// Memory of a result as a buffer of `nbytes` that may be written to, and that gives it back. Throws
// nanobind::python_error.
nanobind::object memory_object(engine::ResultMemory memory, uint64_t nbytes);

}  // namespace unisono
