#include <cstring>

#include "python/argument.hpp"
#include "python/codec.hpp"
#include "python/codec_blobs.hpp"
#include "python/codec_keys.hpp"

namespace unisono::codec {
namespace {

bool is_ascii(const byte* data, size_t bytes) {
  uint8_t all = 0;
  for (size_t i = 0; i < bytes; ++i) all |= static_cast<uint8_t>(data[i]);
  return all < 128;
}

// What arrays need to be used where they are: as much as every element of theirs.
constexpr size_t array_alignment = 16;

// Reads a head. Every function that returns an object returns null with an exception set.
class Unpacker {
 public:
  Unpacker(const byte* head, size_t bytes, Blobs& blobs) : at_(head), end_(head + bytes), blobs_(blobs) {}

  PyObject* whole() {
    PyObject* const made = value(0);
    if (made == nullptr) return nullptr;
    if (at_ == end_ && blobs_.are_all_used()) return made;
    Py_DECREF(made);
    return malformed("malformed object: more bytes came than it names");
  }

 private:
  PyObject* malformed(const char* text) {
    if (!PyErr_Occurred()) PyErr_SetString(kinds().protocol_error, text);
    return nullptr;
  }
  PyObject* cut_short() { return malformed("malformed object: it is cut short"); }

  size_t left() const { return static_cast<size_t>(end_ - at_); }
  template <class T>
  bool get(T& number) {
    if (left() < sizeof number) return false;
    std::memcpy(&number, at_, sizeof number);
    at_ += sizeof number;
    return true;
  }
  template <class T>
  bool get_count(size_t& count) {
    T number;
    if (!get(number)) return false;
    count = number;
    return true;
  }
  // A length of which every byte is there.
  template <class T>
  bool get_length(size_t& length) {
    return get_count<T>(length) && length <= left();
  }
  bool get_blob(size_t bytes, Blob& blob) { return blobs_.next(bytes, blob); }

  PyObject* value(int depth);
  PyObject* text(size_t bytes) {
    const char* const data = reinterpret_cast<const char*>(at_);
    at_ += bytes;
    return PyUnicode_DecodeUTF8(data, static_cast<Py_ssize_t>(bytes), nullptr);
  }
  PyObject* bytes(size_t bytes) {
    const char* const data = reinterpret_cast<const char*>(at_);
    at_ += bytes;
    return PyBytes_FromStringAndSize(data, static_cast<Py_ssize_t>(bytes));
  }
  PyObject* blob(Tag tag);
  PyObject* key(int depth);
  template <class T>
  PyObject* sequence(int depth, bool is_list);
  template <class T>
  PyObject* dict(int depth);
  PyObject* array(bool is_blob);
  PyObject* status(int depth);
  PyObject* record(int depth);
  PyObject* unknown_record(int depth);
  PyObject* instance(PyObject* maker, int depth);
  size_t shape_bytes() const;
  PyObject* scalar();
  PyObject* extension(int depth);
  PyObject* only(Tag first, int depth);

  // Takes note of a container's items. Each is at least one byte, and so are those that other containers still await:
  // what is allocated for all of them together is bounded by the bytes that are there.
  template <class T>
  bool open(size_t& count, size_t values_each) {
    if (!get_count<T>(count) || count > left() || count * values_each > left()) return false;
    if (owed_ > left() - count * values_each) return false;
    owed_ += count * values_each;
    return true;
  }

  const byte* at_;
  const byte* end_;
  size_t owed_ = 0;  // values that open containers await
  Blobs& blobs_;
  Keys keys_;
};

PyObject* Unpacker::value(int depth) {
  Tag tag;
  size_t length;
  if (!get(tag)) return cut_short();
  switch (tag) {
    case Tag::none: Py_RETURN_NONE;
    case Tag::no: Py_RETURN_FALSE;
    case Tag::yes: Py_RETURN_TRUE;
    case Tag::int8: {
      std::int8_t number;
      return get(number) ? PyLong_FromLong(number) : cut_short();
    }
    case Tag::int32: {
      std::int32_t number;
      return get(number) ? PyLong_FromLong(number) : cut_short();
    }
    case Tag::int64: {
      std::int64_t number;
      return get(number) ? PyLong_FromLongLong(number) : cut_short();
    }
    case Tag::float64: {
      double number;
      return get(number) ? PyFloat_FromDouble(number) : cut_short();
    }
    case Tag::text: return get_length<uint8_t>(length) ? text(length) : cut_short();
    case Tag::text_long: return get_length<uint64_t>(length) ? text(length) : cut_short();
    case Tag::bytes: return get_length<uint8_t>(length) ? bytes(length) : cut_short();
    case Tag::bytes_long: return get_length<uint64_t>(length) ? bytes(length) : cut_short();
    case Tag::bytearray: {
      if (!get_length<uint64_t>(length)) return cut_short();
      const char* const data = reinterpret_cast<const char*>(at_);
      at_ += length;
      return PyByteArray_FromStringAndSize(data, static_cast<Py_ssize_t>(length));
    }
    case Tag::text_blob:
    case Tag::bytes_blob:
    case Tag::bytearray_blob: return blob(tag);
    case Tag::list: return sequence<uint8_t>(depth, true);
    case Tag::list_long: return sequence<uint64_t>(depth, true);
    case Tag::tuple: return sequence<uint8_t>(depth, false);
    case Tag::tuple_long: return sequence<uint64_t>(depth, false);
    case Tag::dict: return dict<uint8_t>(depth);
    case Tag::dict_long: return dict<uint64_t>(depth);
    case Tag::array: return array(false);
    case Tag::array_blob: return array(true);
    case Tag::status: return status(depth);
    case Tag::record: return record(depth);
    case Tag::extension: return extension(depth);
  }
  return malformed("malformed object: an unknown tag");
}

PyObject* Unpacker::blob(Tag tag) {
  uint64_t length;
  Blob blob;
  if (!get(length)) return cut_short();
  if (!get_blob(length, blob)) return malformed("malformed object: memory of another length than it names");
  const char* const data = reinterpret_cast<const char*>(blob.data);
  const auto bytes = static_cast<Py_ssize_t>(length);
  PyObject* const whole = blob.whole;
  switch (tag) {
    case Tag::text_blob:
      if (whole == nullptr || !PyUnicode_CheckExact(whole)) return PyUnicode_DecodeUTF8(data, bytes, nullptr);
      return is_ascii(blob.data, length) ? Py_NewRef(whole) : malformed("malformed object: text that is not ASCII");
    case Tag::bytes_blob:
      if (whole != nullptr && PyBytes_CheckExact(whole)) return Py_NewRef(whole);
      return PyBytes_FromStringAndSize(data, bytes);
    default:
      if (whole != nullptr && PyByteArray_CheckExact(whole)) return Py_NewRef(whole);
      return PyByteArray_FromStringAndSize(data, bytes);
  }
}

template <class T>
PyObject* Unpacker::sequence(int depth, bool is_list) {
  size_t count;
  if (depth > depth_max) return malformed("malformed object: nested too deeply");
  if (!open<T>(count, 1)) return malformed("malformed object: a sequence longer than its bytes");
  const auto length = static_cast<Py_ssize_t>(count);
  PyObject* const made = is_list ? PyList_New(length) : PyTuple_New(length);
  if (made == nullptr) return nullptr;
  PyObject** const items =
      is_list ? reinterpret_cast<PyListObject*>(made)->ob_item : reinterpret_cast<PyTupleObject*>(made)->ob_item;
  for (Py_ssize_t i = 0; i < length; ++i) {
    --owed_;
    PyObject* const item = value(depth + 1);
    if (item == nullptr) {
      Py_DECREF(made);
      return nullptr;
    }
    items[i] = item;
  }
  return made;
}

PyObject* Unpacker::key(int depth) {
  constexpr size_t key_bytes_max = 32;
  if (left() >= 2 && static_cast<Tag>(at_[0]) == Tag::text) {
    const auto length = static_cast<size_t>(at_[1]);
    if (length <= key_bytes_max && length <= left() - 2) {
      const byte* const data = at_ + 2;
      at_ += 2 + length;
      return keys_.get(data, length);
    }
  }
  return value(depth);
}

template <class T>
PyObject* Unpacker::dict(int depth) {
  size_t count;
  if (depth > depth_max) return malformed("malformed object: nested too deeply");
  if (!open<T>(count, 2)) return malformed("malformed object: a dict longer than its bytes");
  PyObject* const made = PyDict_New();
  for (size_t i = 0; made != nullptr && i < count; ++i) {
    --owed_;
    PyObject* const name = key(depth + 1);
    --owed_;
    PyObject* const item = name != nullptr ? value(depth + 1) : nullptr;
    const bool is_done = item != nullptr && PyDict_SetItem(made, name, item) == 0;
    Py_XDECREF(name);
    Py_XDECREF(item);
    if (is_done) continue;
    Py_DECREF(made);
    return nullptr;
  }
  return made;
}

PyObject* Unpacker::array(bool is_blob) {
  uint8_t code, dimensions;
  if (!get(code) || !get(dimensions)) return cut_short();
  if (code >= dtype_count || kinds().dtypes[code] == nullptr)
    return malformed("malformed object: an array of an unknown type");
  if (dimensions > dimensions_max || 8 * static_cast<size_t>(dimensions) > left())
    return malformed("malformed object: an array with a bad shape");
  size_t bytes = itemsizes[code];
  bool is_too_long = false;
  PyObject* const shape = PyTuple_New(dimensions);
  if (shape == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < dimensions; ++i) {
    uint64_t length = 0;
    get(length);
    is_too_long |= length > static_cast<uint64_t>(PY_SSIZE_T_MAX) || __builtin_mul_overflow(bytes, length, &bytes);
    PyObject* const number = PyLong_FromUnsignedLongLong(length);
    if (number == nullptr) {
      Py_DECREF(shape);
      return nullptr;
    }
    PyTuple_SET_ITEM(shape, i, number);
  }
  Blob blob;
  const bool is_there = !is_too_long && (is_blob ? get_blob(bytes, blob) : bytes <= left());
  PyObject* made = nullptr;
  if (!is_there) {
    malformed("malformed object: an array of the wrong length");
  } else if (is_blob && blob.is_writable && reinterpret_cast<uintptr_t>(blob.data) % array_alignment == 0) {
    PyObject* const offset = PyLong_FromSize_t(blob.offset);
    PyObject* const arguments[] = {shape, kinds().dtypes[code], blob.owner, offset};
    made = offset != nullptr ? PyObject_Vectorcall(kinds().array_type, arguments, 4, nullptr) : nullptr;
    Py_XDECREF(offset);
  } else {
    PyObject* const arguments[] = {shape, kinds().dtypes[code]};
    made = PyObject_Vectorcall(kinds().empty, arguments, 2, nullptr);
    if (made != nullptr && bytes != 0) std::memcpy(as_array(made).data, is_blob ? blob.data : at_, bytes);
    if (!is_blob) at_ += bytes;
  }
  Py_DECREF(shape);
  return made;
}

PyObject* Unpacker::status(int depth) {
  if (depth > depth_max) return malformed("malformed object: nested too deeply");
  PyObject* const fields = PyTuple_New(3);
  for (Py_ssize_t i = 0; fields != nullptr && i < 3; ++i) {
    PyObject* const item = value(depth + 1);
    if (item == nullptr) {
      Py_DECREF(fields);
      return nullptr;
    }
    PyTuple_SET_ITEM(fields, i, item);
  }
  if (fields == nullptr) return nullptr;
  PyObject* const arguments = PyTuple_Pack(1, fields);
  auto* const type = reinterpret_cast<PyTypeObject*>(kinds().status_type);
  PyObject* const made = arguments != nullptr ? PyTuple_Type.tp_new(type, arguments, nullptr) : nullptr;
  Py_XDECREF(arguments);
  Py_DECREF(fields);
  return made;
}

// A value of one kind: `first` is the short form of its tag, and the long form follows it.
PyObject* Unpacker::only(Tag first, int depth) {
  const auto tag = left() != 0 ? static_cast<uint8_t>(*at_) : uint8_t{255};
  if (tag != static_cast<uint8_t>(first) && tag != static_cast<uint8_t>(first) + 1)
    return malformed("malformed object: a record of other parts");
  return value(depth);
}

PyObject* Unpacker::record(int depth) {
  if (depth > depth_max) return malformed("malformed object: nested too deeply");
  const size_t bytes = shape_bytes();
  PyObject* const shape = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(at_), static_cast<Py_ssize_t>(bytes));
  if (shape == nullptr) return nullptr;
  PyObject* const maker = Py_XNewRef(PyDict_GetItemWithError(kinds().makers, shape));
  Py_DECREF(shape);
  if (maker == nullptr) return PyErr_Occurred() ? nullptr : unknown_record(depth);
  at_ += bytes;
  PyObject* const made = instance(maker, depth);
  Py_DECREF(maker);
  return made;
}

// The length of a record's name and fields, all of them texts; 0 if they are anything else.
size_t Unpacker::shape_bytes() const {
  const byte* at = at_;
  const auto skip_count = [&](Tag tag, uint64_t& count) {
    const auto left = static_cast<size_t>(end_ - at);
    if (left >= 2 && *at == static_cast<byte>(tag)) {
      count = static_cast<uint8_t>(at[1]);
      at += 2;
      return true;
    }
    if (left < 9 || static_cast<uint8_t>(*at) != static_cast<uint8_t>(tag) + 1) return false;
    std::memcpy(&count, at + 1, sizeof count);
    at += 9;
    return true;
  };
  const auto skip_text = [&] {
    uint64_t bytes;
    if (!skip_count(Tag::text, bytes) || bytes > static_cast<size_t>(end_ - at)) return false;
    at += bytes;
    return true;
  };
  uint64_t fields;
  if (!skip_text() || !skip_count(Tag::tuple, fields)) return 0;
  for (; fields != 0; --fields)
    if (!skip_text()) return 0;
  return static_cast<size_t>(at - at_);
}

PyObject* Unpacker::instance(PyObject* maker, int depth) {
  PyObject* const cls = PyTuple_GET_ITEM(maker, 1);
  PyObject* const fields = PyTuple_GET_ITEM(maker, 2);
  const auto how = static_cast<Instance>(PyLong_AsLong(PyTuple_GET_ITEM(maker, 0)));
  Tag tag;
  if (!get(tag)) return cut_short();
  if (tag != Tag::list && tag != Tag::list_long) return malformed("malformed object: a record of other parts");
  PyObject* const values = tag == Tag::list ? sequence<uint8_t>(depth, false) : sequence<uint64_t>(depth, false);
  if (values == nullptr) return nullptr;
  PyObject* made = nullptr;
  if (PyTuple_GET_SIZE(values) != PyTuple_GET_SIZE(fields)) {
    malformed("malformed object: a record of more or fewer values than fields");
  } else if (how == Instance::structure) {
    made = PyObject_Vectorcall(cls, reinterpret_cast<PyTupleObject*>(values)->ob_item, 0, fields);
  } else if (how == Instance::tuple) {
    PyObject* const arguments = PyTuple_Pack(1, values);
    if (arguments != nullptr) made = PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(cls), arguments, nullptr);
    Py_XDECREF(arguments);
  } else {
    // Fields are sent, not constructor arguments: __init__ may compute or check fields.
    made = PyObject_CallOneArg(kinds().object_new, cls);
    for (Py_ssize_t i = 0; made != nullptr && i < PyTuple_GET_SIZE(values); ++i)
      if (PyObject_GenericSetAttr(made, PyTuple_GET_ITEM(fields, i), PyTuple_GET_ITEM(values, i)) != 0) Py_CLEAR(made);
  }
  Py_DECREF(values);
  return made;
}

// Python says what is wrong with it.
PyObject* Unpacker::unknown_record(int depth) {
  PyObject* const parts = PyTuple_New(3);
  if (parts == nullptr) return nullptr;
  constexpr Tag tags[] = {Tag::text, Tag::tuple, Tag::list};
  PyObject* made = nullptr;
  Py_ssize_t i = 0;
  for (; i < 3; ++i) {
    PyObject* const part = only(tags[i], depth);
    if (part == nullptr) break;
    PyTuple_SET_ITEM(parts, i, part);
  }
  if (i == 3) {
    PyObject* const arguments[] = {Py_None, parts};
    made = PyObject_Vectorcall(kinds().rebuild, arguments, 2, nullptr);
  }
  Py_DECREF(parts);
  return made;
}

// A scalar as Packer makes it; null without an exception: it is anything else.
PyObject* Unpacker::scalar() {
  const byte before[] = {static_cast<byte>(Tag::tuple), static_cast<byte>(2), static_cast<byte>(Tag::int8)};
  constexpr size_t head_bytes = sizeof before + 3;
  if (left() < head_bytes || std::memcmp(at_, before, sizeof before) != 0) return nullptr;
  const auto code = static_cast<uint8_t>(at_[3]);
  if (code >= dtype_count || kinds().one_element[code] == nullptr) return nullptr;
  const size_t bytes = itemsizes[code];
  if (at_[4] != static_cast<byte>(Tag::bytes) || static_cast<uint8_t>(at_[5]) != bytes || left() < head_bytes + bytes)
    return nullptr;
  std::memcpy(as_array(kinds().one_element[code]).data, at_ + head_bytes, bytes);
  at_ += head_bytes + bytes;
  return PySequence_GetItem(kinds().one_element[code], 0);
}

PyObject* Unpacker::extension(int depth) {
  uint8_t code;
  if (depth > depth_max) return malformed("malformed object: nested too deeply");
  if (!get(code) || left() == 0) return cut_short();
  if (code == kinds().scalar_extension)
    if (PyObject* const made = scalar(); made != nullptr || PyErr_Occurred()) return made;
  const auto next = static_cast<Tag>(*at_);
  if (next == Tag::extension || next == Tag::record) return malformed("malformed object: an extension of another");
  PyObject* const inner = value(depth);
  PyObject* const number = inner != nullptr ? PyLong_FromLong(code) : nullptr;
  PyObject* made = nullptr;
  if (number != nullptr) {
    PyObject* const arguments[] = {number, inner};
    made = PyObject_Vectorcall(kinds().rebuild, arguments, 2, nullptr);
  }
  Py_XDECREF(number);
  Py_XDECREF(inner);
  return made;
}

// What a value is made of may refuse it: a key that cannot be hashed, text that is no UTF-8, a registered class.
PyObject* checked(PyObject* made) {
  if (made != nullptr || PyErr_ExceptionMatches(kinds().protocol_error)) return made;
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (trace != nullptr) PyException_SetTraceback(error, trace);
  PyObject* const raised = PyObject_CallOneArg(kinds().malformed, error);
  if (raised != nullptr) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised)), raised);
  Py_XDECREF(raised);
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(trace);
  return nullptr;
}

// The length of prefix and head; 0, with the exception set, if it cannot be.
size_t head_length(const byte* data, size_t bytes) {
  if (kinds().protocol_error == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "import unisono.core.codec first");
    return 0;
  }
  if (const size_t length = head_bytes_at(data, bytes); length != 0) return length;
  PyErr_SetString(kinds().protocol_error, "malformed object: a bad prefix");
  return 0;
}

}  // namespace

size_t head_bytes_at(const byte* data, size_t bytes) {
  uint64_t prefix = 0;
  if (bytes > prefix_bytes) std::memcpy(&prefix, data, sizeof prefix);
  const size_t length = prefix >> magic_bits;
  return (prefix & ((1 << magic_bits) - 1)) == magic && length > prefix_bytes && length <= bytes ? length : 0;
}

PyObject* unpack(const byte* data, size_t bytes, PyObject* memory) {
  const size_t length = head_length(data, bytes);
  if (length == 0) return nullptr;
  BlobsInOnePiece blobs(data, bytes, length, memory);
  return checked(Unpacker(data + prefix_bytes, length - prefix_bytes, blobs).whole());
}

namespace {

// A head without anything behind it, and the blobs beside it.
PyObject* unpack_head(const byte* head, size_t bytes, Blobs& blobs) {
  const size_t length = head_length(head, bytes);
  if (length == 0) return nullptr;
  if (length != bytes) {
    PyErr_SetString(kinds().protocol_error, "malformed object: more bytes came than it names");
    return nullptr;
  }
  return checked(Unpacker(head + prefix_bytes, bytes - prefix_bytes, blobs).whole());
}

}  // namespace

PyObject* unpack_parts(const byte* head, size_t bytes, PyObject* const* owners, size_t count) {
  BlobsInParts blobs(owners, count);
  return unpack_head(head, bytes, blobs);
}

PyObject* unpack_beside(const byte* head, size_t bytes, const byte* data, size_t blob_bytes, PyObject* memory) {
  BlobsInOnePiece blobs(data, blob_bytes, 0, memory);
  return unpack_head(head, bytes, blobs);
}

}  // namespace unisono::codec
