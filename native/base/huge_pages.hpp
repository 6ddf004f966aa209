// Huge pages for long memory.

#pragma once

#include <sys/mman.h>

#include <cstdint>

#include "base/types.hpp"

namespace unisono::engine {

// Fresh memory is slow: the system provides it page by page, and another rank reads it page by page. As NumPy does, ask
// for huge pages where there is room for some.
inline void ask_for_huge_pages(void* data, size_t bytes) {
  constexpr size_t huge_page = 2 << 20, bytes_min = 4 << 20;
  if (bytes < bytes_min) return;
  const auto start = reinterpret_cast<uintptr_t>(data), first = (start + huge_page - 1) / huge_page * huge_page;
  madvise(reinterpret_cast<void*>(first), start + bytes - first, MADV_HUGEPAGE);  // advice: the kernel may refuse it
}

}  // namespace unisono::engine
