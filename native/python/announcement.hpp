// An announcement: what a rank says of its arrays or objects before they travel, with these themselves if they are
// short.
// The native twin of unisono/comm/announcement.py, which describes the layout.
//
// Knows the bytes of a row. Does not know Python objects.

#pragma once

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/types.hpp"

namespace unisono {

class Announcement {
 public:
  static constexpr size_t head_bytes = 8, number_bytes = 8, dims_max = 32;

  // How long a row is in a group of `size` ranks, where each rank announces `lengths` lengths.
  static size_t row_bytes(size_t size, size_t lengths) {
    const size_t free = std::clamp<size_t>(8192 / size / number_bytes * number_bytes, 256, 2048);
    return head_bytes + number_bytes * lengths + std::max(free, number_bytes * dims_max);
  }

  // The row that begins here; `nbytes` of it are memory of this process, whatever it says.
  Announcement(engine::byte* row, size_t nbytes, size_t lengths) : row_(row), nbytes_(nbytes), lengths_(lengths) {}

  // Write everything but the elements. Returns where these begin, if there are `element_bytes` left; else nullptr.
  engine::byte* write(uint8_t dtype, uint8_t family, std::span<const Py_ssize_t> dims, uint64_t element_bytes) {
    row_[0] = static_cast<engine::byte>(dtype);
    row_[1] = static_cast<engine::byte>(family);
    row_[2] = static_cast<engine::byte>(dims.size());
    row_[3] = static_cast<engine::byte>(Form::elements);
    for (size_t i = 0; i < dims.size(); ++i) set(i, dims[i]);
    const bool has_elements = has_room(element_bytes);
    set_used(begin() + (has_elements ? element_bytes : 0));
    return has_elements ? row_ + begin() : nullptr;
  }
  // Say that the heads of objects follow, `bytes` of them. Returns where, if there is room; else nullptr.
  engine::byte* write_heads(uint64_t bytes) {
    if (!has_room(bytes)) return nullptr;
    row_[3] = static_cast<engine::byte>(Form::heads);
    set_used(begin() + bytes);
    return row_ + begin();
  }
  void set_length(size_t part, std::int64_t length) { set(dims() + part, length); }

  uint8_t dtype() const { return static_cast<uint8_t>(row_[0]); }
  uint8_t family() const { return static_cast<uint8_t>(row_[1]); }
  size_t dims() const { return std::to_integer<size_t>(row_[2]); }
  std::int64_t dim(size_t i) const { return get(i); }
  std::int64_t length(size_t part) const { return get(dims() + part); }

  // How many elements, of `itemsize` bytes each, every part has. False if it makes no sense, or a part has more than
  // `bytes_max` bytes.
  bool counts(size_t itemsize, uint64_t bytes_max, uint64_t* out) const {
    if (dims() > dims_max || begin() > nbytes_) return false;
    unsigned __int128 step = 1;
    for (size_t i = 0; i < dims(); ++i) {
      if (dim(i) < 0) return false;
      step *= static_cast<uint64_t>(dim(i));
      if (step > bytes_max) return false;
    }
    for (size_t part = 0; part < lengths_; ++part) {
      if (length(part) < 0) return false;
      const unsigned __int128 count = step * static_cast<uint64_t>(length(part));
      if (count > bytes_max || count * itemsize > bytes_max) return false;
      out[part] = static_cast<uint64_t>(count);
    }
    return true;
  }
  // Whether it has the elements, which are this many bytes.
  bool holds(uint64_t element_bytes) const { return !has_heads() && has_room(element_bytes); }
  // Whether it has heads of objects in their place, and what is long travels beside these.
  bool has_heads() const { return row_[3] != static_cast<engine::byte>(Form::elements); }
  // What of the row is used behind the lengths.
  std::span<const engine::byte> rest() const {
    uint32_t used;
    std::memcpy(&used, row_ + 4, sizeof used);
    return {row_ + begin(), std::clamp<size_t>(used, begin(), nbytes_) - begin()};
  }
  // Of a row that has them: the elements of a part, and how many bytes they are.
  std::span<const engine::byte> part(size_t number, size_t itemsize) const {
    size_t step = itemsize, start = 0;
    for (size_t i = 0; i < dims(); ++i) step *= static_cast<size_t>(dim(i));
    for (size_t before = 0; before < number; ++before) start += static_cast<size_t>(length(before)) * step;
    return {row_ + begin() + start, static_cast<size_t>(length(number)) * step};
  }

 private:
  enum class Form : uint8_t { elements, heads };

  bool has_room(uint64_t bytes) const { return bytes <= nbytes_ - begin(); }
  void set_used(uint64_t bytes) {
    const auto used = static_cast<uint32_t>(bytes);
    std::memcpy(row_ + 4, &used, sizeof used);
  }
  size_t begin() const { return head_bytes + number_bytes * (dims() + lengths_); }
  void set(size_t number, std::int64_t value) {
    std::memcpy(row_ + head_bytes + number * number_bytes, &value, sizeof value);
  }
  std::int64_t get(size_t number) const {
    std::int64_t value;
    std::memcpy(&value, row_ + head_bytes + number * number_bytes, sizeof value);
    return value;
  }

  engine::byte* const row_;
  const size_t nbytes_, lengths_;
};

}  // namespace unisono
