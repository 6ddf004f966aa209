// The engine as a Python object: it checks every argument and converts completions into tuples.
//
// The order of locks: the GIL, then the engine's. No Python object is created or released with the engine's lock held,
// because that may run any Python code. The engine's own thread never takes the GIL.

#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "collective/program_call.hpp"
#include "engine/completion_queue.hpp"
#include "engine/engine.hpp"
#include "python/bind.hpp"

namespace nb = nanobind;

namespace unisono {

struct ForkedError : std::runtime_error {
  ForkedError() : std::runtime_error("this engine belongs to the parent process: make a new one after fork") {}
};

using CardTuple = std::tuple<std::string, std::string, std::string, uint16_t, std::int32_t>;

// Seconds as nanoseconds, at most a billion seconds.
std::int64_t in_ns(double seconds);

class PyEngine {
 public:
  PyEngine(std::int32_t rank, std::int32_t size, const std::string& directory, nb::bytes secret,
           const engine::Settings& settings, std::shared_ptr<engine::LocalWorld> local)
      : engine_(rank, size, directory, std::string(secret.c_str(), secret.size()), settings, std::move(local)),
        completions_(engine_) {}
  ~PyEngine() {
    // Before completions_ goes: closing ends operations that belong to it.
    const GilReleased release;
    engine_.close(0);
  }
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  CardTuple card() const;
  void connect(const std::vector<CardTuple>& tuples);
  void secure(const std::vector<std::string>& names, nb::bytes key, nb::bytes certificate, nb::bytes authority);

  // The handle of a send; 0 if it is done already; the negative outcome if it failed.
  std::int64_t send(uint64_t id, std::int32_t dst, uint64_t context, uint64_t tag, nb::handle data, uint8_t dtype,
                    nb::bytes header, uint8_t lane, bool sync);

  // The handle of a receive, or its completion if it ended at once.
  nb::object receive(uint64_t id, std::int32_t src, uint64_t context, std::int64_t tag, nb::handle into, uint8_t dtype,
                     bool in_order);
  nb::object probe(uint64_t id, std::int32_t src, uint64_t context, std::int64_t tag);

  // The handle of a run, or its completion if it ended at once. `op` is negative for a program without reductions.
  nb::object run(uint64_t id, const engine::ProgramCall& call, uint64_t context, uint64_t tag, uint8_t dtype,
                 std::int32_t op, nb::handle in, nb::handle out, nb::bytes header, size_t window, uint64_t row_bytes);

  // Adopt an operation of a call: its handle, and its completion will be dispatched; or its completion if it has ended.
  nb::object adopt(uint64_t id, std::int64_t handle);

  engine::CompletionQueue& completions() { return completions_; }

  // The ranks that a run waits for now.
  std::vector<std::int32_t> awaited(std::int64_t handle);
  bool cancel(std::int64_t handle);

  // Completions, if this thread is to dispatch them; it then calls `more` until that is empty.
  nb::list wait(double timeout, uint64_t interrupts_seen, bool is_dispatcher);
  nb::list pump(double timeout);

  // Further completions for the thread that dispatches; `is_last` ends the dispatching if there are none.
  nb::list more(bool is_last);
  void ignore_context(uint64_t context);
  void end_context(uint64_t context);

  // The same for a context in which nothing was received or sent here; false if messages wait in it.
  bool end_unused_context(uint64_t context);

  // Whether a completion waits to be dispatched, or a thread is dispatching.
  bool has_undispatched() const { return completions_.has_undispatched(); }

  uint64_t interrupt_count();
  void interrupt_wait();
  void close(double flush_s);
  bool is_forked() const { return engine_.is_forked(); }
  uint64_t refused();
  std::vector<std::string> take_refusals();
  std::tuple<std::string, bool> down_of(std::int32_t rank);
  std::vector<std::string> links();
  double ping(std::int32_t peer, size_t nbytes, int rounds, bool is_first);

 private:
  class View;

  void check() const;
  void check_rank(std::int32_t rank) const;

  static engine::byte* buffer_of(uint64_t count, nb::handle given, int flags, uint64_t itemsize,
                                 std::optional<View>& view);

  template <class Prepare>
  nb::object start(uint64_t id, std::int32_t src, uint64_t context, std::int64_t tag, Prepare prepare);

  // `ends_if_empty`: an empty result means that the dispatching has ended.
  template <class May>
  nb::list completions_for(bool ends_if_empty, May may_dispatch);

  template <class May>
  bool take_completions(nb::list& result, May may_dispatch);

  // A message of unknown length waits at its sender: give it memory that Python will own. While the lock is not held
  // the message may be withdrawn and the receive matched with another one: so the memory is for one request only.
  void supply_memory(engine::ReceiveOperation& op);

  // (id, outcome, envelope or None, data or None)
  static nb::object tuple_of(engine::Operation& op);

  engine::Engine engine_;
  engine::CompletionQueue completions_;
};

}  // namespace unisono
