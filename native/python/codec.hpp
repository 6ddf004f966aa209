// The typed codec: plain data and arrays to bytes and back. This file is the home of the byte layout.
//
// Packed, in one piece:  prefix u64 | head | padding | blob | padding | blob | padding ...
// In parts:              prefix u64 | head, and the blobs beside it, each in memory of its own
//
// The prefix is the magic number in its low 16 bits and the length of prefix and head above. The head is one value: a
// tag (Tag below) and what the tag says, numbers in little-endian order. Bytes, text and arrays of at least
// `blob_bytes_min` are *blobs*: the head holds their kind and length, and their bytes follow the head in the order in
// which it names them, each at a multiple of 64 bytes from the start, so that an array can be used where it arrived.
// What has blobs ends at such a multiple, too, so that this is true of several objects in a row.
//
// Knows the kinds that nearly all values consist of, by their exact types. Every other value is given to Python once
// (Kinds::reduce), which returns a plain value in its place or an extension: a code and a plain value; Kinds::rebuild
// makes the value from these again. Nothing is imported by a name from the bytes.
//
// Bytes from others are never trusted: a length is compared with the bytes that are there before memory is taken, a
// value takes at most some 60 times the memory of its bytes, nesting is bounded, and whatever Packer does not write is
// a ProtocolError.

#pragma once

#include <Python.h>

#include <bit>
#include <vector>

#include "base/types.hpp"
#include "kernels/kernels.hpp"

namespace unisono::codec {

using engine::byte;
using std::size_t;
using std::uint64_t;
using std::uint8_t;

static_assert(std::endian::native == std::endian::little, "numbers are copied as they lie in memory");

// A length or count of a container is a u8; of one that is `_long`, a u64.
enum class Tag : uint8_t {
  none,
  no,
  yes,
  int8,
  int32,
  int64,
  float64,
  text,  // length, UTF-8
  text_long,
  text_blob,  // length u64; the UTF-8 is a blob
  bytes,      // length, bytes
  bytes_long,
  bytes_blob,
  bytearray,  // length u64, bytes
  bytearray_blob,
  list,  // count, values
  list_long,
  tuple,
  tuple_long,
  dict,  // count, then key, value, key, value
  dict_long,
  array,       // dtype u8, dimensions u8, each dimension u64, elements
  array_blob,  // the same; the elements are a blob
  status,      // three values: source, tag, nbytes
  record,      // three values: name (text), fields (tuple), values (list)
  extension,   // code u8, value, which is no record and no extension
};

inline constexpr size_t prefix_bytes = 8;
inline constexpr uint64_t magic = 0x7575;
inline constexpr int magic_bits = 16;
inline constexpr size_t blob_alignment = 64;
inline size_t aligned(size_t at) { return (at + blob_alignment - 1) / blob_alignment * blob_alignment; }
// Copying a blob of less costs no more than keeping an account of it.
inline constexpr size_t blob_bytes_min = 4096;
inline constexpr int depth_max = 64;  // deeper than real data, and far from the end of the stack
inline constexpr int dimensions_max = 64;

// What the codec knows of Python; src/unisono/core/codec.py sets it once. References are kept for good.
struct Kinds {
  PyObject* reduce = nullptr;     // value -> (code, plain value); code None: instead of the value
  PyObject* rebuild = nullptr;    // code, plain value -> value; code None: a record that is not in `makers`
  PyObject* too_deep = nullptr;   // () raises
  PyObject* refusal = nullptr;    // exception, steps from the inside out, path_text or None -> exception to raise
  PyObject* malformed = nullptr;  // exception -> exception to raise
  PyObject* protocol_error = nullptr;
  PyObject* status_type = nullptr;
  PyObject* array_type = nullptr;
  PyObject* object_new = nullptr;
  PyObject* empty = nullptr;                  // numpy.empty
  PyObject* dtypes[dtype_count] = {nullptr};  // by code; null where NumPy's type is another's
  // Registered classes: class -> (name and fields as packed, fields), and the other way round:
  // name and fields as packed -> (Instance, class, fields).
  PyObject* records = nullptr;
  PyObject* makers = nullptr;
  // NumPy's scalars: class -> code of its dtype. A new one is the only element of an array, by code.
  PyObject* scalars = nullptr;
  PyObject* one_element[dtype_count] = {nullptr};
  uint8_t scalar_extension = 0;
};
// How an instance of a registered class is made of its values.
enum class Instance : uint8_t { structure, tuple, dataclass };

Kinds& kinds();

// A value in its packed form, before it is in one place. Long bytes, text and arrays stay where they are until they are
// copied: the value must not change meanwhile. The GIL is held.
class Packer {
 public:
  struct Blob {
    const byte* data;
    size_t bytes;
    PyObject* owner;  // a strong reference to what keeps the memory: bytes, text, an array or a memoryview
  };

  explicit Packer(size_t blob_bytes = blob_bytes_min) : blob_bytes_(blob_bytes < 256 ? 256 : blob_bytes) {}
  ~Packer();
  Packer(const Packer&) = delete;
  Packer& operator=(const Packer&) = delete;

  // False if it cannot be sent: the exception is set. `path_text` names a part in errors, or is null.
  bool pack(PyObject* value, PyObject* path_text = nullptr);

  // What was packed, in one piece.
  size_t size() const;
  void copy_to(byte* target) const;
  // The same as a bytes object; null if there is no memory. The packer is spent.
  PyObject* to_bytes();

  // What was packed, in parts.
  size_t head_size() const { return used_; }
  void copy_head_to(byte* target) const;
  PyObject* head_to_bytes();
  const std::vector<Blob>& blobs() const { return blobs_; }
  // The blobs in one piece, each at a multiple of 64 bytes.
  size_t blobs_size() const { return size_from(0); }
  void copy_blobs_to(byte* target) const { copy_blobs_from(0, target); }

 private:
  bool value(PyObject* value, int depth);
  bool integer(PyObject* value, int depth);
  bool text(PyObject* value);
  bool memory(PyObject* owner, const void* data, size_t bytes, Tag short_tag, Tag long_tag, Tag blob_tag);
  bool shared_memory(PyObject* value);
  bool sequence(PyObject* value, int depth, Tag tag);
  bool dict(PyObject* value, int depth);
  bool array(PyObject* value, int depth);
  bool status(PyObject* value, int depth);
  bool rare(PyObject* value, int depth);
  bool record(PyObject* value, PyObject* known, int depth);
  bool scalar(PyObject* value, PyObject* known);
  bool is_too_deep(int depth);
  bool count(Tag tag, size_t count);
  bool blob(PyObject* owner, const void* data, size_t bytes);
  bool failed_at_index(Py_ssize_t index);
  bool failed_at(const char* format, PyObject* what);

  size_t size_from(size_t end) const;
  void copy_blobs_from(size_t end, byte* target) const;
  bool reserve(size_t bytes) { return bytes <= capacity_ - used_ || grow(bytes); }
  bool grow(size_t bytes);
  void put(const void* data, size_t bytes);
  template <class T>
  void put(T number) {
    put(&number, sizeof number);
  }

  byte first_[1024];
  byte* at_ = first_;  // the head's memory: `first_`, or that of `grown_`
  size_t used_ = prefix_bytes, capacity_ = sizeof first_;
  PyObject* grown_ = nullptr;  // a bytes object
  size_t blob_bytes_;
  std::vector<Blob> blobs_;
  PyObject* steps_ = nullptr;  // to the part that failed, from the inside out
};

// A blob as a memoryview, which keeps its memory; null with an exception set.
PyObject* view_of(const Packer::Blob& blob);

// The value that Packer packed in one piece; null: a ProtocolError or an error of a registered class is set. Long
// arrays are views of `memory`, a writable buffer that begins at `data`; without it they get memory of their own.
PyObject* unpack(const byte* data, size_t bytes, PyObject* memory = nullptr);

// The same in parts. A bytes object, a bytearray or ASCII text is used as it is for a value of that kind, given as
// itself or as its memory (blob_memory.hpp), and writable memory for an array; everything else is copied.
PyObject* unpack_parts(const byte* head, size_t bytes, PyObject* const* blobs, size_t count);

// The same with all blobs in one piece, each at a multiple of 64 bytes (Packer::copy_blobs_to). Long arrays are views
// of `memory`, a writable buffer that begins at `blobs`.
PyObject* unpack_beside(const byte* head, size_t bytes, const byte* blobs, size_t blob_bytes, PyObject* memory);

// The length of a head that begins here, of which `bytes` are there at most; 0 if there is none.
size_t head_bytes_at(const byte* data, size_t bytes);

}  // namespace unisono::codec
