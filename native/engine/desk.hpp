// The desk: operations that were started from Python, and those that have ended and wait to be told.
//
// Knows numbers, pools and who should hear of an end. Does not know Python objects: a buffer is an address, and its
// owner is kept by whoever asked until the end was told.

#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "engine.hpp"

namespace unisono::engine {

class Desk;

class Operation {
 public:
  virtual ~Operation() = default;

  uint64_t id = 0;      // the caller's
  uint64_t handle = 0;  // ours: place and number of uses
  Outcome outcome = Outcome::done;
  enum class Phase : uint8_t { idle, starting, active, ended };
  Phase phase = Phase::idle;
  bool is_receive = false;
  bool needs_memory = false;
  Hook<Operation> hook;
};

class SendOperation final : public Send, public Operation {
 public:
  explicit SendOperation(Desk& desk) : desk_(desk) {}
  void end(Outcome how) override;
  std::string header_held;

 private:
  Desk& desk_;
};

class ReceiveOperation final : public Receive, public Operation {
 public:
  explicit ReceiveOperation(Desk& desk) : desk_(desk) { is_receive = true; }
  Meeting meet(const Envelope& envelope, bool is_here) override;
  void want_memory() override;
  byte* place() override { return into; }
  void write(uint64_t, const byte*, size_t) override {}
  void end(Outcome how, std::int32_t from) override;

  byte* into = nullptr;
  uint64_t capacity = 0;
  uint8_t dtype = untyped;
  bool is_probe = false;
  bool is_open_ended = false;  // the length is the message's own
  Envelope met;                // valid if it met a message; the header is in header_held
  bool has_met = false;
  std::string header_held;
  std::unique_ptr<byte[]> own;   // an open-ended receive of bytes that came at once
  void* owner = nullptr;         // whatever the caller keeps with it

 private:
  Desk& desk_;
};

// Every call needs the engine's lock.
class Desk {
 public:
  explicit Desk(Engine& engine);

  SendOperation& make_send();
  ReceiveOperation& make_receive();
  // Start it. If it ends at once it is not told: the phase is `ended`. False if the engine is closed.
  bool start(SendOperation& send, std::int32_t dst);
  bool start(ReceiveOperation& receive);
  // True if it was taken back; then it is not told.
  bool cancel(uint64_t handle);
  void recycle(Operation& operation);

  // Those to be told, oldest first.
  Operation* pop() { return ended_.pop_front(); }
  bool is_empty() const { return ended_.empty() && downs_.empty(); }
  std::deque<Down>& downs() { return downs_; }

  // How threads of Python wait; each returns when there is something to tell, at a poke, or at the deadline.
  void wait(Hold& held, std::int64_t deadline, uint64_t pokes_seen);
  void wait_as_pump(Hold& held, std::int64_t deadline);
  uint64_t pokes() const { return pokes_; }
  void poke();

  void tell(Operation& operation);

 private:
  void add(Operation& operation);
  void wake_pump();

  Engine& engine_;
  std::vector<std::unique_ptr<Operation>> all_;
  std::vector<SendOperation*> spare_sends_;
  std::vector<ReceiveOperation*> spare_receives_;
  Chain<Operation, &Operation::hook> ended_;
  std::deque<Down> downs_;
  uint64_t pokes_ = 0;
  size_t waiters_ = 0;
  bool is_pump_waiting_ = false;
  std::condition_variable_any pump_;
};

}  // namespace unisono::engine
