#include "base/digest.hpp"

#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace unisono::engine {
namespace {

// FIPS 180-4.
constexpr uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

class Sha256 {
 public:
  void add(const byte* data, size_t bytes) {
    total_ += bytes;
    while (bytes > 0) {
      const size_t take = bytes < 64 - used_ ? bytes : 64 - used_;
      std::memcpy(block_ + used_, data, take);
      used_ += take;
      data += take;
      bytes -= take;
      if (used_ == 64) {
        mix();
        used_ = 0;
      }
    }
  }

  Proof result() {
    const uint64_t bits = total_ * 8;
    const byte one{0x80}, zero{0};
    add(&one, 1);
    while (used_ != 56) add(&zero, 1);
    byte length[8];
    for (int i = 0; i < 8; ++i) length[i] = static_cast<byte>(bits >> (56 - 8 * i));
    add(length, 8);
    Proof out;
    for (int i = 0; i < 32; ++i) out[i] = static_cast<byte>(state_[i / 4] >> (24 - 8 * (i % 4)));
    return out;
  }

 private:
  void mix() {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i)
      w[i] = std::to_integer<uint32_t>(block_[4 * i]) << 24 | std::to_integer<uint32_t>(block_[4 * i + 1]) << 16 |
             std::to_integer<uint32_t>(block_[4 * i + 2]) << 8 | std::to_integer<uint32_t>(block_[4 * i + 3]);
    for (int i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    uint32_t a = state_[0], b = state_[1], c = state_[2], d = state_[3];
    uint32_t e = state_[4], f = state_[5], g = state_[6], h = state_[7];
    for (int i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + round_constants[i] + w[i];
      const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const uint32_t add[8] = {a, b, c, d, e, f, g, h};
    for (int i = 0; i < 8; ++i) state_[i] += add[i];
  }

  uint32_t state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  byte block_[64];
  size_t used_ = 0;
  uint64_t total_ = 0;
};

constexpr std::array<uint32_t, 256> crc_table = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int k = 0; k < 8; ++k) c = (c & 1) != 0 ? c >> 1 ^ 0x82f63b78 : c >> 1;
    table[i] = c;
  }
  return table;
}();

uint32_t crc_by_table(uint32_t crc, const byte* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) crc = crc_table[(crc ^ std::to_integer<uint32_t>(data[i])) & 0xff] ^ crc >> 8;
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t crc_by_cpu(uint32_t crc, const byte* data, size_t bytes) {
  uint64_t wide = crc;
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; bytes > 0; ++data, --bytes) crc = _mm_crc32_u8(crc, std::to_integer<uint8_t>(*data));
  return crc;
}
#elif defined(__aarch64__)
__attribute__((target("+crc"))) uint32_t crc_by_cpu(uint32_t crc, const byte* data, size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    crc = __crc32cd(crc, word);
  }
  for (; bytes > 0; ++data, --bytes) crc = __crc32cb(crc, std::to_integer<uint8_t>(*data));
  return crc;
}
#endif

}  // namespace

Proof hmac_sha256(const byte* key, size_t key_bytes, const byte* a, size_t a_bytes, const byte* b, size_t b_bytes) {
  byte padded[64] = {};
  if (key_bytes > 64) {
    Sha256 shorten;
    shorten.add(key, key_bytes);
    const Proof digest = shorten.result();
    std::memcpy(padded, digest.data(), digest.size());
  } else if (key_bytes > 0) {
    std::memcpy(padded, key, key_bytes);
  }
  byte inner_key[64], outer_key[64];
  for (int i = 0; i < 64; ++i) {
    inner_key[i] = padded[i] ^ byte { 0x36 };
    outer_key[i] = padded[i] ^ byte { 0x5c };
  }
  Sha256 inner;
  inner.add(inner_key, 64);
  inner.add(a, a_bytes);
  inner.add(b, b_bytes);
  const Proof digest = inner.result();
  Sha256 outer;
  outer.add(outer_key, 64);
  outer.add(digest.data(), digest.size());
  return outer.result();
}

bool is_equal(const Proof& a, const Proof& b) {
  byte difference{0};
  for (size_t i = 0; i < a.size(); ++i) difference |= a[i] ^ b[i];
  return difference == byte{0};
}

uint32_t crc32c(uint32_t crc, const byte* data, size_t bytes) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return ~crc_by_cpu(~crc, data, bytes);
#elif defined(__aarch64__)
  static const bool has_instruction = (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
  if (has_instruction) return ~crc_by_cpu(~crc, data, bytes);
#endif
  return ~crc_by_table(~crc, data, bytes);
}

}  // namespace unisono::engine
