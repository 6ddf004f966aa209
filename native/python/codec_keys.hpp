// The short keys of dicts that an object was unpacked with.

#pragma once

#include <cstring>

#include "python/codec.hpp"

namespace unisono::codec {

// Short keys of dicts, so that a list of dicts with the same keys makes each key once. Good for one call.
class Keys {
 public:
  ~Keys() {
    for (PyObject* key : keys_) Py_XDECREF(key);
  }

  // Null if there is no such text, with the exception set.
  PyObject* get(const byte* data, size_t bytes) {
    uint64_t first = 0, last = 0;
    if (bytes >= 8) {
      std::memcpy(&first, data, 8);
      std::memcpy(&last, data + bytes - 8, 8);
    } else {
      std::memcpy(&first, data, bytes);
    }
    PyObject*& kept = keys_[((first ^ (last << 1) ^ bytes) * 0x9E3779B97F4A7C15u) >> 58];
    if (kept != nullptr && static_cast<size_t>(PyUnicode_GET_LENGTH(kept)) == bytes &&
        std::memcmp(PyUnicode_1BYTE_DATA(kept), data, bytes) == 0)
      return Py_NewRef(kept);
    PyObject* const made =
        PyUnicode_DecodeUTF8(reinterpret_cast<const char*>(data), static_cast<Py_ssize_t>(bytes), nullptr);
    if (made != nullptr && PyUnicode_IS_COMPACT_ASCII(made)) Py_XSETREF(kept, Py_NewRef(made));
    return made;
  }

 private:
  PyObject* keys_[64] = {nullptr};
};

}  // namespace unisono::codec
