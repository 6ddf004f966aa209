#include "messaging/peer.hpp"

#include <algorithm>
#include <atomic>

namespace unisono::engine {
namespace {

constexpr size_t cause_bytes_max = 200;

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

Peer::Peer(PeerServices& services, std::int32_t rank, bool is_self)
    : rank(rank), rendezvous(*this, services), services_(services) {
  if (is_self) loopback_.emplace(*this, services);
}

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
  if (loopback_.has_value()) return loopback_->send(send);
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
  bool is_eager =
      send.nbytes <= eager_max[lane] && credit_used_[lane] + credit_cost(send.nbytes) <= credit_of(send.lane);
  if (is_eager && !send.sync) [[likely]] {
    head.word = Head::make_word(Kind::eager, send.is_ahead ? flag_run_ahead : 0);
    body.payload = send.data;
    body.payload_bytes = send.nbytes;
    if (!link->put(send.lane, head, body)) return false;
    credit_used_[lane] += credit_cost(send.nbytes);
    send.state = Send::State::ended;
    send.end(Outcome::done);
    return true;
  }
  if (!send_slots_.take(send)) return false;
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
    send_slots_.free(send.rendezvous_id);
    return false;
  }
  if (is_eager) credit_used_[lane] += credit_cost(send.nbytes);
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
      if (loopback_.has_value()) {
        loopback_->withdraw(send);
        break;
      }
      auto* word = link->own_offer(index_of(send.rendezvous_id));
      // Without an offer word the sender decides: no byte has left, and a receive that matched the RTS waits for
      // another message. A send whose receive is certain has left eagerly.
      if (word != nullptr && !change_offer(*word, OfferEvent::withdraw)) return false;
      stop_sharing(send);
      // The slot is free again when the peer's FIN has come.
      send_slots_.find(send.rendezvous_id)->send = nullptr;
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
      send_slots_.free(send.rendezvous_id);
    else
      send_slots_.find(send.rendezvous_id)->send = nullptr;
    send.state = Send::State::ended;
    send.end(Outcome::done);
    moved = true;
  }
  return moved;
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
      RendezvousReceive* offer = rendezvous.data_for(head, fault);
      if (offer == nullptr) return fault;
      if (byte* to = offer->receive->buffer(); to != nullptr)
        std::memcpy(to + offer->received, body, head.nbytes);
      else
        offer->receive->write(offer->received, body, head.nbytes);
      rendezvous.on_data(*offer, head.nbytes);
      return nullptr;
    }
    case Kind::fin: return on_fin(head);
    case Kind::credit:
      if (head.dtype >= lane_count || head.nbytes > credit_used_[head.dtype])
        return "more credit returned than was used";
      credit_used_[head.dtype] -= head.nbytes;
      return nullptr;
    case Kind::withdraw: return rendezvous.on_withdraw(head);
    case Kind::queued:
      if (SendSlots::Slot* slot = send_slots_.find(head.context); slot != nullptr && slot->send != nullptr)
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
    if (credit_cost(head.nbytes) > credit_of(lane) - held) return "eager messages beyond the credit";
    held += credit_cost(head.nbytes);
  }
  RendezvousReceive* announced = nullptr;
  if (prefix != 0) {
    const char* fault = nullptr;
    announced = rendezvous.add(head, body, fault);
    if (announced == nullptr) return fault;
  }
  MatchResult match;
  bool is_gone;
  const byte* payload = body + prefix + head.header_bytes;
  Receive* receive = services_.inbox.take_receive(envelope, is_here, announced, match, is_gone);
  if (is_gone) {
    if (is_here) return_credit(lane, credit_cost(head.nbytes));
    rendezvous.drop(*announced);
    return nullptr;
  }
  if (receive == nullptr && is_here && announced == nullptr && services_.inbox.has_ended(head.context)) {
    return_credit(lane, credit_cost(head.nbytes));
    return nullptr;
  }
  if (receive == nullptr) {
    UnexpectedMessage* message = services_.inbox.queue(envelope, *this, payload, is_here ? head.nbytes : 0);
    if (message == nullptr) return "no memory for a message";
    message->is_here = is_here;
    message->lane = lane;
    message->has_rendezvous = announced != nullptr;
    if ((head.flags() & flag_run_ahead) != 0) services_.inbox.add_ahead(*message);
    if (announced != nullptr) rendezvous.queue(*announced, *message);
    return nullptr;
  }
  if (!is_here) {
    rendezvous.begin(*announced, *receive, match);
    return nullptr;
  }
  Inbox::deliver(*receive, payload, head.nbytes);
  return_credit(lane, credit_cost(head.nbytes));
  if (announced != nullptr) rendezvous.confirm_eager(*announced);
  receive->end(Outcome::done, rank);
  return nullptr;
}

const char* Peer::on_cts(const Head& head) {
  SendSlots::Slot* slot = send_slots_.find(head.context);
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
  SendSlots::Slot* slot = send_slots_.find(head.context);
  if (slot == nullptr) return "FIN of an unknown rendezvous";
  Send* send = slot->send;
  if (send != nullptr && send->state == Send::State::streaming && send->streamed == send->nbytes) {
    // The FIN was faster than the link, which may read the memory again until the bytes are acknowledged, or than the
    // next flush_streams.
    if (std::exchange(send->is_fin, true)) return "FIN of a rendezvous that is over";
    if (link->holds_data(send->lane, send->rendezvous_id)) return nullptr;
    streams_.remove(*send);
    --backlog_;
    send_slots_.free(head.context);
    send->state = Send::State::ended;
    send->end(Outcome::done);
    return nullptr;
  }
  if (send != nullptr && send->state != Send::State::offered) return "FIN before the last data frame";
  send_slots_.free(head.context);
  if (send == nullptr) return nullptr;  // withdrawn earlier
  stop_sharing(*send);
  send->state = Send::State::ended;
  send->end(static_cast<FinStatus>(head.dtype) == FinStatus::withdrawn ? Outcome::cancelled : Outcome::done);
  return nullptr;
}

const char* Peer::read_piece(RendezvousReceive& offer, byte* scratch, size_t scratch_bytes, size_t piece_bytes) {
  if (!loopback_.has_value()) return rendezvous.read_piece(offer, scratch, scratch_bytes, piece_bytes);
  loopback_->copy_piece(offer, scratch_bytes, piece_bytes);
  return nullptr;
}

void Peer::on_matched(const UnexpectedMessage& message) {
  if (loopback_.has_value()) return loopback_->on_matched(message);
  return_credit(message.lane, credit_cost(message.envelope.nbytes));
  // The sender may have withdrawn it meanwhile; its send has then ended, and the FIN only frees the rendezvous id.
  if (message.has_rendezvous) rendezvous.confirm_eager(rendezvous.of(message.rendezvous_id));
}

void Peer::on_dropped(const UnexpectedMessage& message) {
  if (loopback_.has_value()) return loopback_->on_dropped(message);
  return_credit(message.lane, credit_cost(message.envelope.nbytes));
}

// ---- ending ----

bool Peer::are_rendezvous_settled() const {
  for (const SendSlots::Slot& slot : send_slots_) {
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
  for (SendSlots::Slot& slot : send_slots_) {
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
  rendezvous.end_all(outcome);
  if (loopback_.has_value()) loopback_->end_all(outcome);
  send_slots_.clear();
  notes_.clear();
  backlog_ = 0;
}

void Peer::say_goodbye() {
  if (state != State::open || link->over() != nullptr) return;
  note(Lane::bulk, Kind::goodbye, 0);
  note(Lane::control, Kind::goodbye, 0);
}

}  // namespace unisono::engine
