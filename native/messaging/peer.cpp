#include "messaging/peer.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>

namespace unisono::engine {
namespace {

constexpr size_t cause_bytes_max = 200;
// A longer message to oneself is copied in pieces of about 1 ms, between which the links have their turn.
constexpr uint64_t own_bytes_at_once = 4 * 1024 * 1024;

// Text of a peer, safe to print.
std::string readable(const byte* text, size_t bytes) {
  std::string safe;
  for (size_t i = 0; i < bytes && i < cause_bytes_max; ++i) {
    const char c = static_cast<char>(text[i]);
    safe += c >= ' ' && c <= '~' ? c : '?';
  }
  return safe;
}

}  // namespace

void Peer::on_open(std::unique_ptr<Link> opened) {
  link = std::move(opened);
  state = State::open;
  silent_ns = stalled_ns = 0;
  is_rumoured = false;
  for (const Lane lane : {Lane::bulk, Lane::control}) {
    const uint64_t fits = link->eager_bytes_max(lane);
    const Settings& set = services_.settings;
    const uint64_t allowed = lane == Lane::control ? set.control_eager_bytes : set.eager_bytes;
    eager_max_[static_cast<size_t>(lane)] = std::min(fits, allowed);
    certain_eager_max_[static_cast<size_t>(lane)] = std::min(fits, allowed * link->certain_eager_factor());
    control_eager_max_[static_cast<size_t>(lane)] = std::min(fits, set.control_eager_bytes);
  }
}

uint64_t Peer::credit_of(Lane lane) const {
  return lane == Lane::control ? services_.settings.control_credit_bytes : services_.settings.eager_credit_bytes;
}

// ---- sending ----

void Peer::send(Send& send) {
  send.peer = this;
  send.streamed = 0;
  send.is_queued = send.is_fin = false;
  if (is_self_) return send_to_self(send);
  if (state == State::down) {
    send.state = Send::State::ended;
    return send.end(Outcome::peer_down);
  }
  Queue& queue = queued_[static_cast<size_t>(send.lane)];
  if (state == State::open && queue.empty() && notes_.empty() && start(send)) [[likely]]
    return;
  send.state = Send::State::queued;
  queue.push_back(send);
  ++backlog_;
  if (state == State::unopened) services_.open_link(*this);
}

// Put a message on the link: eagerly if it is short and the credit allows it, else as an RTS.
bool Peer::start(Send& send) {
  Head head;
  head.dtype = send.dtype;
  head.context = send.context;
  head.tag = send.tag;
  head.nbytes = send.nbytes;
  Body body;
  const auto lane = static_cast<size_t>(send.lane);
  body.header = send.header;
  body.header_bytes = head.header_bytes = send.header_bytes;
  // A goodbye travels behind the messages before it, in their lane, and is a control message all the same: as an RTS it
  // could be revoked by the end of its sender while the receiver reads it.
  const auto& eager_max = is_control(send.tag)      ? control_eager_max_
                          : send.receive_is_certain ? certain_eager_max_
                                                    : eager_max_;
  bool is_eager = send.nbytes <= eager_max[lane] && credit_used_[lane] + cost(send.nbytes) <= credit_of(send.lane);
  if (is_eager && !send.sync) [[likely]] {
    head.word = Head::make_word(Kind::eager, send.is_ahead ? flag_run_ahead : 0);
    body.payload = send.data;
    body.payload_bytes = send.nbytes;
    if (!link->put(send.lane, head, body)) return false;
    credit_used_[lane] += cost(send.nbytes);
    send.state = Send::State::ended;
    send.end(Outcome::done);
    return true;
  }
  if (!take_slot(send)) return false;
  auto* word = link->own_offer(index_of(send.rendezvous_id));
  // Without an offer word only payload that has not left can be withdrawn for certain.
  if (word == nullptr && !send.receive_is_certain) is_eager = false;
  body.prefix[0] = send.rendezvous_id;
  if (is_eager) {
    head.word = Head::make_word(Kind::eager, flag_rendezvous_id);
    body.prefix_bytes = 8;
    body.payload = send.data;
    body.payload_bytes = send.nbytes;
  } else {
    head.word = Head::make_word(Kind::rts);
    body.prefix[1] = reinterpret_cast<uint64_t>(send.data);
    body.prefix_bytes = 16;
  }
  CooperativeCopy* copy =
      !is_eager && is_worth_sharing(send.nbytes) ? link->own_copy(index_of(send.rendezvous_id)) : nullptr;
  if (copy != nullptr) copy->reset();
  // relaxed: the frame that follows is published after it
  if (word != nullptr) word->store(static_cast<uint32_t>(OfferWord::offered), std::memory_order_relaxed);
  if (!link->put(send.lane, head, body)) {
    free_slot(send.rendezvous_id);
    return false;
  }
  if (is_eager) credit_used_[lane] += cost(send.nbytes);
  send.state = Send::State::offered;
  if (copy != nullptr) shared_copies_.push_back(send);
  return true;
}

void Peer::stop_sharing(Send& send) {
  if (send.hook.is_in) shared_copies_.remove(send);
}

bool Peer::copy_for_receiver(size_t piece_bytes) {
  if (shared_copies_.empty() || !link->can_write() || link->over() != nullptr) return false;
  // The last one first: the receiver begins with the first.
  for (Send* send = shared_copies_.back(); send != nullptr; send = Queue::before(*send)) {
    CooperativeCopy& copy = *link->own_copy(index_of(send->rendezvous_id));
    Part part;
    uint64_t guard;
    const uint64_t target = copy.claim_back(send->nbytes, piece_bytes, part, guard);
    if (target == 0) continue;
    copy.report(part, link->write(guard, target + part.offset, send->data + part.offset, part.bytes));
    link->wake_if_asleep();
    return true;
  }
  return false;
}

bool Peer::cancel(Send& send) {
  switch (send.state) {
    case Send::State::queued:
      queued_[static_cast<size_t>(send.lane)].remove(send);
      --backlog_;
      break;
    case Send::State::offered: {
      if (is_self_) {
        stop_keeping(*send.own);
        services_.inbox.remove(*send.own);
        break;
      }
      auto* word = link->own_offer(index_of(send.rendezvous_id));
      // Without an offer word the sender decides: no byte has left, and a receive that matched the RTS waits for
      // another message. A send whose receive is certain has left eagerly.
      if (word != nullptr && !change_offer(*word, OfferEvent::withdraw)) return false;
      stop_sharing(send);
      // The slot is free again when the peer's FIN has come.
      slot_of(send.rendezvous_id)->send = nullptr;
      note(send.lane, Kind::withdraw, send.rendezvous_id);
      break;
    }
    default: return false;
  }
  send.state = Send::State::ended;
  send.end(Outcome::cancelled);
  return true;
}

bool Peer::flush() {
  bool moved = false;
  while (!notes_.empty() && link->over() == nullptr && put_note(notes_.front())) {
    notes_.pop_front();
    --backlog_;
    moved = true;
  }
  for (Queue& queue : queued_)
    while (Send* send = link->over() == nullptr ? queue.pop_front() : nullptr) {
      // Out of the queue first: once it has ended it must not be touched.
      --backlog_;
      if (!start(*send)) {
        queue.push_front(*send);
        ++backlog_;
        break;
      }
      moved = true;
    }
  if (!streams_.empty()) moved |= flush_streams();
  return moved;
}

bool Peer::flush_streams() {
  bool moved = false;
  // One data frame of each stream, then everything else on the link has its turn.
  for (size_t turns = streams_.size(); turns > 0 && link->over() == nullptr; --turns) {
    Send& send = *streams_.pop_front();
    if (send.streamed < send.nbytes) {
      const size_t taken = link->put_data(send.lane, send.rendezvous_id, send.streamed, send.data + send.streamed,
                                          send.nbytes - send.streamed);
      send.streamed += taken;
      moved |= taken != 0;
    }
    if (send.streamed < send.nbytes || link->holds_data(send.lane, send.rendezvous_id)) {
      streams_.push_back(send);
      continue;
    }
    --backlog_;
    // The slot is free again when the peer's FIN has come: a new RTS on the other lane could overtake the last bytes.
    if (send.is_fin)
      free_slot(send.rendezvous_id);
    else
      slot_of(send.rendezvous_id)->send = nullptr;
    send.state = Send::State::ended;
    send.end(Outcome::done);
    moved = true;
  }
  return moved;
}

void Peer::send_to_self(Send& send) {
  Envelope envelope{send.context, send.tag, send.nbytes, rank, send.dtype, send.header_bytes, send.header};
  MatchResult match;
  bool is_gone;
  Receive* receive = services_.inbox.take_receive(envelope, true, nullptr, match, is_gone);
  const bool is_long = send.nbytes > own_bytes_at_once;
  if (receive != nullptr && is_long) {
    send.state = Send::State::streaming;
    return start_copy(send.data, send.nbytes, receive, nullptr, &send);
  }
  if (receive != nullptr) {
    Inbox::deliver(*receive, send.data, send.nbytes);
    send.state = Send::State::ended;
    send.end(Outcome::done);
    receive->end(Outcome::done, rank);
    return;
  }
  if (!send.sync && services_.inbox.has_ended(send.context)) {
    send.state = Send::State::ended;
    return send.end(Outcome::done);
  }
  const bool is_kept = !send.sync && may_keep_own(send.nbytes);
  UnexpectedMessage* message = services_.inbox.queue(envelope, *this, send.data, is_kept && !is_long ? send.nbytes : 0);
  if (message != nullptr && is_kept && is_long) {
    message->copy.reset(new (std::nothrow) byte[send.nbytes]);
    if (message->copy == nullptr) services_.inbox.remove(*std::exchange(message, nullptr));
  }
  if (message == nullptr) {
    send.state = Send::State::ended;
    return send.end(Outcome::no_memory);
  }
  message->is_here = true;
  if (is_kept) credit_held_[0] += cost(send.nbytes);
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

bool Peer::may_keep_own(uint64_t nbytes) const {
  const uint64_t limit = std::max(services_.settings.own_credit_bytes, services_.settings.eager_credit_bytes);
  return credit_held_[0] == 0 || (nbytes < limit && credit_held_[0] + cost(nbytes) <= limit);
}

bool Peer::begin_own(UnexpectedMessage& message, Receive& receive) {
  if (!is_self_ || message.envelope.nbytes <= own_bytes_at_once) return false;
  stop_keeping(message);
  if (message.own != nullptr) message.own->state = Send::State::streaming;
  start_copy(message.payload, message.envelope.nbytes, &receive, &message, message.own);
  return true;
}

void Peer::start_copy(const byte* from, uint64_t nbytes, Receive* receive, UnexpectedMessage* message, Send* send) {
  auto copy = std::find_if(incoming_.begin(), incoming_.end(),
                           [](const RendezvousReceive& c) { return c.state == RendezvousReceive::State::free; });
  if (copy == incoming_.end()) copy = incoming_.emplace(incoming_.end());
  advance(*copy, RendezvousReceive::Event::read);
  copy->peer = this;
  copy->receive = receive;
  copy->arrived = message;
  copy->own = send;
  copy->address = reinterpret_cast<uint64_t>(from);
  copy->nbytes = nbytes;
  copy->received = 0;
  if (receive != nullptr) receive->incoming = &*copy;
  ++own_copies_;
  services_.start_reading(*copy);
}

void Peer::copy_piece(RendezvousReceive& copy, size_t scratch_bytes, size_t piece_bytes) {
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

void Peer::end_copy(RendezvousReceive& copy, Outcome outcome) {
  services_.stop_reading(copy);
  advance(copy, RendezvousReceive::Event::copied);
  --own_copies_;
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
    if (send == nullptr) credit_held_[0] -= cost(message->envelope.nbytes);
    services_.inbox.recycle(*message);
  }
  if (send != nullptr) {
    send->state = Send::State::ended;
    send->end(outcome);
  }
  if (receive == nullptr) return;
  receive->incoming = nullptr;
  receive->end(outcome, rank);
}

void Peer::stop_keeping(UnexpectedMessage& message) {
  for (RendezvousReceive& copy : incoming_) {
    if (copy.state != RendezvousReceive::State::reading || copy.arrived != &message) continue;
    services_.stop_reading(copy);
    advance(copy, RendezvousReceive::Event::abort);
    copy.arrived = nullptr;
    --own_copies_;
    message.copy.reset();
    credit_held_[0] -= cost(message.envelope.nbytes);
  }
}

bool Peer::take_slot(Send& send) {
  if (free_slots_.empty()) {
    const size_t size = send_slots_.size();
    if (size == rendezvous_max) return false;
    const size_t more = size == 0 ? 64 : size;
    send_slots_.resize(size + more);
    // Low indices first: those have an offer word.
    for (size_t i = size + more; i > size; --i) free_slots_.push_back(static_cast<uint32_t>(i - 1));
  }
  const uint32_t index = free_slots_.back();
  free_slots_.pop_back();
  SendSlot& slot = send_slots_[index];
  slot.send = &send;
  slot.is_taken = true;
  send.rendezvous_id = uint64_t{++slot.uses} << 32 | index;
  return true;
}

Peer::SendSlot* Peer::slot_of(uint64_t rendezvous_id) {
  if (index_of(rendezvous_id) >= send_slots_.size()) return nullptr;
  SendSlot& found = send_slots_[index_of(rendezvous_id)];
  return found.is_taken && found.uses == rendezvous_id >> 32 ? &found : nullptr;
}

void Peer::free_slot(uint64_t rendezvous_id) {
  SendSlot& freed = send_slots_[index_of(rendezvous_id)];
  freed.send = nullptr;
  freed.is_taken = false;
  free_slots_.push_back(static_cast<uint32_t>(index_of(rendezvous_id)));
}

void Peer::note(Lane lane, Kind kind, uint64_t context, uint8_t dtype, uint64_t nbytes, std::string text) {
  Note made{lane, {}, std::move(text)};
  made.head.header_bytes = static_cast<uint16_t>(made.text.size());
  made.head.word = Head::make_word(kind);
  made.head.context = context;
  made.head.dtype = dtype;
  made.head.nbytes = nbytes;
  if (state != State::open || link->over() != nullptr) return;
  if (notes_.empty() && put_note(made)) return;
  notes_.push_back(std::move(made));
  ++backlog_;
}

bool Peer::put_note(const Note& note) {
  Body body;
  body.header = reinterpret_cast<const byte*>(note.text.data());
  body.header_bytes = note.text.size();
  return link->put(note.lane, note.head, body);
}

void Peer::send_down(std::int32_t gone, const std::string& cause, Fate fate) {
  note(Lane::control, Kind::down, static_cast<uint64_t>(gone), static_cast<uint8_t>(fate), 0,
       cause.substr(0, cause_bytes_max));
}

void Peer::on_verdict(const std::string& why) {
  verdict = readable(reinterpret_cast<const byte*>(why.data()), why.size());
}

void Peer::declare_dead(const std::string& cause) {
  if (state != State::open || link->is_hung_up()) return;
  Note made{Lane::control, {}, cause.substr(0, cause_bytes_max)};
  made.head.word = Head::make_word(Kind::down);
  made.head.header_bytes = static_cast<uint16_t>(made.text.size());
  made.head.context = static_cast<uint64_t>(rank);
  made.head.dtype = static_cast<uint8_t>(Fate::given_up);
  put_note(made);
  link->push();
  link->finish();
}

void Peer::return_credit(Lane lane, uint64_t bytes) {
  const auto at = static_cast<size_t>(lane);
  credit_held_[at] -= bytes;
  credit_due_[at] += bytes;
  // A quarter at a time: at most one credit frame per 16 KiB message, and one for hundreds of small ones.
  if (credit_due_[at] < credit_of(lane) / 4) return;
  note(Lane::control, Kind::credit, 0, static_cast<uint8_t>(lane), std::exchange(credit_due_[at], 0));
}

// ---- receiving ----

const char* Peer::on_frame(const Head& head, const byte* body, Lane lane) {
  // A peer that reads its replies never has this many outstanding.
  if (notes_.size() > notes_max) [[unlikely]]
    return "it does not read the replies to its messages";
  switch (head.kind()) {
    case Kind::eager:
    case Kind::rts: return on_message(head, body, lane);
    case Kind::cts: return on_cts(head);
    case Kind::data: {
      const char* fault = nullptr;
      RendezvousReceive* offer = data_for(head, fault);
      if (offer == nullptr) return fault;
      if (byte* to = offer->receive->buffer(); to != nullptr)
        std::memcpy(to + offer->received, body, head.nbytes);
      else
        offer->receive->write(offer->received, body, head.nbytes);
      on_data(*offer, head.nbytes);
      return nullptr;
    }
    case Kind::fin: return on_fin(head);
    case Kind::credit:
      if (head.dtype >= lane_count || head.nbytes > credit_used_[head.dtype])
        return "more credit returned than was used";
      credit_used_[head.dtype] -= head.nbytes;
      return nullptr;
    case Kind::withdraw: return on_withdraw(head);
    case Kind::queued:
      if (SendSlot* slot = slot_of(head.context); slot != nullptr && slot->send != nullptr)
        slot->send->is_queued = true;
      return nullptr;
    case Kind::beat: return nullptr;
    case Kind::goodbye: link->on_goodbye(lane); return nullptr;
    case Kind::down:
      if (head.dtype == static_cast<uint8_t>(Fate::given_up))
        verdict = readable(body, head.header_bytes);
      else
        services_.on_rank_down(head.context, readable(body, head.header_bytes),
                               head.dtype == static_cast<uint8_t>(Fate::left));
      return nullptr;
    default: return "a frame of unknown kind";
  }
}

const char* Peer::on_message(const Head& head, const byte* body, Lane lane) {
  const bool is_here = head.kind() == Kind::eager;
  const size_t prefix = head.prefix_bytes();
  const Envelope envelope{head.context, head.tag, head.nbytes, rank, head.dtype, head.header_bytes, body + prefix};
  if (is_control(head.tag)) {
    if (head.nbytes > services_.settings.control_bytes_max) return "a control message exceeds control_bytes_max";
  } else if (head.nbytes > services_.settings.message_bytes_max) {
    return "a message exceeds message_bytes_max";
  }
  if (is_here) {
    uint64_t& held = credit_held_[static_cast<size_t>(lane)];
    if (cost(head.nbytes) > credit_of(lane) - held) return "eager messages beyond the credit";
    held += cost(head.nbytes);
  }
  RendezvousReceive* rendezvous = nullptr;
  if (prefix != 0) {
    uint64_t rendezvous_id;
    std::memcpy(&rendezvous_id, body, sizeof rendezvous_id);
    const size_t index = index_of(rendezvous_id);
    if (index >= rendezvous_max) return "rendezvous id out of range";
    if (index >= incoming_.size()) incoming_.resize(index + 1);
    rendezvous = &incoming_[index];
    if (rendezvous->state != RendezvousReceive::State::free) return "rendezvous id already in use";
    *rendezvous = RendezvousReceive();
    rendezvous->peer = this;
    rendezvous->rendezvous_id = rendezvous_id;
    rendezvous->nbytes = head.nbytes;
    if (!is_here) std::memcpy(&rendezvous->address, body + sizeof rendezvous_id, sizeof rendezvous->address);
  }
  MatchResult match;
  bool is_gone;
  const byte* payload = body + prefix + head.header_bytes;
  Receive* receive = services_.inbox.take_receive(envelope, is_here, rendezvous, match, is_gone);
  if (is_gone) {
    if (is_here) return_credit(lane, cost(head.nbytes));
    drop(*rendezvous);
    return nullptr;
  }
  if (receive == nullptr && is_here && rendezvous == nullptr && services_.inbox.has_ended(head.context)) {
    return_credit(lane, cost(head.nbytes));
    return nullptr;
  }
  if (receive == nullptr) {
    UnexpectedMessage* message = services_.inbox.queue(envelope, *this, payload, is_here ? head.nbytes : 0);
    if (message == nullptr) return "no memory for a message";
    message->is_here = is_here;
    message->lane = lane;
    message->has_rendezvous = rendezvous != nullptr;
    if ((head.flags() & flag_run_ahead) != 0) services_.inbox.add_ahead(*message);
    if (rendezvous != nullptr) {
      message->rendezvous_id = rendezvous->rendezvous_id;
      rendezvous->arrived = message;
      advance(*rendezvous, RendezvousReceive::Event::queue);
    }
    return nullptr;
  }
  if (!is_here) {
    begin(*rendezvous, *receive, match);
    return nullptr;
  }
  Inbox::deliver(*receive, payload, head.nbytes);
  return_credit(lane, cost(head.nbytes));
  if (rendezvous != nullptr) advance(*rendezvous, RendezvousReceive::Event::complete);
  receive->end(Outcome::done, rank);
  return nullptr;
}

const char* Peer::on_cts(const Head& head) {
  SendSlot* slot = slot_of(head.context);
  if (slot != nullptr && slot->send == nullptr) return nullptr;  // withdrawn, and the withdrawal is on its way
  if (slot == nullptr || slot->send->state != Send::State::offered) return "CTS without an RTS";
  Send& send = *slot->send;
  stop_sharing(send);
  if (send.nbytes == 0) {
    note(send.lane, Kind::data, send.rendezvous_id);
    slot->send = nullptr;
    send.state = Send::State::ended;
    send.end(Outcome::done);
    return nullptr;
  }
  send.state = Send::State::streaming;
  streams_.push_back(send);
  ++backlog_;
  return nullptr;
}

const char* Peer::on_fin(const Head& head) {
  SendSlot* slot = slot_of(head.context);
  if (slot == nullptr) return "FIN of an unknown rendezvous";
  Send* send = slot->send;
  if (send != nullptr && send->state == Send::State::streaming && send->streamed == send->nbytes) {
    // The FIN was faster than the link, which may read the memory again until the bytes are acknowledged, or than the
    // next flush_streams.
    if (std::exchange(send->is_fin, true)) return "FIN of a rendezvous that is over";
    if (link->holds_data(send->lane, send->rendezvous_id)) return nullptr;
    streams_.remove(*send);
    --backlog_;
    free_slot(head.context);
    send->state = Send::State::ended;
    send->end(Outcome::done);
    return nullptr;
  }
  if (send != nullptr && send->state != Send::State::offered) return "FIN before the last data frame";
  free_slot(head.context);
  if (send == nullptr) return nullptr;  // withdrawn earlier
  stop_sharing(*send);
  send->state = Send::State::ended;
  send->end(static_cast<Answer>(head.dtype) == Answer::withdrawn ? Outcome::cancelled : Outcome::done);
  return nullptr;
}

const char* Peer::on_withdraw(const Head& head) {
  if (index_of(head.context) >= incoming_.size()) return "withdrawal of an unknown RTS";
  RendezvousReceive& offer = incoming_of(head.context);
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

void Peer::unmatch(RendezvousReceive& offer) {
  Receive& receive = *std::exchange(offer.receive, nullptr);
  drop(offer);
  receive.incoming = nullptr;
  if (receive.is_unwanted) return receive.end(Outcome::cancelled, rank);
  receive.on_taken_back();
  if (!services_.inbox.serve(receive)) services_.inbox.repost(receive);
}

void Peer::drop_queued(RendezvousReceive& offer) {
  const uint64_t held = offer.arrived->is_here ? cost(offer.nbytes) : 0;
  const Lane lane = offer.arrived->lane;
  services_.inbox.remove(*offer.arrived);
  drop(offer);
  if (held != 0) return_credit(lane, held);
}

bool Peer::claim(RendezvousReceive& offer) {
  auto* word = link != nullptr ? link->peers_offer(index_of(offer.rendezvous_id)) : nullptr;
  return word == nullptr || change_offer(*word, OfferEvent::claim);
}

void Peer::advance(RendezvousReceive& offer, RendezvousReceive::Event event) {
  using State = RendezvousReceive::State;
  using Reply = RendezvousReceive::Reply;
  const auto& step = RendezvousReceive::transitions.at(offer.state, event);
  awaited_ += (step.next == State::streaming) - (offer.state == State::streaming);
  offer.state = step.next;
  switch (step.action) {
    case Reply::none: return;
    case Reply::queued: return reply_queued(offer);
    case Reply::cts: return note(Lane::control, Kind::cts, offer.rendezvous_id);
    case Reply::fin_matched:
      return note(Lane::control, Kind::fin, offer.rendezvous_id, static_cast<uint8_t>(Answer::matched));
    case Reply::fin_withdrawn:
      return note(Lane::control, Kind::fin, offer.rendezvous_id, static_cast<uint8_t>(Answer::withdrawn));
  }
}

void Peer::reply_queued(RendezvousReceive& offer) {
  if (auto* word = link->peers_offer(index_of(offer.rendezvous_id)); word != nullptr)
    change_offer(*word, OfferEvent::queue);  // if the sender withdrew it meanwhile, it stays withdrawn
  else
    note(Lane::control, Kind::queued, offer.rendezvous_id);
}

void Peer::complete(RendezvousReceive& offer, Outcome outcome) {
  advance(offer, RendezvousReceive::Event::complete);
  Receive* receive = std::exchange(offer.receive, nullptr);
  receive->incoming = nullptr;
  receive->end(outcome, rank);
}

void Peer::drop(RendezvousReceive& offer) {
  offer.arrived = nullptr;
  advance(offer, RendezvousReceive::Event::withdraw);
}

void Peer::begin(RendezvousReceive& offer, Receive& receive, MatchResult match) {
  offer.receive = &receive;
  offer.arrived = nullptr;
  receive.incoming = &offer;
  if (match == MatchResult::defer && offer.nbytes != 0) {
    advance(offer, RendezvousReceive::Event::defer);
    return receive.want_memory();
  }
  supply(offer);
}

void Peer::supply(RendezvousReceive& offer) {
  const bool has_word = link->peers_offer(index_of(offer.rendezvous_id)) != nullptr;
  if (offer.nbytes == 0 && has_word) return complete(offer, Outcome::done);
  if (link->can_read() && has_word) {
    advance(offer, RendezvousReceive::Event::read);
    offer.shared_copy = is_worth_sharing(offer.nbytes) ? link->peers_copy(index_of(offer.rendezvous_id)) : nullptr;
    const byte* target =
        offer.shared_copy != nullptr && offer.receive->has_fixed_buffer() ? offer.receive->buffer() : nullptr;
    if (target != nullptr)
      offer.shared_copy->ask(target, link->guard());
    else
      offer.shared_copy = nullptr;
    return services_.start_reading(offer);
  }
  // Without a word only the sender knows whether its RTS still stands, so an empty message needs its answer, too.
  advance(offer, RendezvousReceive::Event::stream);
}

void Peer::give_up(RendezvousReceive& offer) { complete(offer, Outcome::no_memory); }

const char* Peer::read_piece(RendezvousReceive& offer, byte* scratch, size_t scratch_bytes, size_t piece_bytes) {
  if (offer.shared_copy != nullptr) return read_part(offer, piece_bytes);
  if (is_self_) {
    copy_piece(offer, scratch_bytes, piece_bytes);
    return nullptr;
  }
  const uint64_t left = offer.nbytes - offer.received;
  byte* buffer = offer.receive->buffer();
  const size_t bytes = std::min<uint64_t>(left, buffer != nullptr ? piece_bytes : scratch_bytes);
  byte* to = buffer != nullptr ? buffer + offer.received : scratch;
  if (!link->read(offer.address + offer.received, to, bytes)) {
    // If the peer is dead, its end will be noticed; if it lives, it has to stream the message.
    if (!link->is_alive()) return nullptr;
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

const char* Peer::read_part(RendezvousReceive& offer, size_t piece_bytes) {
  Part part;
  CooperativeCopy::Front next;
  // Again once everything is claimed: the sender may have written its parts by now.
  while ((next = offer.shared_copy->claim_front(offer.nbytes, piece_bytes, part)) == CooperativeCopy::Front::part) {
    if (!link->read(offer.address + part.offset, offer.receive->buffer() + part.offset, part.bytes)) {
      if (!link->is_alive()) return nullptr;
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

bool Peer::confirm(RendezvousReceive& offer, const char*& fault) {
  if (!link->is_alive()) return false;
  if (change_offer(*link->peers_offer(index_of(offer.rendezvous_id)), OfferEvent::finish)) return true;
  fault = "declared this rank dead during a direct read";
  return false;
}

void Peer::fence(RendezvousReceive& offer) {
  if (offer.shared_copy == nullptr) return;
  link->shut_guard();
  offer.shared_copy->close();
  // A write that had passed the guard page is inside a system call, which only the lack of a free core can delay.
  while (offer.shared_copy->state(offer.nbytes) == CopyState::draining && link->is_starved()) sched_yield();
}

RendezvousReceive* Peer::data_for(const Head& head, const char*& fault) {
  fault = "data frame without a CTS";
  if (index_of(head.context) >= incoming_.size()) return nullptr;
  RendezvousReceive& offer = incoming_of(head.context);
  if (offer.state != RendezvousReceive::State::streaming || offer.rendezvous_id != head.context) return nullptr;
  fault = "data frame at a wrong offset";
  if (head.tag != offer.received || head.nbytes > offer.nbytes - offer.received) return nullptr;
  if (head.nbytes == 0 && offer.nbytes != 0) return nullptr;
  return &offer;
}

void Peer::on_data(RendezvousReceive& offer, size_t bytes) {
  offer.received += bytes;
  if (offer.received == offer.nbytes) complete(offer, Outcome::done);
}

void Peer::on_matched(const UnexpectedMessage& message) {
  if (message.own != nullptr) {
    message.own->state = Send::State::ended;
    message.own->end(Outcome::done);
  } else if (is_self_) {
    credit_held_[0] -= cost(message.envelope.nbytes);
  }
  if (is_self_) return;
  return_credit(message.lane, cost(message.envelope.nbytes));
  if (!message.has_rendezvous) return;
  // The sender may have withdrawn it meanwhile; its send has then ended, and the FIN only frees the rendezvous id.
  advance(incoming_of(message.rendezvous_id), RendezvousReceive::Event::complete);
}

void Peer::on_dropped(const UnexpectedMessage& message) {
  if (is_self_)
    credit_held_[0] -= cost(message.envelope.nbytes);
  else
    return_credit(message.lane, cost(message.envelope.nbytes));
}

// ---- ending ----

bool Peer::are_rendezvous_settled() const {
  for (const SendSlot& slot : send_slots_) {
    if (!slot.is_taken || slot.send == nullptr || slot.send->state != Send::State::offered) continue;
    auto* word = link->own_offer(index_of(slot.send->rendezvous_id));
    // relaxed: polled until it is so
    const bool is_queued = word != nullptr
                               ? word->load(std::memory_order_relaxed) == static_cast<uint32_t>(OfferWord::queued)
                               : slot.send->is_queued;
    if (!is_queued) return false;
  }
  return true;
}

void Peer::end_all(Outcome outcome) {
  // A stopped peer may come back and go on reading: it must find that the offer was revoked.
  for (SendSlot& slot : send_slots_) {
    if (!slot.is_taken || slot.send == nullptr) continue;
    if (auto* word = link != nullptr ? link->own_offer(index_of(slot.send->rendezvous_id)) : nullptr)
      word->exchange(static_cast<uint32_t>(OfferWord::withdrawn), std::memory_order_acq_rel);
    Send* send = slot.send;
    // The peer may have every byte and leave before the next flush_streams.
    const bool is_done = send->state == Send::State::streaming && send->streamed == send->nbytes && link != nullptr &&
                         (send->is_fin || !link->holds_data(send->lane, send->rendezvous_id));
    if (send->state == Send::State::streaming) streams_.remove(*send);
    if (send->state == Send::State::offered) stop_sharing(*send);
    slot.send = nullptr;
    send->state = Send::State::ended;
    send->end(is_done ? Outcome::done : outcome);
  }
  for (Queue& queue : queued_)
    while (Send* send = queue.pop_front()) {
      send->state = Send::State::ended;
      send->end(outcome);
    }
  for (RendezvousReceive& offer : incoming_) {
    if (is_self_) {
      if (offer.state == RendezvousReceive::State::reading && offer.receive == nullptr)
        stop_keeping(*offer.arrived);
      else if (offer.state == RendezvousReceive::State::reading)
        end_copy(offer, offer.receive->is_unwanted ? Outcome::cancelled : outcome);
      continue;
    }
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
      if (outcome != Outcome::peer_down || receive.source != any_source || receive.is_unwanted) {
        receive.end(receive.is_unwanted ? Outcome::cancelled : outcome, rank);
        continue;
      }
      receive.on_taken_back();
      if (!services_.inbox.serve(receive)) services_.inbox.repost(receive);
    }
  }
  send_slots_.clear();
  free_slots_.clear();
  notes_.clear();
  backlog_ = awaited_ = 0;
}

void Peer::say_goodbye() {
  if (state != State::open || link->over() != nullptr) return;
  note(Lane::bulk, Kind::goodbye, 0);
  note(Lane::control, Kind::goodbye, 0);
}

}  // namespace unisono::engine
