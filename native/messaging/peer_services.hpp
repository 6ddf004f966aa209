// What a peer needs of the engine that it belongs to.

#pragma once

#include <string>

#include "messaging/inbox.hpp"
#include "messaging/settings.hpp"

namespace unisono::engine {

struct RendezvousReceive;

// What a message costs of a lane's eager credit: credit.ENVELOPE_BYTES and its payload.
inline uint64_t credit_cost(uint64_t nbytes) { return nbytes + line_bytes; }

class PeerServices {
 public:
  virtual ~PeerServices() = default;
  virtual void open_link(Peer& peer) = 0;
  virtual void start_reading(RendezvousReceive& offer) = 0;
  virtual void stop_reading(RendezvousReceive& offer) = 0;
  // A peer reports that a rank is gone.
  virtual void on_rank_down(uint64_t rank, std::string cause, bool left) = 0;

  Settings settings{};
  Inbox inbox;
};

}  // namespace unisono::engine
