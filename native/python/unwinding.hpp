// Calls of Python from C++ in which a thread may stay for long, such as a wait.
//
// At interpreter shutdown CPython ends a thread that runs Python by unwinding its stack. In the frames of C++ further
// out, that would drop Python objects without the GIL: so such a thread sleeps for ever instead, as in GilReleased.

#pragma once

#include <Python.h>
#include <unistd.h>

namespace unisono {

// As PyObject_VectorcallMethod.
inline PyObject* call_method(PyObject* name, PyObject* const* args, size_t count) {
  try {
    return PyObject_VectorcallMethod(name, args, count, nullptr);
  } catch (...) {  // nothing else passes through the frames of the interpreter
    for (;;) pause();
  }
}

}  // namespace unisono
