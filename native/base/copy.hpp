// Copying memory past the cache: for what is too long to stay in it.
//
// Streaming stores do not read their target first, which saves a third of the memory traffic. A short copy, or one that
// is read at once, is slower this way: the caller decides.

#pragma once

#include <algorithm>
#include <cstring>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "base/types.hpp"

namespace unisono::engine {

// The last-level cache that cores share. The system's own figure may be the sum of several such caches.
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
  _mm_sfence();  // streaming stores are not ordered with the stores that follow
  std::memcpy(to + at, from + at, bytes - at);
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace unisono::engine
