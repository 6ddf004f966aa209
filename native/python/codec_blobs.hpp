// Where the blobs of a packed object lie: behind its head, in one piece of memory, or in an object each.

#pragma once

#include <memory>

#include "python/blob_memory.hpp"
#include "python/codec.hpp"

namespace unisono::codec {

struct Blob {
  const byte* data = nullptr;
  PyObject* owner = nullptr;  // borrowed; null: the memory may be read now and never again
  size_t offset = 0;          // of the data in the owner's memory
  bool is_writable = false;
  PyObject* whole = nullptr;  // borrowed; an object that the data is all of
};

// Where the blobs are.
class Blobs {
 public:
  virtual ~Blobs() = default;
  // The next one; false if there is none of this length.
  virtual bool next(size_t bytes, Blob& blob) = 0;
  // Whether every one was asked for.
  virtual bool are_all_used() const = 0;
};

class BlobsInOnePiece final : public Blobs {
 public:
  BlobsInOnePiece(const byte* data, size_t bytes, size_t head_bytes, PyObject* memory)
      : data_(data), bytes_(bytes), end_(head_bytes), memory_(memory) {}

  bool next(size_t bytes, Blob& blob) override {
    const size_t start = aligned(end_);
    if (start > bytes_ || bytes > bytes_ - start) return false;
    end_ = aligned(start + bytes);
    blob = {data_ + start, memory_, start, memory_ != nullptr, nullptr};
    return true;
  }
  bool are_all_used() const override { return end_ == bytes_; }

 private:
  const byte* data_;
  size_t bytes_, end_;
  PyObject* memory_;
};

class BlobsInParts final : public Blobs {
 public:
  BlobsInParts(PyObject* const* owners, size_t count) : owners_(owners), count_(count), views_(new Py_buffer[count]) {}
  ~BlobsInParts() override {
    for (size_t i = 0; i < used_; ++i) PyBuffer_Release(&views_[i]);
  }

  bool next(size_t bytes, Blob& blob) override {
    if (used_ == count_) return false;
    PyObject* const owner = owners_[used_];
    Py_buffer& view = views_[used_];
    if (PyObject_GetBuffer(owner, &view, PyBUF_SIMPLE) != 0) return false;
    ++used_;
    if (static_cast<size_t>(view.len) != bytes) return false;
    PyObject* const lender = owner_of_blob(owner);
    blob = {static_cast<const byte*>(view.buf), owner, 0, !view.readonly, lender != nullptr ? lender : owner};
    return true;
  }
  bool are_all_used() const override { return used_ == count_; }

 private:
  PyObject* const* owners_;
  size_t count_, used_ = 0;
  std::unique_ptr<Py_buffer[]> views_;
};

}  // namespace unisono::codec
