#include "messaging/inbox.hpp"

#include <new>

#include "messaging/peer.hpp"

namespace unisono::engine {

namespace {
constexpr size_t spare_max = 256;
constexpr size_t ended_max = 1 << 16;  // credit.ENDED_CONTEXTS_MAX
}  // namespace

Inbox::~Inbox() {
  while (UnexpectedMessage* message = matcher_.first_arrived()) remove(*message);
}

Receive* Inbox::take_receive(const Envelope& envelope, bool is_here, RendezvousReceive* offer, MatchResult& match,
                             bool& is_gone) {
  is_gone = false;
  while (Receive* receive = matcher_.find_posted(envelope)) {
    match = receive->on_match(envelope, is_here);
    if (match == MatchResult::accept || match == MatchResult::defer) {
      // Claim while the receive is still posted: if the message was withdrawn, the receive keeps its position.
      if (offer != nullptr && !offer->peer->rendezvous.claim(*offer)) {
        is_gone = true;
        return nullptr;
      }
      matcher_.withdraw(*receive);
      return receive;
    }
    matcher_.withdraw(*receive);
    receive->end(match == MatchResult::peek ? Outcome::done : Outcome::refused, envelope.source);
  }
  return nullptr;
}

UnexpectedMessage* Inbox::queue(const Envelope& envelope, Peer& peer, const byte* payload, uint64_t held_bytes) {
  std::unique_ptr<UnexpectedMessage> message;
  if (!spare_.empty()) {
    message = std::move(spare_.back());
    spare_.pop_back();
  } else {
    message.reset(new (std::nothrow) UnexpectedMessage);
  }
  if (message == nullptr || !message->hold(envelope, payload, held_bytes)) return nullptr;
  message->peer = &peer;
  matcher_.queue(*message);
  return message.release();
}

bool Inbox::serve(Receive& receive) {
  while (UnexpectedMessage* message = matcher_.find_arrived(receive)) {
    const Envelope& envelope = message->envelope;
    const MatchResult match = receive.on_match(envelope, message->is_here);
    if (match == MatchResult::peek || match == MatchResult::reject) {
      receive.end(match == MatchResult::peek ? Outcome::done : Outcome::refused, envelope.source);
      return true;
    }
    Peer& peer = *message->peer;
    const std::int32_t source = envelope.source;
    if (message->is_here) {
      if (message->has_rendezvous && !peer.rendezvous.claim(peer.rendezvous.of(message->rendezvous_id))) {
        peer.rendezvous.drop_queued(peer.rendezvous.of(message->rendezvous_id));
        continue;
      }
      matcher_.take(*message);
      if (peer.begin_own(*message, receive)) return true;
      deliver(receive, message->payload, envelope.nbytes);
      peer.on_matched(*message);
      recycle(*message);
      receive.end(Outcome::done, source);
      return true;
    }
    RendezvousReceive& offer = peer.rendezvous.of(message->rendezvous_id);
    remove(*message);
    if (!peer.rendezvous.claim(offer)) {
      peer.rendezvous.drop(offer);
      continue;
    }
    peer.rendezvous.begin(offer, receive, match);
    return true;
  }
  return false;
}

void Inbox::end_receives_from(std::int32_t rank) {
  for (Receive* receive : matcher_.all_posted())
    if (receive->source == rank) {
      matcher_.withdraw(*receive);
      receive->end(Outcome::peer_down, rank);
    }
}

void Inbox::end_all(Outcome outcome) {
  for (Receive* receive : matcher_.all_posted()) {
    matcher_.withdraw(*receive);
    receive->end(outcome, -1);
  }
  while (UnexpectedMessage* message = matcher_.first_arrived()) {
    Send* own = message->own;
    remove(*message);
    if (own == nullptr) continue;
    own->state = Send::State::ended;
    own->end(outcome);
  }
}

void Inbox::end_context(uint64_t context) {
  if (ended_.insert(context).second) ended_order_.push_back(context);
  if (ended_order_.size() > ended_max) {
    ended_.erase(ended_order_.front());
    ended_order_.pop_front();
  }
  for (UnexpectedMessage* message = matcher_.first_arrived(); message != nullptr;) {
    UnexpectedMessage* const next = Matcher::next_arrived(*message);
    if (message->envelope.context == context && message->is_here && !message->has_rendezvous &&
        message->own == nullptr) {
      message->peer->on_dropped(*message);
      remove(*message);
    }
    message = next;
  }
}

bool Inbox::has_unexpected(uint64_t context) const {
  for (const UnexpectedMessage* message = matcher_.first_arrived(); message != nullptr;
       message = Matcher::next_arrived(*message))
    if (message->envelope.context == context) return true;
  return false;
}

void Inbox::ignore_context(uint64_t context) {
  for (UnexpectedMessage* message = run_ahead_.front(); message != nullptr;) {
    UnexpectedMessage* const next = RunAhead::next(*message);
    if (message->envelope.context == context) run_ahead_.remove(*message);
    message = next;
  }
}

void Inbox::recycle(UnexpectedMessage& message) {
  std::unique_ptr<UnexpectedMessage> owned(&message);
  if (message.in_ahead.is_in) run_ahead_.remove(message);
  owned->heap.reset();
  owned->copy.reset();
  owned->own = nullptr;
  owned->has_rendezvous = owned->is_here = false;
  if (spare_.size() < spare_max) spare_.push_back(std::move(owned));
}

}  // namespace unisono::engine
