// Digests: proofs that a peer knows the job's secret, and checksums of what crosses a network.

#pragma once

#include <array>

#include "base/types.hpp"

namespace unisono::engine {

using Proof = std::array<byte, 32>;

// HMAC-SHA256 of the concatenation of two pieces.
Proof hmac_sha256(const byte* key, size_t key_bytes, const byte* a, size_t a_bytes, const byte* b, size_t b_bytes);
// In a time that does not depend on where they differ.
bool is_equal(const Proof& a, const Proof& b);

// CRC32C, carried on from `crc`, which starts at 0.
uint32_t crc32c(uint32_t crc, const byte* data, size_t bytes);

}  // namespace unisono::engine
