#include "messaging/peer.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>

namespace unisono::engine {
namespace {

constexpr size_t cause_bytes_max = 200;
// A longer message to oneself is copied in pieces, and the links have their turn between them: 1 ms.
constexpr uint64_t own_bytes_at_once = 4 * 1024 * 1024;

// Words from a peer, safe to print.
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
    const Settings& set = around_.settings;
    const uint64_t allowed = lane == Lane::control ? set.control_eager_bytes : set.eager_bytes;
    eager_max_[static_cast<size_t>(lane)] = std::min(fits, allowed);
    final_max_[static_cast<size_t>(lane)] = std::min(fits, allowed * link->final_factor());
  }
}

uint64_t Peer::credit_of(Lane lane) const {
  return lane == Lane::control ? around_.settings.control_credit_bytes : around_.settings.eager_credit_bytes;
}

// ---- sending ----

void Peer::send(Send& send) {
  send.peer = this;
  send.streamed = 0;
  send.is_queued = false;
  if (is_self_) return send_to_self(send);
  if (state == State::down) {
    send.state = Send::State::ended;
    return send.end(Outcome::peer_down);
  }
  Queue& queue = queued_[static_cast<size_t>(send.lane)];
  if (state == State::open && queue.empty() && notes_.empty() && start(send)) [[likely]] return;
  send.state = Send::State::queued;
  queue.push_back(send);
  ++backlog_;
  if (state == State::unopened) around_.open_link(*this);
}

// Put a message on the link: with its bytes if they are few and the credit allows, else as an offer.
bool Peer::start(Send& send) {
  Head head;
  head.dtype = send.dtype;
  head.context = send.context;
  head.tag = send.tag;
  head.nbytes = send.nbytes;
  Body body;
  const auto lane = static_cast<size_t>(send.lane);
  HeaderTable& headers = headers_sent_[lane];
  const size_t place = send.header_bytes != 0 ? headers.find(send.header, send.header_bytes) : header_places;
  const bool is_known = place != header_places;
  const uint8_t flags = is_known ? static_cast<uint8_t>(flag_known | place << place_shift) : 0;
  if (!is_known) {
    body.header = send.header;
    body.header_bytes = head.header_bytes = send.header_bytes;
  }
  bool is_eager = send.nbytes <= (send.is_final ? final_max_ : eager_max_)[lane] &&
                  credit_used_[lane] + cost(send.nbytes) <= credit_of(send.lane);
  if (is_eager && !send.sync) [[likely]] {
    head.word = Head::make_word(Kind::eager, send.is_ahead ? flags | flag_ahead : flags);
    body.payload = send.data;
    body.payload_bytes = send.nbytes;
    if (!link->put(send.lane, head, body)) return false;
    if (head.header_bytes != 0) headers.keep(send.header, send.header_bytes);
    credit_used_[lane] += cost(send.nbytes);
    send.state = Send::State::ended;
    send.end(Outcome::done);
    return true;
  }
  if (!take_ticket(send)) return false;
  auto* word = link->own_offer(index_of(send.ticket));
  // Without a word only bytes that have not left can be taken back for sure.
  if (word == nullptr && !send.is_final) is_eager = false;
  body.prefix[0] = send.ticket;
  if (is_eager) {
    head.word = Head::make_word(Kind::eager, flags | flag_ticket);
    body.prefix_bytes = 8;
    body.payload = send.data;
    body.payload_bytes = send.nbytes;
  } else {
    head.word = Head::make_word(Kind::offer, flags);
    body.prefix[1] = reinterpret_cast<uint64_t>(send.data);
    body.prefix_bytes = 16;
  }
  Help* help = !is_eager && is_worth_help(send.nbytes) ? link->own_help(index_of(send.ticket)) : nullptr;
  if (help != nullptr) help->reset();
  // relaxed: the frame that follows is published after it
  if (word != nullptr) word->store(static_cast<uint32_t>(Offer::offered), std::memory_order_relaxed);
  if (!link->put(send.lane, head, body)) {
    free_ticket(send.ticket);
    return false;
  }
  if (head.header_bytes != 0) headers.keep(send.header, send.header_bytes);
  if (is_eager) credit_used_[lane] += cost(send.nbytes);
  send.state = Send::State::offered;
  if (help != nullptr) offers_.push_back(send);
  return true;
}

void Peer::leave_offers(Send& send) {
  if (send.hook.is_in) offers_.remove(send);
}

bool Peer::help(size_t piece_bytes) {
  if (offers_.empty() || !link->can_write() || link->over() != nullptr) return false;
  // From the last: the receiver begins with the first.
  for (Send* send = offers_.back(); send != nullptr; send = Queue::before(*send)) {
    Help& help = *link->own_help(index_of(send->ticket));
    Part part;
    uint64_t guard;
    const uint64_t place = help.take_back(send->nbytes, piece_bytes, part, guard);
    if (place == 0) continue;
    help.gave(part, link->write(guard, place + part.offset, send->data + part.offset, part.bytes));
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
        around_.inbox.remove(*send.own);
        break;
      }
      auto* word = link->own_offer(index_of(send.ticket));
      // Without a word the sender decides: no byte has left, and a receive that took the offer waits for another
      // message. What is final has left.
      if (word != nullptr && !change(*word, Offer::withdrawn)) return false;
      leave_offers(send);
      // The place is free again only when the peer has forgotten the offer.
      ticket_of(send.ticket)->send = nullptr;
      note(send.lane, Kind::withdraw, send.ticket);
      break;
    }
    default:
      return false;
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
      // Out of the queue first: once it has ended it is no longer ours to touch.
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
  // Each stream once, then the others on the link have their turn.
  for (size_t turns = streams_.size(); turns > 0 && link->over() == nullptr; --turns) {
    Send& send = *streams_.pop_front();
    if (send.streamed < send.nbytes) {
      const size_t taken = link->put_data(send.lane, send.ticket, send.streamed, send.data + send.streamed,
                                          send.nbytes - send.streamed);
      send.streamed += taken;
      moved |= taken != 0;
    }
    if (send.streamed < send.nbytes || link->holds_data(send.lane, send.ticket)) {
      streams_.push_back(send);
      continue;
    }
    --backlog_;
    // The place is free again when the peer says so: a new offer on the other lane could overtake the last bytes.
    ticket_of(send.ticket)->send = nullptr;
    send.state = Send::State::ended;
    send.end(Outcome::done);
    moved = true;
  }
  return moved;
}

void Peer::send_to_self(Send& send) {
  Envelope envelope{send.context, send.tag, send.nbytes, rank, send.dtype, send.header_bytes, send.header};
  Meeting meeting;
  bool is_gone;
  Receive* receive = around_.inbox.take_receive(envelope, true, nullptr, meeting, is_gone);
  const bool is_long = send.nbytes > own_bytes_at_once;
  if (receive != nullptr && is_long) {
    send.state = Send::State::streaming;
    return start_copy(send.data, send.nbytes, receive, nullptr, &send);
  }
  if (receive != nullptr) {
    Inbox::bring(*receive, send.data, send.nbytes);
    send.state = Send::State::ended;
    send.end(Outcome::done);
    receive->end(Outcome::done, rank);
    return;
  }
  if (!send.sync && around_.inbox.has_ended(send.context)) {
    send.state = Send::State::ended;
    return send.end(Outcome::done);
  }
  const bool is_kept = !send.sync && may_keep_own(send.nbytes);
  Arrived* message = around_.inbox.queue(envelope, *this, send.data, is_kept && !is_long ? send.nbytes : 0);
  if (message != nullptr && is_kept && is_long) {
    message->copy.reset(new (std::nothrow) byte[send.nbytes]);
    if (message->copy == nullptr) around_.inbox.remove(*std::exchange(message, nullptr));
  }
  if (message == nullptr) {
    send.state = Send::State::ended;
    return send.end(Outcome::no_memory);
  }
  message->is_here = true;
  if (is_kept) credit_held_[0] += cost(send.nbytes);
  if (!is_kept || is_long) {
    // Its bytes stay where they are: the send ends when they have been copied from there.
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
  const uint64_t limit = std::max(around_.settings.own_credit_bytes, around_.settings.eager_credit_bytes);
  return credit_held_[0] == 0 || (nbytes < limit && credit_held_[0] + cost(nbytes) <= limit);
}

bool Peer::begin_own(Arrived& message, Receive& receive) {
  if (!is_self_ || message.envelope.nbytes <= own_bytes_at_once) return false;
  stop_keeping(message);
  if (message.own != nullptr) message.own->state = Send::State::streaming;
  start_copy(message.payload, message.envelope.nbytes, &receive, &message, message.own);
  return true;
}

void Peer::start_copy(const byte* from, uint64_t nbytes, Receive* receive, Arrived* message, Send* send) {
  auto copy = std::find_if(incoming_.begin(), incoming_.end(), [](const Incoming& c) { return c.state == Incoming::State::none; });
  if (copy == incoming_.end()) copy = incoming_.emplace(incoming_.end());
  copy->state = Incoming::State::reading;
  copy->peer = this;
  copy->receive = receive;
  copy->arrived = message;
  copy->own = send;
  copy->address = reinterpret_cast<uint64_t>(from);
  copy->nbytes = nbytes;
  copy->received = 0;
  if (receive != nullptr) receive->incoming = &*copy;
  ++own_copies_;
  around_.start_reading(*copy);
}

void Peer::copy_piece(Incoming& copy, size_t scratch_bytes, size_t piece_bytes) {
  byte* place = copy.receive != nullptr ? copy.receive->place() : copy.arrived->copy.get();
  const byte* from = reinterpret_cast<const byte*>(copy.address) + copy.received;
  const size_t bytes = std::min<uint64_t>(copy.nbytes - copy.received, place != nullptr ? piece_bytes : scratch_bytes);
  if (place != nullptr)
    std::memcpy(place + copy.received, from, bytes);
  else
    copy.receive->write(copy.received, from, bytes);
  copy.received += bytes;
  if (copy.received == copy.nbytes) end_copy(copy, Outcome::done);
}

void Peer::end_copy(Incoming& copy, Outcome outcome) {
  around_.stop_reading(copy);
  copy.state = Incoming::State::none;
  --own_copies_;
  Receive* receive = std::exchange(copy.receive, nullptr);
  Arrived* message = std::exchange(copy.arrived, nullptr);
  Send* send = std::exchange(copy.own, nullptr);
  if (receive == nullptr) {
    message->payload = message->copy.get();
    message->own = nullptr;
    // A context that ended meanwhile has dropped what was whole.
    if (around_.inbox.has_ended(message->envelope.context)) {
      on_dropped(*message);
      around_.inbox.remove(*message);
    }
  } else if (message != nullptr) {
    if (send == nullptr) credit_held_[0] -= cost(message->envelope.nbytes);
    around_.inbox.recycle(*message);
  }
  if (send != nullptr) {
    send->state = Send::State::ended;
    send->end(outcome);
  }
  if (receive == nullptr) return;
  receive->incoming = nullptr;
  receive->end(outcome, rank);
}

void Peer::stop_keeping(Arrived& message) {
  for (Incoming& copy : incoming_) {
    if (copy.state != Incoming::State::reading || copy.arrived != &message) continue;
    around_.stop_reading(copy);
    copy.state = Incoming::State::none;
    copy.arrived = nullptr;
    --own_copies_;
    message.copy.reset();
    credit_held_[0] -= cost(message.envelope.nbytes);
  }
}

bool Peer::take_ticket(Send& send) {
  if (free_tickets_.empty()) {
    const size_t size = tickets_.size();
    if (size == tickets_max) return false;
    const size_t more = size == 0 ? 64 : size;
    tickets_.resize(size + more);
    // Low numbers first: those have an offer word.
    for (size_t i = size + more; i > size; --i) free_tickets_.push_back(static_cast<uint32_t>(i - 1));
  }
  const uint32_t index = free_tickets_.back();
  free_tickets_.pop_back();
  Ticket& ticket = tickets_[index];
  ticket.send = &send;
  ticket.is_taken = true;
  send.ticket = uint64_t{++ticket.uses} << 32 | index;
  return true;
}

Peer::Ticket* Peer::ticket_of(uint64_t ticket) {
  if (index_of(ticket) >= tickets_.size()) return nullptr;
  Ticket& found = tickets_[index_of(ticket)];
  return found.is_taken && found.uses == ticket >> 32 ? &found : nullptr;
}

void Peer::free_ticket(uint64_t ticket) {
  Ticket& freed = tickets_[index_of(ticket)];
  freed.send = nullptr;
  freed.is_taken = false;
  free_tickets_.push_back(static_cast<uint32_t>(index_of(ticket)));
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

void Peer::tell_down(std::int32_t gone, const std::string& cause, Fate fate) {
  note(Lane::control, Kind::down, static_cast<uint64_t>(gone), static_cast<uint8_t>(fate), 0, cause.substr(0, cause_bytes_max));
}

void Peer::give_up_on(const std::string& cause) {
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
  // A quarter at a time: a frame per 16 KiB message at most, one in hundreds of small ones.
  if (credit_due_[at] < credit_of(lane) / 4) return;
  note(Lane::control, Kind::credit, 0, static_cast<uint8_t>(lane), std::exchange(credit_due_[at], 0));
}

// ---- receiving ----

const char* Peer::on_frame(const Head& head, const byte* body, Lane lane) {
  // Whoever reads has fewer than this many answers to come.
  if (notes_.size() > notes_max) [[unlikely]] return "it does not take the answers that it asks for";
  switch (head.kind()) {
    case Kind::eager:
    case Kind::offer:
      return on_message(head, body, lane);
    case Kind::accept:
      return on_accept(head);
    case Kind::data: {
      const char* fault = nullptr;
      Incoming* offer = data_for(head, fault);
      if (offer == nullptr) return fault;
      if (byte* to = offer->receive->place(); to != nullptr)
        std::memcpy(to + offer->received, body, head.nbytes);
      else
        offer->receive->write(offer->received, body, head.nbytes);
      on_data(*offer, head.nbytes);
      return nullptr;
    }
    case Kind::done:
      return on_done(head);
    case Kind::credit:
      if (head.dtype >= lane_count || head.nbytes > credit_used_[head.dtype]) return "more credit came back than was given";
      credit_used_[head.dtype] -= head.nbytes;
      return nullptr;
    case Kind::withdraw:
      return on_withdraw(head);
    case Kind::queued:
      if (Ticket* ticket = ticket_of(head.context); ticket != nullptr && ticket->send != nullptr) ticket->send->is_queued = true;
      return nullptr;
    case Kind::beat:
      return nullptr;
    case Kind::goodbye:
      link->on_goodbye(lane);
      return nullptr;
    case Kind::down:
      if (head.dtype == static_cast<uint8_t>(Fate::given_up))
        verdict = readable(body, head.header_bytes);
      else
        around_.on_news(head.context, readable(body, head.header_bytes), head.dtype == static_cast<uint8_t>(Fate::left));
      return nullptr;
    default:
      return "a frame of unknown kind";
  }
}

const char* Peer::on_message(const Head& head, const byte* body, Lane lane) {
  const bool is_here = head.kind() == Kind::eager;
  const size_t prefix = head.prefix_bytes();
  Envelope envelope{head.context, head.tag, head.nbytes, rank, head.dtype, head.header_bytes, body + prefix};
  HeaderTable& headers = headers_came_[static_cast<size_t>(lane)];
  if ((head.flags() & flag_known) != 0) {
    const std::string& known = headers.at(head.flags() >> place_shift & (header_places - 1));
    if (known.empty() || head.header_bytes != 0) return "a header is named that has not come";
    envelope.header = reinterpret_cast<const byte*>(known.data());
    envelope.header_bytes = static_cast<uint16_t>(known.size());
  } else if (head.header_bytes != 0) {
    headers.keep(envelope.header, head.header_bytes);
  }
  if (is_control(head.tag)) {
    if (head.nbytes > around_.settings.control_bytes_max) return "a control message is longer than any may be";
  } else if (head.nbytes > around_.settings.message_bytes_max) {
    return "a message is longer than any may be";
  }
  if (is_here) {
    uint64_t& held = credit_held_[static_cast<size_t>(lane)];
    if (cost(head.nbytes) > credit_of(lane) - held) return "more arrived than the credit allows";
    held += cost(head.nbytes);
  }
  Incoming* ticketed = nullptr;
  if (prefix != 0) {
    uint64_t ticket;
    std::memcpy(&ticket, body, sizeof ticket);
    const size_t index = index_of(ticket);
    if (index >= tickets_max) return "a ticket is out of range";
    if (index >= incoming_.size()) incoming_.resize(index + 1);
    ticketed = &incoming_[index];
    if (ticketed->state != Incoming::State::none) return "a ticket is used twice";
    *ticketed = Incoming();
    ticketed->peer = this;
    ticketed->ticket = ticket;
    ticketed->nbytes = head.nbytes;
    if (!is_here) std::memcpy(&ticketed->address, body + sizeof ticket, sizeof ticketed->address);
  }
  Meeting meeting;
  bool is_gone;
  const byte* payload = body + prefix + head.header_bytes;
  Receive* receive = around_.inbox.take_receive(envelope, is_here, ticketed, meeting, is_gone);
  if (is_gone) {
    if (is_here) return_credit(lane, cost(head.nbytes));
    drop(*ticketed);
    return nullptr;
  }
  if (receive == nullptr && is_here && ticketed == nullptr && around_.inbox.has_ended(head.context)) {
    return_credit(lane, cost(head.nbytes));
    return nullptr;
  }
  if (receive == nullptr) {
    Arrived* message = around_.inbox.queue(envelope, *this, payload, is_here ? head.nbytes : 0);
    if (message == nullptr) return "no memory for a message";
    message->is_here = is_here;
    message->lane = lane;
    message->has_ticket = ticketed != nullptr;
    if ((head.flags() & flag_ahead) != 0) around_.inbox.add_ahead(*message);
    if (ticketed != nullptr) {
      message->ticket = ticketed->ticket;
      ticketed->state = Incoming::State::queued;
      ticketed->arrived = message;
      set_queued(*ticketed);
    }
    return nullptr;
  }
  if (!is_here) {
    begin(*ticketed, *receive, meeting);
    return nullptr;
  }
  Inbox::bring(*receive, payload, head.nbytes);
  return_credit(lane, cost(head.nbytes));
  if (ticketed != nullptr) note(Lane::control, Kind::done, ticketed->ticket, static_cast<uint8_t>(Answer::met));
  receive->end(Outcome::done, rank);
  return nullptr;
}

const char* Peer::on_accept(const Head& head) {
  Ticket* ticket = ticket_of(head.context);
  if (ticket != nullptr && ticket->send == nullptr) return nullptr;  // taken back; the peer will hear of it
  if (ticket == nullptr || ticket->send->state != Send::State::offered) return "an offer is accepted that was not made";
  Send& send = *ticket->send;
  leave_offers(send);
  if (send.nbytes == 0) {
    note(send.lane, Kind::data, send.ticket);
    ticket->send = nullptr;
    send.state = Send::State::ended;
    send.end(Outcome::done);
    return nullptr;
  }
  send.state = Send::State::streaming;
  streams_.push_back(send);
  ++backlog_;
  return nullptr;
}

const char* Peer::on_done(const Head& head) {
  Ticket* ticket = ticket_of(head.context);
  if (ticket == nullptr) return "a message is confirmed that was not sent";
  Send* send = ticket->send;
  if (send != nullptr && send->state == Send::State::streaming && send->streamed == send->nbytes &&
      !link->holds_data(send->lane, send->ticket)) {
    // The last bytes have left since the streams were looked at, and the answer was faster than the next look.
    streams_.remove(*send);
    --backlog_;
    free_ticket(head.context);
    send->state = Send::State::ended;
    send->end(Outcome::done);
    return nullptr;
  }
  if (send != nullptr && send->state != Send::State::offered) return "a message is confirmed while it is sent";
  free_ticket(head.context);
  if (send == nullptr) return nullptr;  // withdrawn here, and forgotten there
  leave_offers(*send);
  send->state = Send::State::ended;
  send->end(static_cast<Answer>(head.dtype) == Answer::withdrawn ? Outcome::cancelled : Outcome::done);
  return nullptr;
}

const char* Peer::on_withdraw(const Head& head) {
  if (index_of(head.context) >= incoming_.size()) return "an offer is taken back that was not made";
  Incoming& offer = incoming_of(head.context);
  if (offer.ticket != head.context) return nullptr;
  if (offer.state == Incoming::State::queued)
    take_back(offer);
  else if (offer.state == Incoming::State::waiting || offer.state == Incoming::State::streaming) {
    if (offer.received != 0) return "an offer is taken back while it is sent";
    part(offer);
  }
  // Else it was dropped already, when the claim failed: the sender has its answer.
  return nullptr;
}

void Peer::part(Incoming& offer) {
  Receive& receive = *std::exchange(offer.receive, nullptr);
  if (offer.state == Incoming::State::streaming) --awaited_;
  drop(offer);
  receive.incoming = nullptr;
  if (receive.is_unwanted) return receive.end(Outcome::cancelled, rank);
  receive.on_taken_back();
  if (!around_.inbox.serve(receive)) around_.inbox.repost(receive);
}

void Peer::take_back(Incoming& offer) {
  const uint64_t held = offer.arrived->is_here ? cost(offer.nbytes) : 0;
  const Lane lane = offer.arrived->lane;
  around_.inbox.remove(*offer.arrived);
  drop(offer);
  if (held != 0) return_credit(lane, held);
}

bool Peer::claim(Incoming& offer) {
  auto* word = link != nullptr ? link->peers_offer(index_of(offer.ticket)) : nullptr;
  if (word == nullptr) return true;
  return change(*word, Offer::reading);
}

// Claim or withdraw an offer: which of the two comes first is decided here.
bool Peer::change(std::atomic<uint32_t>& word, Offer to) {
  for (const Offer from : {Offer::offered, Offer::queued}) {
    auto expected = static_cast<uint32_t>(from);
    // acq_rel: what the other side did before its own change has happened
    if (word.compare_exchange_strong(expected, static_cast<uint32_t>(to), std::memory_order_acq_rel)) return true;
  }
  return false;
}

// Let the sender know that nobody wants its offer so far: it need not wait for an answer when it leaves.
void Peer::set_queued(Incoming& offer) {
  auto* word = link->peers_offer(index_of(offer.ticket));
  if (word == nullptr) return note(Lane::control, Kind::queued, offer.ticket);
  auto expected = static_cast<uint32_t>(Offer::offered);
  // relaxed: a hint; if the sender withdrew it meanwhile, it stays withdrawn
  word->compare_exchange_strong(expected, static_cast<uint32_t>(Offer::queued), std::memory_order_relaxed);
}

void Peer::drop(Incoming& offer) {
  offer.state = Incoming::State::none;
  offer.arrived = nullptr;
  note(Lane::control, Kind::done, offer.ticket, static_cast<uint8_t>(Answer::withdrawn));
}

void Peer::begin(Incoming& offer, Receive& receive, Meeting meeting) {
  offer.receive = &receive;
  offer.arrived = nullptr;
  receive.incoming = &offer;
  if (meeting == Meeting::later && offer.nbytes != 0) {
    offer.state = Incoming::State::waiting;
    return receive.want_memory();
  }
  supply(offer);
}

// The sender decides whether its bytes come or its offer is taken back, also if there are none.
void Peer::ask_for_data(Incoming& offer) {
  offer.state = Incoming::State::streaming;
  ++awaited_;
  note(Lane::control, Kind::accept, offer.ticket);
}

void Peer::supply(Incoming& offer) {
  const bool has_word = link->peers_offer(index_of(offer.ticket)) != nullptr;
  if (offer.nbytes == 0 && has_word) {
    offer.state = Incoming::State::none;
    note(Lane::control, Kind::done, offer.ticket, static_cast<uint8_t>(Answer::met));
    offer.receive->incoming = nullptr;
    return offer.receive->end(Outcome::done, rank);
  }
  if (link->can_read() && has_word) {
    offer.state = Incoming::State::reading;
    offer.help = is_worth_help(offer.nbytes) ? link->peers_help(index_of(offer.ticket)) : nullptr;
    const byte* place = offer.help != nullptr && offer.receive->has_fixed_place() ? offer.receive->place() : nullptr;
    if (place != nullptr)
      offer.help->ask(place, link->guard());
    else
      offer.help = nullptr;
    return around_.start_reading(offer);
  }
  ask_for_data(offer);
}

void Peer::give_up(Incoming& offer) {
  Receive* receive = std::exchange(offer.receive, nullptr);
  offer.state = Incoming::State::none;
  note(Lane::control, Kind::done, offer.ticket, static_cast<uint8_t>(Answer::met));
  receive->incoming = nullptr;
  receive->end(Outcome::no_memory, rank);
}

const char* Peer::read_piece(Incoming& offer, byte* scratch, size_t scratch_bytes, size_t piece_bytes) {
  if (offer.help != nullptr) return read_part(offer, piece_bytes);
  if (is_self_) {
    copy_piece(offer, scratch_bytes, piece_bytes);
    return nullptr;
  }
  const uint64_t left = offer.nbytes - offer.received;
  byte* place = offer.receive->place();
  const size_t bytes = std::min<uint64_t>(left, place != nullptr ? piece_bytes : scratch_bytes);
  byte* to = place != nullptr ? place + offer.received : scratch;
  if (!link->read(offer.address + offer.received, to, bytes)) {
    // Its memory cannot be read (any more): let it send the rest, or let its end be noticed.
    if (!link->is_alive()) return nullptr;
    if (offer.received != 0) return "its memory could be read no longer";
    around_.stop_reading(offer);
    ask_for_data(offer);
    return nullptr;
  }
  const bool is_last = bytes == left;
  const char* fault = nullptr;
  if (is_last && !confirm(offer, fault)) return fault;
  if (place == nullptr) offer.receive->write(offer.received, scratch, bytes);
  offer.received += bytes;
  if (is_last) finish_reading(offer);
  return nullptr;
}

const char* Peer::read_part(Incoming& offer, size_t piece_bytes) {
  Part part;
  Help::Front next;
  // Once more where all is taken: the sender may be done by now.
  while ((next = offer.help->take_front(offer.nbytes, piece_bytes, part)) == Help::Front::part) {
    if (!link->read(offer.address + part.offset, offer.receive->place() + part.offset, part.bytes)) {
      if (!link->is_alive()) return nullptr;
      if (offer.received != 0 || !offer.help->close()) return "its memory could be read no longer";
      around_.stop_reading(offer);
      ask_for_data(offer);
      return nullptr;
    }
    offer.received += part.bytes;
    if (!offer.help->is_all_taken(offer.nbytes)) return nullptr;
  }
  if (next == Help::Front::broken) return "its help makes no sense";
  const char* fault = nullptr;
  if (next == Help::Front::wait || !confirm(offer, fault)) return fault;
  offer.received = offer.nbytes;
  finish_reading(offer);
  return nullptr;
}

bool Peer::confirm(Incoming& offer, const char*& fault) {
  auto expected = static_cast<uint32_t>(Offer::reading);
  auto* word = link->peers_offer(index_of(offer.ticket));
  if (!link->is_alive()) return false;
  if (word->compare_exchange_strong(expected, static_cast<uint32_t>(Offer::done), std::memory_order_acq_rel)) return true;
  fault = "it gave us up while its memory was read";
  return false;
}

void Peer::finish_reading(Incoming& offer) {
  around_.stop_reading(offer);
  offer.state = Incoming::State::none;
  note(Lane::control, Kind::done, offer.ticket, static_cast<uint8_t>(Answer::met));
  offer.receive->incoming = nullptr;
  offer.receive->end(Outcome::done, rank);
}

void Peer::fence(Incoming& offer) {
  if (offer.help == nullptr) return;
  link->shut_guard();
  offer.help->close();
  // A write that had passed the guard is under way in the system, where nothing but want of a core can hold it up.
  while (offer.help->is_being_written() && link->is_starved()) sched_yield();
}

Incoming* Peer::data_for(const Head& head, const char*& fault) {
  fault = "data came that was not asked for";
  if (index_of(head.context) >= incoming_.size()) return nullptr;
  Incoming& offer = incoming_of(head.context);
  if (offer.state != Incoming::State::streaming || offer.ticket != head.context) return nullptr;
  fault = "data came for a wrong place";
  if (head.tag != offer.received || head.nbytes > offer.nbytes - offer.received) return nullptr;
  if (head.nbytes == 0 && offer.nbytes != 0) return nullptr;
  return &offer;
}

void Peer::on_data(Incoming& offer, size_t bytes) {
  offer.received += bytes;
  if (offer.received < offer.nbytes) return;
  --awaited_;
  offer.state = Incoming::State::none;
  note(Lane::control, Kind::done, offer.ticket, static_cast<uint8_t>(Answer::met));
  offer.receive->incoming = nullptr;
  offer.receive->end(Outcome::done, rank);
}

void Peer::on_met(const Arrived& message) {
  if (message.own != nullptr) {
    message.own->state = Send::State::ended;
    message.own->end(Outcome::done);
  } else if (is_self_) {
    credit_held_[0] -= cost(message.envelope.nbytes);
  }
  if (is_self_) return;
  return_credit(message.lane, cost(message.envelope.nbytes));
  if (!message.has_ticket) return;
  incoming_of(message.ticket).state = Incoming::State::none;
  // The sender may have taken it back meanwhile; then it has ended, and the answer only frees the ticket.
  note(Lane::control, Kind::done, message.ticket, static_cast<uint8_t>(Answer::met));
}

void Peer::on_dropped(const Arrived& message) {
  if (is_self_)
    credit_held_[0] -= cost(message.envelope.nbytes);
  else
    return_credit(message.lane, cost(message.envelope.nbytes));
}

// ---- ending ----

bool Peer::are_offers_settled() const {
  for (const Ticket& ticket : tickets_) {
    if (!ticket.is_taken || ticket.send == nullptr || ticket.send->state != Send::State::offered) continue;
    auto* word = link->own_offer(index_of(ticket.send->ticket));
    // relaxed: asked again until it is so
    const bool is_queued = word != nullptr ? word->load(std::memory_order_relaxed) == static_cast<uint32_t>(Offer::queued)
                                           : ticket.send->is_queued;
    if (!is_queued) return false;
  }
  return true;
}

void Peer::end_all(Outcome outcome) {
  // A stopped peer may come back and go on reading: it must find that the memory is no longer offered.
  for (Ticket& ticket : tickets_) {
    if (!ticket.is_taken || ticket.send == nullptr) continue;
    if (auto* word = link != nullptr ? link->own_offer(index_of(ticket.send->ticket)) : nullptr)
      word->exchange(static_cast<uint32_t>(Offer::withdrawn), std::memory_order_acq_rel);
    Send* send = ticket.send;
    if (send->state == Send::State::streaming) streams_.remove(*send);
    if (send->state == Send::State::offered) leave_offers(*send);
    ticket.send = nullptr;
    send->state = Send::State::ended;
    send->end(outcome);
  }
  for (Queue& queue : queued_)
    while (Send* send = queue.pop_front()) {
      send->state = Send::State::ended;
      send->end(outcome);
    }
  for (Incoming& offer : incoming_) {
    if (is_self_) {
      if (offer.state == Incoming::State::reading && offer.receive == nullptr)
        stop_keeping(*offer.arrived);
      else if (offer.state == Incoming::State::reading)
        end_copy(offer, offer.receive->is_unwanted ? Outcome::cancelled : outcome);
      continue;
    }
    const auto was = std::exchange(offer.state, Incoming::State::none);
    if (was == Incoming::State::queued) {
      // What is here stays receivable; what was only offered cannot be had any more.
      if (offer.arrived->is_here)
        offer.arrived->has_ticket = false;
      else
        around_.inbox.remove(*offer.arrived);
    }
    if (was == Incoming::State::reading) {
      around_.stop_reading(offer);
      fence(offer);
    }
    if (was == Incoming::State::waiting || was == Incoming::State::reading || was == Incoming::State::streaming) {
      Receive& receive = *offer.receive;
      receive.incoming = nullptr;
      // Another rank may serve who takes from any.
      if (outcome != Outcome::peer_down || receive.source != any_source || receive.is_unwanted) {
        receive.end(receive.is_unwanted ? Outcome::cancelled : outcome, rank);
        continue;
      }
      receive.on_taken_back();
      if (!around_.inbox.serve(receive)) around_.inbox.repost(receive);
    }
  }
  tickets_.clear();
  free_tickets_.clear();
  notes_.clear();
  backlog_ = awaited_ = 0;
}

void Peer::say_goodbye() {
  if (state != State::open || link->over() != nullptr) return;
  note(Lane::bulk, Kind::goodbye, 0);
  note(Lane::control, Kind::goodbye, 0);
}

}  // namespace unisono::engine
