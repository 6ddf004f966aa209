#include "python/fast_call.hpp"

#include <structmember.h>

#include <stdexcept>

namespace unisono {

void check_layout(nb::handle array_type, nb::handle empty) {
  const nb::object made = empty(nb::make_tuple(2, 3), "float32");
  const ArrayObject& array = as_array(made.ptr());
  const nb::object data = made.attr("__array_interface__")["data"][0];
  const bool is_known = is_a(made.ptr(), array_type) && array.nd == 2 && array.dimensions[0] == 2 &&
                        array.dimensions[1] == 3 && array.descr == nb::object(made.attr("dtype")).ptr() &&
                        reinterpret_cast<uint64_t>(array.data) == nb::cast<uint64_t>(data) &&
                        (array.flags & (is_contiguous | is_writeable)) == (is_contiguous | is_writeable);
  if (!is_known) throw std::runtime_error("NumPy's arrays lie otherwise in memory than this build knows");
}

PyObject* interned(const char* word) {
  PyObject* made = PyUnicode_InternFromString(word);
  if (made == nullptr) throw nb::python_error();
  return made;
}

namespace {

struct CallObject {
  PyObject_HEAD vectorcallfunc vectorcall;
  FastCall* call;
};

FastCall& call_of(PyObject* self) { return *reinterpret_cast<CallObject*>(self)->call; }

PyObject* call_verb(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  try {
    return call_of(self).call(args, nargsf, names);
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// Its name, signature and documentation are those of the verb in Python.
PyObject* verb_attribute(PyObject* self, PyObject* name) {
  if (PyUnicode_CompareWithASCIIString(name, "__class__") == 0) return PyObject_GenericGetAttr(self, name);
  return PyObject_GetAttr(call_of(self).slow.ptr(), name);
}

PyObject* verb_repr(PyObject* self) { return PyObject_Repr(call_of(self).slow.ptr()); }

int traverse_verb(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const FastCall* const call = reinterpret_cast<CallObject*>(self)->call;
  if (call != nullptr) {
    Py_VISIT(call->slow.ptr());
    Py_VISIT(call->helper.ptr());
  }
  return 0;
}

int clear_verb(PyObject* self) {
  FastCall& call = call_of(self);
  // Who calls it in the midst of a collection finds something that can be called.
  call.slow = nb::borrow(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
  call.helper = nb::none();
  return 0;
}

void drop_verb(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* const type = Py_TYPE(self);
  delete reinterpret_cast<CallObject*>(self)->call;
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

PyMemberDef verb_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(CallObject, vectorcall), READONLY, nullptr},
    {},
};

PyType_Slot verb_slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_getattro, reinterpret_cast<void*>(verb_attribute)},
    {Py_tp_repr, reinterpret_cast<void*>(verb_repr)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_verb)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_verb)},
    {Py_tp_dealloc, reinterpret_cast<void*>(drop_verb)},
    {Py_tp_members, verb_members},
    {0, nullptr},
};

PyType_Spec verb_spec = {
    "unisono._native.Verb", sizeof(CallObject), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    verb_slots};

}  // namespace

nb::object make_callable(std::unique_ptr<FastCall> call) {
  static PyObject* const type = PyType_FromSpec(&verb_spec);
  if (type == nullptr) throw nb::python_error();
  CallObject* const made = PyObject_GC_New(CallObject, reinterpret_cast<PyTypeObject*>(type));
  if (made == nullptr) throw nb::python_error();
  made->vectorcall = call_verb;
  made->call = call.release();
  PyObject_GC_Track(made);
  return nb::steal(reinterpret_cast<PyObject*>(made));
}

}  // namespace unisono
