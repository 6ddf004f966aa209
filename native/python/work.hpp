// A work: a started call as the user holds it.
//
// `_native.WorkBase` is the base of unisono.Work. A work without a call of the engine is carried on by Python alone; so
// is one that Python has adopted.

#pragma once

#include "python/call.hpp"

namespace unisono {

struct WorkObject;

struct StartedCall : StartedLink {
  StartedCall(nb::object group, NativeGroup& native, const VerbSpec& spec, nb::object helper)
      : group(std::move(group)),
        native(native),
        helper(std::move(helper)),
        call(std::in_place, native, spec, this->helper),
        spec(spec) {}

  enum class State : uint8_t { active, adopted, done };

  nb::object group;  // keeps `native`
  NativeGroup& native;
  nb::object helper;
  std::optional<Call> call;  // until it is done
  const VerbSpec& spec;
  State state = State::active;
  bool is_being_adopted = false;
  bool is_observed = false;  // the user has waited or asked for it
  unsigned waiters = 0;      // threads that look at it in the engine
  unsigned idle_polls = 0;
  std::int64_t attention_at = 0;
  WorkObject* work = nullptr;
  // The work, and what Python keeps while it carries the call on: the engine may still use memory of the call itself.
  int references = 1;
  nb::object result, error;
  nb::object code;  // where it was started
  int lasti = 0;
};

// Start a call; returns a new Work. Throws LeftToReference or nb::python_error before anything was sent.
PyObject* start_call(nb::handle group, NativeGroup& native, const VerbSpec& spec, nb::handle helper,
                     const Given& given);

void bind_work(nb::module_& m);

}  // namespace unisono
