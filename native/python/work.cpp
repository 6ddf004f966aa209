#include "python/work.hpp"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>

#include "engine/engine.hpp"
#include "python/blocking.hpp"
#include "python/unwinding.hpp"

namespace unisono {

using namespace engine;

CompletionQueue& completions_of(nb::handle engine);

struct WorkObject {
  PyObject_HEAD StartedCall* started;
};

namespace {

constexpr std::int64_t slice_ns = 50 * millisecond;  // between two looks for signals

// unisono.core.work.Work, which derives from WorkBase: the type of the works that are made here.
PyTypeObject* work_type = nullptr;
PyTypeObject* base_type = nullptr;

WorkObject& as_work(PyObject* self) { return *reinterpret_cast<WorkObject*>(self); }

void leave_list(StartedCall& started) {
  if (started.hook.is_in) started.native.started.remove(started);
}

// The user has waited or asked for it: `close` need not name it.
void see(StartedCall& started) {
  started.is_observed = true;
  if (started.state == StartedCall::State::done) leave_list(started);
}

void release(StartedCall* started) {
  if (started != nullptr && --started->references == 0) delete started;
}

// Keeps a started call as long as it lives.
nb::object keeper_of(StartedCall& started) {
  PyObject* const capsule = PyCapsule_New(&started, nullptr, [](PyObject* self) {
    release(static_cast<StartedCall*>(PyCapsule_GetPointer(self, nullptr)));
  });
  if (capsule == nullptr) throw nb::python_error();
  ++started.references;
  return nb::steal(capsule);
}

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

void call_observers(StartedCall& started) {
  const nb::object kept = std::exchange(started.kept, {});
  const nb::object observers = std::exchange(started.observers, {});
  if (!observers.is_valid()) return;
  for (nb::handle observer : observers) {
    try {
      observer();
    } catch (nb::python_error& error) {
      error.discard_as_unraisable("an observer of a work");
    }
  }
}

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

// For functions that the interpreter calls.
template <class Body>
PyObject* translate_errors(const Body& body) {
  try {
    return body();
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// From now on this thread runs Python to make its result or to adopt it.
void begin_change(StartedCall& started) {
  started.state = StartedCall::State::changing;
  started.changer = PyThread_get_thread_ident();
}

// Whether the caller is what this thread runs then: a signal handler or a finalizer.
bool is_changing_here(const StartedCall& started) {
  return started.state == StartedCall::State::changing && started.changer == PyThread_get_thread_ident();
}

// From now on a task carries it on, that of another work.
void hand_over(StartedCall& started, nb::handle other) {
  const nb::object keep = nb::borrow(reinterpret_cast<PyObject*>(started.work));
  const nb::object task = other.attr("_task");
  keep.attr("_task") = task;
  keep.attr("_runtime") = other.attr("_runtime");
  started.state = StartedCall::State::adopted;
  started.kept.reset();
  if (const nb::object observers = std::exchange(started.observers, {}); observers.is_valid())
    for (nb::handle observer : observers) task.attr("on_done")(observer);
}

// It has ended well in the engine: make its result, or keep the error that this raises.
void conclude(StartedCall& started, nb::object adopted_result = {}) {
  if (started.is_observed) leave_list(started);  // else `close` names it
  begin_change(started);
  try {
    started.result = nb::steal(adopted_result.is_valid() ? started.call->finish_adopted(std::move(adopted_result))
                                                         : started.call->finish());
    if (!started.result.is_valid()) throw nb::python_error();
    if (started.spec.verb == Verb::split && PyObject_TypeCheck(started.result.ptr(), base_type)) {
      const nb::object again = std::exchange(started.result, {});
      started.call->forget(started);
      return hand_over(started, again);
    }
  } catch (...) {
    started.error = current_error();
  }
  started.state = StartedCall::State::done;
  if (started.pins == 0) started.call.reset();  // and with it the user's memory
  if (started.is_announced_early) call_observers(started);
}

// Another thread makes the result, or lets Python adopt it.
void wait_until_settled(const StartedCall& started) {
  while (started.state == StartedCall::State::changing) {
    if (is_changing_here(started)) started.adoption.attr("refuse_nested")();
    const GilReleased released;
    sched_yield();
  }
}

// Announce its end to the pump, and keep the work until then.
void observe(StartedCall& started) {
  if (started.kept.is_valid()) return;
  started.kept = nb::borrow(reinterpret_cast<PyObject*>(started.work));
  if (started.state != StartedCall::State::done) return started.call->observe(started);
  // After those that have ended before and are not announced yet.
  const Hold held = started.native.completions.engine().hold();
  started.native.completions.announce(started);
}

// Let Python carry it on.
void adopt(StartedCall& started) {
  const nb::object keep = nb::borrow(reinterpret_cast<PyObject*>(started.work));
  if (started.is_observed) leave_list(started);  // else `close` names it
  started.call->forget(started);
  begin_change(started);
  try {
    hand_over(started, started.call->adopt("adopt", keeper_of(started)));
  } catch (...) {
    // A signal handler has raised, and nothing of the call is under way any more.
    started.error = current_error();
    started.state = StartedCall::State::done;
    call_observers(started);
    throw;
  }
}

// Nothing of it is under way in the engine, and all has ended well so far.
void settle(StartedCall& started) {
  begin_change(started);
  Call::Next next;
  try {
    next = started.call->advance(false);
  } catch (...) {
    started.error = current_error();
    started.state = StartedCall::State::done;
    call_observers(started);
    return;
  }
  switch (next) {
    case Call::Next::finish: conclude(started); break;
    case Call::Next::leave_to_python: adopt(started); break;
    case Call::Next::wait:
      started.state = StartedCall::State::active;
      if (started.kept.is_valid()) started.call->observe(started);
  }
}

// A forked child has no engine.
void check_process(const StartedCall& started) {
  if (started.native.completions.engine().is_forked()) [[unlikely]]
    started.adoption.attr("refuse_forked")();
}

PyObject* outcome_of(const StartedCall& started) {
  if (!started.error.is_valid()) return Py_NewRef(started.result.ptr());
  // Each thread that asks raises its own copy, so that tracebacks do not grow into each other.
  const nb::object error = started.adoption.attr("copy_of")(started.error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  return nullptr;
}

PyObject* wait_by_python(PyObject* self, PyObject* timeout) {
  static PyObject* const word = interned("_wait");
  PyObject* const args[] = {self, timeout};
  return call_method(word, args, 2);
}

// When a wait that begins now is over. Python refuses what is no time.
std::int64_t limit_of(const StartedCall& started, PyObject* timeout) {
  if (timeout == Py_None) return never;
  double seconds = seconds_of(timeout);
  if (!(seconds >= 0)) {
    const nb::object deadline = started.adoption.attr("runtime").attr("deadline")(nb::handle(timeout));
    const nb::object given = deadline.attr("given_s");
    if (given.is_none()) return never;
    seconds = nb::cast<double>(given);
  }
  return seconds < 1e9 ? now_ns() + static_cast<std::int64_t>(seconds * 1e9) : never;
}

PyObject* wait_for(PyObject* self, PyObject* timeout) {
  StartedCall* const started = as_work(self).started;
  if (started == nullptr) {
    check_may_block();
    return wait_by_python(self, timeout);
  }
  check_process(*started);
  see(*started);
  if (started->state != StartedCall::State::done) check_may_block();
  const bool is_over = started->state == StartedCall::State::adopted || started->state == StartedCall::State::done;
  const std::int64_t limit = is_over ? never : limit_of(*started, timeout);
  nb::object rest = nb::borrow(timeout);
  for (;; wait_until_settled(*started)) {
    if (started->state == StartedCall::State::changing) continue;
    if (started->state != StartedCall::State::active) break;
    const Pinned pinned(*started);
    ++started->waiters;
    const Call::Waited waited = started->call->wait(limit);
    --started->waiters;
    switch (waited) {
      case Call::Waited::taken:
        settle(*started);
        started->call->dispatch_completions();
        break;
      case Call::Waited::interrupted: return nullptr;
      case Call::Waited::attention:
      case Call::Waited::limit:
        // Another thread may have taken it while a signal handler ran here.
        if (started->state == StartedCall::State::active) adopt(*started);
        break;
      case Call::Waited::elsewhere: break;
    }
  }
  if (started->state == StartedCall::State::adopted) {
    if (limit != never) rest = nb::float_(std::max(0.0, static_cast<double>(limit - now_ns()) / 1e9));
    nb::object result = nb::steal(wait_by_python(self, rest.ptr()));
    if (!result.is_valid()) return nullptr;
    if (started->state == StartedCall::State::adopted) conclude(*started, std::move(result));
  }
  wait_until_settled(*started);
  return outcome_of(*started);
}

PyObject* wait_method(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  static PyObject* const timeout_word = interned("timeout");
  PyObject* timeout = count == 1 ? args[0] : Py_None;
  const Py_ssize_t named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
  if (count > 1 || named > 1 || (named == 1 && (count == 1 || !is_word(PyTuple_GET_ITEM(names, 0), timeout_word)))) {
    PyErr_SetString(PyExc_TypeError, "wait(timeout=None) takes one argument");
    return nullptr;
  }
  if (named == 1) timeout = args[0];
  return translate_errors([&] { return wait_for(self, timeout); });
}

PyObject* done_method(PyObject* self, PyObject*) {
  StartedCall* const started = as_work(self).started;
  if (started == nullptr || started->state == StartedCall::State::adopted) {
    static PyObject* const word = interned("_done");
    return PyObject_CallMethodNoArgs(self, word);
  }
  return translate_errors([&]() -> PyObject* {
    check_process(*started);
    if (is_changing_here(*started)) Py_RETURN_FALSE;
    if (started->state == StartedCall::State::active) {
      const Pinned pinned(*started);
      const bool is_taken = started->call->poll(started->idle_polls++);
      if (is_taken && started->state == StartedCall::State::active)
        settle(*started);
      else if (started->state == StartedCall::State::active && started->call->has_failed())
        adopt(*started);
    }
    if (started->state == StartedCall::State::active) {
      if (PyErr_CheckSignals() != 0) return nullptr;
      Py_RETURN_FALSE;
    }
    wait_until_settled(*started);
    if (started->state == StartedCall::State::active) Py_RETURN_FALSE;  // its second stage
    if (started->state == StartedCall::State::adopted) return done_method(self, nullptr);
    see(*started);
    Py_RETURN_TRUE;
  });
}

// Let Python carry it on; True if a task does or did.
PyObject* adopt_method(PyObject* self, PyObject* is_seen) {
  StartedCall* const started = as_work(self).started;
  return translate_errors([&]() -> PyObject* {
    if (started != nullptr) {
      check_process(*started);
      started->is_observed = started->is_observed || is_seen == Py_True;
      const Pinned pinned(*started);
      // Unless the user asked, a thread that waits for this work in the engine adopts it; it was interrupted for that.
      if (started->state == StartedCall::State::active && started->waiters != 0 && is_seen != Py_True) Py_RETURN_TRUE;
      do {
        if (started->state == StartedCall::State::active) adopt(*started);
        if (is_seen == Py_True) wait_until_settled(*started);
      } while (started->state == StartedCall::State::active);
      if (started->state == StartedCall::State::done) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
  });
}

// Call `observer` without arguments when it has ended, on any thread. False if its task is to be asked, or the
// engine is closed.
PyObject* observe_method(PyObject* self, PyObject* observer) {
  StartedCall* const started = as_work(self).started;
  if (started == nullptr) Py_RETURN_FALSE;
  return translate_errors([&]() -> PyObject* {
    check_process(*started);
    see(*started);
    const bool is_closed = started->native.completions.engine().is_closed();
    if (started->state == StartedCall::State::active && is_closed) adopt(*started);
    if (!started->kept.is_valid()) {
      wait_until_settled(*started);
      if (started->state == StartedCall::State::adopted || is_closed) Py_RETURN_FALSE;
    }
    if (!started->observers.is_valid()) started->observers = nb::list();
    if (PyList_Append(started->observers.ptr(), observer) != 0) return nullptr;
    observe(*started);
    Py_RETURN_TRUE;
  });
}

PyObject* forget_method(PyObject* self, PyObject* observer) {
  if (StartedCall* const started = as_work(self).started; started != nullptr && started->observers.is_valid())
    for (Py_ssize_t i = PyList_GET_SIZE(started->observers.ptr()); i-- > 0;)
      if (PyList_GET_ITEM(started->observers.ptr(), i) == observer)
        PyList_SetSlice(started->observers.ptr(), i, i + 1, nullptr);
  Py_RETURN_NONE;
}

// Conclude what was announced, in the order in which it has ended; collectives of a group by number.
void conclude_announced(nb::handle engine) {
  CompletionQueue& completions = completions_of(engine);
  std::vector<StartedCall*> ended;
  {
    const Hold held = completions.engine().hold();
    while (Observer* const observer = completions.take_announced())
      ended.push_back(static_cast<StartedCall*>(observer));
  }
  std::map<const NativeGroup*, std::vector<size_t>> places;
  for (size_t i = 0; i < ended.size(); ++i)
    if (ended[i]->spec.is_collective()) places[&ended[i]->native].push_back(i);
  for (const auto& [group, at] : places) {
    std::vector<StartedCall*> sorted;
    for (const size_t i : at) sorted.push_back(ended[i]);
    std::sort(sorted.begin(), sorted.end(), [](auto* a, auto* b) { return a->sequence < b->sequence; });
    for (size_t k = 0; k < at.size(); ++k) ended[at[k]] = sorted[k];
  }
  std::vector<nb::object> kept;  // another thread may let go of one while Python runs
  for (const StartedCall* one : ended) kept.push_back(one->kept);
  for (StartedCall* const one : ended) {
    if (one->state == StartedCall::State::active) {
      try {
        if (one->call->take_ended())
          settle(*one);
        else
          adopt(*one);
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("a work that has failed");
      } catch (const std::exception&) {
        // It is the work's error.
      }
      if (one->state == StartedCall::State::adopted || one->state == StartedCall::State::active) continue;
    }
    if (one->state == StartedCall::State::changing)
      one->is_announced_early = true;
    else
      call_observers(*one);
  }
}

// While it lives, the end of works that Python has adopted makes a thread look that waits in the engine.
class AdoptedEnds {
 public:
  explicit AdoptedEnds(const StartedCall& in) : group_(in.group), engine_(in.native.completions.engine()) {}
  ~AdoptedEnds() {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    for (const nb::object& work : works_) {
      try {
        work.attr("_off_end")(notify_);
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("a wait for several works");
      }
    }
    PyErr_Restore(type, value, trace);
  }
  AdoptedEnds(const AdoptedEnds&) = delete;
  AdoptedEnds& operator=(const AdoptedEnds&) = delete;

  void add(nb::handle work) {
    if (!notify_.is_valid())
      // It may be called when this is gone.
      notify_ = nb::cpp_function([has_ended = has_ended_, group = group_, &engine = engine_] {
        has_ended->store(true, std::memory_order_relaxed);  // relaxed: the lock below orders it
        const Hold held = engine.hold();
        engine.wake_waiters();
      });
    works_.push_back(nb::borrow(work));
    work.attr("_on_end")(notify_);
  }
  size_t size() const { return works_.size(); }
  bool has_one() const { return has_ended_->load(std::memory_order_relaxed); }

 private:
  nb::object group_;  // keeps the engine
  Engine& engine_;
  std::shared_ptr<std::atomic<bool>> has_ended_ = std::make_shared<std::atomic<bool>>(false);
  nb::object notify_;
  std::vector<nb::object> works_;
};

bool has_task_ended(PyObject* work) {
  static PyObject* const word = interned("_has_ended");
  const nb::object has_ended = nb::steal(PyObject_CallMethodNoArgs(work, word));
  if (!has_ended.is_valid()) throw nb::python_error();
  return has_ended.ptr() == Py_True;
}

// Wait until some of the works have ended: their places. Empty if the time is over first; None if Python has to wait,
// because none of them, or not all, are the engine's, or it takes so long that Python must see the wait.
// `is_one`: the place of the first is enough.
nb::object wait_works(nb::tuple works, double seconds, bool is_one) {
  const std::int64_t begun = now_ns();
  const std::int64_t limit = seconds < 0 ? never : begun + static_cast<std::int64_t>(seconds * 1e9);
  std::vector<StartedCall*> active;
  std::vector<PyObject*> adopted;
  std::optional<AdoptedEnds> adopted_ends;
  for (bool is_first = true;; is_first = false) {
    nb::list ended;
    active.clear();
    adopted.clear();
    for (size_t i = 0; i < works.size(); ++i) {
      PyObject* const work = PyTuple_GET_ITEM(works.ptr(), static_cast<Py_ssize_t>(i));
      if (!PyObject_TypeCheck(work, base_type)) throw nb::type_error("allowed: works");
      StartedCall* const one = as_work(work).started;
      if (one == nullptr) return nb::none();
      check_process(*one);
      if (one->state == StartedCall::State::active && one->call->take_ended()) settle(*one);
      wait_until_settled(*one);
      if (one->state == StartedCall::State::active && one->call->has_failed()) adopt(*one);
      const bool is_adopted = one->state == StartedCall::State::adopted;
      if (is_adopted ? has_task_ended(work) : one->state == StartedCall::State::done) {
        see(*one);
        ended.append(i);
        if (is_one) return std::move(ended);
      } else if (is_adopted) {
        adopted.push_back(work);
      } else if (!active.empty() && &one->native.completions != &active[0]->native.completions) {
        return nb::none();
      } else {
        active.push_back(one);
      }
    }
    const std::int64_t now = now_ns();
    if (ended.size() == 0) check_may_block();
    if (ended.size() != 0 || (!is_first && now >= limit)) return std::move(ended);
    if (active.empty() || now >= begun + active[0]->native.message_stall_ns) return nb::none();
    if (!adopted_ends.has_value() || adopted_ends->size() != adopted.size()) {
      adopted_ends.emplace(*active[0]);
      for (PyObject* const work : adopted) adopted_ends->add(work);
    }
    const auto is_one_over = [&active, &adopted_ends] {
      return adopted_ends->has_one() ||
             std::any_of(active.begin(), active.end(), [](const StartedCall* one) { return one->call->is_over(); });
    };
    Engine& engine = active[0]->native.completions.engine();
    std::deque<Pinned> pinned;
    for (StartedCall* const one : active) pinned.emplace_back(*one);
    if (is_first) {
      const Hold held = engine.hold();
      engine.poll_briefly(is_one_over);
    } else {
      const GilReleased released;
      Hold held = engine.hold();
      engine.wait(held, is_one_over, std::min(limit, now + slice_ns));
    }
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

PyObject* adoption_of(PyObject* self, void*) {
  const StartedCall* const started = as_work(self).started;
  if (started == nullptr) Py_RETURN_NONE;
  return Py_NewRef(started->adoption.ptr());
}

// Whether it has ended, without a look at the links.
PyObject* is_done_of(PyObject* self, void*) {
  const StartedCall* const started = as_work(self).started;
  return PyBool_FromLong(started != nullptr && started->state == StartedCall::State::done);
}

PyObject* name_of(PyObject* self, void*) {
  const StartedCall* const started = as_work(self).started;
  if (started == nullptr) Py_RETURN_NONE;
  return Py_NewRef(started->spec.word);
}

// The code object and instruction that started it; None and -1 if that is not known.
PyObject* call_site_of(PyObject* self, void*) {
  const StartedCall* const started = as_work(self).started;
  if (started == nullptr || !started->code.is_valid()) return Py_BuildValue("(Oi)", Py_None, -1);
  return Py_BuildValue("(Oi)", started->code.ptr(), started->lasti);
}

// A work that was dropped goes on: it lives until its end is announced.
void finalize_work(PyObject* self) {
  StartedCall* const started = as_work(self).started;
  if (started == nullptr || started->native.completions.engine().is_forked()) return;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  try {
    if (!started->is_observed) started->native.note_dropped(started->spec.word, started->code.ptr(), started->lasti);
    if (started->state == StartedCall::State::active && !started->native.completions.engine().is_closed()) {
      // The pump makes the group of a split, and leaves it: other members may use it.
      if (started->spec.verb == Verb::split)
        observe(*started);
      else if (!started->call->poll(0)) {
        observe(*started);
        started->adoption.attr("warn_dropped")(nb::handle(started->spec.word));
      }
    }
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("a work that was dropped");
  }
  PyErr_Restore(type, value, trace);
}

void drop_work(PyObject* self) {
  if (PyObject_CallFinalizerFromDealloc(self) < 0) return;
  PyTypeObject* const type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (StartedCall* const started = as_work(self).started; started != nullptr) leave_list(*started);
  release(as_work(self).started);
  type->tp_free(self);
  Py_DECREF(type);
}

int traverse_work(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (const StartedCall* const started = as_work(self).started; started != nullptr) {
    Py_VISIT(started->adoption.ptr());
    Py_VISIT(started->result.ptr());
    Py_VISIT(started->error.ptr());
  }
  return 0;
}

int clear_work(PyObject* self) {
  if (StartedCall* const started = as_work(self).started;
      started != nullptr && started->state == StartedCall::State::done) {
    started->result.reset();
    started->error.reset();
  }
  return 0;
}

PyMethodDef work_methods[] = {
    {"wait", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(wait_method)), METH_FASTCALL | METH_KEYWORDS,
     "wait($self, timeout=None)\n--\n\n"
     "Wait until the operation ends, and return its result.\n\n"
     "Raises:\n"
     "    DeadlineExceeded: `timeout` seconds passed; the operation goes on, and may be waited for again.\n"
     "    UnisonoError: the operation failed.\n"},
    {"done", done_method, METH_NOARGS,
     "done($self)\n--\n\nMake progress, and return whether it has ended, successfully or not."},
    {"_adopt", adopt_method, METH_O, nullptr},
    {"_observe", observe_method, METH_O, nullptr},
    {"_forget", forget_method, METH_O, nullptr},
    {},
};
PyGetSetDef work_attributes[] = {{"_verb", name_of, nullptr, nullptr, nullptr},
                                 {"_adoption", adoption_of, nullptr, nullptr, nullptr},
                                 {"_is_concluded", is_done_of, nullptr, nullptr, nullptr},
                                 {"_call_site", call_site_of, nullptr, nullptr, nullptr},
                                 {}};
PyType_Slot work_slots[] = {
    {Py_tp_methods, work_methods},
    {Py_tp_getset, work_attributes},
    {Py_tp_finalize, reinterpret_cast<void*>(finalize_work)},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop_work)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_work)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_work)},
    {0, nullptr},
};
PyType_Spec work_spec = {"unisono._native.WorkBase", sizeof(WorkObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, work_slots};

}  // namespace

PyObject* start_call(nb::handle group, NativeGroup& native, const VerbSpec& spec, nb::handle adoption,
                     const Given& given) {
  auto started = std::make_unique<StartedCall>(nb::borrow(group), native, spec, nb::borrow(adoption));
  Call& call = *started->call;
  call.prepare(given, true);
  nb::object work = nb::steal(work_type->tp_alloc(work_type, 0));
  if (!work.is_valid()) throw nb::python_error();
  call.keep();
  started->code = nb::borrow(call.code());
  started->lasti = call.instruction();
  call.catch_up();
  const bool is_taken = call.begin_and_poll(false);
  StartedCall& one = *started;
  one.work = reinterpret_cast<WorkObject*>(work.ptr());
  one.sequence = call.sequence();
  one.work->started = started.release();
  native.started.push_back(one);
  if (is_taken) {
    settle(one);
  } else {
    one.attention_at = call.pump_at();
    const Hold held = native.completions.engine().hold();
    native.completions.wake_pump_at(one.attention_at);
  }
  return work.release().ptr();
}

nb::list NativeGroup::works_to_adopt(bool only_overdue, bool all_messages) {
  nb::list works;
  std::int64_t next = never;
  const std::int64_t now = only_overdue ? now_ns() : never;
  for (StartedLink* link = started.front(); link != nullptr; link = StartedList::next(*link)) {
    auto* const one = static_cast<StartedCall*>(link);
    if (one->state != StartedCall::State::active) continue;
    if (!only_overdue && !all_messages && !one->spec.is_collective() && one->call->is_open()) continue;
    if (one->waiters != 0)
      // Its thread lets Python adopt it, unless a signal handler raises there just now.
      next = std::min(next, std::max(one->attention_at, now_ns() + slice_ns));
    else if (one->attention_at <= now)
      works.append(nb::borrow(reinterpret_cast<PyObject*>(one->work)));
    else
      next = std::min(next, one->attention_at);
  }
  if (next != never) {
    const Hold held = completions.engine().hold();
    completions.wake_pump_at(next);
  }
  return works;
}

nb::list NativeGroup::messages_under_way() const {
  std::vector<std::tuple<bool, std::int32_t, std::int64_t>> found;
  for (const StartedLink* link = started.front(); link != nullptr; link = StartedList::next(*link))
    if (const auto* const one = static_cast<const StartedCall*>(link); one->state == StartedCall::State::active) {
      const auto messages = one->call->messages_under_way();
      found.insert(found.end(), messages.begin(), messages.end());
    }
  nb::list messages;
  for (const auto& [is_send, peer, tag] : found) messages.append(nb::make_tuple(is_send, peer, tag));
  return messages;
}

nb::list NativeGroup::unwaited() const {
  // Making a tuple may run the garbage collector, and that may drop works: first they are read, then dispatched.
  std::vector<std::tuple<nb::object, nb::object, int, size_t>> found;
  for (const StartedLink* link = started.front(); link != nullptr; link = StartedList::next(*link))
    if (const auto* const one = static_cast<const StartedCall*>(link); !one->is_observed)
      found.emplace_back(nb::borrow(one->spec.word), one->code, one->lasti, 1);
  for (const auto& [site, times] : dropped_) {
    const auto& [word, code, lasti] = site;
    found.emplace_back(nb::borrow(word), nb::borrow(code), lasti, times);
  }
  nb::list works;
  for (const auto& [word, code, lasti, times] : found)
    works.append(nb::make_tuple(word, code.is_valid() ? code : nb::none(), lasti, times));
  return works;
}

void bind_work(nb::module_& m) {
  PyObject* const base = PyType_FromSpec(&work_spec);
  if (base == nullptr) throw nb::python_error();
  base_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(base));
  m.attr("WorkBase") = nb::steal(base);
  m.def("are_works", [](nb::tuple objects) {
    return std::all_of(objects.begin(), objects.end(),
                       [](nb::handle one) { return PyObject_TypeCheck(one.ptr(), work_type) != 0; });
  });
  m.def("wait_works", &wait_works, nb::arg("works"), nb::arg("timeout"), nb::arg("is_one"));
  m.def("conclude_announced", &conclude_announced, nb::arg("engine"));
  m.def("set_work_type", [](nb::object type) {
    if (!PyType_Check(type.ptr())) throw nb::type_error("allowed: a type");
    work_type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
  });
}

}  // namespace unisono
