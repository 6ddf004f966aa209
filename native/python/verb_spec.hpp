// What a verb takes, and how the arguments of a call are bound to its parameters.

#pragma once

#include <string>
#include <vector>

#include "python/bind.hpp"

namespace unisono {

// Verbs that the engine runs; the reference path makes the calls of all others.
enum class Verb : uint8_t {
  reference,
  send,
  recv,
  recv_bytes,
  sendrecv,
  send_object,
  recv_object,
  probe,
  all_reduce,
  all_reduce_many,
  reduce,
  broadcast,
  all_gather,
  gather,
  reduce_scatter,
  reduce_scatter_v,
  all_to_all,
  scan,
  exscan,
  barrier,
  split,
  // Ranks do not know each other's lengths: see announcement.hpp.
  scatter,
  scatter_v,
  scatter_object,
  broadcast_object,
  all_gather_v,
  gather_v,
  all_to_all_v,
  all_gather_object,
  gather_object,
  all_to_all_object,
  all_reduce_object,
};

inline bool is_of_objects(Verb verb) {
  return verb == Verb::all_gather_object || verb == Verb::gather_object || verb == Verb::scatter_object ||
         verb == Verb::broadcast_object || verb == Verb::all_to_all_object || verb == Verb::all_reduce_object;
}

enum class Parameter : uint8_t { x, out, op, root, dst, src, tag, timeout, algorithm, color, key, counts, fn };
inline constexpr size_t parameter_count = 13;

// What a verb takes: a row of the table in unisono/comm/verb_table.py.
struct VerbSpec {
  struct Named {
    PyObject* word;  // interned
    Parameter parameter;
  };
  std::string name;
  PyObject* word = nullptr;
  Verb verb = Verb::reference;
  std::vector<Named> parameters;
  size_t positional = 0;

  bool is_collective() const { return verb >= Verb::all_reduce; }
  bool is_announced() const { return verb >= Verb::scatter; }
  // Of messages.
  bool sends() const { return verb == Verb::send || verb == Verb::sendrecv || verb == Verb::send_object; }
  bool receives() const { return verb != Verb::send && verb != Verb::send_object; }
  bool is_open_ended() const { return verb == Verb::recv_bytes || verb == Verb::recv_object; }
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
