// The last headers that travelled in one direction of a lane. A header that comes again is sent as its place in this
// table: a collective's fingerprint is longer than a small message, and without it the frame is one cache line. Both
// sides keep the same headers in the same order, so that a place means the same on both.

#pragma once

#include <array>
#include <cstring>
#include <string>

#include "wire/frame.hpp"

namespace unisono::engine {

class HeaderTable {
 public:
  // The place of a header; `header_places` if it is not kept.
  size_t find(const byte* header, size_t bytes) const {
    // Newest first: most often the same collective is called again.
    for (size_t i = 1; i <= header_places; ++i) {
      const size_t place = (next_ + header_places - i) % header_places;
      const std::string& one = kept_[place];
      if (one.size() == bytes && std::memcmp(one.data(), header, bytes) == 0) return place;
    }
    return header_places;
  }
  // Replace the oldest one. `header` is not empty.
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
