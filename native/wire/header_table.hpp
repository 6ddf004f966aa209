// The headers that travelled last in one direction of a lane: one that comes again is named instead of sent.
//
// Knows texts and their places. Both sides of a lane keep one, in the same order, so that a place means the same on
// both. A collective's fingerprint is longer than a small message: without it the frame is one cache line.

#pragma once

#include <array>
#include <cstring>
#include <string>

#include "wire/frame.hpp"

namespace unisono::engine {

class HeaderTable {
 public:
  // Its place; `header_places` if it is not here.
  size_t find(const byte* header, size_t bytes) const {
    // The newest first: most often one call follows itself.
    for (size_t i = 1; i <= header_places; ++i) {
      const size_t place = (next_ + header_places - i) % header_places;
      const std::string& one = kept_[place];
      if (one.size() == bytes && std::memcmp(one.data(), header, bytes) == 0) return place;
    }
    return header_places;
  }
  // In place of the oldest. An empty one is not kept.
  void keep(const byte* header, size_t bytes) {
    kept_[next_].assign(reinterpret_cast<const char*>(header), bytes);
    next_ = (next_ + 1) % header_places;
  }
  const std::string& at(size_t place) const { return kept_[place]; }

 private:
  std::array<std::string, header_places> kept_;
  size_t next_ = 0;
};

}  // namespace unisono::engine
