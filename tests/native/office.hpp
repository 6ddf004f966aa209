// An engine, its completions and its pump thread: what bind_engine.cpp and backends/native.py make of them, without
// Python.
//
// Knows who tells what has ended, and gives memory to whoever wants it. Does not know what the operations are for.

#pragma once

#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

#include "collective/run.hpp"
#include "engine/completion_queue.hpp"

namespace unisono::engine {

class Office {
 public:
  // An operation as its owner sees it. Every field is guarded by the engine's lock.
  struct Slip {
    uint64_t handle = 0;  // 0: it ended at once
    bool is_done = false;
    Outcome outcome = Outcome::done;
    uint64_t nbytes = 0;      // of the message that a receive met
    std::vector<byte> bytes;  // of one whose length was not known
  };
  using SendSlot = std::shared_ptr<Slip>;

  explicit Office(Engine& engine) : engine(engine), completions_(engine), pump_([this] { pump(); }) {}
  ~Office() {
    {
      const Hold held = engine.hold();
      is_over_ = true;
      completions_.interrupt_wait();
    }
    pump_.join();
  }

  Engine& engine;

  SendSlot send(const std::vector<byte>& data, std::int32_t dst, uint64_t context, uint64_t tag, bool sync = false) {
    const Hold held = engine.hold();
    SendOperation& op = completions_.make_send();
    op.context = context;
    op.tag = tag;
    op.data = data.data();
    op.nbytes = data.size();
    op.header = nullptr;
    op.header_bytes = 0;
    op.sync = sync;
    return started(op, [&] { return completions_.start(op, dst); });
  }

  // Into memory of the caller, or for a message of any length.
  SendSlot receive(std::vector<byte>* into, std::int32_t source, uint64_t context, uint64_t tag) {
    const Hold held = engine.hold();
    ReceiveOperation& op = completions_.make_receive();
    op.source = source;
    op.context = context;
    op.tag = tag;
    op.any_tag = op.is_probe = op.in_order = false;
    op.into = into != nullptr ? into->data() : nullptr;
    op.capacity = into != nullptr ? into->size() : 0;
    op.is_open_ended = into == nullptr;
    op.dtype = untyped;
    return started(op, [&] { return completions_.start(op); });
  }

  SendSlot run(std::shared_ptr<const Program> program, const Stage& stage, const std::string& header) {
    const Hold held = engine.hold();
    Run& op = completions_.make_run();
    op.header = std::make_shared<const std::string>(header);
    return started(op, [&] {
      completions_.start(op, [&] { op.begin(std::move(program), stage); });
      return true;
    });
  }

  // Take it back; what cannot be taken back ends by itself. A run ends as cancelled, later.
  bool cancel(Slip& slip) {
    const Hold held = engine.hold();
    if (slip.is_done || !completions_.cancel(slip.handle)) return false;
    const auto found = by_handle_.find(slip.handle);
    if (found != by_handle_.end() && !found->second.is_run) {
      by_handle_.erase(found);
      slip.is_done = true;
      slip.outcome = Outcome::cancelled;
    }
    return true;
  }

  // False if it has not ended by then.
  bool wait(const SendSlot& slip, std::int64_t deadline) {
    Hold held = engine.hold();
    while (!slip->is_done) {
      const std::int64_t now = now_ns();
      if (now >= deadline) return false;
      completions_.wait(held, std::min(deadline, now + 50 * millisecond), completions_.interrupt_count(), false);
      if (!completions_.is_empty() && completions_.begin_telling()) tell(held);
      if (engine.is_closed() && !slip->is_done) {
        // Whoever tells has not come to it yet.
        held.unlock();
        std::this_thread::yield();
        held.lock();
      }
    }
    return true;
  }

 private:
  struct Kept {
    SendSlot slip;
    bool is_run;
  };

  template <class Start>
  SendSlot started(Operation& op, Start start) {
    auto slip = std::make_shared<Slip>();
    slip->handle = op.handle;
    if (!start()) {
      op.outcome = Outcome::closed;
      op.phase = Operation::Phase::ended;
    }
    if (op.phase != Operation::Phase::ended || op.is_news) {
      by_handle_.emplace(op.handle, Kept{slip, op.is_run});
    } else {
      end(op, *slip);
      completions_.recycle(op);
    }
    return slip;
  }

  static void end(Operation& op, Slip& slip) {
    slip.is_done = true;
    slip.outcome = op.outcome;
    if (!op.is_receive) return;
    auto& receive = static_cast<ReceiveOperation&>(op);
    slip.nbytes = receive.has_met ? receive.met.nbytes : 0;
    // What came at once lies in memory that the engine took; the rest is in ours. Both may be left from messages that
    // were taken back.
    if (receive.own != nullptr && receive.into == receive.own.get())
      slip.bytes.assign(receive.own.get(), receive.own.get() + slip.nbytes);
  }

  void pump() {
    Hold held = engine.hold();
    while (!is_over_) {
      completions_.wait_as_pump(held, now_ns() + 20 * millisecond);
      if (!completions_.is_empty() && completions_.begin_telling()) tell(held);
      if (engine.is_closed()) {
        held.unlock();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        held.lock();
      }
    }
  }

  // One thread at a time; without the lock in between, as Python's callbacks run without it.
  void tell(Hold& held) {
    do {
      for (const CompletionQueue::News& one : completions_.take()) {
        if (one.operation == nullptr) continue;
        Operation& op = *one.operation;
        op.is_news = false;
        const auto found = by_handle_.find(op.handle);
        if (op.phase == Operation::Phase::ended) {
          if (found != by_handle_.end()) end(op, *found->second.slip);
          by_handle_.erase(op.handle);
          completions_.recycle(op);
        } else if (op.needs_memory && found != by_handle_.end()) {
          auto& receive = static_cast<ReceiveOperation&>(op);
          receive.needs_memory = false;
          found->second.slip->bytes.resize(receive.met.nbytes);
          receive.into = found->second.slip->bytes.data();
          engine.supply(receive);
        }
      }
      completions_.interrupt_wait();
      held.unlock();
      std::this_thread::yield();
      held.lock();
    } while (!completions_.end_telling());
  }

  CompletionQueue completions_;
  std::unordered_map<uint64_t, Kept> by_handle_;
  bool is_over_ = false;
  std::thread pump_;
};

}  // namespace unisono::engine
