// The counts of a collective that is cut unevenly: how much of axis 0 each rank gets. All ranks give the same.

#pragma once

#include <ranges>
#include <vector>

#include "collective/program.hpp"
#include "collective/size_class.hpp"
#include "python/argument.hpp"

namespace unisono {

class PartCounts {
 public:
  // Read one length for each of `ranks` from anything but an iterator. They cut axis 0 of `x` into parts of whole items
  // of `width` elements. Throws LeftToReference for anything else, which the reference path refuses or reads.
  void read(PyObject* given, const Argument& x, std::int32_t ranks, uint64_t width);

  bool is_even() const { return engine::is_even(items_); }
  int size_class() const { return engine::size_class(items_); }
  // The length of a part along axis 0.
  std::int64_t rows(std::int32_t rank) const { return rows_[static_cast<size_t>(rank)]; }
  engine::Counts items() const { return {items_.data(), items_.size(), false}; }
  // The elements of each part.
  auto elements() const {
    return rows_ | std::views::transform([row = row_elements_](std::int64_t rows) { return rows * row; });
  }

 private:
  std::vector<std::int64_t> rows_;
  std::vector<uint64_t> items_;
  std::int64_t row_elements_ = 1;
};

}  // namespace unisono
