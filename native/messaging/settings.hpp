// The settings of an engine, and how its peers are reached.

#pragma once

#include <cstdint>
#include <string>

#include "base/system.hpp"

namespace unisono::engine {

// Numbers without a default have their home in Python, which passes them: config.py, messaging/credit.py and
// messaging/strangers.py.
struct Settings {
  uint64_t eager_bytes;
  uint64_t eager_credit_bytes;
  uint64_t control_eager_bytes;
  uint64_t control_credit_bytes;
  uint64_t control_bytes_max;  // of one control message or RPC frame
  uint64_t own_credit_bytes;   // of messages to oneself
  uint64_t message_bytes_max;
  uint64_t recv_bytes_max;  // of a receive that takes the message's own length
  std::int64_t silence_ns;
  // Before authentication.
  uint64_t stranger_bytes_max;
  std::int64_t stranger_ns;
  uint64_t strangers_max;
  uint64_t strangers_per_address_max;

  bool shm = true;
  bool checksum = true;                        // between hosts, without TLS
  bool tls = false;                            // on all connections by TCP
  bool quic = false;                           // instead of TCP
  size_t datagram_bytes = 0;                   // of QUIC; 0: what the path carries
  size_t socket_buffer_bytes = 4 << 20;        // asked of the system for QUIC's socket
  uint64_t rekey_records = uint64_t{1} << 22;  // records that a sender encrypts with one key
  bool neighbours = false;                     // open control links to ranks +-2^k at once
  bool direct_read = true;                     // read the peer's memory where the system allows it
  std::string bind = "127.0.0.1";
  uint16_t port = 0;
  std::string host;  // replaces the machine's id
};

// A peer that is starved of CPU time is declared dead after this many times silence_ns: a minute by default, the
// longest that a process may reasonably hold the GIL.
inline constexpr std::int64_t starved_silences_max = 24;
// Bound on silence_ns, so that every multiple of it fits 64 bits.
inline constexpr std::int64_t silence_ns_max = 1'000'000 * second;

// How to reach a rank.
struct Card {
  std::string host;
  std::string unix_path;  // empty: no shared memory
  std::string address;
  uint16_t port = 0;
  std::int32_t pid = 0;  // 0: unknown
};

}  // namespace unisono::engine
