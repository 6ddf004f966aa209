// The links of an engine: how they begin, how a peer is lost, and how this rank leaves.

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "engine/engine.hpp"

namespace unisono::engine {
namespace {

// For each step of leaving: goodbyes are sent, and the peers hang up.
constexpr std::int64_t goodbye_ns = second / 2;

}  // namespace

// ---- beginning and losing ----

void Engine::open_link(Peer& peer) {
  if (!is_connected_ || is_closed() || peer.state != Peer::State::unopened) return;
  peer.state = Peer::State::opening;
  peer.silent_ns = 0;
  if (local_ != nullptr) return local_->open(rank, peer.rank);
  connector_.connect(peer.rank, peer.card);
}

Admission Engine::admit(std::int32_t from) {
  const Peer& peer = *peers_[from];
  if (is_leaving_) return Admission::leaving;
  if (peer.state == Peer::State::down) return Admission::unknown;
  if (peer.state == Peer::State::open) return Admission::known;
  // Both connect at once: the lower rank's connection counts, unless it has not reached the peer and perhaps never
  // will.
  if (peer.state == Peer::State::opening && from > rank && !connector_.is_connecting(from)) return Admission::crossing;
  return Admission::welcome;
}

Peer* Engine::on_admitted(std::int32_t of) {
  Peer& peer = *peers_[of];
  if (peer.state == Peer::State::down || peer.state == Peer::State::open) return nullptr;
  peer.state = Peer::State::opening;
  peer.silent_ns = 0;
  connector_.forget(of);
  return &peer;
}

void Engine::on_refused(std::int32_t to, const std::string& cause, Admission admission) {
  Peer& peer = *peers_[to];
  if (peer.state != Peer::State::opening) return;
  // What others reported is the better cause; a missing answer is a symptom.
  if (peer.is_rumoured) return lose(peer, std::string(peer.cause), peer.left);
  lose(peer, cause, admission == Admission::leaving);
}

void Engine::take_arrivals() {
  // A rank of this process reads its own memory: the test is only whether the system allows the call at all.
  static constexpr byte nothing[sizeof Probe::value] = {};
  Probe probe;
  if (settings.direct_read) probe.address = reinterpret_cast<uint64_t>(nothing);
  for (LocalWorld::Arrival& arrival : local_->take(rank)) {
    Peer& peer = *peers_[arrival.rank];
    const bool is_unlinked = peer.state == Peer::State::unopened || peer.state == Peer::State::opening;
    if (!is_unlinked || is_leaving_) continue;
    if (arrival.has_left) {
      lose(peer, "left", true);
      continue;
    }
    on_link(peer, std::make_unique<ShmLink>(peer, std::move(arrival.memory), std::move(arrival.presence),
                                            std::move(arrival.doorbell), arrival.is_opener, probe));
  }
}

void Engine::on_link(Peer& peer, std::unique_ptr<Link> link) {
  peer.on_open(std::move(link));
  open_.push_back(&peer);
  peer.link->start();
  peer.flush();
}

void Engine::lose(Peer& peer, const std::string& cause, bool left) {
  if (peer.state == Peer::State::down) return;
  // It may live: then it should learn why this rank hangs up.
  if (!left) peer.declare_dead(cause);
  peer.state = Peer::State::down;
  peer.cause = cause;
  peer.left = left;
  std::erase(open_, &peer);
  connector_.forget(peer.rank);
  peer.end_all(Outcome::peer_down);
  inbox.end_receives_from(peer.rank);
  peer.link.reset();
  // A rank that leaves reports no other: they hang up because of its own goodbye.
  if (is_leaving_) return wake_waiters();
  // A killed process could not remove its socket file; a live one, only lost to this rank, still listens there.
  if (!left && peer.is_same_host && !peer.card.unix_path.empty() && is_gone(peer.card.pid))
    unlink(peer.card.unix_path.c_str());
  // Ranks without a link to it would not learn of it otherwise.
  for (Peer* other : open_) other->send_down(peer.rank, cause, left ? Fate::left : Fate::died);
  if (on_down_ != nullptr) on_down_(on_down_self_, Down{peer.rank, cause, left});
  wake_waiters();
}

void Engine::on_rank_down(uint64_t gone, std::string cause, bool left) {
  if (gone >= peers_.size() || gone == static_cast<uint64_t>(rank)) return;
  Peer& peer = *peers_[gone];
  // A rank with a link to it sees the end itself, after all messages sent before. If our handshake with that rank is
  // under way, its messages may still arrive over the new link: keep the report until the handshake ends. If the peer's
  // connection replaced ours, there is no such link, except for a peer that leaves: it waits for its own connections.
  if (peer.state == Peer::State::opening && connector_.is_calling(peer.rank) &&
      (left || !connector_.is_crossed(peer.rank))) {
    if (std::exchange(peer.is_rumoured, true)) return;
    peer.cause = cause;
    peer.left = left;
  } else if (peer.state == Peer::State::unopened || peer.state == Peer::State::opening) {
    lose(peer, cause, left);
  }
}

void Engine::on_answer(std::int32_t from, bool is_given_up) {
  Peer& peer = *peers_[from];
  if (peer.state != Peer::State::open) return;
  if (is_given_up) {
    char why[64];
    snprintf(why, sizeof why, "no heartbeat for silence_s = %.1f s", static_cast<double>(settings.silence_ns) / 1e9);
    return lose(peer, gave_up_on_us(why), false);
  }
  detector_.on_ping_answer(peer);
}

void Engine::beat(std::int64_t now) {
  const std::int64_t passed = detector_.begin_beat(now, connector_.has_caught_up());
  connector_.tick(passed);
  const std::vector<Peer*> open = open_;
  for (Peer* peer : open) {
    peer->link->beat();
    if (peer->link->was_heard()) detector_.on_sign_of_life(*peer, passed);
  }
  for (const auto& [peer, cause] : detector_.count_silence(peers_, connector_, now, passed)) lose(*peer, cause, false);
  if (!inbox.run_ahead().empty() && on_unclaimed_ != nullptr) on_unclaimed_(on_unclaimed_self_);
}

// ---- leaving ----

bool Engine::is_each_peer(bool (*is_so)(const Peer&)) const {
  return std::all_of(peers_.begin(), peers_.end(),
                     [is_so](const auto& peer) { return peer->state == Peer::State::down || is_so(*peer); });
}

bool Engine::is_each_link(bool (*is_so)(const Link&)) const {
  return std::all_of(open_.begin(), open_.end(), [is_so](const Peer* peer) { return is_so(*peer->link); });
}

void Engine::close(std::int64_t flush_ns) {
  if (is_forked()) return;
  {
    Hold held(mutex_);
    if (is_closing_) return;
    is_closing_ = true;
    flush(held, flush_ns);
    say_goodbyes(held);
    await_hang_ups(held, flush_ns);
    stop(held);
  }
  if (thread_ != nullptr) thread_->join();
  thread_.reset();
  Hold held(mutex_);
  connector_.close(false);
  if (local_ != nullptr) local_->leave(rank);
  open_.clear();
  for (auto& peer : peers_) {
    peer->link.reset();
    if (peer->rank != rank && peer->state != Peer::State::down) {
      peer->state = Peer::State::down;
      peer->cause = "this rank is closed";
    }
  }
  poller_.close();
  presence_.close();
}

void Engine::flush(Hold& held, std::int64_t flush_ns) {
  const std::int64_t until = now_ns() + flush_ns;
  const auto is_flushed = [this] {
    return !is_connected_ || is_each_peer([](const Peer& peer) { return peer.is_flushed(); });
  };
  // An RTS that becomes queued wakes no thread, so poll often.
  while (!wait(held, is_flushed, std::min(until, now_ns() + 2 * millisecond)) && now_ns() < until) continue;
  // A peer in the middle of a handshake must get a goodbye, too.
  const auto are_all_met = [this] {
    return !connector_.is_connecting() &&
           is_each_peer([](const Peer& peer) { return peer.state != Peer::State::opening; });
  };
  wait(held, are_all_met, now_ns() + std::max(flush_ns, goodbye_ns));
}

void Engine::say_goodbyes(Hold& held) {
  is_leaving_ = true;
  // What is unmatched by now stays so.
  for (auto& peer : peers_) peer->end_all(Outcome::closed);
  inbox.end_all(Outcome::closed);
  for (size_t turns = deferred_.size(); turns > 0 && !deferred_.empty(); --turns) deferred_.pop_front()->drop();
  for (Peer* peer : open_) {
    peer->link->discard_input();
    peer->say_goodbye();
  }
  const auto are_sent = [this] {
    return is_each_peer(
        [](const Peer& peer) { return !peer.has_backlog() && (peer.link == nullptr || peer.link->is_drained()); });
  };
  wait(held, are_sent, now_ns() + goodbye_ns);
}

void Engine::await_hang_ups(Hold& held, std::int64_t flush_ns) {
  // Closing a connection with unread bytes resets it, and the peer loses what we sent: wait until the peers hung up,
  // too.
  for (Peer* peer : open_) peer->link->finish();
  const auto is_over = [this] {
    return is_each_link([](const Link& link) { return !link.needs_hang_up() && link.is_delivered(); });
  };
  if (!is_over()) wait(held, is_over, now_ns() + goodbye_ns);
  // Bytes in transit are lost if a peer writes to a closed connection: a slow one gets more time.
  const auto is_delivered = [this] { return is_each_link([](const Link& link) { return link.is_delivered(); }); };
  const std::int64_t until = now_ns() + flush_ns;
  while (!is_delivered() && !wait(held, is_delivered, std::min(until, now_ns() + 2 * millisecond)) && now_ns() < until)
    continue;
}

void Engine::stop(Hold& held) {
  is_closed_.store(true, std::memory_order_relaxed);
  is_stopping_.store(true, std::memory_order_relaxed);
  poller_.wake_poller();
  background_.notify_all();
  moved_.notify_all();
  // A caller that sleeps in the poller must leave before it is closed.
  while (is_polled_.load(std::memory_order_relaxed)) {
    poller_.wake_poller();
    moved_.wait_for(held, std::chrono::milliseconds(1));
  }
}

}  // namespace unisono::engine
