#include "python/work.hpp"

#include <algorithm>
#include <map>
#include <memory>

#include "engine/engine.hpp"
#include "python/blocking.hpp"
#include "python/unwinding.hpp"

namespace unisono {

using namespace engine;

CompletionQueue& completions_of(nb::handle engine);

PyTypeObject* work_type = nullptr;
PyTypeObject* work_base_type = nullptr;

namespace {

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
  started->check_process();
  started->see();
  if (started->state != StartedCall::State::done) check_may_block();
  const bool is_over = started->state == StartedCall::State::adopted || started->state == StartedCall::State::done;
  const std::int64_t limit = is_over ? never : limit_of(*started, timeout);
  nb::object rest = nb::borrow(timeout);
  for (;; started->wait_until_settled()) {
    if (started->state == StartedCall::State::changing) continue;
    if (started->state != StartedCall::State::active) break;
    const Pinned pinned(*started);
    ++started->waiters;
    const Call::Waited waited = started->call->wait(limit);
    --started->waiters;
    switch (waited) {
      case Call::Waited::taken:
        started->settle();
        started->call->dispatch_completions();
        break;
      case Call::Waited::interrupted: return nullptr;
      case Call::Waited::attention:
      case Call::Waited::limit:
        // Another thread may have taken it while a signal handler ran here.
        if (started->state == StartedCall::State::active) started->adopt();
        break;
      case Call::Waited::elsewhere: break;
    }
  }
  if (started->state == StartedCall::State::adopted) {
    if (limit != never) rest = nb::float_(std::max(0.0, static_cast<double>(limit - now_ns()) / 1e9));
    nb::object result = nb::steal(wait_by_python(self, rest.ptr()));
    if (!result.is_valid()) return nullptr;
    if (started->state == StartedCall::State::adopted) started->conclude(std::move(result));
  }
  started->wait_until_settled();
  return started->outcome();
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
    started->check_process();
    if (started->is_changing_here()) Py_RETURN_FALSE;
    if (started->state == StartedCall::State::active) {
      const Pinned pinned(*started);
      const bool is_taken = started->call->poll(started->idle_polls++);
      if (is_taken && started->state == StartedCall::State::active)
        started->settle();
      else if (started->state == StartedCall::State::active && started->call->has_failed())
        started->adopt();
    }
    if (started->state == StartedCall::State::active) {
      if (PyErr_CheckSignals() != 0) return nullptr;
      Py_RETURN_FALSE;
    }
    started->wait_until_settled();
    if (started->state == StartedCall::State::active) Py_RETURN_FALSE;  // its second stage
    if (started->state == StartedCall::State::adopted) return done_method(self, nullptr);
    started->see();
    Py_RETURN_TRUE;
  });
}

// Let Python carry it on; True if a task does or did.
PyObject* adopt_method(PyObject* self, PyObject* is_seen) {
  StartedCall* const started = as_work(self).started;
  return translate_errors([&]() -> PyObject* {
    if (started != nullptr) {
      started->check_process();
      started->is_observed = started->is_observed || is_seen == Py_True;
      const Pinned pinned(*started);
      // Unless the user asked, a thread that waits for this work in the engine adopts it; it was interrupted for that.
      if (started->state == StartedCall::State::active && started->waiters != 0 && is_seen != Py_True) Py_RETURN_TRUE;
      do {
        if (started->state == StartedCall::State::active) started->adopt();
        if (is_seen == Py_True) started->wait_until_settled();
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
    started->check_process();
    started->see();
    const bool is_closed = started->native.completions.engine().is_closed();
    if (started->state == StartedCall::State::active && is_closed) started->adopt();
    if (!started->kept.is_valid()) {
      started->wait_until_settled();
      if (started->state == StartedCall::State::adopted || is_closed) Py_RETURN_FALSE;
    }
    if (!started->observers.is_valid()) started->observers = nb::list();
    if (PyList_Append(started->observers.ptr(), observer) != 0) return nullptr;
    started->observe();
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
          one->settle();
        else
          one->adopt();
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
      one->call_observers();
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
      if (started->spec.has(Fact::groups))
        started->observe();
      else if (!started->call->poll(0)) {
        started->observe();
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
  if (StartedCall* const started = as_work(self).started; started != nullptr) {
    started->leave_list();
    started->release();
  }
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
    one.settle();
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
      next = std::min(next, std::max(one->attention_at, now_ns() + signal_check_ns));
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
  work_base_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(base));
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
