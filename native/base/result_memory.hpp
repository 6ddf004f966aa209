// Memory of results, used again: when an array that a verb has returned is dropped, its memory is kept for the next
// result of about that length. Fresh memory costs a page fault every 4 KiB, which takes longer than receiving 4 KiB.
//
// One pool serves all threads of the process. It keeps a bounded amount, and the system may take back the pages of long
// blocks when memory is short.

#pragma once

#include <utility>

#include "base/types.hpp"

namespace unisono::engine {

class ResultMemory {
 public:
  // Memory of shorter results comes from the allocator, which keeps it itself.
  static constexpr size_t pooled_bytes_min = 32 * 1024;

  ResultMemory() = default;
  ResultMemory(ResultMemory&& other) noexcept { *this = std::move(other); }
  ResultMemory& operator=(ResultMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(capacity_, other.capacity_);
    return *this;
  }
  ~ResultMemory() { reset(); }

  // At least `bytes`, of any content; an empty one if there is no memory.
  static ResultMemory take(size_t bytes) noexcept;
  byte* get() const { return data_; }
  // Give it back.
  void reset() noexcept;

 private:
  friend struct ResultPool;
  ResultMemory(byte* data, size_t capacity) : data_(data), capacity_(capacity) {}

  byte* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace unisono::engine
