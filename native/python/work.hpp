// A work: a started call as the user holds it.
//
// `_native.WorkBase` is the base of unisono.Work. A work without a call of the engine is carried on by Python alone; so
// is one that Python has adopted.

#pragma once

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
};

// Start a call; returns a new Work. Throws LeftToReference or nb::python_error before anything was sent.
PyObject* start_call(nb::handle group, NativeGroup& native, const VerbSpec& spec, nb::handle adoption,
                     const Given& given);

void bind_work(nb::module_& m);

}  // namespace unisono
