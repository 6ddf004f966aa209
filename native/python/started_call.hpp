// A started call: a call of the engine, its state and its observers.

#pragma once

#include <optional>
#include <utility>

#include "python/call.hpp"

namespace unisono {

struct WorkObject;

struct StartedCall : StartedLink, engine::Observer {
  StartedCall(nb::object group, NativeGroup& native, const VerbSpec& spec, nb::object adoption)
      : group(std::move(group)),
        native(native),
        adoption(std::move(adoption)),
        call(std::in_place, native, spec, this->adoption),
        spec(spec) {}

  // active -> changing -> done, or active -> changing -> adopted -> changing -> done. While it is changing, a thread
  // runs Python, which makes the result or adopts the call.
  enum class State : uint8_t { active, changing, adopted, done };

  // The user has waited or asked for it: `close` need not name it.
  void see();
  void leave_list();
  // Nothing of it is under way in the engine, and all has ended well so far.
  void settle();
  // Let Python carry it on.
  void adopt();
  // It has ended well: make its result, or keep the error that this raises.
  void conclude(nb::object adopted_result = {});
  // Another thread makes the result, or lets Python adopt it.
  void wait_until_settled() const;
  // Whether the caller is what this thread runs while it changes: a signal handler or a finalizer.
  bool is_changing_here() const;
  // Announce its end to the pump, and keep the work until then.
  void observe();
  void call_observers();
  // The result, or nullptr with its error raised.
  PyObject* outcome() const;
  // Raise in a forked child, which has no engine.
  void check_process() const;
  void release();

  nb::object group;  // keeps `native`
  NativeGroup& native;
  nb::object adoption;
  std::optional<Call> call;  // until it is done and no thread looks at it
  const VerbSpec& spec;
  State state = State::active;
  unsigned long changer = 0;  // while it is changing: that thread
  bool is_observed = false;   // the user has waited or asked for it
  unsigned waiters = 0;       // threads that wait for it in the engine, and let Python adopt it
  unsigned pins = 0;          // threads that look at the call without the GIL
  unsigned idle_polls = 0;
  std::int64_t attention_at = 0;
  uint64_t sequence = 0;  // of a collective
  WorkObject* work = nullptr;
  // The work, and what Python keeps while it carries the call on: the engine may still use memory of the call itself.
  int references = 1;
  // While its end is to be announced: the work itself, to which no other reference may exist, and what is to be called.
  nb::object kept;
  nb::object observers;             // a list
  bool is_announced_early = false;  // the pump has seen the end before another thread had made the result
  nb::object result, error;
  nb::object code;  // where it was started
  int lasti = 0;

 private:
  // From now on this thread runs Python to make its result or to adopt it.
  void begin_change();
  // From now on a task carries it on, that of another work.
  void hand_over(nb::handle other);
  // Keeps this as long as it lives.
  nb::object make_keeper();
};

// Keeps the call while the GIL is released.
class Pinned {
 public:
  explicit Pinned(StartedCall& started) : started_(started) { ++started_.pins; }
  ~Pinned() {
    if (--started_.pins == 0 && started_.state == StartedCall::State::done) started_.call.reset();
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

 private:
  StartedCall& started_;
};

}  // namespace unisono
