#include "engine/completion_queue.hpp"

#include <algorithm>
#include <new>

#include "collective/run.hpp"

namespace unisono::engine {

namespace {
constexpr size_t index_bits = 32;
// How long the pump leaves progress to callers that poll themselves before it looks again whether they still do.
constexpr std::int64_t rest_ns = millisecond / 5;
}  // namespace

void SendOperation::end(Outcome how) {
  outcome = how;
  completions_.enqueue(*this);
}

MatchResult ReceiveOperation::on_match(const Envelope& envelope, bool is_here) {
  matched = envelope;
  matched.header = nullptr;
  is_matched = true;
  if (envelope.header_bytes != 0)
    header_held.assign(reinterpret_cast<const char*>(envelope.header), envelope.header_bytes);
  else
    header_held.clear();
  if (is_probe) return MatchResult::peek;
  if (is_open_ended) {
    if (envelope.nbytes == 0) return MatchResult::accept;
    // Control messages have a bound of their own (Peer::on_message); refused here, they would block all later ones.
    if (envelope.nbytes > completions_.engine().settings.recv_bytes_max && !is_control(envelope.tag))
      return MatchResult::reject;
    if (!is_here && !takes_memory) return MatchResult::defer;
    own = ResultMemory::take(envelope.nbytes);
    into = own.get();
    return into != nullptr ? MatchResult::accept : MatchResult::reject;
  }
  // unisono/messaging/matching.py's refusal() finds the words for it.
  if (envelope.nbytes > capacity) return MatchResult::reject;
  const auto fits_any = [](uint8_t code) { return code == untyped || code == plain_bytes; };
  if (envelope.dtype != dtype && !fits_any(envelope.dtype) && !fits_any(dtype)) return MatchResult::reject;
  return MatchResult::accept;
}

void ReceiveOperation::want_memory() {
  needs_memory = true;
  ++memory_requests;
  if (is_watched) return completions_.engine().wake_waiters();
  if (phase != Phase::starting) completions_.enqueue(*this);
}

void ReceiveOperation::on_taken_back() {
  needs_memory = is_matched = false;
  if (!is_open_ended) return;
  into = nullptr;
  own.reset();
}

void ReceiveOperation::end(Outcome how, std::int32_t) {
  outcome = how;
  needs_memory = false;
  completions_.enqueue(*this);
}

CompletionQueue::CompletionQueue(Engine& engine) : engine_(engine) {
  engine.set_on_down(
      [](void* self, const Down& down) {
        CompletionQueue& completions = *static_cast<CompletionQueue*>(self);
        completions.undispatched_.push_back({nullptr, down, completions.engine_.inbox.newest()});
        completions.note_undispatched();
        completions.wake_pump();
      },
      this);
  engine.set_on_unclaimed([](void* self) { static_cast<CompletionQueue*>(self)->dispatch_unclaimed(); }, this);
}

CompletionQueue::Unclaimed::Unclaimed(const Envelope& envelope)
    : context(envelope.context),
      source(envelope.source),
      sequence(sequence_of(envelope.tag)),
      header(reinterpret_cast<const char*>(envelope.header), envelope.header_bytes) {}

std::vector<CompletionQueue::Unclaimed> CompletionQueue::unclaimed(uint64_t context, uint64_t tag_max) const {
  std::vector<Unclaimed> found;
  for (const UnexpectedMessage* one = engine_.inbox.run_ahead().front(); one != nullptr;
       one = Inbox::RunAhead::next(*one))
    if (one->envelope.context == context && one->envelope.tag <= tag_max) found.emplace_back(one->envelope);
  return found;
}

// The oldest of each sender and context: if that is early, so are the others.
void CompletionQueue::dispatch_unclaimed() {
  // What Python has not dispatched yet is not queued again.
  if (unclaimed_waiting_ != 0) return;
  std::vector<std::pair<uint64_t, std::int32_t>> queued;
  for (const UnexpectedMessage* one = engine_.inbox.run_ahead().front(); one != nullptr;
       one = Inbox::RunAhead::next(*one)) {
    const std::pair key{one->envelope.context, one->envelope.source};
    if (std::find(queued.begin(), queued.end(), key) != queued.end()) continue;
    queued.push_back(key);
    undispatched_.push_back({nullptr, {}, 0, std::make_shared<const Unclaimed>(one->envelope)});
    ++unclaimed_waiting_;
  }
  note_undispatched();
  engine_.wake_waiters();
  wake_pump();
}

SendOperation& CompletionQueue::make_send() {
  if (spare_sends_.empty()) {
    auto made = std::make_unique<SendOperation>(*this);
    spare_sends_.push_back(made.get());
    made->handle = all_.size();
    all_.push_back(std::move(made));
  }
  SendOperation& send = *spare_sends_.back();
  spare_sends_.pop_back();
  add(send);
  return send;
}

ReceiveOperation& CompletionQueue::make_receive() {
  if (spare_receives_.empty()) {
    auto made = std::make_unique<ReceiveOperation>(*this);
    spare_receives_.push_back(made.get());
    made->handle = all_.size();
    all_.push_back(std::move(made));
  }
  ReceiveOperation& receive = *spare_receives_.back();
  spare_receives_.pop_back();
  add(receive);
  return receive;
}

Run& CompletionQueue::make_run() {
  if (spare_runs_.empty()) {
    auto made = std::make_unique<Run>(engine_, *this, scratch_);
    spare_runs_.push_back(made.get());
    made->handle = all_.size();
    all_.push_back(std::move(made));
  }
  Run& run = *spare_runs_.back();
  spare_runs_.pop_back();
  add(run);
  return run;
}

void CompletionQueue::add(Operation& operation) {
  operation.handle += uint64_t{1} << index_bits;  // a new use of the same slot
  operation.phase = Operation::Phase::idle;
  operation.needs_memory = false;
}

bool CompletionQueue::start(SendOperation& send, std::int32_t dst) {
  send.phase = Operation::Phase::starting;
  if (!engine_.start(send, dst)) return false;
  if (send.phase == Operation::Phase::starting) send.phase = Operation::Phase::active;
  return true;
}

bool CompletionQueue::start(ReceiveOperation& receive) {
  receive.phase = Operation::Phase::starting;
  receive.is_matched = false;
  if (!engine_.start(receive)) return false;
  if (receive.phase == Operation::Phase::ended) {
    if (receive.in_order && (!undispatched_.empty() || is_dispatching_)) {
      receive.phase = Operation::Phase::active;
      enqueue(receive, receive.is_matched ? receive.matched.arrival : never_arrived);
    }
    return true;
  }
  receive.phase = Operation::Phase::active;
  if (receive.needs_memory && !receive.is_watched) enqueue(receive);
  return true;
}

bool CompletionQueue::cancel(uint64_t handle) {
  const size_t index = handle & ((uint64_t{1} << index_bits) - 1);
  if (index >= all_.size()) return false;
  Operation& operation = *all_[index];
  if (operation.handle != handle || operation.phase != Operation::Phase::active) return false;
  if (operation.is_run) {
    static_cast<Run&>(operation).cancel();
    return true;
  }
  if (operation.is_receive) {
    auto& receive = static_cast<ReceiveOperation&>(operation);
    if (!engine_.cancel(receive)) return false;
    // It may have requested memory for an RTS that was withdrawn since.
    if (std::exchange(operation.is_undispatched, false)) {
      std::erase_if(undispatched_, [&](const Completion& one) { return one.operation == &operation; });
      note_undispatched();
    }
    recycle(operation);
    return true;
  }
  auto& send = static_cast<SendOperation&>(operation);
  operation.phase = Operation::Phase::starting;  // it ends here and now, or not at all
  if (!engine_.cancel(send)) {
    if (operation.phase == Operation::Phase::starting) operation.phase = Operation::Phase::active;
    return false;
  }
  recycle(operation);
  return true;
}

void CompletionQueue::withdraw(Operation& operation) {
  if (operation.is_run) return static_cast<Run&>(operation).cancel();
  if (!operation.is_receive) {
    engine_.cancel(static_cast<SendOperation&>(operation));
    return;
  }
  auto& receive = static_cast<ReceiveOperation&>(operation);
  if (engine_.cancel(receive))
    receive.end(Outcome::cancelled, receive.source);
  else if (receive.needs_memory)
    engine_.give_up(receive);
}

Operation* CompletionQueue::active(uint64_t handle) const {
  const size_t index = handle & ((uint64_t{1} << index_bits) - 1);
  if (index >= all_.size() || all_[index]->handle != handle) return nullptr;
  return all_[index]->phase == Operation::Phase::active ? all_[index].get() : nullptr;
}

Run* CompletionQueue::run_of(uint64_t handle) const {
  Operation* const operation = active(handle);
  return operation != nullptr && operation->is_run ? static_cast<Run*>(operation) : nullptr;
}

Operation* CompletionQueue::watched(uint64_t handle) const {
  const size_t index = handle & ((uint64_t{1} << index_bits) - 1);
  if (index >= all_.size() || all_[index]->handle != handle) return nullptr;
  return all_[index]->is_watched ? all_[index].get() : nullptr;
}

void CompletionQueue::recycle(Operation& operation) {
  operation.phase = Operation::Phase::idle;
  operation.is_watched = false;
  operation.observer = nullptr;
  if (operation.is_run) return spare_runs_.push_back(static_cast<Run*>(&operation));
  if (operation.is_receive) {
    auto& receive = static_cast<ReceiveOperation&>(operation);
    receive.own.reset();
    receive.into = nullptr;
    receive.owner = nullptr;
    spare_receives_.push_back(&receive);
  } else {
    spare_sends_.push_back(static_cast<SendOperation*>(&operation));
  }
}

std::vector<CompletionQueue::Completion> CompletionQueue::take() {
  std::vector<Completion> taken;
  while (!undispatched_.empty() && (taken.empty() || undispatched_.front().operation != nullptr)) {
    taken.push_back(std::move(undispatched_.front()));
    undispatched_.pop_front();
    if (taken.back().unclaimed != nullptr) --unclaimed_waiting_;
    if (taken.back().operation == nullptr) break;
  }
  note_undispatched();
  return taken;
}

// Called when an operation has ended or wants memory.
void CompletionQueue::enqueue(Operation& operation, uint64_t arrival) {
  if (operation.is_watched) {
    operation.phase = Operation::Phase::ended;
    if (Observer* const observer = std::exchange(operation.observer, nullptr);
        observer != nullptr && --observer->left == 0) {
      --observed_;
      announce(*observer);
    }
    engine_.wake_waiters();
    return;
  }
  if (!operation.needs_memory) {
    const bool is_starting = operation.phase == Operation::Phase::starting;
    operation.phase = Operation::Phase::ended;
    if (is_starting) return;
  }
  if (operation.is_undispatched) return;
  operation.is_undispatched = true;
  if (arrival == never_arrived) [[likely]] {
    undispatched_.push_back({&operation, {}, 0});
  } else {
    auto place = undispatched_.begin();
    while (place != undispatched_.end() && (place->operation != nullptr || place->arrival < arrival)) ++place;
    undispatched_.insert(place, {&operation, {}, 0});
  }
  note_undispatched();
  engine_.wake_waiters();
  wake_pump();
}

void CompletionQueue::wake_pump() {
  if (is_pump_waiting_ && waiters_ == 0) pump_.notify_one();
}

void CompletionQueue::wait(Hold& held, std::int64_t deadline, uint64_t interrupts_seen, bool is_dispatcher) {
  ++waiters_;
  engine_.wait(
      held, [&] { return (!is_empty() && (is_dispatcher || !is_dispatching_)) || interrupts_ != interrupts_seen; },
      deadline);
  --waiters_;
  // The caller dispatches what is queued; the pump is only needed for later completions.
}

void CompletionQueue::observe(Observer& observer, Operation* const* operations, unsigned count) {
  for (unsigned i = 0; i < count; ++i)
    if (operations[i]->phase != Operation::Phase::ended) {
      operations[i]->observer = &observer;
      ++observer.left;
    }
  if (observer.left == 0) return announce(observer);
  ++observed_;
  // From now on the pump makes progress.
  if (is_pump_waiting_) pump_.notify_one();
}

void CompletionQueue::forget(Observer& observer, Operation* const* operations, unsigned count) {
  for (unsigned i = 0; i < count; ++i) operations[i]->observer = nullptr;
  if (std::exchange(observer.left, 0) != 0) --observed_;
  if (observer.ended_hook.is_in) announced_.remove(observer);
}

void CompletionQueue::announce(Observer& observer) {
  announced_.push_back(observer);
  if (is_pump_waiting_) pump_.notify_one();
}

void CompletionQueue::wait_as_pump(Hold& held, std::int64_t deadline) {
  const auto has_undispatched = [this] {
    return (!is_empty() && !is_dispatching_ && waiters_ == 0) || !announced_.empty() || engine_.is_closed();
  };
  while (!has_undispatched()) {
    const std::int64_t now = now_ns(), until = std::min(deadline, pump_at_);
    std::int64_t left = until - now;
    if (left <= 0) {
      if (now >= pump_at_) pump_at_ = never;
      return;
    }
    if (observed_ != 0) {
      // No thread waits for them in the engine, but a callback does: poll as often as a waiter would. A program
      // that polls for itself makes progress for them, too.
      if (!engine_.is_polled() && engine_.polls() == polls_seen_) {
        is_pump_polling_ = true;
        engine_.wait(held, [&] { return has_undispatched() || observed_ == 0 || pump_at_ < until; }, until, true);
        is_pump_polling_ = false;
        polls_seen_ = engine_.polls();
        continue;
      }
      polls_seen_ = engine_.polls();
      left = std::min(left, rest_ns);
    }
    is_pump_waiting_ = true;
    pump_.wait_until(held, std::chrono::steady_clock::now() + std::chrono::nanoseconds(left < second ? left : second));
    is_pump_waiting_ = false;
  }
}

bool CompletionQueue::unwatch(Operation& operation, uint64_t id) {
  operation.id = id;
  if (operation.phase == Operation::Phase::ended) return false;
  operation.is_watched = false;
  if (operation.needs_memory) enqueue(operation);
  return true;
}

void CompletionQueue::interrupt_wait() {
  ++interrupts_;
  engine_.wake_waiters();
  pump_.notify_all();
}

}  // namespace unisono::engine
