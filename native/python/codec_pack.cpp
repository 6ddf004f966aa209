#include <cstdio>
#include <cstring>
#include <limits>
#include <new>

#include "python/argument.hpp"
#include "python/blob_memory.hpp"
#include "python/codec.hpp"

namespace unisono::codec {
namespace {

bool is_type(PyObject* value, PyObject* type) { return reinterpret_cast<PyObject*>(Py_TYPE(value)) == type; }

}  // namespace

Kinds& kinds() {
  static Kinds known;
  return known;
}

Packer::~Packer() {
  for (const Blob& blob : blobs_) Py_DECREF(blob.owner);
  Py_XDECREF(grown_);
  Py_XDECREF(steps_);
}

bool Packer::pack(PyObject* given, PyObject* path_text) {
  if (kinds().reduce == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "import unisono.core.codec first");
    return false;
  }
  if (value(given, 0)) return true;
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (trace != nullptr) PyException_SetTraceback(error, trace);
  PyObject* const arguments[] = {error, steps_ != nullptr ? steps_ : Py_None,
                                 path_text != nullptr ? path_text : Py_None};
  PyObject* const refusal = PyObject_Vectorcall(kinds().refusal, arguments, 3, nullptr);
  if (refusal != nullptr) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(refusal)), refusal);
  Py_XDECREF(refusal);
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(trace);
  return false;
}

// -- the result -------------------------------------------------------------------------------------------------------

size_t Packer::size() const { return size_from(used_); }

size_t Packer::size_from(size_t end) const {
  for (const Blob& blob : blobs_) end = aligned(aligned(end) + blob.bytes);
  return end;
}

void Packer::copy_head_to(byte* target) const {
  const uint64_t prefix = static_cast<uint64_t>(used_) << magic_bits | magic;
  std::memcpy(target, &prefix, sizeof prefix);
  std::memcpy(target + prefix_bytes, at_ + prefix_bytes, used_ - prefix_bytes);
}

void Packer::copy_to(byte* target) const {
  copy_head_to(target);
  copy_blobs_from(used_, target);
}

void Packer::copy_blobs_from(size_t end, byte* target) const {
  const auto pad = [&] {
    std::memset(target + end, 0, aligned(end) - end);
    end = aligned(end);
  };
  for (const Blob& blob : blobs_) {
    pad();
    std::memcpy(target + end, blob.data, blob.bytes);
    end += blob.bytes;
    pad();
  }
}

PyObject* Packer::to_bytes() {
  if (blobs_.empty()) return head_to_bytes();
  PyObject* const made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size()));
  if (made != nullptr) copy_to(reinterpret_cast<byte*>(PyBytes_AS_STRING(made)));
  return made;
}

PyObject* Packer::head_to_bytes() {
  const uint64_t prefix = static_cast<uint64_t>(used_) << magic_bits | magic;
  std::memcpy(at_, &prefix, sizeof prefix);
  const auto length = static_cast<Py_ssize_t>(used_);
  if (grown_ == nullptr) return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(at_), length);
  PyObject* made = grown_;
  grown_ = nullptr;
  at_ = first_;
  if (_PyBytes_Resize(&made, length) != 0) return nullptr;
  return made;
}

PyObject* view_of(const Packer::Blob& blob) {
  if (PyMemoryView_Check(blob.owner)) {
    const Py_buffer& view = *PyMemoryView_GET_BUFFER(blob.owner);
    const bool is_plain = view.ndim == 1 && (view.format == nullptr || std::strcmp(view.format, "B") == 0);
    if (is_plain && PyByteArray_CheckExact(view.obj)) return Py_NewRef(blob.owner);
  }
  if (PyBytes_CheckExact(blob.owner)) return PyMemoryView_FromObject(blob.owner);
  PyObject* const memory =
      make_blob(Py_NewRef(blob.owner), const_cast<byte*>(blob.data), static_cast<Py_ssize_t>(blob.bytes), false);
  PyObject* const made = memory != nullptr ? PyMemoryView_FromObject(memory) : nullptr;
  Py_XDECREF(memory);
  return made;
}

// -- memory of the head -----------------------------------------------------------------------------------------------

bool Packer::grow(size_t bytes) {
  constexpr size_t largest = std::numeric_limits<Py_ssize_t>::max() / 4;
  if (bytes > largest || used_ > largest) {
    PyErr_NoMemory();
    return false;
  }
  const size_t wanted = used_ + bytes, doubled = 2 * capacity_, capacity = wanted > doubled ? wanted : doubled;
  if (grown_ == nullptr) {
    grown_ = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(capacity));
    if (grown_ != nullptr) std::memcpy(PyBytes_AS_STRING(grown_), first_, used_);
  } else {
    _PyBytes_Resize(&grown_, static_cast<Py_ssize_t>(capacity));  // null, with the exception, if it fails
  }
  if (grown_ == nullptr) {
    at_ = first_;
    used_ = prefix_bytes;
    capacity_ = sizeof first_;
    return false;
  }
  at_ = reinterpret_cast<byte*>(PyBytes_AS_STRING(grown_));
  capacity_ = capacity;
  return true;
}

void Packer::put(const void* data, size_t bytes) {
  std::memcpy(at_ + used_, data, bytes);
  used_ += bytes;
}

// A tag and a count: a u8 after the tag, a u64 after the one that follows it.
bool Packer::count(Tag tag, size_t count) {
  if (!reserve(9)) return false;
  if (count < 256) {
    put(tag);
    put(static_cast<uint8_t>(count));
  } else {
    put(static_cast<Tag>(static_cast<uint8_t>(tag) + 1));
    put(static_cast<uint64_t>(count));
  }
  return true;
}

bool Packer::blob(PyObject* owner, const void* data, size_t bytes) {
  try {
    blobs_.push_back({static_cast<const byte*>(data), bytes, owner});
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return false;
  }
  Py_INCREF(owner);
  return true;
}

// -- values -----------------------------------------------------------------------------------------------------------

bool Packer::value(PyObject* given, int depth) {
  PyTypeObject* const type = Py_TYPE(given);
  if (type == &PyUnicode_Type) return text(given);
  if (type == &PyLong_Type) return integer(given, depth);
  if (type == &PyFloat_Type) {
    if (!reserve(9)) return false;
    put(Tag::float64);
    put(PyFloat_AS_DOUBLE(given));
    return true;
  }
  if (type == &PyDict_Type) return dict(given, depth);
  if (type == &PyList_Type) return sequence(given, depth, Tag::list);
  if (type == &PyTuple_Type) return sequence(given, depth, Tag::tuple);
  if (given == Py_None || type == &PyBool_Type) {
    if (!reserve(1)) return false;
    put(given == Py_None ? Tag::none : given == Py_True ? Tag::yes : Tag::no);
    return true;
  }
  if (type == &PyBytes_Type)
    return memory(given, PyBytes_AS_STRING(given), static_cast<size_t>(PyBytes_GET_SIZE(given)), Tag::bytes,
                  Tag::bytes_long, Tag::bytes_blob);
  if (is_type(given, kinds().array_type)) return array(given, depth);
  if (type == &PyByteArray_Type) return shared_memory(given);
  if (type == &PyMemoryView_Type && PyBuffer_IsContiguous(PyMemoryView_GET_BUFFER(given), 'C'))
    return shared_memory(given);
  if (is_type(given, kinds().status_type) && PyTuple_GET_SIZE(given) == 3) return status(given, depth);
  return rare(given, depth);
}

bool Packer::integer(PyObject* given, int depth) {
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(given, &overflow);
  if (overflow != 0) return rare(given, depth);
  if (!reserve(9)) return false;
  if (number >= -128 && number < 128) {
    put(Tag::int8);
    put(static_cast<std::int8_t>(number));
  } else if (number >= std::numeric_limits<std::int32_t>::min() && number <= std::numeric_limits<std::int32_t>::max()) {
    put(Tag::int32);
    put(static_cast<std::int32_t>(number));
  } else {
    put(Tag::int64);
    put(static_cast<std::int64_t>(number));
  }
  return true;
}

bool Packer::text(PyObject* given) {
  Py_ssize_t length = 0;
  const char* const data = PyUnicode_AsUTF8AndSize(given, &length);  // no copy for ASCII; else Python keeps it
  if (data == nullptr) return false;
  return memory(given, data, static_cast<size_t>(length), Tag::text, Tag::text_long, Tag::text_blob);
}

// Bytes that nothing can change or free while `owner` lives.
bool Packer::memory(PyObject* owner, const void* data, size_t bytes, Tag short_tag, Tag long_tag, Tag blob_tag) {
  const bool is_blob = bytes >= blob_bytes_;
  if (!reserve(9 + (is_blob ? 0 : bytes))) return false;
  if (bytes < 256 && short_tag != long_tag) {
    put(short_tag);
    put(static_cast<uint8_t>(bytes));
  } else {
    put(is_blob ? blob_tag : long_tag);
    put(static_cast<uint64_t>(bytes));
  }
  if (is_blob) return blob(owner, data, bytes);
  put(data, bytes);
  return true;
}

// A bytearray or a contiguous memoryview. A view of it keeps the memory where it is.
bool Packer::shared_memory(PyObject* given) {
  PyObject* const view = PyMemoryView_FromObject(given);
  if (view == nullptr) return false;
  const Py_buffer& buffer = *PyMemoryView_GET_BUFFER(view);
  const bool is_done =
      memory(view, buffer.buf, static_cast<size_t>(buffer.len), Tag::bytearray, Tag::bytearray, Tag::bytearray_blob);
  Py_DECREF(view);
  return is_done;
}

bool Packer::is_too_deep(int depth) {
  if (depth <= depth_max) return false;
  Py_XDECREF(PyObject_CallNoArgs(kinds().too_deep));
  return true;
}

// A list or a tuple. Python code that runs for one of its items may change a list.
bool Packer::sequence(PyObject* given, int depth, Tag tag) {
  if (is_too_deep(depth)) return false;
  const Py_ssize_t length = Py_SIZE(given);
  if (!count(tag, static_cast<size_t>(length))) return false;
  const bool is_list = tag == Tag::list;
  for (Py_ssize_t i = 0; i < length; ++i) {
    if (is_list && Py_SIZE(given) != length) {
      PyErr_SetString(PyExc_RuntimeError, "a list changed its length while it was packed");
      return false;
    }
    PyObject* const item = is_list ? PyList_GET_ITEM(given, i) : PyTuple_GET_ITEM(given, i);
    Py_INCREF(item);
    const bool is_done = value(item, depth + 1);
    Py_DECREF(item);
    if (!is_done) return failed_at_index(i);
  }
  return true;
}

bool Packer::dict(PyObject* given, int depth) {
  if (is_too_deep(depth)) return false;
  const Py_ssize_t length = PyDict_GET_SIZE(given);
  if (!count(Tag::dict, static_cast<size_t>(length))) return false;
  Py_ssize_t at = 0, seen = 0;
  PyObject *key, *item;
  while (PyDict_Next(given, &at, &key, &item)) {
    if (++seen > length || PyDict_GET_SIZE(given) != length) break;
    Py_INCREF(key);
    Py_INCREF(item);
    bool is_done = value(key, depth + 1);
    if (!is_done) {
      failed_at(".keys()", nullptr);
    } else if (!(is_done = value(item, depth + 1))) {
      failed_at("[%R]", key);
    }
    Py_DECREF(key);
    Py_DECREF(item);
    if (!is_done) return false;
  }
  if (seen == length && PyDict_GET_SIZE(given) == length) return true;
  PyErr_SetString(PyExc_RuntimeError, "dictionary changed size during iteration");
  return false;
}

bool Packer::array(PyObject* given, int depth) {
  const ArrayObject& array = as_array(given);
  size_t code = 0;
  while (code < dtype_count && array.descr != kinds().dtypes[code]) ++code;
  if (code == dtype_count || !(array.flags & is_contiguous) || array.nd > dimensions_max) return rare(given, depth);
  size_t bytes = itemsizes[code];
  for (int i = 0; i < array.nd; ++i) bytes *= static_cast<size_t>(array.dimensions[i]);
  const bool is_blob = bytes >= blob_bytes_;
  const auto dimensions = static_cast<size_t>(array.nd);
  if (!reserve(3 + 8 * dimensions + (is_blob ? 0 : bytes))) return false;
  put(is_blob ? Tag::array_blob : Tag::array);
  put(static_cast<uint8_t>(code));
  put(static_cast<uint8_t>(dimensions));
  if (dimensions != 0) put(array.dimensions, 8 * dimensions);  // else NumPy has none
  if (is_blob) return blob(given, array.data, bytes);
  put(array.data, bytes);
  return true;
}

bool Packer::status(PyObject* given, int depth) {
  if (is_too_deep(depth)) return false;
  if (!reserve(1)) return false;
  put(Tag::status);
  for (Py_ssize_t i = 0; i < 3; ++i)
    if (!value(PyTuple_GET_ITEM(given, i), depth + 1)) return failed_at_index(i);
  return true;
}

// -- what Python must look at -----------------------------------------------------------------------------------------

bool Packer::rare(PyObject* given, int depth) {
  if (is_too_deep(depth)) return false;
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(given));
  if (PyObject* const known = PyDict_GetItemWithError(kinds().records, type)) return record(given, known, depth);
  if (PyObject* const known = PyDict_GetItemWithError(kinds().scalars, type)) return scalar(given, known);
  if (PyErr_Occurred()) return false;
  PyObject* const reduced = PyObject_CallOneArg(kinds().reduce, given);
  if (reduced == nullptr) return false;
  bool is_done = false;
  if (!PyTuple_CheckExact(reduced) || PyTuple_GET_SIZE(reduced) != 2) {
    PyErr_SetString(PyExc_TypeError, "reduce returns (code, value)");
  } else if (PyTuple_GET_ITEM(reduced, 0) == Py_None) {
    is_done = value(PyTuple_GET_ITEM(reduced, 1), depth);
  } else {
    const long code = PyLong_AsLong(PyTuple_GET_ITEM(reduced, 0));
    if (!(code == -1 && PyErr_Occurred()) && reserve(2)) {
      put(Tag::extension);
      put(static_cast<uint8_t>(code));
      is_done = value(PyTuple_GET_ITEM(reduced, 1), depth);
    }
  }
  Py_DECREF(reduced);
  return is_done;
}

// An instance of a registered class.
bool Packer::record(PyObject* given, PyObject* known, int depth) {
  PyObject* const shape = PyTuple_GET_ITEM(known, 0);
  PyObject* const fields = Py_NewRef(PyTuple_GET_ITEM(known, 1));  // Python code of the instance may register anew
  const auto shape_bytes = static_cast<size_t>(PyBytes_GET_SIZE(shape));
  const Py_ssize_t length = PyTuple_GET_SIZE(fields);
  bool is_done = reserve(1 + shape_bytes);
  if (is_done) {
    put(Tag::record);
    put(PyBytes_AS_STRING(shape), shape_bytes);
    is_done = count(Tag::list, static_cast<size_t>(length));
  }
  for (Py_ssize_t i = 0; is_done && i < length; ++i) {
    PyObject* const item = PyObject_GetAttr(given, PyTuple_GET_ITEM(fields, i));
    is_done = item != nullptr && value(item, depth + 1);
    Py_XDECREF(item);
    if (!is_done) failed_at(".%U", PyTuple_GET_ITEM(fields, i));
  }
  Py_DECREF(fields);
  return is_done;
}

// A scalar of NumPy: an extension of (code of the dtype, bytes).
bool Packer::scalar(PyObject* given, PyObject* known) {
  const auto code = static_cast<uint8_t>(PyLong_AsLong(known));
  Py_buffer view;
  if (PyObject_GetBuffer(given, &view, PyBUF_SIMPLE) != 0) return false;
  const auto bytes = static_cast<size_t>(view.len);
  const bool is_done = bytes == itemsizes[code] && reserve(8 + bytes);
  if (is_done) {
    put(Tag::extension);
    put(kinds().scalar_extension);
    put(Tag::tuple);
    put(uint8_t{2});
    put(Tag::int8);
    put(code);
    put(Tag::bytes);
    put(static_cast<uint8_t>(bytes));
    put(view.buf, bytes);
  }
  PyBuffer_Release(&view);
  if (!is_done && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "a scalar of another length than its dtype");
  return is_done;
}

// -- where it failed --------------------------------------------------------------------------------------------------

bool Packer::failed_at_index(Py_ssize_t index) {
  char step[32];
  std::snprintf(step, sizeof step, "[%zd]", index);
  return failed_at(step, nullptr);
}

// Notes a step to the failed part; always false. A step without a name is left out.
bool Packer::failed_at(const char* format, PyObject* what) {
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  if (steps_ == nullptr) steps_ = PyList_New(0);
  PyObject* const step = what == nullptr ? PyUnicode_FromString(format) : PyUnicode_FromFormat(format, what);
  if (steps_ == nullptr || step == nullptr || PyList_Append(steps_, step) != 0) PyErr_Clear();
  Py_XDECREF(step);
  PyErr_Restore(type, error, trace);
  return false;
}

}  // namespace unisono::codec
