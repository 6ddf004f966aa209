#include "python/started_call.hpp"

#include <sched.h>

#include <utility>

#include "engine/engine.hpp"
#include "python/work.hpp"

namespace unisono {

using namespace engine;

namespace {

// The exception that is being handled, as Python's.
nb::object current_error() {
  try {
    throw;
  } catch (nb::python_error& error) {
    return nb::borrow(error.value());
  } catch (const std::exception& error) {
    return nb::borrow(PyExc_RuntimeError)(error.what());
  }
}

}  // namespace

void StartedCall::leave_list() {
  if (hook.is_in) native.started.remove(*this);
}

void StartedCall::see() {
  is_observed = true;
  if (state == State::done) leave_list();
}

void StartedCall::release() {
  if (--references == 0) delete this;
}

nb::object StartedCall::make_keeper() {
  PyObject* const capsule = PyCapsule_New(
      this, nullptr, [](PyObject* self) { static_cast<StartedCall*>(PyCapsule_GetPointer(self, nullptr))->release(); });
  if (capsule == nullptr) throw nb::python_error();
  ++references;
  return nb::steal(capsule);
}

void StartedCall::call_observers() {
  const nb::object work_kept = std::exchange(kept, {});
  const nb::object called = std::exchange(observers, {});
  if (!called.is_valid()) return;
  for (nb::handle observer : called) {
    try {
      observer();
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("an observer of a work");
    }
  }
}

void StartedCall::begin_change() {
  state = State::changing;
  changer = PyThread_get_thread_ident();
}

bool StartedCall::is_changing_here() const {
  return state == State::changing && changer == PyThread_get_thread_ident();
}

void StartedCall::hand_over(nb::handle other) {
  const nb::object keep = nb::borrow(reinterpret_cast<PyObject*>(work));
  const nb::object task = other.attr("_task");
  keep.attr("_task") = task;
  keep.attr("_runtime") = other.attr("_runtime");
  state = State::adopted;
  kept.reset();
  if (const nb::object called = std::exchange(observers, {}); called.is_valid())
    for (nb::handle observer : called) task.attr("on_done")(observer);
}

void StartedCall::conclude(nb::object adopted_result) {
  if (is_observed) leave_list();  // else `close` names it
  begin_change();
  try {
    result = nb::steal(adopted_result.is_valid() ? call->finish_adopted(std::move(adopted_result)) : call->finish());
    if (!result.is_valid()) throw nb::python_error();
    if (spec.has(Fact::groups) && PyObject_TypeCheck(result.ptr(), work_base_type)) {
      const nb::object again = std::exchange(result, {});
      call->forget(*this);
      return hand_over(again);
    }
  } catch (...) {
    error = current_error();
  }
  state = State::done;
  if (pins == 0) call.reset();  // and with it the user's memory
  if (is_announced_early) call_observers();
}

void StartedCall::wait_until_settled() const {
  while (state == State::changing) {
    if (is_changing_here()) adoption.attr("refuse_nested")();
    const GilReleased released;
    sched_yield();
  }
}

void StartedCall::observe() {
  if (kept.is_valid()) return;
  kept = nb::borrow(reinterpret_cast<PyObject*>(work));
  if (state != State::done) return call->observe(*this);
  // After those that have ended before and are not announced yet.
  const Hold held = native.completions.engine().hold();
  native.completions.announce(*this);
}

void StartedCall::adopt() {
  const nb::object keep = nb::borrow(reinterpret_cast<PyObject*>(work));
  if (is_observed) leave_list();  // else `close` names it
  call->forget(*this);
  begin_change();
  try {
    hand_over(call->adopt("adopt", make_keeper()));
  } catch (...) {
    // A signal handler has raised, and nothing of the call is under way any more.
    error = current_error();
    state = State::done;
    call_observers();
    throw;
  }
}

void StartedCall::settle() {
  begin_change();
  Call::Next next;
  try {
    next = call->advance(false);
  } catch (...) {
    error = current_error();
    state = State::done;
    call_observers();
    return;
  }
  switch (next) {
    case Call::Next::finish: conclude(); break;
    case Call::Next::leave_to_python: adopt(); break;
    case Call::Next::wait:
      state = State::active;
      if (kept.is_valid()) call->observe(*this);
  }
}

void StartedCall::check_process() const {
  if (native.completions.engine().is_forked()) [[unlikely]]
    adoption.attr("refuse_forked")();
}

PyObject* StartedCall::outcome() const {
  if (!error.is_valid()) return Py_NewRef(result.ptr());
  // Each thread that asks raises its own copy, so that tracebacks do not grow into each other.
  const nb::object copy = adoption.attr("copy_of")(error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(copy.ptr())), copy.ptr());
  return nullptr;
}

}  // namespace unisono
