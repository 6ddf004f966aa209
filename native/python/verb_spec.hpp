// What a verb takes, what is true of it, and how the arguments of a call are bound to its parameters.

#pragma once

#include <string>
#include <vector>

#include "python/bind.hpp"

namespace unisono {

// What may be true of a verb, in the order of `Fact` in unisono/comm/verb_table.py, which says what each means.
enum class Fact : uint8_t {
  sends,
  receives,
  unsized,
  probes,
  empty,
  objects,
  fused,
  per_rank,
  by_rank,
  cut,
  rooted,
  root_only,
  reduces,
  prefix,
  folds,
  groups,
  in_place,
  stacked,
  shaped,
  announced,
  exchanged,
  gathered,
};

enum class Parameter : uint8_t { x, out, op, root, dst, src, tag, timeout, algorithm, color, key, counts, fn };
inline constexpr size_t parameter_count = 13;

// What a verb takes and what is true of it: a row of that table.
struct VerbSpec {
  struct Named {
    PyObject* word;  // interned
    Parameter parameter;
  };
  std::string name;
  PyObject* word = nullptr;
  uint8_t number = 0;  // its place in the table
  uint32_t facts = 0;  // a bit for each
  std::vector<Named> parameters;
  size_t positional = 0;

  bool has(Fact fact) const { return (facts >> static_cast<unsigned>(fact) & 1) != 0; }
  bool is_collective() const { return !has(Fact::sends) && !has(Fact::receives); }
  // Every rank gets the same from root.
  bool broadcasts() const {
    return has(Fact::rooted) && !has(Fact::root_only) && !has(Fact::per_rank) && !has(Fact::by_rank);
  }
};

// The objects that were passed, by parameter; nullptr if left out.
struct Given {
  PyObject* of[parameter_count] = {};
  PyObject*& operator[](Parameter parameter) { return of[static_cast<size_t>(parameter)]; }
  PyObject* operator[](Parameter parameter) const { return of[static_cast<size_t>(parameter)]; }
  // False if the call does not fit the verb: the reference path raises the TypeError.
  bool bind(const VerbSpec& spec, PyObject* const* args, Py_ssize_t count, PyObject* names);
};

// The name of the algorithm, interned; nullptr if none was given. Throws LeftToReference for what is no name.
PyObject* algorithm_of(const Given& given);

}  // namespace unisono
