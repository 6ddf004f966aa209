// The integer and byte types that every file uses, and the size of a cache line.

#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono::engine {

using std::byte;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

inline constexpr size_t line_bytes = 64;

}  // namespace unisono::engine
