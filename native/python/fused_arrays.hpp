// Arrays that travel as one: those of an all_reduce_many.
//
// They lie in memory of their own while the engine works on them, and are copied back in the end. A list of one array
// needs no such memory.

#pragma once

#include <memory>
#include <vector>

#include "python/argument.hpp"

namespace unisono {

class FusedArrays {
 public:
  // See a list or a tuple of arrays of one type, which hold whole items of `width` elements. Throws LeftToReference for
  // anything else, which the reference path makes in several stages, or refuses.
  FusedArrays(const Arguments& arguments, PyObject* given, uint64_t width);

  uint8_t dtype() const { return arrays_[0].dtype; }
  uint64_t count() const { return count_; }
  // The arguments, as a tuple of our own that does not change.
  nb::handle items() const { return items_; }
  const std::vector<std::int64_t>& lengths() const { return lengths_; }
  // What ranks compare: type and length of each array. unisono/comm/fingerprint.py has the same in `fused`.
  std::vector<std::int64_t> compared() const;

  // Copy the arrays into memory that lies in a row: that of the only one, or new memory, which `result` keeps.
  engine::byte* join(const Arguments& arguments, Result& result) const;
  // Copy what was reduced back into the arrays.
  void part(const engine::byte* joined) const;
  // What was given, or a new list if it holds numbers.
  PyObject* give_back() const;

 private:
  nb::object given_, items_;
  std::unique_ptr<Argument[]> arrays_;
  size_t number_ = 0;
  uint64_t count_ = 0;  // elements
  std::vector<std::int64_t> lengths_;
};

}  // namespace unisono
