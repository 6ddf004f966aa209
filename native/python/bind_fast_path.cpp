// The hot path: the blocking collectives of a communicator, from the raw arguments to the result without Python.
//
// Knows the verbs with plain arguments (see hot_argument.hpp; no keyword but op, root, out and algorithm) and what
// Python decided when such a call was made for the first time: the program, the fingerprint, the type. Does not know
// why it was decided so. Whatever else is given goes to Python, and so does a call that was never made before, from
// which it learns. A call that does not end well or soon is handed over to Python while its run goes on: all that
// concerns errors, stalls, interrupts and other people's news is there.
//
// The order of locks is that of bind_engine.cpp: the GIL, then the engine's.

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <vector>

#include "collective/call_log.hpp"
#include "collective/program_call.hpp"
#include "engine/completion_queue.hpp"
#include "kernels/isa.hpp"
#include "python/bind.hpp"
#include "python/fast_argument.hpp"

namespace nb = nanobind;

namespace unisono {

engine::CompletionQueue& completions_of(nb::handle engine);
const engine::ProgramCall& program_call_of(nb::handle call);

namespace {

using namespace engine;

// How often a thread that waits looks for signals.
constexpr std::int64_t slice_ns = 50 * millisecond;
// Up to this a call first looks for its end with the GIL held: letting go and taking it back costs as much as the
// rest of the call, and others wait for microseconds.
constexpr uint64_t glance_bytes = 16 * 1024;
constexpr uint64_t gil_release_bytes = 32 * 1024;
// Up to this a call does not wait until peers from which nothing comes back have met its messages, but no more than
// so many times in a row: then it waits, so that none is further ahead. They fit into the credit many times over, and
// a wait costs a message there and back: a few percent of 32 calls.
constexpr uint64_t ahead_bytes = 16 * 1024;
constexpr uint8_t ahead_max = 32;
constexpr int dims_max = 8;
constexpr size_t learned_max = 512;  // per verb; a newer one takes the place of an older
constexpr size_t probes_max = 8;     // places in which the decision of a key may be

enum class Verb : uint8_t { all_reduce, broadcast, all_gather, reduce_scatter, all_to_all, barrier };
constexpr const char* verb_names[] = {"all_reduce",     "broadcast",  "all_gather",
                                      "reduce_scatter", "all_to_all", "barrier"};
constexpr size_t verb_count = 6;

// What tells calls apart. The place of the call counts: its line is part of the fingerprint.
struct Key {
  PyObject* descr = nullptr;
  PyObject* op = nullptr;  // nullptr if not given
  PyObject* algorithm = nullptr;
  PyObject* code = nullptr;
  long root = 0;
  int lasti = 0;
  int nd = 0;
  Form form = Form::array;
  Py_ssize_t shape[dims_max] = {};

  bool operator==(const Key& o) const {
    return descr == o.descr && op == o.op && algorithm == o.algorithm && code == o.code && root == o.root &&
           lasti == o.lasti && nd == o.nd && form == o.form &&
           std::memcmp(shape, o.shape, static_cast<size_t>(nd) * sizeof *shape) == 0;
  }
  size_t hash() const {
    uint64_t x = reinterpret_cast<uint64_t>(descr) ^ reinterpret_cast<uint64_t>(code) << 7;
    x = (x ^ static_cast<uint64_t>(lasti) << 32 ^ reinterpret_cast<uint64_t>(op)) * 0x9e3779b97f4a7c15u;
    x ^= static_cast<uint64_t>(root) ^ reinterpret_cast<uint64_t>(algorithm) >> 4 ^ static_cast<uint64_t>(form) << 24;
    for (int i = 0; i < nd; ++i) x = (x ^ static_cast<uint64_t>(shape[i]) ^ x >> 29) * 0xd6e8feb86659fd93u;
    return x ^ x >> 32;
  }
};

// A call with plain arguments.
struct Given {
  Key key;
  Argument x, out;  // without an array if there is none
};

// What Python decided for a key; it keeps what the key points to.
struct Learned {
  Key key;
  nb::object descr, op, algorithm, code;
  ProgramCall call;
  uint64_t counts[buffer_count] = {};
  Text header;
  uint8_t dtype = 0;
  std::int32_t op_code = -1;
  std::int64_t divisor = 0;              // of a mean
  std::vector<std::int32_t> unanswered;  // peers to which we send, and from which nothing comes back
  std::vector<std::int32_t> answering;
  uint64_t bytes = 0;  // of the longer buffer
};

class FastVerb;

class FastPath {
 public:
  FastPath(nb::object engine, nb::object call_log, uint64_t context, Py_ssize_t size, size_t window, double stall_s,
           nb::object array_type, nb::object empty, nb::object is_users)
      : call_log(nb::cast<CallLog&>(call_log)),
        completions(completions_of(engine)),
        context(context),
        size(size),
        window(window > 0 ? window : 1),
        stall_ns(static_cast<std::int64_t>(stall_s * 1e9)),
        arguments(std::move(array_type), std::move(empty)),
        engine_(std::move(engine)),
        call_log_(std::move(call_log)),
        is_users_(std::move(is_users)) {
    run_ahead.resize(static_cast<size_t>(completions.engine().size));
  }

  // Messages that no call here has met although it should have: (rank, number, header) of calls before `sequence`.
  nb::list unclaimed(uint64_t sequence) {
    std::vector<CompletionQueue::Unclaimed> found;
    if (sequence > 0) {
      const Hold held = completions.engine().hold();
      found = completions.unclaimed(context, tag_of(sequence - 1));
    }
    nb::list result;
    for (const CompletionQueue::Unclaimed& one : found)
      result.append(nb::make_tuple(one.source, one.sequence, nb::bytes(one.header.data(), one.header.size())));
    return result;
  }

  // Who has not shown yet that it has made all calls that ended here.
  std::vector<std::int32_t> unconfirmed_ranks() const {
    std::vector<std::int32_t> ranks;
    for (size_t rank = 0; rank < run_ahead.size(); ++rank)
      if (run_ahead[rank] != 0) ranks.push_back(static_cast<std::int32_t>(rank));
    return ranks;
  }

  // Called by Python in the midst of a call that was not known: what it decided.
  bool cache_decision(uint64_t sequence, const std::string& operation, nb::handle call, uint8_t dtype, std::int32_t op,
                      nb::handle in, nb::handle out, nb::bytes header, std::int64_t divisor);

  CallLog& call_log;
  CompletionQueue& completions;
  const uint64_t context;
  const Py_ssize_t size;
  const size_t window;
  const std::int64_t stall_ns;
  const Arguments arguments;
  // By rank: how many of our calls it may not have made yet. Whatever comes from it in a later call shows that it has.
  std::vector<uint8_t> run_ahead;

  // For tests: calls that ended here, that Python had to decide, and that Python had to end.
  uint64_t ended = 0, missed = 0, handed_over = 0;

  struct PendingMiss {
    FastVerb& verb;
    const Given& given;
    uint64_t sequence;
    unsigned long thread;
  };
  const PendingMiss* miss = nullptr;

 private:
  bool is_users(PyObject* code) const { return nb::cast<bool>(is_users_(nb::borrow(code).attr("co_filename"))); }

  nb::object engine_, call_log_;  // kept for the references above
  nb::object is_users_;
};

// One verb of one communicator.
class FastVerb final : public FastCall {
 public:
  FastVerb(nb::object path, Verb verb, nb::object slow, nb::object slow_path)
      : FastCall(std::move(slow), std::move(slow_path)),
        path(nb::cast<FastPath&>(path)),
        verb(verb),
        path_(std::move(path)) {}

  PyObject* call(PyObject* const* args, size_t nargsf, PyObject* names) override;
  void keep(std::unique_ptr<Learned> learned) {
    if (decisions_.empty()) decisions_.resize(learned_max);
    const size_t first = learned->key.hash();
    size_t at = first;
    while (at < first + probes_max && slot(at) != nullptr && !(slot(at)->key == learned->key)) ++at;
    slot(at < first + probes_max ? at : first) = std::move(learned);
  }

  FastPath& path;
  const Verb verb;

 private:
  bool parse(PyObject* const* args, Py_ssize_t count, PyObject* names, Given& given) const;
  bool parse_x(PyObject* x, Given& given) const;
  bool fits(const Given& given) const;
  PyObject* ask_python(PyObject* const* args, size_t nargsf, PyObject* names, const Given& given);
  bool run(const Learned& learned, PyObject* x, const nb::object& out);
  bool wait(Run& run, const Learned& learned, uint64_t sequence, uint64_t handle, PyObject* x, const nb::object& out,
            std::optional<CompletionQueue::Unclaimed>& unclaimed);
  bool may_run_ahead(const Learned& learned) const;
  void check_unclaimed(const CompletionQueue::Unclaimed& unclaimed) const;
  bool hand_over(const Text& header, uint64_t sequence, uint64_t handle, std::int64_t started, PyObject* x,
                 const nb::object& out, nb::handle interruption);
  bool is_in_place() const { return verb == Verb::all_reduce || verb == Verb::broadcast; }
  nb::object make_result(const Given& given) const;

  nb::object path_;
  std::unique_ptr<Learned>& slot(size_t at) { return decisions_[at % learned_max]; }
  // What was decided for a key; nullptr if nothing was, or if it was replaced.
  const Learned* find(const Key& key) {
    if (decisions_.empty()) return nullptr;
    const size_t first = key.hash();
    for (size_t at = first; at < first + probes_max; ++at)
      if (slot(at) != nullptr && slot(at)->key == key) return slot(at).get();
    return nullptr;
  }

  std::vector<std::unique_ptr<Learned>> decisions_;
};

bool FastVerb::parse_x(PyObject* x, Given& given) const {
  if (!path.arguments.see(x, given.x)) return false;
  const ArrayObject& array = as_array(given.x.array);
  const int needed = is_contiguous | is_aligned | (is_in_place() ? is_writeable : 0);
  if ((array.flags & needed) != needed || array.nd > dims_max) return false;
  const bool is_by_rank = verb == Verb::reduce_scatter || verb == Verb::all_to_all;
  if (is_by_rank && (array.nd == 0 || array.dimensions[0] != path.size)) return false;
  if (verb == Verb::all_gather && array.nd == dims_max) return false;
  given.key.form = given.x.form;
  given.key.descr = array.descr;
  given.key.nd = array.nd;
  for (int i = 0; i < array.nd; ++i) given.key.shape[i] = array.dimensions[i];
  return true;
}

// The same text may come in many objects; those in the source are one.
bool is_one_object(PyObject* text) { return PyUnicode_CheckExact(text) && PyUnicode_CHECK_INTERNED(text); }

bool FastVerb::parse(PyObject* const* args, Py_ssize_t count, PyObject* names, Given& given) const {
  static PyObject* const op_word = interned("op");
  static PyObject* const root_word = interned("root");
  static PyObject* const out_word = interned("out");
  static PyObject* const algorithm_word = interned("algorithm");
  const bool takes_op = verb == Verb::all_reduce || verb == Verb::reduce_scatter;
  const bool takes_root = verb == Verb::broadcast;
  const bool takes_out = verb == Verb::all_gather || verb == Verb::reduce_scatter || verb == Verb::all_to_all;
  PyObject* op = nullptr;
  PyObject* root = nullptr;
  if (verb == Verb::barrier ? count != 0
                            : count < 1 || count > (takes_op || takes_root ? 2 : 1) || !parse_x(args[0], given))
    return false;
  if (count == 2) (takes_op ? op : root) = args[1];
  const Py_ssize_t named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const word = PyTuple_GET_ITEM(names, i);
    PyObject* const value = args[count + i];
    if (word == op_word && takes_op && op == nullptr)
      op = value;
    else if (word == root_word && takes_root && root == nullptr)
      root = value;
    else if (word == out_word && takes_out)
      given.out.given = value != Py_None ? value : nullptr;
    else if (word == algorithm_word && is_one_object(value))
      given.key.algorithm = value;
    else
      return false;
  }
  if (given.out.given != nullptr && !(path.arguments.see(given.out.given, given.out) && fits(given))) return false;
  if (op != nullptr) {
    if (PyUnicode_CheckExact(op) && !is_one_object(op)) return false;
    given.key.op = op;
  }
  if (root != nullptr) {
    if (!PyLong_CheckExact(root)) return false;
    int overflow = 0;
    given.key.root = PyLong_AsLongAndOverflow(root, &overflow);
    if (overflow != 0) return false;
  }
  return true;
}

// Whether `out` may be filled as it is.
bool FastVerb::fits(const Given& given) const {
  if (given.out.is_number()) return false;
  const ArrayObject& x = as_array(given.x.array);
  const ArrayObject& out = as_array(given.out.array);
  constexpr int needed = is_contiguous | is_aligned | is_writeable;
  if ((out.flags & needed) != needed || out.descr != x.descr) return false;
  const int shift = verb == Verb::all_gather ? 1 : verb == Verb::reduce_scatter ? -1 : 0;
  if (out.nd != x.nd + shift || (shift > 0 && out.dimensions[0] != path.size)) return false;
  for (int i = shift < 0 ? 1 : 0; i < x.nd; ++i)
    if (out.dimensions[i + shift] != x.dimensions[i]) return false;
  // Separate memory: whether it is, in bytes, is known only with the type's size. Who starts inside is caught here,
  // and `run` compares the ends.
  return true;
}

nb::object FastVerb::make_result(const Given& given) const {
  const Key& key = given.key;
  Py_ssize_t shape[dims_max];
  int nd = 0;
  if (verb == Verb::all_gather) shape[nd++] = path.size;
  for (int i = verb == Verb::reduce_scatter ? 1 : 0; i < key.nd; ++i) shape[nd++] = key.shape[i];
  return path.arguments.make(shape, nd, nb::handle(key.descr));
}

PyObject* FastVerb::call(PyObject* const* args, size_t nargsf, PyObject* names) {
  Given given;
  if (path.completions.engine().is_forked() || !parse(args, PyVectorcall_NARGS(nargsf), names, given))
    return call_slow(args, nargsf, names);
  PyFrameObject* const frame = PyEval_GetFrame();
  if (frame == nullptr) return call_slow(args, nargsf, names);
  const nb::object code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  given.key.code = code.ptr();
  given.key.lasti = PyFrame_GetLasti(frame);
  const Learned* known = find(given.key);
  if (known == nullptr || !path.call_log.fast_path_open) return ask_python(args, nargsf, names, given);
  nb::object out;
  if (given.out.given != nullptr) {
    const uint64_t itemsize = itemsizes[known->dtype];
    const byte* const in_at = as_array(given.x.array).data;
    const byte* const out_at = as_array(given.out.array).data;
    const uint64_t in_bytes = known->counts[static_cast<size_t>(Buffer::in)] * itemsize;
    const uint64_t out_bytes = known->counts[static_cast<size_t>(Buffer::out)] * itemsize;
    if (in_at < out_at + out_bytes && out_at < in_at + in_bytes) return call_slow(args, nargsf, names);
    out = nb::borrow(given.out.array);
  } else if (is_in_place()) {
    out = nb::borrow(given.x.array);
  } else if (verb != Verb::barrier) {
    out = make_result(given);
    // Making it may have run any code, and `known` may be gone.
    known = find(given.key);
    if (known == nullptr || !path.call_log.fast_path_open) return ask_python(args, nargsf, names, given);
  }
  if (!run(*known, given.x.array, out)) return nullptr;
  if (verb == Verb::barrier) Py_RETURN_NONE;
  if (given.out.given != nullptr) return Py_NewRef(given.out.given);
  if (!is_in_place()) return Arguments::give(given.x.form, std::move(out));
  return given.x.is_number() ? Arguments::number_of(given.x) : Py_NewRef(given.x.given);
}

PyObject* FastVerb::ask_python(PyObject* const* args, size_t nargsf, PyObject* names, const Given& given) {
  ++path.missed;
  const FastPath::PendingMiss miss{*this, given, path.call_log.next, PyThread_get_thread_ident()};
  const FastPath::PendingMiss* const outer = std::exchange(path.miss, &miss);
  PyObject* const result = call_slow(args, nargsf, names);
  // Another thread may have put its own in this place, and taken it away again, or not yet.
  if (path.miss == &miss) path.miss = outer;
  return result;
}

bool FastPath::cache_decision(uint64_t sequence, const std::string& operation, nb::handle call, uint8_t dtype,
                              std::int32_t op, nb::handle in, nb::handle out, nb::bytes header, std::int64_t divisor) {
  if (miss == nullptr || miss->thread != PyThread_get_thread_ident() || miss->sequence != sequence) return false;
  const FastVerb& verb = miss->verb;
  const Given& given = miss->given;
  if (operation != verb_names[static_cast<size_t>(verb.verb)] || dtype >= dtype_count) return false;
  if (!is_users(given.key.code)) return false;  // the place that the fingerprint shows is further out
  auto learned = std::make_unique<Learned>();
  learned->call = program_call_of(call);
  const Program& program = *learned->call.program;
  program.buffer_counts(learned->call.given(), learned->counts);
  const uint64_t itemsize = itemsizes[dtype];
  uint64_t bytes[2];
  for (const size_t which : {static_cast<size_t>(Buffer::in), static_cast<size_t>(Buffer::out)}) {
    bytes[which] = learned->counts[which] * itemsize;
    learned->bytes = std::max(learned->bytes, bytes[which]);
  }
  // What travels must be what was given, not a copy in another form.
  if (given.x.array != nullptr) {
    const bool is_out = verb.verb == Verb::all_reduce || verb.verb == Verb::broadcast;
    const nb::handle used = is_out ? out : in;
    if (!arguments.is_array(used.ptr())) return false;
    // A number has no memory: its type says whether it travels as it is.
    const ArrayObject& one = as_array(used.ptr());
    if (given.x.is_number() ? one.descr != given.key.descr : one.data != as_array(given.x.array).data) return false;
    uint64_t count = 1;
    for (int i = 0; i < given.key.nd; ++i) count *= static_cast<uint64_t>(given.key.shape[i]);
    if (count * itemsize != bytes[static_cast<size_t>(is_out ? Buffer::out : Buffer::in)] && count != 0) return false;
  } else if (learned->bytes != 0) {
    return false;
  }
  if (given.out.given != nullptr && as_array(out.ptr()).data != as_array(given.out.array).data) return false;
  learned->key = given.key;
  learned->descr = nb::borrow(given.key.descr);
  learned->op = nb::borrow(given.key.op);
  learned->algorithm = nb::borrow(given.key.algorithm);
  learned->code = nb::borrow(given.key.code);
  learned->header = std::make_shared<const std::string>(header.c_str(), header.size());
  learned->dtype = dtype;
  learned->op_code = op;
  learned->divisor = divisor;
  BoundProgram bound;
  bound.bind(program, learned->call.given(), learned->call.piece_elements);
  for (const Line& line : program.lines)
    if (bound.moves(line.recvs))
      learned->answering.push_back(learned->call.rank_of(line));
    else if (bound.moves(line.sends))
      learned->unanswered.push_back(learned->call.rank_of(line));
  miss->verb.keep(std::move(learned));
  return true;
}

bool FastVerb::may_run_ahead(const Learned& learned) const {
  if (learned.bytes > ahead_bytes) return false;
  for (const std::int32_t peer : learned.unanswered)
    if (path.run_ahead[static_cast<size_t>(peer)] >= ahead_max) return false;
  return true;
}

// A message waits for a call that has been made here: Python compares, and raises if it was another.
void FastVerb::check_unclaimed(const CompletionQueue::Unclaimed& unclaimed) const {
  helper.attr("check_unclaimed")(unclaimed.source, unclaimed.sequence,
                                 nb::bytes(unclaimed.header.data(), unclaimed.header.size()));
}

bool FastVerb::run(const Learned& learned, PyObject* x, const nb::object& out) {
  Stage stage = learned.call.stage();
  stage.context = path.context;
  stage.dtype = learned.dtype;
  stage.itemsize = itemsizes[learned.dtype];
  stage.kernel = learned.op_code < 0 ? nullptr : active_kernels().reduce[learned.dtype][learned.op_code];
  stage.window = path.window;
  if (x != nullptr && !is_in_place()) stage.in = as_array(x).data;
  if (out.is_valid()) stage.out = as_array(out.ptr()).data;
  // From here to the flight's entry below nobody else runs Python: allowed, numbered and under way in one breath.
  const uint64_t sequence = path.call_log.next++;
  path.call_log.remember(sequence, learned.header);
  stage.tag = tag_of(sequence);
  stage.runs_ahead = may_run_ahead(learned);
  for (const std::int32_t peer : learned.unanswered) {
    uint8_t& ahead = path.run_ahead[static_cast<size_t>(peer)];
    ahead = stage.runs_ahead ? static_cast<uint8_t>(ahead + 1) : 0;
  }
  for (const std::int32_t peer : learned.answering) path.run_ahead[static_cast<size_t>(peer)] = 0;
  bool is_done = false;
  std::optional<CompletionQueue::Unclaimed> unclaimed;
  Run* run;
  uint64_t handle;
  {
    const Hold held = path.completions.engine().hold();
    run = &path.completions.make_run();
    handle = run->handle;
    run->is_watched = true;
    run->header = learned.header;
    run->phase = Operation::Phase::starting;
    run->begin(learned.call.program, stage);
    if (run->phase == Operation::Phase::starting) run->phase = Operation::Phase::active;
    if (learned.bytes <= glance_bytes) path.completions.poll_briefly_for(*run);
    if (run->phase == Operation::Phase::ended && run->outcome == Outcome::done) [[likely]] {
      is_done = true;
      path.completions.recycle(*run);
      if (const UnexpectedMessage* const first = path.completions.first_unmet(path.context, stage.tag);
          first != nullptr) [[unlikely]]
        unclaimed.emplace(first->envelope);
    }
  }
  // What was learned may be replaced while others run Python.
  const std::int64_t divisor = learned.divisor;
  const uint8_t dtype = learned.dtype;
  const uint64_t count = learned.counts[static_cast<size_t>(Buffer::out)];
  if (is_done)
    ++path.ended;
  else if (!wait(*run, learned, sequence, handle, x, out, unclaimed))
    return false;
  if (unclaimed.has_value()) check_unclaimed(*unclaimed);
  if (divisor != 0) {
    std::optional<GilReleased> released;
    if (count * itemsizes[dtype] >= gil_release_bytes) released.emplace();
    active_kernels().divide[dtype](as_array(out.ptr()).data, count, divisor);
  }
  return true;
}

// Wait for the end of a run with the GIL let go; false if an exception is set.
bool FastVerb::wait(Run& run, const Learned& learned, uint64_t sequence, uint64_t handle, PyObject* x,
                    const nb::object& out, std::optional<CompletionQueue::Unclaimed>& unclaimed) {
  const Text header = learned.header;
  const std::int64_t started = now_ns(), stalled = started + path.stall_ns;
  CallLog::InFlightCall flight{sequence, path.completions, handle};
  path.call_log.flights.push_back(&flight);
  nb::object interruption;
  for (;;) {
    bool is_done = false, is_ours = true;
    {
      const GilReleased released;
      Hold held = path.completions.engine().hold();
      const std::int64_t now = now_ns();
      const bool has_other =
          path.completions.wait_for(held, run, std::min(now + slice_ns, stalled), flight.is_recalled);
      if (run.phase == Operation::Phase::ended) {
        is_done = run.outcome == Outcome::done;
        is_ours = is_done;
        if (is_done) {
          path.completions.recycle(run);
          if (const UnexpectedMessage* const first = path.completions.first_unmet(path.context, tag_of(sequence));
              first != nullptr) [[unlikely]]
            unclaimed.emplace(first->envelope);
        }
      } else if (has_other) {
        is_ours = false;
      }
    }
    if (is_done) {
      std::erase(path.call_log.flights, &flight);
      ++path.ended;
      return true;
    }
    if (PyErr_CheckSignals() != 0) {
      const nb::python_error raised;
      interruption = nb::borrow(raised.value());
      break;
    }
    if (!is_ours || now_ns() >= stalled) break;
  }
  std::erase(path.call_log.flights, &flight);
  return hand_over(header, sequence, handle, started, x, out, interruption);
}

bool FastVerb::hand_over(const Text& header, uint64_t sequence, uint64_t handle, std::int64_t started, PyObject* x,
                         const nb::object& out, nb::handle interruption) {
  ++path.handed_over;
  try {
    const nb::object given = x != nullptr ? nb::borrow(x) : nb::none();
    helper.attr("take_over")(verb_names[static_cast<size_t>(verb)], sequence, nb::bytes(header->data(), header->size()),
                             static_cast<double>(started) / 1e9, handle,
                             nb::make_tuple(given, out.is_valid() ? out : nb::none()),
                             interruption.is_valid() ? interruption : nb::handle(Py_None));
    return true;
  } catch (nb::python_error& error) {
    // An interrupt may have come before Python had it in hand: the memory must be left alone before we return.
    {
      const GilReleased released;
      Hold held = path.completions.engine().hold();
      if (Run* const run = path.completions.watched(handle); run != nullptr) {
        run->cancel();
        path.completions.engine().wait(held, [&] { return run->phase == Operation::Phase::ended; }, never);
        path.completions.recycle(*run);
      }
    }
    error.restore();
    return false;
  }
}

nb::object make_verb(nb::object path, const std::string& name, nb::object slow, nb::object slow_path) {
  for (size_t i = 0; i < verb_count; ++i)
    if (name == verb_names[i])
      return make_callable(
          std::make_unique<FastVerb>(std::move(path), static_cast<Verb>(i), std::move(slow), std::move(slow_path)));
  throw nb::value_error("no such verb");
}

nb::object bytes_of(const Text& text) { return nb::bytes(text->data(), text->size()); }

}  // namespace

void bind_hot_path(nb::module_& m) {
  nb::class_<CallLog>(m, "CallLog")
      .def(nb::init<>())
      .def_rw("next", &CallLog::next)
      .def_rw("fast_path_open", &CallLog::fast_path_open)
      .def("take", [](CallLog& self) { return self.next++; })
      .def("remember",
           [](CallLog& self, uint64_t sequence, nb::bytes text) {
             self.remember(sequence, std::make_shared<const std::string>(text.c_str(), text.size()));
           })
      .def("find",
           [](const CallLog& self, uint64_t sequence) {
             const Text* const found = self.find(sequence);
             return found != nullptr ? bytes_of(*found) : nb::none();
           })
      .def("last",
           [](const CallLog& self, size_t count) {
             nb::dict calls;
             for (size_t i = std::min(count, self.size()); i > 0; --i)
               calls[nb::int_(self.at(i - 1).sequence)] = bytes_of(self.at(i - 1).text);
             return calls;
           })
      .def("__len__", &CallLog::size)
      .def("awaited",
           [](const CallLog& self, uint64_t sequence) {
             for (const CallLog::InFlightCall* flight : self.flights) {
               if (flight->sequence != sequence) continue;
               const Hold held = flight->completions.engine().hold();
               const Run* const run = flight->completions.run_of(flight->handle);
               return run != nullptr ? run->awaited() : std::vector<std::int32_t>();
             }
             return std::vector<std::int32_t>();
           })
      .def("interrupt_in_flight", [](CallLog& self) {
        for (CallLog::InFlightCall* flight : self.flights) {
          flight->is_recalled.store(true, std::memory_order_relaxed);
          const Hold held = flight->completions.engine().hold();
          flight->completions.interrupt_wait();
        }
      });
  nb::class_<FastPath>(m, "FastPath")
      .def(nb::init<nb::object, nb::object, uint64_t, Py_ssize_t, size_t, double, nb::object, nb::object, nb::object>(),
           nb::arg("engine"), nb::arg("call_log"), nb::kw_only(), nb::arg("context"), nb::arg("size"),
           nb::arg("window"), nb::arg("stall_s"), nb::arg("array_type"), nb::arg("empty"), nb::arg("is_users"))
      .def_prop_ro_static("verbs",
                          [](nb::handle) {
                            nb::list names;
                            for (const char* name : verb_names) names.append(name);
                            return nb::tuple(names);
                          })
      .def("verb", &make_verb, nb::arg("name"), nb::arg("slow"), nb::arg("slow_path"))
      .def("unclaimed", &FastPath::unclaimed, nb::arg("sequence"))
      .def("unconfirmed_ranks", &FastPath::unconfirmed_ranks)
      .def("cache_decision", &FastPath::cache_decision, nb::arg("sequence"), nb::arg("operation"), nb::arg("call"),
           nb::arg("dtype"), nb::arg("op"), nb::arg("memory_in").none(), nb::arg("memory_out").none(),
           nb::arg("header"), nb::arg("divisor"))
      .def_ro("ended", &FastPath::ended)
      .def_ro("missed", &FastPath::missed)
      .def_ro("handed_over", &FastPath::handed_over);
}

}  // namespace unisono
