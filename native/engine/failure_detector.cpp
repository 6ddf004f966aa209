#include "engine/failure_detector.hpp"

#include <algorithm>
#include <cstdio>

namespace unisono::engine {
namespace {

constexpr std::int64_t beat_ns_max = second / 2;
// Ten heartbeats may be missing. A peer that missed three is also pinged by UDP, twice as often.
constexpr std::int64_t beats_per_silence = 10, beats_before_ping = 3;

}  // namespace

void FailureDetector::start(const Settings& settings, std::int64_t now) {
  silence_ns_ = settings.silence_ns;
  beat_ns_ = std::min(beat_ns_max, silence_ns_ / beats_per_silence);
  counted_at_ = now;
  beat_at_ = now + beat_ns_;
}

std::int64_t FailureDetector::begin_beat(std::int64_t now, bool has_caught_up) {
  // Silence is measured only while this rank was scheduled, and not while signs of life may lie unread. A peer
  // that floods this rank could keep it behind for ever, so there is a limit.
  const std::int64_t passed = std::min(now - counted_at_, beat_ns_ + beat_ns_ / 4);
  counted_at_ = now;
  behind_ns_ = has_caught_up ? 0 : behind_ns_ + passed;
  return behind_ns_ == 0 || behind_ns_ > starved_silences_max * silence_ns_ ? passed : 0;
}

void FailureDetector::on_sign_of_life(Peer& peer, std::int64_t passed) const {
  // The sign of life came at some time since the last beat; silence begins when the next one is due.
  peer.silent_ns = peer.stalled_ns = -passed - beat_ns_ / 2;
}

std::vector<FailureDetector::Dead> FailureDetector::count_silence(const std::vector<std::unique_ptr<Peer>>& peers,
                                                                  Connector& connector, std::int64_t now,
                                                                  std::int64_t passed) {
  std::vector<Dead> dead;
  bool is_pinging = false;
  for (const auto& peer : peers) {
    const bool is_open = peer->state == Peer::State::open;
    if (is_open ? peer->link == nullptr : peer->state != Peer::State::opening) continue;
    // A handshake that we opened has its own deadline.
    if (!is_open && connector.is_calling(peer->rank) && !connector.is_crossed(peer->rank)) continue;
    peer->silent_ns += passed;
    peer->stalled_ns += passed;
    if (is_open && peer->link->can_stall() && peer->silent_ns >= (beats_before_ping - 1) * beat_ns_) {
      connector.ping(peer->rank);
      is_pinging = true;
    }
    // A link half made, or a connection that the peer should open, gets twice the time.
    const bool is_silent = peer->silent_ns >= (is_open ? silence_ns_ : 2 * silence_ns_);
    // The peer answers pings: its connection has time to retransmit what the network lost.
    const bool is_stalled = is_open && peer->stalled_ns >= 2 * silence_ns_;
    if (!is_silent && !is_stalled) continue;
    if (peer->link != nullptr ? peer->link->is_starved() : peer->is_starved()) continue;
    char text[96];
    snprintf(text, sizeof text,
             is_silent ? "silent for %.1f s" : "answers pings, but its connection brought nothing for %.1f s",
             static_cast<double>(is_silent ? peer->silent_ns : peer->stalled_ns) / 1e9);
    dead.push_back({peer.get(), text});
  }
  beat_at_ = now + (is_pinging ? beat_ns_ / 2 : beat_ns_);
  return dead;
}

}  // namespace unisono::engine
