// An argument of a hot call: a NumPy array, a torch tensor on the CPU or a number, seen as a NumPy array.
//
// Knows these kinds and how a result of each is made. Does not know what is done with the memory. torch is never
// imported: who passes a tensor has it. What a kind cannot show (a gradient, another device, a type that NumPy lacks)
// is left to Python, and so is every other kind.

#pragma once

#include "python/fast_call.hpp"

namespace unisono {

enum class Form : uint8_t { array, tensor, whole, real };

struct Argument {
  PyObject* given = nullptr;
  PyObject* array = nullptr;  // shares the memory of what was given, or holds the number
  nb::object held;            // keeps that array, if it was made
  Form form = Form::array;

  bool is_number() const { return form == Form::whole || form == Form::real; }
};

class Arguments {
 public:
  // Throws std::runtime_error if NumPy's arrays are not what this build knows.
  Arguments(nb::object array_type, nb::object empty);

  bool is_array(PyObject* object) const { return is_a(object, array_type_); }
  // False if it is to be left to Python; no exception is set.
  bool see(PyObject* given, Argument& seen) const {
    seen.given = given;
    if (is_array(given)) [[likely]] {
      seen.array = given;
      return true;
    }
    return see_other(given, seen);
  }

  nb::object make(const Py_ssize_t* shape, int nd, nb::handle descr) const;
  // A new array as the kind in which the argument came.
  static PyObject* give(Form form, nb::object array);
  // The number that an argument holds now.
  static PyObject* number_of(const Argument& argument);

 private:
  bool see_other(PyObject* given, Argument& seen) const;

  nb::object array_type_, empty_, whole_, real_;
};

}  // namespace unisono
