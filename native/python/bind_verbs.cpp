// The verbs of a communicator as methods of a type, made from the table of verbs (unisono/comm/verb_table.py).
//
// They are methods as the interpreter makes them for its own types, so profilers see them and their signatures are
// true. A verb runs in the engine if the group has one and the arguments allow it; otherwise the reference path, in
// Python, makes the call.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <utility>

#include "engine/engine.hpp"
#include "python/blocking.hpp"
#include "python/library_call.hpp"
#include "python/user_files.hpp"
#include "python/work.hpp"

namespace unisono {
namespace {

using namespace engine;

constexpr size_t verbs_max = 48;
// They live as long as the type, which is never freed.
std::vector<VerbSpec> specs;
std::array<PyMethodDef, verbs_max + 1> methods{};

struct VerbsObject {
  PyObject_HEAD PyObject* group;  // what keeps `verb_group`
  VerbGroup* verb_group;          // nullptr: the reference path makes all calls
  NativeGroup* native;            // the same, if the engine runs its calls
  PyObject* adoption;
  PyObject* reference;
  bool is_started;
};

PyObject* call_reference(const VerbsObject& self, const VerbSpec& spec, PyObject* const* args, Py_ssize_t count,
                         PyObject* names) {
  const Py_ssize_t named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
  std::vector<PyObject*> all;
  all.reserve(static_cast<size_t>(count + named) + 1);
  all.push_back(self.reference);
  all.insert(all.end(), args, args + count + named);
  return PyObject_VectorcallMethod(spec.word, all.data(), static_cast<size_t>(count + 1), names);
}

PyObject* end_interrupted(Call& call) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  try {
    call.adopt("cancel");
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("a call that was interrupted");
  }
  PyErr_Restore(type, value, trace);
  return nullptr;
}

// The result of a call that was taken.
PyObject* result_of(Call& call) {
  nb::object result;
  try {
    result = nb::steal(call.finish());
  } catch (...) {
    call.leave_dispatch();
    throw;
  }
  if (result.is_valid())
    call.dispatch_completions();
  else
    call.leave_dispatch();
  return result.release().ptr();
}

PyObject* run_call(const VerbsObject& self, const VerbSpec& spec, const Given& given) {
  Call call(*self.native, spec, self.adoption);
  call.prepare(given, false);
  call.catch_up();
  bool is_taken = call.begin_and_poll(true);
  if (!is_taken && call.is_poll() && call.withdraw()) {
    call.leave_dispatch();
    Py_RETURN_NONE;
  }
  for (;; is_taken = false) {
    if (!is_taken) switch (call.wait(never)) {
        case Call::Waited::taken: break;
        case Call::Waited::interrupted: return end_interrupted(call);
        default: return call.finish_adopted(call.adopt("carry_on"));
      }
    switch (call.advance(true)) {
      case Call::Next::finish: return result_of(call);
      case Call::Next::leave_to_python: call.leave_dispatch(); return call.finish_adopted(call.adopt("carry_on"));
      case Call::Next::wait: break;
    }
  }
}

// A communicator that is used for the first time binds its verbs (`bind_object`). False: with a Python error set.
bool bind_now(PyObject* object) {
  static PyObject* const word = interned("_bind_verbs");
  if (PyObject_HasAttr(object, word) != 0) {
    const nb::object bound = nb::steal(PyObject_CallMethodNoArgs(object, word));
    if (!bound.is_valid()) return false;
  }
  if (reinterpret_cast<VerbsObject*>(object)->reference != nullptr) return true;
  PyErr_SetString(PyExc_RuntimeError, "this communicator was not made by unisono");
  return false;
}

PyObject* call_verb(size_t index, PyObject* object, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  const VerbsObject& self = *reinterpret_cast<VerbsObject*>(object);
  const VerbSpec& spec = specs[index];
  if (self.reference == nullptr && !bind_now(object)) return nullptr;
  try {
    if (!self.is_started) check_may_block();
    Given given;
    if (VerbGroup* const group = self.verb_group;
        group != nullptr && (spec.is_collective() ? group->call_log.fast_path_open : group->call_log.messages_open) &&
        !(self.native != nullptr && self.native->completions.engine().is_forked()) &&
        given.bind(spec, args, count, names)) {
      try {
        if (self.native == nullptr) return LibraryCall(*group, spec, self.adoption).run(given, self.is_started);
        return self.is_started ? start_call(self.group, *self.native, spec, self.adoption, given)
                               : run_call(self, spec, given);
      } catch (const LeftToReference&) {
        // Nothing was sent.
      }
    }
    return call_reference(self, spec, args, count, names);
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <size_t index>
PyObject* call_at(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  return call_verb(index, self, args, count, names);
}

using Function = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);
template <size_t... index>
constexpr std::array<Function, sizeof...(index)> functions(std::index_sequence<index...>) {
  return {call_at<index>...};
}
constexpr auto call_functions = functions(std::make_index_sequence<verbs_max>());

PyTypeObject* verbs_type = nullptr;

// Make the verbs of a new communicator, or of its `start`, work.
void bind_object(nb::handle object, nb::handle group, nb::handle adoption, nb::handle reference, bool is_started) {
  if (verbs_type == nullptr || !PyType_IsSubtype(Py_TYPE(object.ptr()), verbs_type))
    throw nb::type_error("allowed: an object of the type of verbs");
  VerbsObject& self = *reinterpret_cast<VerbsObject*>(object.ptr());
  self.verb_group = group.is_none() ? nullptr : &nb::cast<VerbGroup&>(group);
  self.native = nb::isinstance<NativeGroup>(group) ? &nb::cast<NativeGroup&>(group) : nullptr;
  Py_XSETREF(self.group, Py_NewRef(group.ptr()));
  Py_XSETREF(self.adoption, Py_NewRef(adoption.ptr()));
  Py_XSETREF(self.reference, Py_NewRef(reference.ptr()));
  self.is_started = is_started;
}

int traverse_verbs(PyObject* object, visitproc visit, void* arg) {
  const VerbsObject& self = *reinterpret_cast<VerbsObject*>(object);
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self.adoption);
  Py_VISIT(self.reference);
  return 0;
}

int clear_verbs(PyObject* object) {
  VerbsObject& self = *reinterpret_cast<VerbsObject*>(object);
  self.verb_group = nullptr;
  self.native = nullptr;
  Py_CLEAR(self.adoption);
  Py_CLEAR(self.reference);
  Py_CLEAR(self.group);
  return 0;
}

void drop_verbs(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  clear_verbs(object);
  type->tp_free(object);
  Py_DECREF(type);
}

Parameter parameter_named(const std::string& name) {
  static const std::pair<const char*, Parameter> known[] = {
      {"x", Parameter::x},           {"xs", Parameter::x},      {"data", Parameter::x},
      {"obj", Parameter::x},         {"parts", Parameter::x},   {"value", Parameter::x},
      {"values", Parameter::x},      {"out", Parameter::out},   {"buf", Parameter::out},
      {"op", Parameter::op},         {"root", Parameter::root}, {"dst", Parameter::dst},
      {"src", Parameter::src},       {"tag", Parameter::tag},   {"timeout", Parameter::timeout},
      {"color", Parameter::color},   {"key", Parameter::key},   {"algorithm", Parameter::algorithm},
      {"counts", Parameter::counts}, {"objects", Parameter::x}, {"fn", Parameter::fn},
  };
  for (const auto& [word, parameter] : known)
    if (name == word) return parameter;
  throw nb::value_error(("no verb of the engine takes " + name).c_str());
}

// (name, signature and documentation, facts, names of parameters, how many of them may be passed by position)
using Row = std::tuple<std::string, std::string, uint32_t, std::vector<std::string>, size_t>;

nb::object make_verbs_type(const std::vector<Row>& rows, const std::vector<std::string>& ops) {
  if (!specs.empty()) throw nb::value_error("the type of verbs is made once");
  if (rows.size() > verbs_max) throw nb::value_error("more verbs than there is room for");
  static std::vector<std::string> docs;
  docs.reserve(rows.size());
  specs.reserve(rows.size());
  op_names.set(ops);
  for (const auto& [name, doc, facts, parameters, positional] : rows) {
    VerbSpec spec;
    spec.name = name;
    spec.word = interned(name.c_str());
    const size_t index = specs.size();
    spec.number = static_cast<uint8_t>(index);
    spec.facts = facts;
    spec.positional = positional;
    for (const std::string& parameter : parameters)
      spec.parameters.push_back({interned(parameter.c_str()), parameter_named(parameter)});
    docs.push_back(doc);
    specs.push_back(std::move(spec));
    methods[index] = {specs[index].name.c_str(),
                      reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_functions[index])),
                      METH_FASTCALL | METH_KEYWORDS, docs[index].c_str()};
  }
  static PyType_Slot slots[] = {
      {Py_tp_methods, methods.data()},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse_verbs)},
      {Py_tp_clear, reinterpret_cast<void*>(clear_verbs)},
      {Py_tp_dealloc, reinterpret_cast<void*>(drop_verbs)},
      {0, nullptr},
  };
  static PyType_Spec spec = {"unisono._native.VerbsBase", sizeof(VerbsObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, slots};
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) throw nb::python_error();
  verbs_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
  return nb::steal(type);
}

}  // namespace

void bind_verbs(nb::module_& m) {
  bind_work(m);
  nb::class_<Arguments>(m, "Arguments")
      .def(nb::init<nb::object, nb::object, nb::object, nb::list, bool>(), nb::kw_only(), nb::arg("array_type"),
           nb::arg("empty"), nb::arg("view"), nb::arg("dtypes"), nb::arg("leaves_tensors"));
  nb::class_<DecisionTable>(m, "DecisionTable").def(nb::init<>());
  nb::class_<VerbGroup>(m, "VerbGroup")
      .def(nb::init<nb::object, nb::object, nb::object, uint64_t, std::int32_t, std::int32_t, std::optional<double>>(),
           nb::arg("call_log"), nb::arg("arguments"), nb::arg("decisions"), nb::kw_only(), nb::arg("fingerprint_seed"),
           nb::arg("rank"), nb::arg("size"), nb::arg("deadline_s").none())
      .def_ro("ended", &VerbGroup::ended)
      .def_ro("decided", &VerbGroup::decided)
      .def_ro("adopted", &VerbGroup::adopted);
  nb::class_<NativeGroup, VerbGroup>(m, "NativeGroup")
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, uint64_t, uint64_t, std::shared_ptr<RankMap>, bool,
                    size_t, double, double, std::optional<double>, nb::object, nb::object>(),
           nb::arg("engine"), nb::arg("call_log"), nb::arg("arguments"), nb::arg("decisions"), nb::kw_only(),
           nb::arg("context"), nb::arg("fingerprint_seed"), nb::arg("rank_map"), nb::arg("is_introduced"),
           nb::arg("window"), nb::arg("stall_s"), nb::arg("message_stall_s"), nb::arg("deadline_s").none(),
           nb::arg("status"), nb::arg("any_"))
      .def("unclaimed", &NativeGroup::unclaimed, nb::arg("sequence"))
      .def("has_unexpected", &NativeGroup::has_unexpected)
      .def("unconfirmed_ranks", &NativeGroup::unconfirmed_ranks)
      .def("is_idle", &NativeGroup::is_idle)
      .def("introduce", &NativeGroup::introduce)
      .def("note_gone", &NativeGroup::note_gone, nb::arg("rank"), nb::arg("is_dead"))
      .def("works_to_adopt", &NativeGroup::works_to_adopt, nb::kw_only(), nb::arg("only_overdue"),
           nb::arg("all_messages"))
      .def("messages_under_way", &NativeGroup::messages_under_way)
      .def("unwaited", &NativeGroup::unwaited);
  m.def("bind_verbs", &bind_object, nb::arg("verbs"), nb::arg("group").none(), nb::arg("adoption"),
        nb::arg("reference"), nb::arg("is_started"));
  m.def("set_user_files", [](nb::object is_users) { user_files.set_rule(std::move(is_users)); }, nb::arg("is_users"));
  m.def("make_verbs_type", &make_verbs_type, nb::arg("rows"), nb::arg("ops"));
}

}  // namespace unisono
