// Heartbeats and the time that passed in, dead peers out: how long each peer has been silent, and when that is too
// long.
//
// Silence is measured only while this rank was scheduled and has read what arrived. A peer that is silent on a
// connection that may stall is pinged by UDP before it is given up.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "connect/connector.hpp"
#include "messaging/peer.hpp"

namespace unisono::engine {

class FailureDetector {
 public:
  struct Dead {
    Peer* peer;
    std::string cause;
  };

  void start(const Settings& settings, std::int64_t now);
  // When the next heartbeat is due.
  std::int64_t beat_at() const { return beat_at_; }
  // A heartbeat is due: the time since the last one that counts as silence. `has_caught_up`: what had arrived by then
  // was read.
  std::int64_t begin_beat(std::int64_t now, bool has_caught_up);
  void on_sign_of_life(Peer& peer, std::int64_t passed) const;
  void on_ping_answer(Peer& peer) const { peer.silent_ns = -beat_ns_; }
  // Count the silence, ping silent peers, and return those that are dead.
  std::vector<Dead> count_silence(const std::vector<std::unique_ptr<Peer>>& peers, Connector& connector,
                                  std::int64_t now, std::int64_t passed);

 private:
  std::int64_t silence_ns_ = 0;
  std::int64_t beat_ns_ = 0;
  std::int64_t beat_at_ = 0;
  std::int64_t counted_at_ = 0;
  std::int64_t behind_ns_ = 0;  // for how long this rank has not kept up with what arrives
};

}  // namespace unisono::engine
