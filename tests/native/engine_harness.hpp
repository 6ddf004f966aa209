// An engine, its completion queue and a pump thread: what bind_engine.cpp and backends/native/ make of them, without
// Python. It dispatches completions and gives memory to receives of unknown length.

#pragma once

#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

#include "collective/run.hpp"
#include "engine/completion_queue.hpp"

namespace unisono::engine {

class EngineHarness {
 public:
  // An operation as the test sees it. The engine's lock guards every field.
  struct Started {
    uint64_t handle = 0;  // 0: it completed at once
    bool is_done = false;
    Outcome outcome = Outcome::done;
    uint64_t nbytes = 0;      // of the message that a receive matched
    std::vector<byte> bytes;  // of a message whose length was unknown
  };
  using Handle = std::shared_ptr<Started>;

  explicit EngineHarness(Engine& engine) : engine(engine), completions_(engine), pump_([this] { pump(); }) {}
  ~EngineHarness() {
    {
      const Hold held = engine.hold();
      is_over_ = true;
      completions_.interrupt_wait();
    }
    pump_.join();
  }

  Engine& engine;

  Handle send(const std::vector<byte>& data, std::int32_t dst, uint64_t context, uint64_t tag, bool sync = false) {
    const Hold held = engine.hold();
    SendOperation& op = completions_.make_send();
    op.context = context;
    op.tag = tag;
    op.data = data.data();
    op.nbytes = data.size();
    op.header = nullptr;
    op.header_bytes = 0;
    op.sync = sync;
    return start(op, [&] { return completions_.start(op, dst); });
  }

  // `into` is null for a message of unknown length.
  Handle receive(std::vector<byte>* into, std::int32_t source, uint64_t context, uint64_t tag) {
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
    return start(op, [&] { return completions_.start(op); });
  }

  Handle run(std::shared_ptr<const Program> program, const Stage& stage, const Fingerprint& fingerprint) {
    const Hold held = engine.hold();
    Run& op = completions_.make_run();
    op.fingerprint = fingerprint;
    return start(op, [&] {
      completions_.start(op, [&] { op.begin(std::move(program), stage); });
      return true;
    });
  }

  // False if the operation can no longer be cancelled; it then completes by itself. A run completes later, as
  // cancelled.
  bool cancel(Started& started) {
    const Hold held = engine.hold();
    if (started.is_done || !completions_.cancel(started.handle)) return false;
    const auto found = by_handle_.find(started.handle);
    if (found != by_handle_.end() && !found->second.is_run) {
      by_handle_.erase(found);
      started.is_done = true;
      started.outcome = Outcome::cancelled;
    }
    return true;
  }

  // False if the operation has not completed by the deadline.
  bool wait(const Handle& started, std::int64_t deadline) {
    Hold held = engine.hold();
    while (!started->is_done) {
      const std::int64_t now = now_ns();
      if (now >= deadline) return false;
      completions_.wait(held, std::min(deadline, now + 50 * millisecond), completions_.interrupt_count(), false);
      if (!completions_.is_empty() && completions_.begin_dispatch()) dispatch(held);
      if (engine.is_closed() && !started->is_done) {
        // Another thread dispatches and has not reached this operation yet.
        held.unlock();
        std::this_thread::yield();
        held.lock();
      }
    }
    return true;
  }

 private:
  struct Kept {
    Handle started;
    bool is_run;
  };

  template <class Start>
  Handle start(Operation& op, Start start_it) {
    auto started = std::make_shared<Started>();
    started->handle = op.handle;
    if (!start_it()) {
      op.outcome = Outcome::closed;
      op.phase = Operation::Phase::ended;
    }
    if (op.phase != Operation::Phase::ended || op.is_undispatched) {
      by_handle_.emplace(op.handle, Kept{started, op.is_run});
    } else {
      end(op, *started);
      completions_.recycle(op);
    }
    return started;
  }

  static void end(Operation& op, Started& started) {
    started.is_done = true;
    started.outcome = op.outcome;
    if (!op.is_receive) return;
    auto& receive = static_cast<ReceiveOperation&>(op);
    started.nbytes = receive.is_matched ? receive.matched.nbytes : 0;
    // A message that arrived eagerly lies in the engine's memory, a longer one in `bytes`. Either may be left over from
    // a withdrawn message.
    if (receive.own.get() != nullptr && receive.into == receive.own.get())
      started.bytes.assign(receive.own.get(), receive.own.get() + started.nbytes);
  }

  void pump() {
    Hold held = engine.hold();
    while (!is_over_) {
      completions_.wait_as_pump(held, now_ns() + 20 * millisecond);
      if (!completions_.is_empty() && completions_.begin_dispatch()) dispatch(held);
      if (engine.is_closed()) {
        held.unlock();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        held.lock();
      }
    }
  }

  // One thread at a time, and without the lock between batches, because Python's callbacks run without it.
  void dispatch(Hold& held) {
    do {
      for (const CompletionQueue::Completion& one : completions_.take()) {
        if (one.operation == nullptr) continue;
        Operation& op = *one.operation;
        op.is_undispatched = false;
        const auto found = by_handle_.find(op.handle);
        if (op.phase == Operation::Phase::ended) {
          if (found != by_handle_.end()) end(op, *found->second.started);
          by_handle_.erase(op.handle);
          completions_.recycle(op);
        } else if (op.needs_memory && found != by_handle_.end()) {
          auto& receive = static_cast<ReceiveOperation&>(op);
          receive.needs_memory = false;
          found->second.started->bytes.resize(receive.matched.nbytes);
          receive.into = found->second.started->bytes.data();
          engine.supply(receive);
        }
      }
      completions_.interrupt_wait();
      held.unlock();
      std::this_thread::yield();
      held.lock();
    } while (!completions_.end_dispatch());
  }

  CompletionQueue completions_;
  std::unordered_map<uint64_t, Kept> by_handle_;
  bool is_over_ = false;
  std::thread pump_;
};

}  // namespace unisono::engine
