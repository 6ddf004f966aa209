#include "python/fast_argument.hpp"

#include <cstring>
#include <stdexcept>

namespace unisono {
namespace {

// torch, if somebody has imported it; else nothing.
nb::object torch_attribute(const char* name) {
  PyObject* const modules = PyImport_GetModuleDict();
  PyObject* const torch = modules != nullptr ? PyDict_GetItemString(modules, "torch") : nullptr;
  PyObject* const found = torch != nullptr ? PyObject_GetAttrString(torch, name) : nullptr;
  if (found == nullptr) PyErr_Clear();
  return nb::steal(found);
}

// Asked for everything that is no array: the name first, which costs nothing. Subclasses are Python's.
bool is_tensor(PyObject* object) {
  static PyTypeObject* known = nullptr;  // kept for good, as torch is
  PyTypeObject* const type = Py_TYPE(object);
  if (type == known) return true;
  if (known != nullptr || std::strcmp(type->tp_name, "Tensor") != 0) return false;
  nb::object tensor = torch_attribute("Tensor");
  if (tensor.ptr() != reinterpret_cast<PyObject*>(type)) return false;
  known = reinterpret_cast<PyTypeObject*>(tensor.release().ptr());
  return true;
}

}  // namespace

Arguments::Arguments(nb::object array_type, nb::object empty)
    : array_type_(std::move(array_type)), empty_(std::move(empty)) {
  check_layout(array_type_, empty_);
  whole_ = nb::object(empty_(0, "int64").attr("dtype"));
  real_ = nb::object(empty_(0, "float64").attr("dtype"));
}

nb::object Arguments::make(const Py_ssize_t* shape, int nd, nb::handle descr) const {
  nb::object dims = nb::steal(PyTuple_New(nd));
  for (int i = 0; i < nd; ++i) PyTuple_SET_ITEM(dims.ptr(), i, PyLong_FromSsize_t(shape[i]));
  return empty_(dims, descr);
}

bool Arguments::see_other(PyObject* given, Argument& seen) const {
  if (PyFloat_CheckExact(given)) {
    seen.form = Form::real;
    seen.held = make(nullptr, 0, real_);
    const double number = PyFloat_AS_DOUBLE(given);
    std::memcpy(as_array(seen.held.ptr()).data, &number, sizeof number);
  } else if (PyLong_CheckExact(given)) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(given, &overflow);
    if (overflow != 0) return false;
    seen.form = Form::whole;
    seen.held = make(nullptr, 0, whole_);
    std::memcpy(as_array(seen.held.ptr()).data, &number, sizeof number);
  } else if (is_tensor(given)) {
    static PyObject* const numpy_word = interned("numpy");
    seen.form = Form::tensor;
    seen.held = nb::steal(PyObject_CallMethodNoArgs(given, numpy_word));
    if (!seen.held.is_valid()) {
      PyErr_Clear();
      return false;
    }
    if (!is_array(seen.held.ptr())) return false;
  } else {
    return false;
  }
  seen.array = seen.held.ptr();
  return true;
}

PyObject* Arguments::give(Form form, nb::object array) {
  if (form != Form::tensor) return array.release().ptr();
  const nb::object from_numpy = torch_attribute("from_numpy");
  if (!from_numpy.is_valid()) throw std::runtime_error("a tensor without torch");
  return PyObject_CallOneArg(from_numpy.ptr(), array.ptr());
}

PyObject* Arguments::number_of(const Argument& argument) {
  const void* const at = as_array(argument.array).data;
  if (argument.form == Form::real) {
    double number;
    std::memcpy(&number, at, sizeof number);
    return PyFloat_FromDouble(number);
  }
  long long number;
  std::memcpy(&number, at, sizeof number);
  return PyLong_FromLongLong(number);
}

}  // namespace unisono
