// The frame: the unit that crosses a link, with the same layout in a ring and on a socket.
//
// A frame is a head of 32 bytes and a body: a prefix (rendezvous id, address), the message's opaque header, its
// payload. In a ring it starts on a cache line and fills whole lines, so that a message of up to 16 bytes with a
// fingerprint of 16 bytes is one line.

#pragma once

#include <bit>

#include "base/types.hpp"

namespace unisono::engine {

static_assert(std::endian::native == std::endian::little, "frames are written as they lie in memory");

// Of the handshake and of every frame.
inline constexpr uint32_t protocol_version = 2;

inline constexpr size_t header_bytes_max = 1024;  // envelope.HEADER_BYTES_MAX

enum class Lane : uint8_t { bulk, control };
inline constexpr size_t lane_count = 2;

enum class Kind : uint8_t {
  none,      // the next position of a ring before a frame is published there
  wrap,      // the rest of a ring is unused; the next frame is at its start
  eager,     // a message with its payload; flags say whether a rendezvous id precedes the header
  rts,       // ready to send: envelope, rendezvous id and address of a message; its payload stays at the sender
  cts,       // clear to send. context = rendezvous id
  data,      // payload of a message after its CTS. context = rendezvous id, tag = offset
  fin,       // the rendezvous is over, and its id may be used again. context = rendezvous id, dtype = a FinStatus
  credit,    // credit returned. nbytes = bytes, dtype = lane
  queued,    // no receive matches the RTS so far; only for an RTS without an offer word. context = rendezvous id
  withdraw,  // the sender withdraws an unmatched RTS. context = rendezvous id
  beat,      // heartbeat
  goodbye,   // the last frame of this lane
  down,      // a rank is gone. context = rank, dtype = its Fate, header = the cause
};
inline constexpr uint8_t kind_count = 13;

enum class FinStatus : uint8_t { matched, withdrawn };

// How a rank went: it died, it left, or the sender of the frame declares the reader itself dead and hangs up.
enum class Fate : uint8_t { died, left, given_up };

inline constexpr uint8_t flag_rendezvous_id = 1;  // eager: a rendezvous id precedes the header
inline constexpr uint8_t flag_run_ahead = 2;      // eager: the sender does not wait for a match; see Inbox::run_ahead

struct Head {
  uint32_t word = 0;  // kind | flags << 8 | cache lines << 16; published last, and never 0
  uint8_t dtype = 0;
  uint8_t core = 0;  // on a socket: the sender's CPU core plus 1; 0 if unknown
  uint16_t header_bytes = 0;
  uint64_t context = 0;
  uint64_t tag = 0;
  uint64_t nbytes = 0;

  Kind kind() const { return static_cast<Kind>(word & 0xff); }
  uint8_t flags() const { return static_cast<uint8_t>(word >> 8); }
  size_t lines() const { return word >> 16; }

  static uint32_t make_word(Kind kind, uint8_t flags = 0, size_t lines = 0) {
    return static_cast<uint32_t>(kind) | uint32_t{flags} << 8 | static_cast<uint32_t>(lines) << 16;
  }

  // Bytes between head and header.
  size_t prefix_bytes() const {
    if (kind() == Kind::rts) return 16;
    return kind() == Kind::eager && (flags() & flag_rendezvous_id) != 0 ? 8 : 0;
  }
  // Bytes of payload inside this frame.
  uint64_t payload_bytes() const { return kind() == Kind::eager || kind() == Kind::data ? nbytes : 0; }
};
static_assert(sizeof(Head) == 32);

// The parts of a frame's body.
struct Body {
  uint64_t prefix[2] = {0, 0};
  size_t prefix_bytes = 0;
  const byte* header = nullptr;
  size_t header_bytes = 0;
  const byte* payload = nullptr;
  size_t payload_bytes = 0;

  size_t total() const { return prefix_bytes + header_bytes + payload_bytes; }
};

inline constexpr size_t in_lines(size_t bytes) { return (bytes + line_bytes - 1) / line_bytes * line_bytes; }

}  // namespace unisono::engine
