// A work: a started call as the user holds it.
//
// `_native.WorkBase` is the base of unisono.Work. A work without a call of the engine is carried on by Python alone; so
// is one that Python has adopted.

#pragma once

#include "python/started_call.hpp"

namespace unisono {

struct WorkObject {
  PyObject_HEAD StartedCall* started;
};

inline WorkObject& as_work(PyObject* self) { return *reinterpret_cast<WorkObject*>(self); }

// unisono.core.work.Work, which derives from WorkBase: the type of the works that are made here.
extern PyTypeObject* work_type;
extern PyTypeObject* work_base_type;

// Start a call; returns a new Work. Throws LeftToReference or nb::python_error before anything was sent.
PyObject* start_call(nb::handle group, NativeGroup& native, const VerbSpec& spec, nb::handle adoption,
                     const Given& given);

// Wait until some of the works have ended: their places. Empty if the time is over first; None if Python has to wait,
// because none of them, or not all, are the engine's, or it takes so long that Python must see the wait.
// `is_one`: the place of the first is enough.
nb::object wait_works(nb::tuple works, double seconds, bool is_one);

void bind_work(nb::module_& m);

}  // namespace unisono
