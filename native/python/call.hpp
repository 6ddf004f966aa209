// A call of a verb: from the raw arguments to the result, for blocking and started calls alike.
//
// The engine runs it. Python is asked for what is rare: the decision for the first call of a class, and everything that
// must be known of a call that does not end well or soon. Python then *adopts* the call: its operations go on, and from
// that moment its errors, stalls, deadlines and interrupts are those of a Task (unisono/comm/adoption.py).
//
// The order of locks: the GIL, then the engine's. No Python object is made or dropped with the engine's lock held.

#pragma once

#include <optional>
#include <string>
#include <vector>

#include "python/native_group.hpp"

namespace unisono {

// Verbs that the engine runs; the reference path makes the calls of all others.
enum class Verb : uint8_t {
  reference,
  send,
  recv,
  sendrecv,
  all_reduce,
  reduce,
  broadcast,
  all_gather,
  gather,
  reduce_scatter,
  all_to_all,
  scan,
  exscan,
  barrier,
  split,
};

enum class Parameter : uint8_t { x, out, op, root, dst, src, tag, timeout, algorithm, color, key };
inline constexpr size_t parameter_count = 11;

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
};

// The objects that were passed, by parameter; nullptr if left out.
struct Given {
  PyObject* of[parameter_count] = {};
  PyObject*& operator[](Parameter parameter) { return of[static_cast<size_t>(parameter)]; }
  PyObject* operator[](Parameter parameter) const { return of[static_cast<size_t>(parameter)]; }
  // False if the call does not fit the verb: the reference path raises the TypeError.
  bool bind(const VerbSpec& spec, PyObject* const* args, Py_ssize_t count, PyObject* names);
};

// Names of reductions by number, as in core/ops.py.
class OpNames {
 public:
  static constexpr std::int16_t none = -1;
  void set(const std::vector<std::string>& names);
  // Throws LeftToReference for a user's own and for anything unknown.
  std::int16_t number_of(PyObject* op) const;
  // How many elements are never separated.
  uint64_t width_of(std::int16_t number) const;
  nb::object name_of(std::int16_t number) const { return nb::borrow(words_[static_cast<size_t>(number)]); }

 private:
  std::vector<PyObject*> words_;  // interned, kept for good
  std::int16_t maxloc_ = none, minloc_ = none;
};
extern OpNames op_names;

// The arguments of a collective and what was decided for it, whatever runs it: the engine (Call) or a library
// (LibraryCall).
class ParsedCall {
 public:
  ParsedCall(VerbGroup& group, const VerbSpec& spec, nb::handle helper)
      : verb_group_(group), spec_(spec), helper_(helper) {}
  ParsedCall(const ParsedCall&) = delete;
  ParsedCall& operator=(const ParsedCall&) = delete;

 protected:
  void prepare_collective(const Given& given);
  void read_timeout(PyObject* timeout);
  std::int32_t rank_of(PyObject* rank) const;
  void find_decision(const Given& given);
  const Decision* decide(const DecisionKey& key, const Given& given);
  void find_target(const Given& given);
  void find_site();
  void widen();
  void check_out(const Py_ssize_t* shape, int nd) const;
  void fill_with_identity();
  bool is_in_place() const {
    return spec_.verb == Verb::all_reduce || spec_.verb == Verb::broadcast ||
           (spec_.verb == Verb::reduce && root_ == verb_group_.rank);
  }
  // The result of a collective that has ended well.
  PyObject* give();
  // All counts of an even collective are one.
  engine::Counts counts() const {
    return {&count_, spec_.verb == Verb::barrier ? 0u : 1u, spec_.verb != Verb::barrier};
  }

  VerbGroup& verb_group_;
  const VerbSpec& spec_;
  nb::handle helper_;
  Argument x_, out_;
  Result result_;
  std::vector<float> wide_;  // see `widen`
  const Decision* decision_ = nullptr;
  engine::Fingerprint fingerprint_;
  nb::object code_;  // where the program calls it, until it is in the log
  int instruction_ = 0;
  std::int16_t op_ = OpNames::none;
  uint64_t count_ = 0;     // items of one rank
  std::int32_t root_ = 0;  // a rank of the group
  std::int64_t timeout_ns_ = -1;
  engine::byte* target_ = nullptr;  // where the result is made
  uint64_t target_count_ = 0;
  bool is_result_scalar_ = false;
};

// A blocking call that a library runs, on the caller's thread: the decision is what calls it.
class LibraryCall : public ParsedCall {
 public:
  using ParsedCall::ParsedCall;
  // Throws LeftToReference if the library has not begun it.
  PyObject* run(const Given& given, bool is_started);
};

class Call : public ParsedCall {
 public:
  Call(NativeGroup& group, const VerbSpec& spec, nb::handle helper) : ParsedCall(group, spec, helper), group_(group) {}

  // Read the arguments and find the decision. Throws LeftToReference, or nb::python_error.
  void prepare(const Given& given, bool is_started);
  // Keep the arguments beyond the caller's frame.
  void keep();
  // Let Python see what has come, before a collective begins. LeftToReference if the fast path is closed.
  void look_at_news();
  // Start its operations: allowed, numbered and under way while nobody else runs Python.
  void begin();
  // Look for its end for a few rounds of progress, if that is worth it; true if it has ended well and was taken.
  bool begin_and_poll(bool is_blocking);

  enum class Waited : uint8_t {
    taken,        // it has ended well
    attention,    // Python must look at it
    interrupted,  // a signal handler has raised
    limit,        // the time is over
    elsewhere,    // another thread has taken it, or has let Python adopt it
  };
  Waited wait(std::int64_t limit_ns);
  // Take it if it has ended well.
  bool take_ended();
  // Whether nothing of it is under way in the engine; with the engine's lock.
  bool is_over() const { return has_ended(); }
  // Announce its end to the pump.
  void observe(engine::Observer& observer);
  void forget(engine::Observer& observer);
  // Whether it has ended otherwise than well.
  bool has_failed();
  // One look at the links; true if it has ended well and was taken.
  bool poll(unsigned idle_polls);
  // Let Python carry it on: `how` is the method of the helper, which returns a Work. It keeps the memory and `keeper`
  // until the operations have ended.
  nb::object adopt(const char* how, nb::object keeper = nb::none());
  // Its result, once it has ended well.
  PyObject* finish();
  // As above, for one that Python has carried to its end.
  PyObject* finish_adopted(nb::object result);

  bool is_collective() const { return spec_.is_collective(); }
  uint64_t sequence() const { return sequence_; }
  const VerbSpec& spec() const { return spec_; }
  NativeGroup& group() const { return group_; }
  nb::handle helper() const { return helper_; }
  nb::handle code() const { return code_; }
  int instruction() const { return instruction_; }
  // When Python must look at it at the latest.
  std::int64_t attention_at();

 private:
  void prepare_split(const Given& given);
  void prepare_message(const Given& given);
  std::int64_t tag_of_user(PyObject* tag, bool takes_any) const;
  void begin_collective();
  void begin_send();
  void begin_receive();
  bool has_ended() const {
    for (unsigned i = 0; i < started_; ++i)
      if (operations_[i]->phase != engine::Operation::Phase::ended) return false;
    return true;
  }
  // With the engine's lock: true if all operations ended well; then they are back in their pools.
  bool take();
  void release(unsigned count);
  nb::object status() const;
  nb::object make_group();
  uint64_t poll_bytes() const;

  NativeGroup& group_;
  std::int32_t dst_ = 0, src_ = 0;  // ranks of the group; src -1: any
  std::int64_t tag_ = 0;            // -1: any
  std::int64_t begun_at_ = 0;       // 0: the clock was not read yet
  uint64_t sequence_ = engine::CallLog::no_sequence;
  unsigned started_ = 0;
  engine::Operation* operations_[2] = {};
  uint64_t handles_[2] = {};
  // Of a receive that has ended.
  std::int32_t source_ = 0;
  uint64_t met_tag_ = 0, met_bytes_ = 0;
  std::string header_;
  std::optional<engine::CompletionQueue::Unclaimed> unclaimed_;
};

}  // namespace unisono
