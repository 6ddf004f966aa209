// The fingerprint of a collective call: what ranks compare, in 16 bytes. The native twin of
// unisono/comm/fingerprint.py.
//
// Knows the layout and the hash. Does not know what the numbers stand for: the tables of verbs, ops and algorithms are
// Python's. Any rank can put a fingerprint into words alone; only what the hash stands for (shape, uneven counts,
// segment size, group, the user's op) needs the rank that made the call.

#pragma once

#include <bit>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace unisono::engine {

class Fingerprint {
 public:
  static constexpr int verb_at = 0, dtype_at = 8, op_at = 16, algorithm_at = 24, root_at = 32, stage_at = 52,
                       count_at = 56;
  static constexpr int root_bits = 20, stage_bits = 4, count_bits = 40;

  // The rest of a call, in 32 bits: a few multiplications, so that it can be computed for every call.
  template <class Values>
  static constexpr uint32_t hash_of(uint64_t seed, const Values& values) {
    uint64_t x = seed;
    for (const std::int64_t value : values) {
      x = (x ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15u;
      x ^= x >> 29;
    }
    return static_cast<uint32_t>(x ^ x >> 32);
  }
  static constexpr uint32_t hash_of(uint64_t seed, std::initializer_list<std::int64_t> values) {
    return hash_of<std::initializer_list<std::int64_t>>(seed, values);
  }

  constexpr uint8_t verb() const { return static_cast<uint8_t>(low_ >> verb_at); }
  constexpr uint8_t dtype() const { return static_cast<uint8_t>(low_ >> dtype_at); }
  constexpr uint8_t op() const { return static_cast<uint8_t>(low_ >> op_at); }
  constexpr uint8_t algorithm() const { return static_cast<uint8_t>(low_ >> algorithm_at); }
  constexpr uint32_t root() const { return static_cast<uint32_t>(low_ >> root_at & mask(root_bits)); }
  constexpr uint8_t stage() const { return static_cast<uint8_t>(low_ >> stage_at & mask(stage_bits)); }
  constexpr uint64_t count() const { return low_ >> count_at | (high_ & mask(32)) << 8; }
  constexpr uint32_t hash() const { return static_cast<uint32_t>(high_ >> 32); }

  // The same call with another count: what a decision does not know.
  constexpr Fingerprint with(uint64_t count, uint32_t hash) const {
    Fingerprint other;
    other.low_ = (low_ & mask(count_at)) | count << count_at;
    other.high_ = (count >> 8 & mask(32)) | uint64_t{hash} << 32;
    return other;
  }

  constexpr bool operator==(const Fingerprint&) const = default;

 private:
  static constexpr uint64_t mask(int bits) { return (uint64_t{1} << bits) - 1; }

  uint64_t low_ = 0;   // verb, dtype, op, algorithm, root, stage, and the lowest 8 bits of the count
  uint64_t high_ = 0;  // the other 32 bits of the count, and the hash
};
static_assert(sizeof(Fingerprint) == 16 && std::is_trivially_copyable_v<Fingerprint>);
static_assert(std::endian::native == std::endian::little, "it is written as it lies in memory");

}  // namespace unisono::engine
