#include "python/call.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>

#include "collective/size_class.hpp"
#include "engine/engine.hpp"
#include "kernels/isa.hpp"
#include "python/fingerprint_bytes.hpp"
#include "python/object_payload.hpp"
#include "python/unwinding.hpp"

namespace unisono {

using namespace engine;

std::shared_ptr<const Program> program_of(nb::handle program);

OpNames op_names;
UserFiles user_files;

namespace {

// How often a thread that waits looks for signals.
constexpr std::int64_t slice_ns = 50 * millisecond;
// Up to this many bytes a call first looks for its end with the GIL held: letting go and taking it back costs as much
// as the rest of the call, and others wait for microseconds.
constexpr uint64_t poll_bytes_max = 16 * 1024;
// The longest that `done` waits in the engine, for a call that it has found unfinished again and again.
constexpr std::int64_t poll_ns_max = 100'000;
// How long a started call that may need Python for a second stage goes on without it, if no thread waits for it. So
// does a split, whose group other members may use.
constexpr std::int64_t second_stage_ns = 2 * millisecond;

bool is_by_rank(Verb verb) { return verb == Verb::reduce_scatter || verb == Verb::all_to_all; }

}  // namespace

void UserFiles::set_rule(nb::object is_users) {
  rule_ = is_users.release();
  Py_XDECREF(std::exchange(last_, nullptr));
  for (const auto& [name, is_one] : known_) Py_DECREF(name);
  known_.clear();
}

bool UserFiles::has(PyObject* code) {
  if (code == last_ || !rule_.is_valid()) return true;
  PyObject* const name = reinterpret_cast<PyCodeObject*>(code)->co_filename;
  auto known = known_.find(name);
  if (known == known_.end()) {
    const bool is_one = nb::cast<bool>(rule_(nb::handle(name)));
    if (known_.size() == names_max) set_rule(nb::borrow(rule_));
    known = known_.emplace(Py_NewRef(name), is_one).first;
  }
  if (known->second) {
    Py_XDECREF(std::exchange(last_, Py_NewRef(code)));
  }
  return known->second;
}

void OpNames::set(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    if (name == "maxloc") maxloc_ = static_cast<std::int16_t>(words_.size());
    if (name == "minloc") minloc_ = static_cast<std::int16_t>(words_.size());
    words_.push_back(interned(name.c_str()));
  }
}

uint64_t OpNames::width_of(std::int16_t number) const { return number == maxloc_ || number == minloc_ ? 2 : 1; }

std::int16_t OpNames::number_of(PyObject* op) const {
  if (op == nullptr) return 0;
  for (size_t i = 0; i < words_.size(); ++i)
    if (words_[i] == op) return static_cast<std::int16_t>(i);
  nb::object name = nb::borrow(op);
  if (!PyUnicode_CheckExact(op)) {
    static PyObject* const fn_word = interned("fn");
    static PyObject* const name_word = interned("name");
    const nb::object fn = nb::steal(PyObject_GetAttr(op, fn_word));
    if (!fn.is_valid() || !fn.is_none()) {
      PyErr_Clear();
      throw LeftToReference();
    }
    name = nb::steal(PyObject_GetAttr(op, name_word));
    if (!name.is_valid() || !PyUnicode_CheckExact(name.ptr())) {
      PyErr_Clear();
      throw LeftToReference();
    }
  }
  for (size_t i = 0; i < words_.size(); ++i)
    if (PyUnicode_Compare(words_[i], name.ptr()) == 0) return static_cast<std::int16_t>(i);
  throw LeftToReference();
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

// ---- arguments ----

void Call::prepare(const Given& given, bool is_started) {
  is_started_ = is_started;
  read_timeout(given[Parameter::timeout]);
  if (spec_.verb == Verb::split)
    prepare_split(given);
  else if (spec_.is_announced())
    prepare_announced(given);
  else if (spec_.verb == Verb::all_reduce_many)
    prepare_fused(given);
  else if (is_collective())
    prepare_collective(given);
  else
    prepare_message(given, is_started);
  if (is_collective() || is_started) find_site();
}

// Find the caller's line. This may allocate, and so run arbitrary Python, so it comes before the group's state is read.
void ParsedCall::find_site() {
  PyFrameObject* const inner = PyEval_GetFrame();
  if (inner == nullptr) return;
  code_ = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(inner)));
  instruction_ = PyFrame_GetLasti(inner);
  if (user_files.has(code_.ptr())) [[likely]]
    return;
  nb::object frame = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(inner)));
  while (frame.is_valid()) {
    auto* const one = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const nb::object code = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(one)));
    if (user_files.has(code.ptr())) {
      code_ = code;
      instruction_ = PyFrame_GetLasti(one);
      return;
    }
    frame = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(one)));
  }
}

void ParsedCall::read_timeout(PyObject* timeout) {
  timeout_ns_ = verb_group_.deadline_ns;
  if (timeout == nullptr || timeout == Py_None) return;
  const double seconds = seconds_of(timeout);
  if (!(seconds >= 0)) throw LeftToReference();  // refuses it
  if (seconds >= 1e9) {                          // longer than any program runs
    timeout_ns_ = -1;
    return;
  }
  timeout_ns_ = static_cast<std::int64_t>(seconds * 1e9);
}

std::int32_t ParsedCall::rank_of(PyObject* rank) const {
  if (rank == nullptr) throw LeftToReference();
  const std::int64_t number = index_of(rank);
  if (number < 0 || number >= verb_group_.size) throw LeftToReference();
  return static_cast<std::int32_t>(number);
}

void ParsedCall::prepare_collective(const Given& given) {
  const Verb verb = spec_.verb;
  root_ = given[Parameter::root] == nullptr ? 0 : rank_of(given[Parameter::root]);
  const bool is_root = root_ == verb_group_.rank;
  const bool reduces = verb == Verb::all_reduce || verb == Verb::reduce || verb == Verb::reduce_scatter ||
                       verb == Verb::reduce_scatter_v || verb == Verb::scan || verb == Verb::exscan;
  if (reduces) op_ = op_names.number_of(given[Parameter::op]);
  if (verb != Verb::barrier) {
    PyObject* const x = given[Parameter::x];
    if (x == nullptr) throw LeftToReference();
    PyObject* const out = given[Parameter::out];
    const bool has_out = out != nullptr && out != Py_None;
    const bool is_written = (verb == Verb::broadcast && !is_root) ||
                            (!has_out && (verb == Verb::all_reduce || (verb == Verb::reduce && is_root)));
    verb_group_.arguments.see(x, "x", is_written, x_);
    if (is_by_rank(verb) && (x_.nd == 0 || x_.shape[0] != verb_group_.size)) throw LeftToReference();
    const bool is_for_root = verb == Verb::gather || verb == Verb::reduce;
    if (has_out && (is_root || !is_for_root)) verb_group_.arguments.see(out, "out", true, out_);
  }
  if (verb == Verb::reduce_scatter_v) {
    if (given[Parameter::counts] == nullptr) throw LeftToReference();
    parts_.emplace().read(given[Parameter::counts], verb_group_.arguments, x_, verb_group_.size,
                          op_names.width_of(op_));
  }
  find_decision(given);
  if (verb == Verb::broadcast && is_root && decision_->writes_out) check_root_is_writable(given[Parameter::x]);
  find_target(given);
  if (x_.is_given() && decision_->dtype != x_.dtype) widen();
}

// A root may broadcast what it cannot write. With some algorithms it gets parts of it back: not into its memory.
void ParsedCall::check_root_is_writable(PyObject* x) const {
  Argument written;
  try {
    verb_group_.arguments.see(x, "x", true, written);
  } catch (nb::python_error&) {
    throw LeftToReference();
  }
}

// The mean of 16-bit floats is computed in float32: reduced in memory of our own, and rounded in the end.
void ParsedCall::widen() {
  const bool has_target = spec_.verb != Verb::reduce_scatter && spec_.verb != Verb::reduce_scatter_v;
  wide_count_ = x_.count + (has_target ? 0 : target_count_);
  if (wide_count_ == 0) return;
  std::optional<GilReleased> released;
  if (x_.nbytes() >= gil_release_bytes) released.emplace();
  wide_ = ResultMemory::take(wide_count_ * sizeof(float));
  if (wide_.get() == nullptr) {
    released.reset();
    PyErr_NoMemory();
    throw nb::python_error();
  }
  active_kernels().widen[x_.dtype](wide_.get(), has_target && target_ != nullptr ? target_ : x_.data, x_.count);
}

// An all_reduce of arrays in a row.
void Call::prepare_fused(const Given& given) {
  if (given[Parameter::x] == nullptr) throw LeftToReference();
  op_ = op_names.number_of(given[Parameter::op]);
  fused_.emplace(group_.arguments, given[Parameter::x], op_names.width_of(op_));
  x_.stand_for(fused_->items().ptr(), nullptr, fused_->dtype(), fused_->count());
  x_.keep();
  find_decision(given);
  x_.data = target_ = fused_->join(group_.arguments, result_);
  target_count_ = x_.count;
  if (decision_->dtype != x_.dtype) widen();
}

// An all_gather of one row per rank, which Python writes and reads.
void Call::prepare_split(const Given& given) {
  static PyObject* const split_row = interned("split_row");
  PyObject* const color = given[Parameter::color];
  if (color == nullptr) throw LeftToReference();
  static PyObject* const zero = PyLong_FromLong(0);
  PyObject* const key = given[Parameter::key] == nullptr ? zero : given[Parameter::key];
  PyObject* const args[] = {adoption_.ptr(), color, key};
  const nb::object row = nb::steal(PyObject_VectorcallMethod(split_row, args, 3, nullptr));
  if (!row.is_valid()) throw nb::python_error();
  group_.arguments.see(row.ptr(), "x", false, x_);
  x_.keep();
  find_decision(given);
  find_target(given);
}

void ParsedCall::find_decision(const Given& given) {
  DecisionKey key;
  key.verb = static_cast<uint8_t>(spec_.verb);
  key.dtype = x_.dtype;
  key.op = op_;
  key.root = root_;
  key.algorithm = algorithm_of(given);
  const uint64_t width = op_ == OpNames::none ? 1 : op_names.width_of(op_);
  count_ = x_.count / width / static_cast<uint64_t>(is_by_rank(spec_.verb) ? verb_group_.size : 1);
  key.size_class = parts_.has_value() ? parts_->size_class() : size_class(count_);
  // The last axis is one item, and no rank gets a part of one; the reference path refuses it. See ReduceOp.check_shape.
  if (width > 1 && !fused_.has_value() &&
      (x_.nd <= (is_by_rank(spec_.verb) ? 1 : 0) || x_.shape[x_.nd - 1] != static_cast<Py_ssize_t>(width)))
    throw LeftToReference();
  decision_ = verb_group_.decisions.find(key);
  if (decision_ == nullptr) decision_ = decide(key, given, x_.dtype, {x_.shape, static_cast<size_t>(x_.nd)});
  if (decision_->program == nullptr && !decision_->library.is_valid()) throw LeftToReference();
  // A longer one does not fit into a fingerprint, or into 64 bits.
  if (x_.count >= count_any || (decision_->program != nullptr && !decision_->program->accepts(counts())))
    throw LeftToReference();
  fingerprint_ = decision_->fingerprint.with(x_.count, hash_of_call());
}

// Of what ranks compare beside the decision and the count.
uint32_t ParsedCall::hash_of_call() const {
  if (fused_.has_value()) return Fingerprint::hash_of(verb_group_.fingerprint_seed, fused_->compared());
  if (parts_.has_value() && !parts_->is_even())
    return Fingerprint::hash_of(verb_group_.fingerprint_seed, parts_->elements());
  const std::span<const Py_ssize_t> dims(x_.shape, decision_->is_shape_compared ? static_cast<size_t>(x_.nd) : 0);
  return Fingerprint::hash_of(verb_group_.fingerprint_seed, dims);
}

// Whether its end shows that every rank has made the same call: what ends here has come from all of them.
bool ParsedCall::shows_all() const {
  const Counts given = counts();
  return decision_->is_synchronizing && std::all_of(given.at, given.at + given.size, [](uint64_t n) { return n != 0; });
}

// What a report says of its arrays.
void Call::note_lengths(const Argument& shown, CallLog::Lengths& lengths) const {
  lengths.are_known = true;
  if (fused_.has_value()) {
    lengths.of = fused_->lengths();
  } else if (parts_.has_value()) {
    const auto elements = parts_->elements();
    lengths.of.assign(elements.begin(), elements.end());
  } else {
    lengths.of.assign(shown.shape, shown.shape + shown.nd);
  }
}

const Decision* ParsedCall::decide(const DecisionKey& key, const Given& given, uint8_t given_dtype,
                                   std::span<const Py_ssize_t> dims) {
  ++verb_group_.decided;
  nb::object shape = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(dims.size())));
  for (size_t i = 0; i < dims.size(); ++i)
    PyTuple_SET_ITEM(shape.ptr(), static_cast<Py_ssize_t>(i), PyLong_FromSsize_t(dims[i]));
  const nb::object op = op_ == OpNames::none ? nb::none() : op_names.name_of(op_);
  PyObject* const algorithm = given[Parameter::algorithm];
  nb::list lengths;
  if (fused_.has_value())
    for (const std::int64_t length : fused_->lengths()) lengths.append(length);
  if (parts_.has_value())
    for (const std::int64_t length : parts_->elements()) lengths.append(length);
  const nb::object decided = adoption_.attr("decide")(
      spec_.name, given_dtype == untyped ? int{plain_bytes} : int{given_dtype}, op, root_,
      algorithm == nullptr ? nb::str("auto") : nb::borrow<nb::str>(algorithm), shape, nb::tuple(lengths));
  return keep_decision(key, given_dtype, decided);
}

const Decision* ParsedCall::keep_decision(const DecisionKey& key, uint8_t given_dtype, nb::handle decided) {
  auto decision = std::make_unique<Decision>();
  if (decided.is_none()) {
    Py_XINCREF(key.algorithm);
    return verb_group_.decisions.add(key, std::move(decision));
  }
  const nb::tuple values = nb::cast<nb::tuple>(decided);
  if (PyCallable_Check(nb::object(values[0]).ptr()))
    decision->library = values[0];
  else
    decision->program = program_of(values[0]);
  decision->piece_elements = nb::cast<uint64_t>(values[1]);
  decision->fingerprint = fingerprint_of(nb::cast<nb::bytes>(values[2]));
  decision->is_shape_compared = nb::cast<bool>(values[6]);
  decision->is_synchronizing = nb::cast<bool>(values[7]);
  const int code = nb::cast<int>(values[3]);
  const bool is_half =
      given_dtype == static_cast<uint8_t>(DType::float16) || given_dtype == static_cast<uint8_t>(DType::bfloat16);
  decision->divisor = nb::cast<std::int64_t>(values[4]);
  const bool is_row = spec_.is_announced() && key.stage == 0;
  const uint8_t dtype = given_dtype == untyped || is_row    ? plain_bytes
                        : is_half && decision->divisor != 0 ? static_cast<uint8_t>(DType::float32)
                                                            : given_dtype;
  decision->dtype = dtype;
  if (code >= 0) decision->kernel = active_kernels().reduce[dtype][code];
  decision->itemsize = item_bytes(dtype, code);
  const nb::bytes identity = nb::cast<nb::bytes>(values[5]);
  decision->identity.assign(identity.c_str(), identity.size());
  // What a library does is not known.
  decision->writes_out =
      decision->program == nullptr ||
      std::any_of(decision->program->steps.begin(), decision->program->steps.end(),
                  [](const SymbolicStep& step) { return step.step != Step::send && step.dst_buf == Buffer::out; });
  if (decision->program != nullptr && decision->program->reduces && decision->kernel == nullptr)
    throw nb::value_error("the operation is not defined for the dtype");
  // The classes above it for which Python would decide the same.
  const int last = key.size_class + std::min(nb::cast<int>(values[8]), Fingerprint::count_bits - key.size_class);
  for (DecisionKey alike = key; ++alike.size_class <= last;) {
    Py_XINCREF(key.algorithm);
    verb_group_.decisions.add(alike, std::make_unique<Decision>(*decision));
  }
  Py_XINCREF(key.algorithm);
  return verb_group_.decisions.add(key, std::move(decision));
}

void ParsedCall::check_out(const Py_ssize_t* shape, int nd) const {
  if (out_.is_number() || out_.dtype != x_.dtype || out_.nd != nd) throw LeftToReference();
  for (int i = 0; i < nd; ++i)
    if (out_.shape[i] != shape[i]) throw LeftToReference();
  const bool overlap =
      x_.count != 0 && out_.count != 0 && x_.data < out_.data + out_.nbytes() && out_.data < x_.data + x_.nbytes();
  if (overlap && !is_own_slot()) throw LeftToReference();
}

// Whether x is where the result of a gather has it: nothing is to be copied. Libraries ask for other arguments then.
bool ParsedCall::is_own_slot() const {
  const bool gathers = spec_.verb == Verb::all_gather || spec_.verb == Verb::gather;
  return gathers && decision_->program != nullptr &&
         x_.data == out_.data + static_cast<uint64_t>(verb_group_.rank) * x_.nbytes();
}

void ParsedCall::find_target(const Given&) {
  const Verb verb = spec_.verb;
  const bool is_root = root_ == verb_group_.rank;
  if (verb == Verb::barrier) return;
  const bool is_reduced_whole = verb == Verb::all_reduce || verb == Verb::reduce;
  if (verb == Verb::broadcast || (is_reduced_whole && !out_.is_given())) {
    target_ = x_.data;
    target_count_ = x_.count;
    return;
  }
  if (verb == Verb::gather && !is_root) return;
  Py_ssize_t shape[Argument::dims_max + 1];
  int nd = 0;
  if (verb == Verb::all_gather || verb == Verb::gather || verb == Verb::split) shape[nd++] = verb_group_.size;
  if (parts_.has_value()) shape[nd++] = parts_->rows(verb_group_.rank);
  for (int i = verb == Verb::reduce_scatter || parts_.has_value() ? 1 : 0; i < x_.nd; ++i) shape[nd++] = x_.shape[i];
  target_count_ = 1;
  for (int i = 0; i < nd; ++i) target_count_ *= static_cast<uint64_t>(shape[i]);
  if (out_.is_given()) {
    check_out(shape, nd);
    target_ = out_.data;
    if (is_reduced_whole && x_.count != 0) {
      std::optional<GilReleased> released;
      if (x_.nbytes() >= gil_release_bytes) released.emplace();
      std::memcpy(target_, x_.data, x_.nbytes());
    }
    return;
  }
  is_result_scalar_ = nd == 0;
  result_ = verb_group_.arguments.make(x_, shape, nd);
  target_ = result_.data;
}

void Call::keep() {
  if (x_.is_given()) x_.keep();
  if (out_.is_given()) out_.keep();
}

// ---- running ----

PyObject* LibraryCall::run(const Given& given, bool is_started) {
  // A library makes calls with equal lengths.
  if (is_started || !spec_.is_collective() || spec_.verb == Verb::split || spec_.is_announced() ||
      spec_.verb == Verb::all_reduce_many || spec_.verb == Verb::reduce_scatter_v)
    throw LeftToReference();
  read_timeout(given[Parameter::timeout]);
  prepare_collective(given);
  find_site();
  if (!verb_group_.call_log.fast_path_open) throw LeftToReference();
  nb::object operand = nb::none(), result = nb::none();
  if (x_.is_given() && !is_in_place()) operand = x_.array();
  if (target_ != nullptr && (is_in_place() || spec_.verb != Verb::reduce))
    result = result_.object.is_valid() ? result_.object : (out_.is_given() ? out_ : x_).array();
  const nb::object timeout =
      timeout_ns_ >= 0 ? nb::object(nb::float_(static_cast<double>(timeout_ns_) / 1e9)) : nb::none();
  const nb::object has_run = decision_->library(adoption_, count_, bytes_of(fingerprint_), operand, result,
                                                code_.is_valid() ? code_ : nb::none(), instruction_, timeout);
  if (!nb::cast<bool>(has_run)) throw LeftToReference();
  ++verb_group_.ended;
  return give();
}

uint64_t Call::poll_bytes() const {
  if (announced_) return stage() == 0 ? std::max(count_, target_count_) : announced_->bytes;
  if (!is_collective()) return std::max(x_.is_given() ? x_.nbytes() : 0, out_.is_given() ? out_.nbytes() : 0);
  return x_.is_given() ? std::max(x_.nbytes(), target_count_ * itemsizes[x_.dtype]) : 0;
}

// The caller holds the engine's lock and the GIL.
void Call::begin() {
  if (is_collective()) return begin_collective();
  if (spec_.sends()) begin_send();
  if (spec_.receives()) begin_receive();
}

void Call::begin_collective() {
  Stage stage;
  stage.context = group_.context;
  stage.dtype = decision_->dtype;
  stage.itemsize = decision_->itemsize;
  stage.kernel = decision_->kernel;
  stage.window = group_.window;
  const bool has_no_in = is_in_place();
  if (!has_no_in) stage.in = x_.data;
  if (has_no_in || spec_.verb != Verb::reduce) stage.out = target_;
  if (announced_) {
    stage.in = const_cast<byte*>(in_);
    stage.in_parts = announced_->sent_from;
    if (this->stage() == 0) stage.row_bytes = announced_->row_bytes;
  }
  if (byte* const wide = wide_.get(); wide != nullptr) {
    if (stage.in != nullptr) stage.in = wide;
    if (stage.out != nullptr) stage.out = has_no_in ? wide : wide + x_.count * sizeof(float);
  }
  if (this->stage() == 0) sequence_ = group_.call_log.next++;
  stage.tag = tag_of(sequence_) + this->stage();
  const Counts given = counts();
  stage.counts = given.at;
  stage.counts_n = given.size;
  stage.is_even = given.is_even;
  stage.piece_elements = decision_->piece_elements;
  stage.peers = group_.rank_map->translation();
  Run& run = group_.completions.make_run();
  operations_[started_] = &run;
  handles_[started_++] = run.handle;
  run.is_watched = true;
  run.fingerprint = fingerprint_;
  run.phase = Operation::Phase::starting;
  run.bind(decision_->program, stage);
  // A group's first call of a class waits for its receivers: where programs differ from the start, it ends with the
  // error.
  run.start(group_.count_run_ahead(run, group_.takes_first_call(*decision_) ? UINT64_MAX : poll_bytes()));
  if (run.phase == Operation::Phase::starting) run.phase = Operation::Phase::active;
}

bool Call::is_poll_over() const {
  if (has_ended() || wants_memory()) return true;
  if (!spec_.is_open_ended()) return false;
  const auto& receive = static_cast<const ReceiveOperation&>(*operations_[0]);
  return receive.is_matched && receive.matched.nbytes > poll_bytes_max;
}

bool Call::begin_and_poll(bool is_blocking) {
  // Released only after the call has started, because releasing it may run arbitrary Python.
  nb::object replaced;
  if (is_collective()) {
    const CallLog::Site site{code_.release().ptr(), instruction_};
    replaced = nb::steal(static_cast<PyObject*>(group_.call_log.remember(group_.call_log.next, fingerprint_, site)));
    const Argument& shown = announced_ && announced_->part_count != 0 ? announced_->parts[0] : x_;
    if (shown.is_given()) note_lengths(shown, group_.call_log.lengths());
  }
  const Hold held = group_.completions.engine().hold();
  if (Users* const users = group_.completions.engine().users(); users != nullptr) users->note(true);
  begin();
  if (is_blocking) poll_if_short();
  return has_ended() && take();
}

void Call::poll_if_short() {
  if (!has_ended() && poll_bytes() <= poll_bytes_max)
    group_.completions.poll_briefly([this] { return is_poll_over(); });
}

void Call::catch_up() {
  if (is_collective()) dispatch_completions();
  if (!is_open()) throw LeftToReference();
}

void Call::dispatch_completions() {
  if (!group_.completions.has_undispatched()) [[likely]]
    return;
  try {
    adoption_.attr("catch_up")();
  } catch (...) {
    leave_dispatch();
    throw;
  }
}

void Call::leave_dispatch() {
  const Hold held = group_.completions.engine().hold();
  group_.completions.leave_dispatch_to_pump();
}

// True if it needs nothing of Python but that it dispatches what has come for others.
bool Call::is_uninterrupted(const CallLog::InFlightCall& flight) const {
  return is_open() && !flight.is_recalled.load(std::memory_order_relaxed) && !group_.completions.engine().is_closed();
}

bool Call::take() {
  for (unsigned i = 0; i < started_; ++i)
    if (operations_[i]->outcome != Outcome::done) return false;
  for (unsigned i = 0; i < started_; ++i) {
    Operation& op = *operations_[i];
    if (op.is_receive) take_received(static_cast<ReceiveOperation&>(op));
    group_.completions.recycle(op);
  }
  started_ = 0;
  if (is_collective()) {
    if (stage() == 0 && shows_all()) ++group_.call_log.agreed;
    if (const UnexpectedMessage* const first =
            group_.completions.first_unmet(group_.context, tag_of(sequence_) + stage());
        first != nullptr) [[unlikely]]
      unclaimed_.emplace(first->envelope);
  }
  ++group_.ended;
  return true;
}

std::int64_t Call::begun_at() {
  if (begun_at_ == 0) begun_at_ = now_ns();
  return begun_at_;
}

// A collective is compared with those of the ranks that it waits for, whether a thread waits or not. Of a message there
// is nothing to find out but that a thread waits for it too long.
std::int64_t Call::attention_at() {
  const bool has_begun = begun_at_ != 0;
  const std::int64_t begun = begun_at(), deadline = timeout_ns_ >= 0 ? begun + timeout_ns_ : never;
  if (is_collective()) return std::min(deadline, begun + group_.stall_ns);
  return std::min(deadline, (has_begun ? now_ns() : begun) + group_.message_stall_ns);
}

std::int64_t Call::pump_at() {
  const std::int64_t begun = begun_at();
  if (!is_collective()) return timeout_ns_ >= 0 ? begun + timeout_ns_ : never;
  const std::int64_t at = attention_at();
  return announced_ || spec_.verb == Verb::split ? std::min(at, begun + second_stage_ns) : at;
}

Call::Waited Call::wait(std::int64_t limit_ns) {
  const std::int64_t attention = attention_at();
  CallLog::InFlightCall flight{sequence_, group_.completions, handles_[0]};
  group_.call_log.flights.push_back(&flight);
  Waited waited = Waited::attention;
  for (;;) {
    bool has_other = false, is_wanting = false;
    std::int64_t now;
    {
      const GilReleased released;
      Hold held = group_.completions.engine().hold();
      now = now_ns();
      has_other = group_.completions.wait_until(
          held, [this] { return has_ended() || wants_memory(); }, std::min({now + slice_ns, attention, limit_ns}),
          flight.is_recalled);
      now = now_ns();
    }
    {
      const Hold held = group_.completions.engine().hold();
      if (started_ == 0) {
        waited = Waited::elsewhere;
        break;
      }
      if (has_ended()) {
        if (take()) waited = Waited::taken;
        break;
      }
      is_wanting = wants_memory();
    }
    if (is_wanting) supply_memory();
    if (PyErr_CheckSignals() != 0) {
      waited = Waited::interrupted;
      break;
    }
    if (now >= attention) break;
    if (has_other) {
      if (!is_uninterrupted(flight)) break;
      try {
        dispatch_completions();
      } catch (nb::python_error& error) {
        error.restore();
        waited = Waited::interrupted;
        break;
      }
      if (!is_uninterrupted(flight)) break;
    }
    if (now >= limit_ns) {
      waited = Waited::limit;
      break;
    }
  }
  std::erase(group_.call_log.flights, &flight);
  if (waited != Waited::taken) leave_dispatch();
  return waited;
}

bool Call::poll(unsigned idle_polls) {
  if (idle_polls % 8 == 7) {
    // Nothing came for several looks: let others have the GIL and the core, as long as a wait would.
    const GilReleased released;
    Hold held = group_.completions.engine().hold();
    static const std::atomic<bool> never_recalled{false};
    const std::int64_t pause = std::min<std::int64_t>(poll_ns_max, std::int64_t{idle_polls} * 1000);
    group_.completions.wait_until(held, [this] { return has_ended(); }, now_ns() + pause, never_recalled);
    group_.completions.leave_dispatch_to_pump();
  }
  const Hold held = group_.completions.engine().hold();
  if (started_ != 0 && !has_ended()) group_.completions.engine().poll_briefly([this] { return has_ended(); });
  return started_ != 0 && has_ended() && take();
}

bool Call::take_ended() {
  const Hold held = group_.completions.engine().hold();
  return started_ != 0 && has_ended() && take();
}

void Call::observe(Observer& observer) {
  const Hold held = group_.completions.engine().hold();
  group_.completions.observe(observer, operations_, started_);
}

void Call::forget(Observer& observer) {
  const Hold held = group_.completions.engine().hold();
  group_.completions.forget(observer, operations_, started_);
}

bool Call::has_failed() {
  const Hold held = group_.completions.engine().hold();
  return started_ != 0 && has_ended() && std::any_of(operations_, operations_ + started_, [](const Operation* op) {
           return op->outcome != Outcome::done;
         });
}

nb::object Call::adopt(const char* how, nb::object keeper) {
  ++group_.adopted;
  begun_at();
  unsigned count;
  {
    // From here on another thread that waits for it finds nothing of it in the engine. Before any object is made: that
    // may run the garbage collector, and so let another thread take what has ended.
    const Hold held = group_.completions.engine().hold();
    count = std::exchange(started_, 0);
    group_.completions.engine().wake_waiters();
  }
  try {
    return hand_over(how, std::move(keeper), count);
  } catch (...) {
    release(count);
    throw;
  }
}

nb::object Call::hand_over(const char* how, nb::object keeper, unsigned count) {
  nb::list operations;
  for (unsigned i = 0; i < count; ++i) {
    const Operation& op = *operations_[i];
    if (op.is_run) {
      operations.append(nb::make_tuple("collective", handles_[i]));
      continue;
    }
    operations.append(message_of(i));
  }
  const auto object_of = [](const Argument& argument) {
    return argument.is_given() ? nb::borrow(argument.given) : nb::object(nb::none());
  };
  const auto or_none = [](const nb::object& object) { return object.is_valid() ? object : nb::object(nb::none()); };
  nb::object result = or_none(result_.object);
  if (stage() != 0) result = nb::make_tuple(result, or_none(announced_->sent), or_none(announced_->received.object));
  const nb::object out = announced_ && announced_->outs ? announced_->given_outs : object_of(out_);
  const nb::object memory = nb::make_tuple(announced_ ? announced_parts() : object_of(x_), out, result, keeper);
  // Python runs the second stage, if it has not begun.
  const nb::object root = announced_ && stage() == 0 ? nb::object(nb::int_(root_)) : nb::none();
  const nb::object algorithm =
      announced_ && announced_->algorithm != nullptr ? nb::borrow(announced_->algorithm) : nb::object(nb::str("auto"));
  const nb::object sequence = sequence_ == CallLog::no_sequence ? nb::none() : nb::object(nb::int_(sequence_));
  const nb::object header = decision_ != nullptr ? nb::object(bytes_of(fingerprint_)) : nb::none();
  const nb::object timeout =
      timeout_ns_ >= 0 ? nb::object(nb::float_(static_cast<double>(timeout_ns_) / 1e9)) : nb::none();
  const nb::object method = nb::steal(interned(how));
  const nb::float_ begun_at(static_cast<double>(begun_at_) / 1e9);
  PyObject* const args[] = {adoption_.ptr(), spec_.word,       sequence.ptr(), header.ptr(), begun_at.ptr(),
                            timeout.ptr(),   operations.ptr(), memory.ptr(),   root.ptr(),   algorithm.ptr()};
  PyObject* const carried = call_method(method.ptr(), args, std::size(args));
  if (carried == nullptr) throw nb::python_error();
  return nb::steal(carried);
}

// The engine must not touch the memory after the return. An exception may have left Python before it had the call in
// hand, or while it was cancelling it: then Python adopts what is still under way, and is notified of its end.
void Call::release(unsigned count) {
  const GilReleased released;
  CompletionQueue& completions = group_.completions;
  Engine& engine = completions.engine();
  Hold held = engine.hold();
  for (unsigned i = 0; i < count; ++i) {
    if (Operation* const op = completions.active(handles_[i]); op != nullptr) {
      completions.withdraw(*op);
      engine.wait(held, [&] { return completions.active(handles_[i]) == nullptr || engine.is_closed(); }, never);
    }
    if (Operation* const op = completions.watched(handles_[i]); op != nullptr) completions.recycle(*op);
  }
}

// ---- results ----

// Python has made what a message or a split gives, and that of a call whose second stage it has run.
PyObject* Call::finish_adopted(nb::object result) {
  if (spec_.verb == Verb::broadcast_object && root_ == group_.rank) return Py_NewRef(announced_->value.ptr());
  if (announced_ && stage() == 0) return finish_announced(std::move(result));
  const bool is_made = !is_collective() || spec_.verb == Verb::split;
  return is_made ? result.release().ptr() : finish();
}

// One item, then twice as many again and again up to a page, which stays in the cache while it is copied.
void ParsedCall::fill_with_identity() {
  constexpr uint64_t page = 4096;
  const uint64_t nbytes = x_.nbytes();
  std::optional<GilReleased> released;
  if (nbytes >= gil_release_bytes) released.emplace();
  uint64_t filled = std::min<uint64_t>(decision_->identity.size(), nbytes);
  std::memcpy(target_, decision_->identity.data(), filled);
  for (uint64_t more = 0; filled < nbytes; filled += more) {
    more = std::min({filled, nbytes - filled, page});
    std::memcpy(target_ + filled, target_, more);
  }
}

PyObject* Call::finish() {
  if (unclaimed_.has_value()) [[unlikely]] {
    // A message waits for a call that has been made here: Python compares, and raises if it was another.
    const CompletionQueue::Unclaimed unclaimed = *unclaimed_;
    unclaimed_.reset();
    adoption_.attr("check_unclaimed")(unclaimed.source, unclaimed.sequence,
                                      nb::bytes(unclaimed.header.data(), unclaimed.header.size()));
  }
  if (announced_)
    return finish_announced(stage() == 0 ? std::move(announced_->result) : nb::steal(finish_second_stage()));
  switch (spec_.verb) {
    case Verb::send:
    case Verb::send_object: Py_RETURN_NONE;
    case Verb::split: return make_group().release().ptr();
    case Verb::recv:
    case Verb::recv_bytes:
    case Verb::sendrecv:
    case Verb::recv_object:
    case Verb::probe: return received().release().ptr();
    default: return give();
  }
}

PyObject* ParsedCall::give() {
  const bool is_root = root_ == verb_group_.rank;
  if (decision_->divisor != 0 && (spec_.verb != Verb::reduce || is_root)) {
    std::optional<GilReleased> released;
    if (target_count_ * itemsizes[x_.dtype] >= gil_release_bytes) released.emplace();
    byte* const wide = wide_.get();
    byte* const sum = wide == nullptr ? target_ : wide + (wide_count_ - target_count_) * sizeof(float);
    active_kernels().divide[decision_->dtype](sum, target_count_, decision_->divisor);
    if (wide != nullptr) active_kernels().narrow[x_.dtype](target_, sum, target_count_);
  }
  switch (spec_.verb) {
    case Verb::barrier: Py_RETURN_NONE;
    case Verb::broadcast: return Arguments::give_back(x_);
    case Verb::reduce:
      if (!is_root) Py_RETURN_NONE;
      [[fallthrough]];
    case Verb::all_reduce:
      if (out_.is_given()) return Py_NewRef(out_.given);
      return Arguments::give_back(x_);
    case Verb::all_reduce_many: fused_->part(target_); return fused_->give_back();
    case Verb::gather:
      if (!is_root) Py_RETURN_NONE;
      break;
    case Verb::exscan:
      if (verb_group_.rank == 0) fill_with_identity();
      break;
    default: break;
  }
  if (out_.is_given()) return Py_NewRef(out_.given);
  return verb_group_.arguments.give(x_, result_, is_result_scalar_);
}

// The communicator that a split makes on this rank, from the rows of all. A started split that needs a second attempt
// gives the work that makes it.
nb::object Call::make_group() {
  const nb::object timeout =
      timeout_ns_ >= 0 ? nb::object(nb::float_(static_cast<double>(timeout_ns_) / 1e9)) : nb::none();
  return adoption_.attr("make_group")(sequence_, nb::borrow(x_.given), result_.object, timeout, is_started_);
}

}  // namespace unisono
