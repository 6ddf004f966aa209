#include "engine/mailbox.hpp"

#include <cstring>
#include <new>
#include <string>

namespace unisono::engine {
namespace {

// Unread messages of one sender: all the calls that it may have under way, and as many answers.
constexpr uint64_t queued_bytes_max = 32 * 1024 * 1024;
constexpr size_t offers_max = 64;
// While other threads make progress, the leader leaves it to them and looks again after this time.
constexpr std::int64_t rest_ns = millisecond / 2;
// A leader that has been away for longer is busy with a long call: a spare takes its place.
constexpr std::int64_t away_ns = millisecond;
// Checks, one per millisecond, that a spare makes while the leader is present before it sleeps until the leader leaves.
constexpr int spare_checks = 50;

}  // namespace

// The receive that is always posted, one for each sender.
class Mailbox::Slot final : public Receive {
 public:
  explicit Slot(Mailbox& box) : box_(box) {}

  MatchResult on_match(const Envelope& envelope, bool is_here) override {
    message_ = MailboxMessage{};
    message_.source = envelope.source;
    message_.nbytes = envelope.nbytes;
    is_offer_ = false;
    if (envelope.nbytes <= box_.engine_.settings.control_bytes_max)
      message_.data.reset(new (std::nothrow) byte[envelope.nbytes + 1]);
    if (is_here) return MatchResult::accept;
    if (message_.data == nullptr) return MatchResult::defer;
    // A rendezvous takes a while: messages behind it must not wait.
    is_offer_ = true;
    Sender& sender = box_.senders_[envelope.source];
    if (++sender.offers < offers_max) {
      sender.needs_slot = true;
      box_.engine_.add(box_);
    }
    return MatchResult::accept;
  }
  void want_memory() override { box_.engine_.give_up(*this); }
  void on_taken_back() override {
    if (std::exchange(is_offer_, false)) --box_.senders_[message_.source].offers;
    message_.data.reset();
  }
  byte* buffer() override { return message_.data.get(); }
  void write(uint64_t, const byte*, size_t) override {}  // without memory the message is lost
  void end(Outcome outcome, std::int32_t) override {
    Sender& sender = box_.senders_[source];
    if (std::exchange(is_offer_, false)) --sender.offers;
    --box_.active_;
    box_.spare_slots_.push_back(this);
    if (outcome == Outcome::closed) box_.is_closed_ = true;
    if (outcome == Outcome::peer_down || outcome == Outcome::closed || box_.is_closed_) return;
    if (outcome == Outcome::done && message_.data != nullptr) box_.on_message(std::move(message_));
    sender.needs_slot = true;
    box_.refill(source);
  }

 private:
  Mailbox& box_;
  MailboxMessage message_;
  bool is_offer_ = false;
};

class Mailbox::OwnedSend final : public Send {
 public:
  explicit OwnedSend(Mailbox& box) : box_(box) { lane = Lane::control; }
  void end(Outcome) override {
    --box_.active_;
    box_.senders_[to].unsent_bytes -= held.size() + line_bytes;
    box_.spare_sends_.push_back(this);
  }
  std::string held;
  std::int32_t to = 0;

 private:
  Mailbox& box_;
};

class Mailbox::Lent final : public Send {
 public:
  explicit Lent(Mailbox& box) : box_(box) {}
  void end(Outcome) override {
    --box_.active_;
    box_.lent_.erase(number_of);
    box_.returned_.push_back(std::move(owner));
    box_.spare_lent_.push_back(this);
  }
  uint64_t number_of = 0;
  Owner owner;

 private:
  Mailbox& box_;
};

class Mailbox::Expected final : public Receive {
 public:
  explicit Expected(Mailbox& box) : box_(box) {}
  MatchResult on_match(const Envelope& envelope, bool) override {
    came_ = envelope.nbytes;
    return came_ <= nbytes ? MatchResult::accept : MatchResult::reject;
  }
  byte* buffer() override { return into; }
  void write(uint64_t, const byte*, size_t) override {}
  void end(Outcome outcome, std::int32_t) override {
    --box_.active_;
    box_.expected_.erase(number_of);
    MailboxMessage message;
    message.source = source;
    message.nbytes = came_;
    message.number = number_of;
    message.outcome = outcome;
    message.owner = std::move(owner);
    box_.spare_expected_.push_back(this);
    if (ended_at_once != nullptr)
      ended_at_once->emplace(std::move(message));
    else
      box_.add(std::move(message));
  }
  std::optional<MailboxMessage>* ended_at_once = nullptr;  // while it is started: where its end is reported
  uint64_t number_of = 0;
  byte* into = nullptr;
  uint64_t nbytes = 0;
  Owner owner;

 private:
  Mailbox& box_;
  uint64_t came_ = 0;
};

Mailbox::Mailbox(Engine& engine, uint64_t context, uint64_t tag)
    : engine_(engine), context_(context), tag_(tag), senders_(static_cast<size_t>(engine.size)) {
  for (std::int32_t source = 0; source < engine.size; ++source) open_slot(source);
}

Mailbox::~Mailbox() = default;

namespace {

// An operation from the pool, or a new one.
template <class Kept, class One>
One& taken(Mailbox& box, std::vector<std::unique_ptr<Kept>>& all, std::vector<One*>& spare) {
  if (spare.empty()) {
    auto made = std::make_unique<One>(box);
    spare.push_back(made.get());
    all.push_back(std::move(made));
  }
  One& one = *spare.back();
  spare.pop_back();
  return one;
}

}  // namespace

void Mailbox::open_slot(std::int32_t source) {
  senders_[source].needs_slot = false;
  Slot& slot = taken(*this, slots_, spare_slots_);
  slot.context = context_;
  slot.tag = tag_;
  slot.source = source;
  slot.any_tag = false;
  ++active_;
  if (engine_.start(slot)) return;
  --active_;
  spare_slots_.push_back(&slot);
  is_closed_ = true;
}

// A slot may be matched at once and end while it is opened: then the outermost call opens the next.
void Mailbox::refill(std::int32_t source) {
  if (std::exchange(is_filling_, true)) return;
  Sender& sender = senders_[source];
  while (sender.needs_slot && sender.queued_bytes < queued_bytes_max && sender.offers < offers_max && !is_closed_)
    open_slot(source);
  is_filling_ = false;
}

void Mailbox::cork() {
  if (std::exchange(is_corked_, true)) return;
  engine_.cork();
  engine_.add(*this);
}

void Mailbox::uncork() {
  if (std::exchange(is_corked_, false)) engine_.uncork();
}

void Mailbox::work() {
  uncork();
  for (std::int32_t source = 0; source < engine_.size; ++source) refill(source);
}

bool Mailbox::post(std::int32_t dst, const byte* data, uint64_t nbytes, uint64_t unsent_bytes_max, bool is_more,
                   std::vector<LentPayload>* lent) {
  Sender& sender = senders_[dst];
  if (sender.unsent_bytes > unsent_bytes_max) return false;
  const auto lend_those = [&](bool are_certain) {
    if (lent == nullptr) return;
    for (LentPayload& payload : *lent)
      if ((payload.nbytes <= certain_bytes_max) == are_certain) lend(dst, std::move(payload));
  };
  lend_those(true);
  OwnedSend& send = taken(*this, sends_, spare_sends_);
  send.to = dst;
  send.context = context_;
  send.tag = tag_;
  send.held.assign(reinterpret_cast<const char*>(data), nbytes);
  send.data = reinterpret_cast<const byte*>(send.held.data());
  send.nbytes = nbytes;
  sender.unsent_bytes += nbytes + line_bytes;
  ++active_;
  if (is_more && !is_closed_) cork();
  const bool is_started = !is_closed_ && engine_.start(send, dst);
  if (!is_more) uncork();
  if (!is_started) {  // closed: the message is lost, and the close was reported elsewhere
    --active_;
    sender.unsent_bytes -= nbytes + line_bytes;
    spare_sends_.push_back(&send);
  }
  lend_those(false);
  return true;
}

void Mailbox::lend(std::int32_t dst, LentPayload payload) {
  Lent& lent = taken(*this, all_lent_, spare_lent_);
  lent.context = context_;
  lent.tag = payload.tag;
  lent.data = payload.data;
  lent.nbytes = payload.nbytes;
  // Nothing of a longer one is sent before the receiver takes it: it may not want it, and what is never received must
  // neither stay there nor use up credit.
  lent.receive_is_certain = payload.nbytes <= certain_bytes_max;
  lent.sync = !lent.receive_is_certain;
  lent.number_of = payload.number;
  lent.owner = std::move(payload.owner);
  lent_[payload.number] = &lent;
  ++active_;
  if (is_closed_ || !engine_.start(lent, dst)) lent.end(Outcome::closed);
}

std::optional<MailboxMessage> Mailbox::expect(std::int32_t source, uint64_t tag, byte* into, uint64_t nbytes,
                                              uint64_t number, Owner owner) {
  Expected& expected = taken(*this, all_expected_, spare_expected_);
  expected.context = context_;
  expected.tag = tag;
  expected.source = source;
  expected.into = into;
  expected.nbytes = nbytes;
  expected.number_of = number;
  expected.owner = std::move(owner);
  expected_[number] = &expected;
  ++active_;
  std::optional<MailboxMessage> ended;
  expected.ended_at_once = &ended;
  if (is_closed_ || !engine_.start(expected)) expected.end(Outcome::closed, source);
  expected.ended_at_once = nullptr;
  return ended;
}

void Mailbox::withdraw(uint64_t number) {
  if (const auto found = lent_.find(number); found != lent_.end()) {
    engine_.cancel(*found->second);
  } else if (const auto it = expected_.find(number); it != expected_.end()) {
    Expected& expected = *it->second;
    if (engine_.cancel(expected)) expected.end(Outcome::cancelled, expected.source);
  }
}

void Mailbox::on_message(MailboxMessage message) {
  senders_[message.source].queued_bytes += message.nbytes + line_bytes;
  add(std::move(message));
}

void Mailbox::add(MailboxMessage message) {
  queue_.push_back(std::move(message));
  // A message to oneself arrives on a thread that may not be the one that makes progress.
  engine_.wake_waiters();
  // A front reader that returned just now most likely comes back at once; if not, the leader's rest ends soon.
  if (front_readers_ == 0 && leader_ == Leader::resting && now_ns() - front_read_at_ > rest_ns) rest_.notify_one();
}

std::vector<MailboxMessage> Mailbox::take_ready() {
  std::vector<MailboxMessage> taken = std::move(queue_);
  queue_.clear();
  if (!taken.empty()) ++batches_;
  bool is_short = false;
  for (const MailboxMessage& message : taken) {
    if (message.number != 0) continue;
    Sender& sender = senders_[message.source];
    is_short |= sender.needs_slot;
    sender.queued_bytes -= message.nbytes + line_bytes;
  }
  if (is_short && !is_closed_) work();
  return taken;
}

std::vector<MailboxMessage> Mailbox::take(Hold& held, std::int64_t deadline, bool is_front) {
  if (is_front)
    wait_in_front(held, deadline);
  else
    wait_in_background(held, deadline);
  if (!is_front && (front_readers_ != 0 || leader_id_ != std::this_thread::get_id())) return {};
  return take_ready();
}

void Mailbox::wait_in_front(Hold& held, std::int64_t deadline) {
  ++front_readers_;
  engine_.wait(held, [this] { return !queue_.empty() || is_front_interrupted_ || is_closed_; }, deadline);
  --front_readers_;
  is_front_interrupted_ = false;
  front_read_at_ = now_ns();
}

void Mailbox::wait_in_background(Hold& held, std::int64_t deadline) {
  const std::thread::id me = std::this_thread::get_id();
  const auto clock = [](std::int64_t at) {
    return std::chrono::steady_clock::now() + std::chrono::nanoseconds(at - now_ns());
  };
  const auto is_readable = [this] { return !queue_.empty() && front_readers_ == 0; };
  int checks = spare_checks;
  for (;;) {
    if (is_closed_) return;
    if (background_interrupts_ != 0) {
      --background_interrupts_;
      break;
    }
    const std::int64_t now = now_ns();
    if (now >= deadline) break;
    if (leader_ != Leader::absent && leader_id_ != me) {
      if (leader_ == Leader::away && now - leader_left_at_ >= away_ns) {
        // Return even without a message: the batch that the late leader took may hold calls for this thread to run.
        leader_id_ = me;
        on(LeaderEvent::succeed);
        break;
      }
      if (leader_ == Leader::away) checks = spare_checks;
      if (checks-- > 0) {
        spare_.wait_until(held, clock(now + away_ns));
      } else {
        ++spares_asleep_;
        spare_.wait_until(held, clock(deadline));
        --spares_asleep_;
        checks = spare_checks;
      }
      continue;
    }
    leader_id_ = me;
    on(LeaderEvent::lead);
    if (is_readable()) break;
    if (engine_.is_polled() || engine_.polls() != polls_seen_) {
      polls_seen_ = engine_.polls();
      on(LeaderEvent::rest);
      rest_.wait_until(held, clock(std::min(deadline, now + rest_ns)));
      on(LeaderEvent::resume);
    } else {
      engine_.wait(held, [&] { return is_readable() || background_interrupts_ != 0 || is_closed_; }, deadline, true);
      polls_seen_ = engine_.polls();
    }
    if (is_readable()) break;
  }
  if (leader_id_ != me) return;
  on(LeaderEvent::leave);
  leader_left_at_ = now_ns();
  if (spares_asleep_ != 0) spare_.notify_one();
}

void Mailbox::interrupt_wait(bool is_front) {
  if (is_front) {
    is_front_interrupted_ = true;
    if (front_readers_ != 0) engine_.wake_waiters();
    return;
  }
  ++background_interrupts_;
  if (leader_ == Leader::polling || leader_ == Leader::resting) {
    rest_.notify_one();
    engine_.wake_waiters();
  } else {
    spare_.notify_one();
  }
}

void Mailbox::close() {
  is_closed_ = true;
  uncork();
  engine_.remove(*this);
  for (auto& slot : slots_)
    if (slot->is_posted() && engine_.cancel(*slot)) {
      --active_;
      spare_slots_.push_back(slot.get());
    }
  std::vector<uint64_t> expected;
  for (const auto& [number, one] : expected_) expected.push_back(number);
  for (const uint64_t number : expected) withdraw(number);
  engine_.wake_waiters();
  rest_.notify_all();
  spare_.notify_all();
}

}  // namespace unisono::engine
