#include "python/verb_spec.hpp"

#include <algorithm>

#include "python/argument.hpp"

namespace unisono {

using namespace engine;

bool Given::bind(const VerbSpec& spec, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  if (static_cast<size_t>(count) > spec.positional) return false;
  for (Py_ssize_t i = 0; i < count; ++i) (*this)[spec.parameters[static_cast<size_t>(i)].parameter] = args[i];
  const Py_ssize_t named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const word = PyTuple_GET_ITEM(names, i);
    auto known = std::find_if(spec.parameters.begin(), spec.parameters.end(),
                              [&](const VerbSpec::Named& one) { return one.word == word; });
    if (known == spec.parameters.end())  // names that come from data are not interned
      known = std::find_if(spec.parameters.begin(), spec.parameters.end(),
                           [&](const VerbSpec::Named& one) { return is_word(word, one.word); });
    if (known == spec.parameters.end() || (*this)[known->parameter] != nullptr) return false;
    (*this)[known->parameter] = args[count + i];
  }
  return true;
}

PyObject* algorithm_of(const Given& given) {
  PyObject* algorithm = given[Parameter::algorithm];
  if (algorithm == nullptr) return nullptr;
  if (!PyUnicode_CheckExact(algorithm)) throw LeftToReference();
  if (PyUnicode_CHECK_INTERNED(algorithm)) return algorithm;
  Py_INCREF(algorithm);
  PyUnicode_InternInPlace(&algorithm);
  PyObject* const known = algorithm;
  Py_DECREF(algorithm);
  return known;
}

}  // namespace unisono
