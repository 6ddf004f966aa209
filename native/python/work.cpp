#include "python/work.hpp"

#include <algorithm>
#include <memory>
#include <thread>

#include "engine/engine.hpp"

namespace unisono {

using namespace engine;

struct WorkObject {
  PyObject_HEAD StartedCall* started;
};

namespace {

// unisono.core.work.Work, which derives from WorkBase: the type of the works that are made here.
PyTypeObject* work_type = nullptr;

WorkObject& as_work(PyObject* self) { return *reinterpret_cast<WorkObject*>(self); }

void leave_list(StartedCall& started) {
  if (started.hook.is_in) started.native.started.remove(started);
}

// The group need not know of it any more once the engine is done with it and the user has looked at it.
void leave_if_seen(StartedCall& started) {
  if (started.is_observed && started.state != StartedCall::State::active) leave_list(started);
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

// It has ended well in the engine: make its result, or keep the error that this raises.
void conclude(StartedCall& started, nb::object adopted_result = {}) {
  try {
    started.result = nb::steal(adopted_result.is_valid() ? started.call->finish_adopted(std::move(adopted_result))
                                                         : started.call->finish());
    if (!started.result.is_valid()) throw nb::python_error();
  } catch (nb::python_error& error) {
    started.error = nb::borrow(error.value());
  }
  started.state = StartedCall::State::done;
  leave_if_seen(started);
  started.call.reset();  // and with it the user's memory
}

// Let Python carry it on. Meanwhile other threads run Python, and may come here for the same call: they find it active
// until it is adopted.
void adopt(StartedCall& started) {
  if (started.is_being_adopted) return;
  const nb::object keep = nb::borrow(reinterpret_cast<PyObject*>(started.work));
  started.is_being_adopted = true;
  try {
    const nb::object adopted = started.call->adopt("adopt", keeper_of(started));
    keep.attr("_task") = adopted.attr("_task");
    keep.attr("_runtime") = adopted.attr("_runtime");
  } catch (...) {
    started.is_being_adopted = false;
    throw;
  }
  started.state = StartedCall::State::adopted;
  started.is_being_adopted = false;
  leave_if_seen(started);
}

PyObject* outcome_of(const StartedCall& started) {
  if (!started.error.is_valid()) return Py_NewRef(started.result.ptr());
  // Each thread that asks raises its own copy, so that tracebacks do not grow into each other.
  const nb::object error = started.helper.attr("copy_of")(started.error);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
  return nullptr;
}

PyObject* wait_by_python(PyObject* self, PyObject* timeout) {
  static PyObject* const word = interned("_wait");
  PyObject* const args[] = {self, timeout};
  return PyObject_VectorcallMethod(word, args, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

PyObject* wait_for(PyObject* self, PyObject* timeout) {
  StartedCall* const started = as_work(self).started;
  if (started == nullptr) return wait_by_python(self, timeout);
  started->is_observed = true;
  leave_if_seen(*started);
  std::int64_t limit = never;
  nb::object rest = nb::borrow(timeout);
  if (timeout != Py_None && started->state == StartedCall::State::active) {
    const double seconds = PyFloat_CheckExact(timeout)  ? PyFloat_AS_DOUBLE(timeout)
                           : PyLong_CheckExact(timeout) ? PyLong_AsDouble(timeout)
                                                        : -1;
    PyErr_Clear();
    if (!(seconds >= 0 && seconds < 1e9)) {
      if (seconds < 1e9) return wait_by_python(self, timeout);  // refuses it
    } else {
      limit = now_ns() + static_cast<std::int64_t>(seconds * 1e9);
    }
  }
  while (started->state == StartedCall::State::active) {
    ++started->waiters;
    const Call::Waited waited = started->call->wait(limit);
    --started->waiters;
    switch (waited) {
      case Call::Waited::taken: conclude(*started); break;
      case Call::Waited::attention:
      case Call::Waited::limit: adopt(*started); break;
      case Call::Waited::interrupted: return nullptr;
      case Call::Waited::elsewhere: break;
    }
  }
  if (started->state == StartedCall::State::adopted) {
    if (limit != never) rest = nb::float_(std::max(0.0, static_cast<double>(limit - now_ns()) / 1e9));
    nb::object result = nb::steal(wait_by_python(self, rest.ptr()));
    if (!result.is_valid()) return nullptr;
    if (started->state == StartedCall::State::adopted) conclude(*started, std::move(result));
  }
  return outcome_of(*started);
}

PyObject* wait_method(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  static PyObject* const timeout_word = interned("timeout");
  PyObject* timeout = count == 1 ? args[0] : Py_None;
  const Py_ssize_t named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
  if (count > 1 || named > 1 || (named == 1 && (count == 1 || PyTuple_GET_ITEM(names, 0) != timeout_word))) {
    PyErr_SetString(PyExc_TypeError, "wait(timeout=None) takes one argument");
    return nullptr;
  }
  if (named == 1) timeout = args[0];
  try {
    return wait_for(self, timeout);
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* done_method(PyObject* self, PyObject*) {
  StartedCall* const started = as_work(self).started;
  if (started == nullptr || started->state == StartedCall::State::adopted) {
    static PyObject* const word = interned("_done");
    return PyObject_CallMethodNoArgs(self, word);
  }
  try {
    if (started->state == StartedCall::State::active) {
      ++started->waiters;
      const bool is_taken = started->call->poll(started->idle_polls++);
      --started->waiters;
      if (is_taken && started->state == StartedCall::State::active)
        conclude(*started);
      else if (started->state == StartedCall::State::active && started->call->has_failed())
        adopt(*started);
    }
    if (started->state == StartedCall::State::active) {
      if (PyErr_CheckSignals() != 0) return nullptr;
      Py_RETURN_FALSE;
    }
    if (started->state == StartedCall::State::adopted) return done_method(self, nullptr);
    started->is_observed = true;
    leave_if_seen(*started);
    Py_RETURN_TRUE;
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Let Python carry it on; True if it has not ended.
PyObject* adopt_method(PyObject* self, PyObject* is_seen) {
  StartedCall* const started = as_work(self).started;
  try {
    if (started != nullptr) {
      started->is_observed = started->is_observed || is_seen == Py_True;
      // A thread that waits for it in the engine does it: it has just been told to.
      const bool is_left_to_waiter = started->waiters != 0 && is_seen != Py_True;
      if (started->state == StartedCall::State::active && is_left_to_waiter) Py_RETURN_TRUE;
      if (started->state == StartedCall::State::active) adopt(*started);
      while (started->state == StartedCall::State::active && is_seen == Py_True) {
        // Another thread is at it.
        if (PyErr_CheckSignals() != 0) return nullptr;
        const GilReleased released;
        std::this_thread::yield();
      }
      leave_if_seen(*started);
      if (started->state == StartedCall::State::done) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
  } catch (nb::python_error& error) {
    error.restore();
  }
  return nullptr;
}

PyObject* name_of(PyObject* self, void*) {
  const StartedCall* const started = as_work(self).started;
  if (started == nullptr) Py_RETURN_NONE;
  return Py_NewRef(started->spec.word);
}

// A work that was dropped goes on: Python keeps its memory until it has ended.
void finalize_work(PyObject* self) {
  StartedCall* const started = as_work(self).started;
  if (started == nullptr) return;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  try {
    leave_list(*started);
    if (!started->is_observed)
      started->helper.attr("note_unwaited")(nb::handle(started->spec.word), started->code, started->lasti);
    if (started->state == StartedCall::State::active && !started->call->poll(0)) {
      const nb::object dropped = started->call->adopt("adopt_dropped", keeper_of(*started));
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
  release(as_work(self).started);
  type->tp_free(self);
  Py_DECREF(type);
}

int traverse_work(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (const StartedCall* const started = as_work(self).started; started != nullptr) {
    Py_VISIT(started->helper.ptr());
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
    {},
};
PyGetSetDef work_attributes[] = {{"_verb", name_of, nullptr, nullptr, nullptr}, {}};
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

PyObject* start_call(nb::handle group, NativeGroup& native, const VerbSpec& spec, nb::handle helper,
                     const Given& given) {
  auto started = std::make_unique<StartedCall>(nb::borrow(group), native, spec, nb::borrow(helper));
  Call& call = *started->call;
  call.prepare(given, true);
  nb::object work = nb::steal(work_type->tp_alloc(work_type, 0));
  if (!work.is_valid()) throw nb::python_error();
  call.keep();
  started->code = nb::borrow(call.code());
  started->lasti = call.instruction();
  if (!native.call_log.fast_path_open) throw LeftToReference();
  const bool is_taken = call.begin_and_poll(false);
  StartedCall& one = *started;
  one.work = reinterpret_cast<WorkObject*>(work.ptr());
  one.work->started = started.release();
  native.started.push_back(one);
  if (is_taken) {
    conclude(one);
  } else {
    one.attention_at = call.attention_at();
    const Hold held = native.completions.engine().hold();
    native.completions.wake_pump_at(one.attention_at);
  }
  return work.release().ptr();
}

nb::list NativeGroup::works_to_adopt(bool only_overdue) {
  nb::list works;
  std::int64_t next = never;
  const std::int64_t now = only_overdue ? now_ns() : never;
  for (StartedLink* link = started.front(); link != nullptr; link = StartedList::next(*link)) {
    auto* const one = static_cast<StartedCall*>(link);
    if (one->state != StartedCall::State::active || one->is_being_adopted || one->waiters != 0) continue;
    if (one->attention_at <= now)
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

nb::list NativeGroup::unwaited() const {
  nb::list works;
  for (const StartedLink* link = started.front(); link != nullptr; link = StartedList::next(*link))
    if (const auto* const one = static_cast<const StartedCall*>(link); !one->is_observed)
      works.append(nb::make_tuple(nb::borrow(one->spec.word), one->code, one->lasti));
  return works;
}

void bind_work(nb::module_& m) {
  PyObject* const base = PyType_FromSpec(&work_spec);
  if (base == nullptr) throw nb::python_error();
  m.attr("WorkBase") = nb::steal(base);
  m.def("set_work_type", [](nb::object type) {
    if (!PyType_Check(type.ptr())) throw nb::type_error("allowed: a type");
    work_type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
  });
}

}  // namespace unisono
