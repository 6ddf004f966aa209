#include "messaging/rendezvous_receiver.hpp"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "messaging/peer.hpp"

namespace unisono::engine {

RendezvousReceive* RendezvousReceiver::add(const Head& head, const byte* prefix, const char*& fault) {
  uint64_t rendezvous_id;
  std::memcpy(&rendezvous_id, prefix, sizeof rendezvous_id);
  const size_t index = index_of(rendezvous_id);
  fault = "rendezvous id out of range";
  if (index >= rendezvous_max) return nullptr;
  if (index >= receives_.size()) receives_.resize(index + 1);
  RendezvousReceive& added = receives_[index];
  fault = "rendezvous id already in use";
  if (added.state != RendezvousReceive::State::free) return nullptr;
  added = RendezvousReceive();
  added.peer = &peer_;
  added.rendezvous_id = rendezvous_id;
  added.nbytes = head.nbytes;
  if (head.kind() == Kind::rts) std::memcpy(&added.address, prefix + sizeof rendezvous_id, sizeof added.address);
  return &added;
}

void RendezvousReceiver::queue(RendezvousReceive& offer, UnexpectedMessage& message) {
  message.rendezvous_id = offer.rendezvous_id;
  offer.arrived = &message;
  advance(offer, RendezvousReceive::Event::queue);
}

const char* RendezvousReceiver::on_withdraw(const Head& head) {
  if (index_of(head.context) >= receives_.size()) return "withdrawal of an unknown RTS";
  RendezvousReceive& offer = of(head.context);
  if (offer.rendezvous_id != head.context) return nullptr;
  switch (offer.state) {
    case RendezvousReceive::State::free: break;     // our claim came too late, and the sender has its FIN
    case RendezvousReceive::State::reading: break;  // claimed by its offer word, which an honest sender respects
    case RendezvousReceive::State::queued: drop_queued(offer); break;
    case RendezvousReceive::State::awaiting_memory:
    case RendezvousReceive::State::streaming:
      if (offer.received != 0) return "withdrawal after the first data frame";
      unmatch(offer);
  }
  return nullptr;
}

void RendezvousReceiver::unmatch(RendezvousReceive& offer) {
  Receive& receive = *std::exchange(offer.receive, nullptr);
  drop(offer);
  receive.incoming = nullptr;
  if (receive.is_unwanted) return receive.end(Outcome::cancelled, peer_.rank);
  wait_for_another(receive);
}

void RendezvousReceiver::wait_for_another(Receive& receive) {
  receive.on_taken_back();
  if (!services_.inbox.serve(receive)) services_.inbox.repost(receive);
}

void RendezvousReceiver::drop_queued(RendezvousReceive& offer) {
  const uint64_t held = offer.arrived->is_here ? credit_cost(offer.nbytes) : 0;
  const Lane lane = offer.arrived->lane;
  services_.inbox.remove(*offer.arrived);
  drop(offer);
  if (held != 0) peer_.return_credit(lane, held);
}

bool RendezvousReceiver::claim(RendezvousReceive& offer) {
  auto* word = peer_.link != nullptr ? peer_.link->peers_offer(index_of(offer.rendezvous_id)) : nullptr;
  return word == nullptr || change_offer(*word, OfferEvent::claim);
}

void RendezvousReceiver::advance(RendezvousReceive& offer, RendezvousReceive::Event event) {
  using State = RendezvousReceive::State;
  using Reply = RendezvousReceive::Reply;
  const auto& step = RendezvousReceive::transitions.at(offer.state, event);
  streaming_ += (step.next == State::streaming) - (offer.state == State::streaming);
  offer.state = step.next;
  switch (step.action) {
    case Reply::none: return;
    case Reply::queued: return reply_queued(offer);
    case Reply::cts: return peer_.note(Lane::control, Kind::cts, offer.rendezvous_id);
    case Reply::fin_matched:
      return peer_.note(Lane::control, Kind::fin, offer.rendezvous_id, static_cast<uint8_t>(FinStatus::matched));
    case Reply::fin_withdrawn:
      return peer_.note(Lane::control, Kind::fin, offer.rendezvous_id, static_cast<uint8_t>(FinStatus::withdrawn));
  }
}

void RendezvousReceiver::reply_queued(RendezvousReceive& offer) {
  if (auto* word = peer_.link->peers_offer(index_of(offer.rendezvous_id)); word != nullptr)
    change_offer(*word, OfferEvent::queue);  // if the sender withdrew it meanwhile, it stays withdrawn
  else
    peer_.note(Lane::control, Kind::queued, offer.rendezvous_id);
}

void RendezvousReceiver::complete(RendezvousReceive& offer, Outcome outcome) {
  advance(offer, RendezvousReceive::Event::complete);
  Receive* receive = std::exchange(offer.receive, nullptr);
  receive->incoming = nullptr;
  receive->end(outcome, peer_.rank);
}

void RendezvousReceiver::drop(RendezvousReceive& offer) {
  offer.arrived = nullptr;
  advance(offer, RendezvousReceive::Event::withdraw);
}

void RendezvousReceiver::begin(RendezvousReceive& offer, Receive& receive, MatchResult match) {
  offer.receive = &receive;
  offer.arrived = nullptr;
  receive.incoming = &offer;
  if (match == MatchResult::defer && offer.nbytes != 0) {
    advance(offer, RendezvousReceive::Event::defer);
    return receive.want_memory();
  }
  supply(offer);
}

void RendezvousReceiver::supply(RendezvousReceive& offer) {
  const bool has_word = peer_.link->peers_offer(index_of(offer.rendezvous_id)) != nullptr;
  if (offer.nbytes == 0 && has_word) return complete(offer, Outcome::done);
  if (peer_.link->can_read() && has_word) {
    advance(offer, RendezvousReceive::Event::read);
    offer.shared_copy =
        is_worth_sharing(offer.nbytes) ? peer_.link->peers_copy(index_of(offer.rendezvous_id)) : nullptr;
    const byte* target =
        offer.shared_copy != nullptr && offer.receive->has_fixed_buffer() ? offer.receive->buffer() : nullptr;
    if (target != nullptr)
      offer.shared_copy->ask(target, peer_.link->guard());
    else
      offer.shared_copy = nullptr;
    return services_.start_reading(offer);
  }
  // Without a word only the sender knows whether its RTS still stands, so an empty message needs its answer, too.
  advance(offer, RendezvousReceive::Event::stream);
}

const char* RendezvousReceiver::read_piece(RendezvousReceive& offer, byte* scratch, size_t scratch_bytes,
                                           size_t piece_bytes) {
  if (offer.shared_copy != nullptr) return read_part(offer, piece_bytes);
  const uint64_t left = offer.nbytes - offer.received;
  byte* buffer = offer.receive->buffer();
  const size_t bytes = std::min<uint64_t>(left, buffer != nullptr ? piece_bytes : scratch_bytes);
  byte* to = buffer != nullptr ? buffer + offer.received : scratch;
  if (!peer_.link->read(offer.address + offer.received, to, bytes)) {
    // If the peer is dead, its end will be noticed; if it lives, it has to stream the message.
    if (!peer_.link->is_alive()) return nullptr;
    if (offer.received != 0) return "its memory became unreadable during a direct read";
    services_.stop_reading(offer);
    advance(offer, RendezvousReceive::Event::stream);
    return nullptr;
  }
  const bool is_last = bytes == left;
  const char* fault = nullptr;
  if (is_last && !confirm(offer, fault)) return fault;
  if (buffer == nullptr) offer.receive->write(offer.received, scratch, bytes);
  offer.received += bytes;
  if (!is_last) return nullptr;
  services_.stop_reading(offer);
  complete(offer, Outcome::done);
  return nullptr;
}

const char* RendezvousReceiver::read_part(RendezvousReceive& offer, size_t piece_bytes) {
  Part part;
  CooperativeCopy::Front next;
  // Again once everything is claimed: the sender may have written its parts by now.
  while ((next = offer.shared_copy->claim_front(offer.nbytes, piece_bytes, part)) == CooperativeCopy::Front::part) {
    if (!peer_.link->read(offer.address + part.offset, offer.receive->buffer() + part.offset, part.bytes)) {
      if (!peer_.link->is_alive()) return nullptr;
      if (offer.received != 0 || !offer.shared_copy->close())
        return "its memory became unreadable during a direct read";
      services_.stop_reading(offer);
      advance(offer, RendezvousReceive::Event::stream);
      return nullptr;
    }
    offer.received += part.bytes;
    if (!offer.shared_copy->is_all_claimed(offer.nbytes)) return nullptr;
  }
  if (next == CooperativeCopy::Front::broken)
    return "broke the protocol: corrupt cooperative-copy state in shared memory";
  const char* fault = nullptr;
  if (next == CooperativeCopy::Front::wait || !confirm(offer, fault)) return fault;
  offer.received = offer.nbytes;
  services_.stop_reading(offer);
  complete(offer, Outcome::done);
  return nullptr;
}

bool RendezvousReceiver::confirm(RendezvousReceive& offer, const char*& fault) {
  if (!peer_.link->is_alive()) return false;
  if (change_offer(*peer_.link->peers_offer(index_of(offer.rendezvous_id)), OfferEvent::finish)) return true;
  fault = "declared this rank dead during a direct read";
  return false;
}

void RendezvousReceiver::fence(RendezvousReceive& offer) {
  if (offer.shared_copy == nullptr) return;
  peer_.link->shut_guard();
  offer.shared_copy->close();
  // A write that had passed the guard page is inside a system call, which only the lack of a free core can delay.
  while (offer.shared_copy->state(offer.nbytes) == CopyState::draining && peer_.link->is_starved()) sched_yield();
}

RendezvousReceive* RendezvousReceiver::data_for(const Head& head, const char*& fault) {
  fault = "data frame without a CTS";
  if (index_of(head.context) >= receives_.size()) return nullptr;
  RendezvousReceive& offer = of(head.context);
  if (offer.state != RendezvousReceive::State::streaming || offer.rendezvous_id != head.context) return nullptr;
  fault = "data frame at a wrong offset";
  if (head.tag != offer.received || head.nbytes > offer.nbytes - offer.received) return nullptr;
  if (head.nbytes == 0 && offer.nbytes != 0) return nullptr;
  return &offer;
}

void RendezvousReceiver::on_data(RendezvousReceive& offer, size_t bytes) {
  offer.received += bytes;
  if (offer.received == offer.nbytes) complete(offer, Outcome::done);
}

void RendezvousReceiver::end_all(Outcome outcome) {
  for (RendezvousReceive& offer : receives_) {
    const auto was = offer.state;
    advance(offer, RendezvousReceive::Event::abort);
    if (was == RendezvousReceive::State::queued) {
      // An eager message stays receivable; the payload of an RTS is lost.
      if (offer.arrived->is_here)
        offer.arrived->has_rendezvous = false;
      else
        services_.inbox.remove(*offer.arrived);
    }
    if (was == RendezvousReceive::State::reading) {
      services_.stop_reading(offer);
      fence(offer);
    }
    if (was != RendezvousReceive::State::free && was != RendezvousReceive::State::queued) {
      Receive& receive = *offer.receive;
      receive.incoming = nullptr;
      // A receive from any source may still match another rank's message.
      if (outcome != Outcome::peer_down || receive.source != any_source || receive.is_unwanted)
        receive.end(receive.is_unwanted ? Outcome::cancelled : outcome, peer_.rank);
      else
        wait_for_another(receive);
    }
  }
  streaming_ = 0;
}

}  // namespace unisono::engine
