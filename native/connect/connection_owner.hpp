// What a connector passes to the engine, and asks of it.

#pragma once

#include <memory>
#include <string>

#include "connect/pinger.hpp"
#include "link/link.hpp"
#include "wire/admission.hpp"

namespace unisono::engine {

class Peer;

// Connections that a rank opens at a time. With TLS or QUIC each costs both sides milliseconds, and a hundred begun at
// once on a few cores would all time out.
inline constexpr size_t attempts_max = 16;
// Refused callers that are kept for the log.
inline constexpr size_t refusals_max = 8;

class ConnectionOwner : public PingOwner {
 public:
  // Whether a caller that has proven its rank gets a link.
  virtual Admission admit(std::int32_t rank) = 0;
  // A handshake with a rank has succeeded, on either side: the peer that its link is made for, or nullptr if it needs
  // none any more. The owner forgets other handshakes with that rank. `on_link` or `on_refused` follows, perhaps later.
  virtual Peer* on_admitted(std::int32_t rank) = 0;
  virtual void on_link(Peer& peer, std::unique_ptr<Link> link) = 0;
  // A connection to a rank failed. `admission` is `leaving` if that rank closes, else `unknown`.
  virtual void on_refused(std::int32_t rank, const std::string& cause, Admission admission) = 0;
};

}  // namespace unisono::engine
