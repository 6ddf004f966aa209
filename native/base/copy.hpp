// Copying memory past the cache: for what is too long to stay in it.
//
// Knows stores that do not read their target first, which saves a third of the way to memory. Does not know when that
// is right: whoever copies little, or reads the copy at once, loses by it.

#pragma once

#include <algorithm>
#include <cstring>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "base/types.hpp"

namespace unisono::engine {

// What cores that share a cache find in it. The system's own figure may be the sum of many such caches.
inline constexpr size_t cache_bytes = 32 * 1024 * 1024;

inline void copy_past_cache(byte* to, const byte* from, size_t bytes) {
#if defined(__x86_64__)
  constexpr size_t step = 64, ahead = 512;
  const size_t front = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % step);
  std::memcpy(to, from, front);
  size_t at = front;
  for (; at + step <= bytes; at += step) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    _mm_prefetch(reinterpret_cast<const char*>(source) + ahead, _MM_HINT_NTA);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  _mm_sfence();  // such stores are in no order with those that follow
  std::memcpy(to + at, from + at, bytes - at);
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace unisono::engine
