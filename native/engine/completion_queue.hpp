// The completion queue: operations that were started from Python, and those that have ended and wait to be dispatched.
//
// Knows numbers, pools and the observers of an end. Does not know Python objects: a buffer is an address, and the
// caller keeps its owner until the end was dispatched.

#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/result_memory.hpp"
#include "base/scratch.hpp"
#include "engine/engine.hpp"

namespace unisono::engine {

class CompletionQueue;
class Run;

// Is notified once all operations that it watches have ended.
struct Observer {
  ListHook<Observer> ended_hook;
  unsigned left = 0;  // operations under way
};
using ObserverList = IntrusiveList<Observer, &Observer::ended_hook>;

class Operation {
 public:
  virtual ~Operation() = default;

  uint64_t id = 0;      // the caller's
  uint64_t handle = 0;  // ours: slot and number of uses
  Outcome outcome = Outcome::done;
  enum class Phase : uint8_t { idle, starting, active, ended };
  Phase phase = Phase::idle;
  bool is_receive = false;
  bool is_run = false;
  bool needs_memory = false;
  bool is_undispatched = false;
  bool is_watched = false;  // its starter polls the phase: it is not dispatched
  Observer* observer = nullptr;
};

class SendOperation final : public Send, public Operation {
 public:
  explicit SendOperation(CompletionQueue& completions) : completions_(completions) {}
  void end(Outcome how) override;
  std::string header_held;

 private:
  CompletionQueue& completions_;
};

class ReceiveOperation final : public Receive, public Operation {
 public:
  explicit ReceiveOperation(CompletionQueue& completions) : completions_(completions) { is_receive = true; }
  MatchResult on_match(const Envelope& envelope, bool is_here) override;
  void want_memory() override;
  void on_taken_back() override;
  byte* buffer() override { return into; }
  void write(uint64_t, const byte*, size_t) override {}
  void end(Outcome how, std::int32_t from) override;

  byte* into = nullptr;
  uint64_t capacity = 0;
  uint8_t dtype = untyped;
  bool is_probe = false;
  bool is_open_ended = false;    // the length is the message's own
  bool takes_memory = false;     // an open-ended one takes memory when it matches a message, and never requests any
  bool in_order = false;         // if it ends at once, it is still dispatched after all that ended earlier
  uint64_t memory_requests = 0;  // so far
  Envelope matched;              // valid if is_matched; the header is in header_held
  bool is_matched = false;
  std::string header_held;
  ResultMemory own;       // what an open-ended one has taken: for bytes that came at once, or `takes_memory`
  void* owner = nullptr;  // whatever the caller keeps with it

 private:
  CompletionQueue& completions_;
};

// Every call needs the engine's lock.
class CompletionQueue {
 public:
  explicit CompletionQueue(Engine& engine);

  SendOperation& make_send();
  ReceiveOperation& make_receive();
  Run& make_run();
  // Start it. If it ends at once it is not dispatched: the phase is `ended`. A receive that is `in_order`
  // is dispatched, if anything else still waits for that. False if the engine is closed.
  bool start(SendOperation& send, std::int32_t dst);
  bool start(ReceiveOperation& receive);
  // Call `begin`, in which the run starts. If it ends at once it is not dispatched, as above.
  template <class Begin>
  void start(Run& run, Begin begin);
  // True if it was withdrawn; then it is not dispatched. A run is dispatched when it has released its memory.
  bool cancel(uint64_t handle);
  // Withdraw an operation that is under way, if possible. Its end is seen or dispatched like any other.
  void withdraw(Operation& operation);
  // The operation of this handle; nullptr if it is not under way.
  Operation* active(uint64_t handle) const;
  // The run of this handle; nullptr if it has ended.
  Run* run_of(uint64_t handle) const;
  // The operation of this handle that is watched, also if it has ended; nullptr if there is none.
  Operation* watched(uint64_t handle) const;
  void recycle(Operation& operation);

  // A message that waits although its sender does not (Inbox::run_ahead), as Python compares it with what was called
  // here.
  struct Unclaimed {
    uint64_t context = 0;
    std::int32_t source = 0;
    uint64_t sequence = 0;
    std::string header;
    explicit Unclaimed(const Envelope& envelope);
  };
  // Those of a context that belong to calls up to the one with this tag.
  std::vector<Unclaimed> unclaimed(uint64_t context, uint64_t tag_max) const;
  // The oldest, if it is such a one. Cheap enough to ask at the end of every call.
  const UnexpectedMessage* first_unclaimed(uint64_t context, uint64_t tag_max) const {
    const UnexpectedMessage* first = engine_.inbox.run_ahead().front();
    while (first != nullptr && first->envelope.context != context) first = Inbox::RunAhead::next(*first);
    return first != nullptr && first->envelope.tag <= tag_max ? first : nullptr;
  }

  // What is to be dispatched, oldest first: an operation, a peer that is gone, or a message that waits too long. The
  // end of a peer is dispatched after every message that came from it, even one that is matched only now. So one
  // thread dispatches at a time, from `begin_dispatch` until `end_dispatch` finds nothing more, and the end of a peer
  // is taken alone.
  struct Completion {
    Operation* operation = nullptr;
    Down down{};
    uint64_t arrival = 0;  // of a peer's end: what has arrived by then came before
    std::shared_ptr<const Unclaimed> unclaimed{};
  };
  bool begin_dispatch() {
    const bool is_first = !std::exchange(is_dispatching_, true);
    note_undispatched();
    return is_first;
  }
  bool end_dispatch() {
    if (!undispatched_.empty()) return false;
    is_dispatching_ = false;
    note_undispatched();
    return true;
  }
  bool is_empty() const { return undispatched_.empty(); }
  // Nothing waits for dispatch, and no thread dispatches.
  bool is_quiet() const { return undispatched_.empty() && !is_dispatching_; }
  // The opposite, for a thread that does not hold the lock.
  // relaxed: a thread that must see a completion has seen, under the lock, what came after it
  bool has_undispatched() const { return has_undispatched_.load(std::memory_order_relaxed); }
  std::vector<Completion> take();

  // How threads of Python wait; each returns when there is something to dispatch, at an interrupt_wait, or at the
  // deadline.
  void wait(Hold& held, std::int64_t deadline, uint64_t interrupts_seen, bool is_dispatcher);
  void wait_as_pump(Hold& held, std::int64_t deadline);
  // Wait for watched operations. Returns when they have ended; true if other completions wait for dispatch. The pump
  // sleeps meanwhile: the caller dispatches them, or leaves them to the pump.
  template <class HasEnded>
  bool wait_until(Hold& held, HasEnded has_ended, std::int64_t deadline, const std::atomic<bool>& is_interrupted) {
    const auto has_other = [&] {
      // relaxed: an interrupt_wait follows it
      return (!is_empty() && !is_dispatching_) || is_interrupted.load(std::memory_order_relaxed) || engine_.is_closed();
    };
    ++waiters_;
    engine_.wait(held, [&] { return has_ended() || has_other(); }, deadline);
    --waiters_;
    return !has_ended() && has_other();
  }
  void leave_dispatch_to_pump() {
    if (!is_empty() && !is_dispatching_) wake_pump();
  }
  // Look for the end of operations for a few rounds of progress; as above, the pump does not wake up meanwhile.
  template <class HasEnded>
  void poll_briefly(HasEnded has_ended) {
    ++waiters_;
    engine_.poll_briefly(has_ended);
    --waiters_;
  }
  // Watch it no more: from now on it is dispatched, under the caller's number, also if it wants memory now. False if it
  // has ended.
  bool unwatch(Operation& operation, uint64_t id);
  // Let the pump return at this time at the latest.
  void wake_pump_at(std::int64_t time) {
    if (time >= pump_at_) return;
    pump_at_ = time;
    if (is_pump_waiting_) pump_.notify_one();
    if (is_pump_polling_) engine_.wake_waiters();
  }
  // Announce to the pump when these operations, which are watched, have ended.
  void observe(Observer& observer, Operation* const* operations, unsigned count);
  void forget(Observer& observer, Operation* const* operations, unsigned count);
  void announce(Observer& observer);
  // The oldest that was announced; nullptr if there is none.
  Observer* take_announced() { return announced_.empty() ? nullptr : announced_.pop_front(); }
  uint64_t interrupt_count() const { return interrupts_; }
  void interrupt_wait();

  Engine& engine() const { return engine_; }
  // Keep something that the engine still uses until there is no engine any more.
  void keep(std::shared_ptr<void> thing) { kept_.push_back(std::move(thing)); }
  void enqueue(Operation& operation, uint64_t arrival = never_arrived);
  static constexpr uint64_t never_arrived = UINT64_MAX;

 private:
  void add(Operation& operation);
  void dispatch_unclaimed();
  void wake_pump();
  void note_undispatched() { has_undispatched_.store(!is_quiet(), std::memory_order_relaxed); }

  Engine& engine_;
  std::vector<std::shared_ptr<void>> kept_;
  std::vector<std::unique_ptr<Operation>> all_;
  std::vector<SendOperation*> spare_sends_;
  std::vector<ReceiveOperation*> spare_receives_;
  std::vector<Run*> spare_runs_;
  Scratch scratch_;
  std::deque<Completion> undispatched_;
  std::atomic<bool> has_undispatched_{false};  // is_quiet() is false
  size_t unclaimed_waiting_ = 0;
  bool is_dispatching_ = false;
  uint64_t interrupts_ = 0;
  size_t waiters_ = 0;
  ObserverList announced_;
  size_t observed_ = 0;  // observers with operations under way
  bool is_pump_waiting_ = false;
  bool is_pump_polling_ = false;
  uint64_t polls_seen_ = 0;
  std::int64_t pump_at_ = never;
  std::condition_variable_any pump_;
};

}  // namespace unisono::engine
