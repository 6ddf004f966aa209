// Digests: proofs that a peer knows the job's secret, and checksums of what crosses a network.

#pragma once

#include <array>

#include "base/types.hpp"

namespace unisono::engine {

using Proof = std::array<byte, 32>;

// HMAC-SHA256 of the concatenation of two pieces.
Proof hmac_sha256(const byte* key, size_t key_bytes, const byte* a, size_t a_bytes, const byte* b, size_t b_bytes);
// Takes the same time wherever they differ.
bool is_equal(const Proof& a, const Proof& b);

// CRC32C of bytes that follow those of `crc`; 0 for the first ones.
uint32_t crc32c(uint32_t crc, const byte* data, size_t bytes);

}  // namespace unisono::engine
