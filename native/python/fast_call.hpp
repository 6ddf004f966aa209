// A hot call: a verb of a communicator as a Python object, as short a way from the interpreter as there is.
//
// Knows NumPy's arrays as they lie in memory, and the verb in Python that stands behind. Does not know what is done
// with the arguments: whoever derives from it does.

#pragma once

#include <memory>
#include <vector>

#include "python/bind.hpp"
#include "wire/frame.hpp"

namespace unisono {

namespace nb = nanobind;

// NumPy's array object. Its layout is part of NumPy's binary interface, old and new; check_layout compares.
struct ArrayObject {
  PyObject_HEAD engine::byte* data;
  int nd;
  Py_ssize_t* dimensions;
  Py_ssize_t* strides;
  PyObject* base;
  PyObject* descr;
  int flags;
};
inline constexpr int is_contiguous = 0x1, is_aligned = 0x100, is_writeable = 0x400;

inline const ArrayObject& as_array(PyObject* object) { return *reinterpret_cast<const ArrayObject*>(object); }
inline bool is_a(PyObject* object, nb::handle type) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.ptr();
}

// Throws std::runtime_error if arrays that `empty` makes lie otherwise in memory than ArrayObject says.
void check_layout(nb::handle array_type, nb::handle empty);

// A word that the interpreter has once: names of arguments can be compared by address.
PyObject* interned(const char* word);

class FastCall {
 public:
  // `slow` is the verb in Python; `helper` is called on a bad day.
  FastCall(nb::object slow, nb::object helper) : slow(std::move(slow)), helper(std::move(helper)) {}
  virtual ~FastCall() = default;
  FastCall(const FastCall&) = delete;
  FastCall& operator=(const FastCall&) = delete;

  // A vectorcall.
  virtual PyObject* call(PyObject* const* args, size_t nargsf, PyObject* names) = 0;

  PyObject* call_slow(PyObject* const* args, size_t nargsf, PyObject* names) const {
    return PyObject_Vectorcall(slow.ptr(), args, nargsf, names);
  }

  nb::object slow, helper;
};

nb::object make_callable(std::unique_ptr<FastCall> call);

}  // namespace unisono
