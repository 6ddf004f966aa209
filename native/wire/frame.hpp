// The frame: what crosses a link, in a ring and on a socket alike. Knows the layout and its limits; does not know
// what a frame causes.
//
// A frame is 32 bytes of head and a body: a prefix (a rendezvous_id, an address), the message's opaque header, its
// payload. In a ring it starts on a cache line and fills whole lines, so that an 8-byte message with a 16-byte
// header is one line.

#pragma once

#include <bit>

#include "base/types.hpp"

namespace unisono::engine {

static_assert(std::endian::native == std::endian::little, "frames are written as they lie in memory");

// Of the greeting and of everything that follows it.
inline constexpr uint32_t protocol_version = 1;

inline constexpr size_t header_bytes_max = 1024;  // contract.HEADER_BYTES_MAX

enum class Lane : uint8_t { bulk, control };
inline constexpr size_t lane_count = 2;

enum class Kind : uint8_t {
  none,      // nothing yet: a ring's next position holds 0
  wrap,      // the rest of a ring is empty, go on at its start
  eager,     // a message with its bytes; with a rendezvous_id if flags say so
  rts,       // ready to send: a message's envelope, rendezvous_id and address; its bytes wait at the sender
  cts,       // context: rendezvous_id. Clear to send: the receiver wants the bytes of an RTS
  data,      // context: rendezvous_id, tag: offset, nbytes of a message that got its CTS
  fin,       // context: rendezvous_id, dtype: an Answer. The sender may forget the rendezvous_id
  credit,    // nbytes: credit given back, for the lane in dtype
  queued,    // context: rendezvous_id. No receive matches the RTS so far; only if it has no word to say so
  withdraw,  // context: rendezvous_id. The sender withdraws an RTS that is still unmatched
  beat,      // alive
  goodbye,   // nothing follows on this lane
  down,      // context: a rank that is gone, dtype: its Fate; the header says why
};
inline constexpr uint8_t kind_count = 13;

enum class Answer : uint8_t { met, withdrawn };

// How a rank went: it died, it left; or it is the reader itself, whom the sender has given up and hangs up on.
enum class Fate : uint8_t { died, left, given_up };

inline constexpr uint8_t flag_rendezvous_id = 1;  // eager: a rendezvous_id precedes the header
inline constexpr uint8_t flag_run_ahead = 2;      // eager: the sender does not wait until it is met; see Inbox::ahead
// A message's header is not in the frame: it came before in this lane, and these bits say which it was (HeaderTable).
inline constexpr uint8_t flag_known = 4;
inline constexpr int place_shift = 3;
inline constexpr size_t header_places = 8;

struct Head {
  uint32_t word = 0;  // kind | flags << 8 | lines << 16; published last, and never 0
  uint8_t dtype = 0;
  uint8_t core = 0;  // on a socket: the sender's core plus 1, 0 if it does not say
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
  // Bytes of payload that follow in this very frame.
  uint64_t payload_bytes() const { return kind() == Kind::eager || kind() == Kind::data ? nbytes : 0; }
};
static_assert(sizeof(Head) == 32);

// What a frame's body is made of.
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
