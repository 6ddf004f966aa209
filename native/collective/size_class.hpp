// The class of a count: counts of one class are decided alike. The native twin of _bucket in unisono/plans/choose.py.

#pragma once

#include <algorithm>
#include <bit>
#include <functional>
#include <numeric>
#include <span>

#include "base/types.hpp"

namespace unisono::engine {

// What is empty is a class of its own.
inline int size_class(uint64_t count) { return count == 0 ? 0 : 1 + std::bit_width(count - 1); }

inline bool is_even(std::span<const uint64_t> counts) {
  return std::adjacent_find(counts.begin(), counts.end(), std::not_equal_to<>()) == counts.end();
}

// Of equally long parts, the class of one; otherwise those of the longest and of the mean of the others.
inline int size_class(std::span<const uint64_t> counts) {
  if (is_even(counts)) return size_class(counts[0]);
  const uint64_t longest = *std::max_element(counts.begin(), counts.end());
  const uint64_t others = std::accumulate(counts.begin(), counts.end(), uint64_t{0}) - longest;
  return 1 << 16 | size_class(longest) << 8 | size_class(others / (counts.size() - 1));
}

}  // namespace unisono::engine
