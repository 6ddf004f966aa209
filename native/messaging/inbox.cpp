#include "messaging/inbox.hpp"

#include <new>

#include "messaging/peer.hpp"

namespace unisono::engine {

namespace {
constexpr size_t spare_max = 256;
constexpr size_t ended_max = 1 << 16;  // contract.ENDED_CONTEXTS_MAX
}

Inbox::~Inbox() {
  while (Arrived* message = matcher_.first_arrived()) remove(*message);
}

Receive* Inbox::take_receive(const Envelope& envelope, bool is_here, Incoming* offer, Meeting& meeting,
                             bool& is_gone) {
  is_gone = false;
  while (Receive* receive = matcher_.find_posted(envelope)) {
    meeting = receive->meet(envelope, is_here);
    if (meeting == Meeting::accept || meeting == Meeting::later) {
      // Claimed while the receive is still posted: if the offer is gone, the receive keeps its place.
      if (offer != nullptr && !offer->peer->claim(*offer)) {
        is_gone = true;
        return nullptr;
      }
      matcher_.withdraw(*receive);
      return receive;
    }
    matcher_.withdraw(*receive);
    receive->end(meeting == Meeting::look ? Outcome::done : Outcome::refused, envelope.source);
  }
  return nullptr;
}

Arrived* Inbox::queue(const Envelope& envelope, Peer& peer, const byte* payload, uint64_t held_bytes) {
  std::unique_ptr<Arrived> message;
  if (!spare_.empty()) {
    message = std::move(spare_.back());
    spare_.pop_back();
  } else {
    message.reset(new (std::nothrow) Arrived);
  }
  if (message == nullptr || !message->hold(envelope, payload, held_bytes)) return nullptr;
  message->peer = &peer;
  matcher_.queue(*message);
  return message.release();
}

bool Inbox::serve(Receive& receive) {
  while (Arrived* message = matcher_.find_arrived(receive)) {
    const Envelope& envelope = message->envelope;
    const Meeting meeting = receive.meet(envelope, message->is_here);
    if (meeting == Meeting::look || meeting == Meeting::refuse) {
      receive.end(meeting == Meeting::look ? Outcome::done : Outcome::refused, envelope.source);
      return true;
    }
    Peer& peer = *message->peer;
    const std::int32_t source = envelope.source;
    if (message->is_here) {
      if (message->has_ticket && !peer.claim(peer.incoming_of(message->ticket))) {
        peer.take_back(peer.incoming_of(message->ticket));
        continue;
      }
      matcher_.take(*message);
      if (peer.begin_own(*message, receive)) return true;
      bring(receive, message->payload, envelope.nbytes);
      peer.on_met(*message);
      recycle(*message);
      receive.end(Outcome::done, source);
      return true;
    }
    Incoming& offer = peer.incoming_of(message->ticket);
    remove(*message);
    if (!peer.claim(offer)) {
      peer.drop(offer);
      continue;
    }
    peer.begin(offer, receive, meeting);
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
  while (Arrived* message = matcher_.first_arrived()) {
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
  for (Arrived* message = matcher_.first_arrived(); message != nullptr;) {
    Arrived* const next = Matcher::next_arrived(*message);
    if (message->envelope.context == context && message->is_here && !message->has_ticket && message->own == nullptr) {
      message->peer->on_dropped(*message);
      remove(*message);
    }
    message = next;
  }
}

void Inbox::overlook(uint64_t context) {
  for (Arrived* message = ahead_.front(); message != nullptr;) {
    Arrived* const next = Ahead::next(*message);
    if (message->envelope.context == context) ahead_.remove(*message);
    message = next;
  }
}

void Inbox::recycle(Arrived& message) {
  std::unique_ptr<Arrived> owned(&message);
  if (message.in_ahead.is_in) ahead_.remove(message);
  owned->heap.reset();
  owned->copy.reset();
  owned->own = nullptr;
  owned->has_ticket = owned->is_here = false;
  if (spare_.size() < spare_max) spare_.push_back(std::move(owned));
}

}  // namespace unisono::engine
