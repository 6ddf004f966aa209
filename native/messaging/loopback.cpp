#include "messaging/loopback.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "messaging/peer.hpp"

namespace unisono::engine {
namespace {

// A longer message is copied in pieces of about 1 ms, between which the links have their turn.
constexpr uint64_t bytes_at_once = 4 * 1024 * 1024;

// A copy has no peer that would get a reply.
void change(RendezvousReceive& copy, RendezvousReceive::Event event) {
  copy.state = RendezvousReceive::transitions.next(copy.state, event);
}

}  // namespace

void Loopback::send(Send& send) {
  Envelope envelope{send.context, send.tag, send.nbytes, peer_.rank, send.dtype, send.header_bytes, send.header};
  MatchResult match;
  bool is_gone;
  Receive* receive = services_.inbox.take_receive(envelope, true, nullptr, match, is_gone);
  const bool is_long = send.nbytes > bytes_at_once;
  if (receive != nullptr && is_long) {
    send.state = Send::State::streaming;
    return start_copy(send.data, send.nbytes, receive, nullptr, &send);
  }
  if (receive != nullptr) {
    Inbox::deliver(*receive, send.data, send.nbytes);
    send.state = Send::State::ended;
    send.end(Outcome::done);
    receive->end(Outcome::done, peer_.rank);
    return;
  }
  if (!send.sync && services_.inbox.has_ended(send.context)) {
    send.state = Send::State::ended;
    return send.end(Outcome::done);
  }
  const bool is_kept = !send.sync && may_keep(send.nbytes);
  UnexpectedMessage* message = services_.inbox.queue(envelope, peer_, send.data, is_kept && !is_long ? send.nbytes : 0);
  if (message != nullptr && is_kept && is_long) {
    message->copy.reset(new (std::nothrow) byte[send.nbytes]);
    if (message->copy == nullptr) services_.inbox.remove(*std::exchange(message, nullptr));
  }
  if (message == nullptr) {
    send.state = Send::State::ended;
    return send.end(Outcome::no_memory);
  }
  message->is_here = true;
  if (is_kept) kept_bytes_ += credit_cost(send.nbytes);
  if (!is_kept || is_long) {
    // The payload stays in the sender's buffer, and the send ends when it was copied from there.
    message->payload = send.data;
    message->own = &send;
    send.own = message;
    send.state = Send::State::offered;
    if (is_kept) start_copy(send.data, send.nbytes, nullptr, message, &send);
    return;
  }
  send.state = Send::State::ended;
  send.end(Outcome::done);
}

bool Loopback::may_keep(uint64_t nbytes) const {
  const uint64_t limit = std::max(services_.settings.own_credit_bytes, services_.settings.eager_credit_bytes);
  return kept_bytes_ == 0 || (nbytes < limit && kept_bytes_ + credit_cost(nbytes) <= limit);
}

bool Loopback::begin(UnexpectedMessage& message, Receive& receive) {
  if (message.envelope.nbytes <= bytes_at_once) return false;
  stop_keeping(message);
  if (message.own != nullptr) message.own->state = Send::State::streaming;
  start_copy(message.payload, message.envelope.nbytes, &receive, &message, message.own);
  return true;
}

void Loopback::start_copy(const byte* from, uint64_t nbytes, Receive* receive, UnexpectedMessage* message, Send* send) {
  auto copy = std::find_if(copies_.begin(), copies_.end(),
                           [](const RendezvousReceive& c) { return c.state == RendezvousReceive::State::free; });
  if (copy == copies_.end()) copy = copies_.emplace(copies_.end());
  change(*copy, RendezvousReceive::Event::read);
  copy->peer = &peer_;
  copy->receive = receive;
  copy->arrived = message;
  copy->own = send;
  copy->address = reinterpret_cast<uint64_t>(from);
  copy->nbytes = nbytes;
  copy->received = 0;
  if (receive != nullptr) receive->incoming = &*copy;
  ++copying_;
  services_.start_reading(*copy);
}

void Loopback::copy_piece(RendezvousReceive& copy, size_t scratch_bytes, size_t piece_bytes) {
  byte* buffer = copy.receive != nullptr ? copy.receive->buffer() : copy.arrived->copy.get();
  const byte* from = reinterpret_cast<const byte*>(copy.address) + copy.received;
  const size_t bytes = std::min<uint64_t>(copy.nbytes - copy.received, buffer != nullptr ? piece_bytes : scratch_bytes);
  if (buffer != nullptr)
    std::memcpy(buffer + copy.received, from, bytes);
  else
    copy.receive->write(copy.received, from, bytes);
  copy.received += bytes;
  if (copy.received == copy.nbytes) end_copy(copy, Outcome::done);
}

void Loopback::end_copy(RendezvousReceive& copy, Outcome outcome) {
  services_.stop_reading(copy);
  change(copy, RendezvousReceive::Event::copied);
  --copying_;
  Receive* receive = std::exchange(copy.receive, nullptr);
  UnexpectedMessage* message = std::exchange(copy.arrived, nullptr);
  Send* send = std::exchange(copy.own, nullptr);
  if (receive == nullptr) {
    message->payload = message->copy.get();
    message->own = nullptr;
    // A context that ended meanwhile has dropped its complete messages.
    if (services_.inbox.has_ended(message->envelope.context)) {
      on_dropped(*message);
      services_.inbox.remove(*message);
    }
  } else if (message != nullptr) {
    if (send == nullptr) kept_bytes_ -= credit_cost(message->envelope.nbytes);
    services_.inbox.recycle(*message);
  }
  if (send != nullptr) {
    send->state = Send::State::ended;
    send->end(outcome);
  }
  if (receive == nullptr) return;
  receive->incoming = nullptr;
  receive->end(outcome, peer_.rank);
}

void Loopback::stop_keeping(UnexpectedMessage& message) {
  for (RendezvousReceive& copy : copies_) {
    if (copy.state != RendezvousReceive::State::reading || copy.arrived != &message) continue;
    services_.stop_reading(copy);
    change(copy, RendezvousReceive::Event::abort);
    copy.arrived = nullptr;
    --copying_;
    message.copy.reset();
    kept_bytes_ -= credit_cost(message.envelope.nbytes);
  }
}

void Loopback::withdraw(Send& send) {
  stop_keeping(*send.own);
  services_.inbox.remove(*send.own);
}

void Loopback::on_matched(const UnexpectedMessage& message) {
  if (message.own == nullptr) return on_dropped(message);
  message.own->state = Send::State::ended;
  message.own->end(Outcome::done);
}

void Loopback::on_dropped(const UnexpectedMessage& message) { kept_bytes_ -= credit_cost(message.envelope.nbytes); }

void Loopback::end_all(Outcome outcome) {
  for (RendezvousReceive& copy : copies_) {
    if (copy.state != RendezvousReceive::State::reading) continue;
    if (copy.receive == nullptr)
      stop_keeping(*copy.arrived);
    else
      end_copy(copy, copy.receive->is_unwanted ? Outcome::cancelled : outcome);
  }
}

}  // namespace unisono::engine
