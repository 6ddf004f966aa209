#include "python/call.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>

#include "engine/engine.hpp"
#include "kernels/isa.hpp"
#include "python/fingerprint_bytes.hpp"
#include "python/unwinding.hpp"

namespace unisono {

using namespace engine;

std::shared_ptr<const Program> program_of(nb::handle program);

OpNames op_names;

namespace {

// How often a thread that waits looks for signals.
constexpr std::int64_t slice_ns = 50 * millisecond;
// Up to this many bytes a call first looks for its end with the GIL held: letting go and taking it back costs as much
// as the rest of the call, and others wait for microseconds.
constexpr uint64_t poll_bytes_max = 16 * 1024;
constexpr uint64_t gil_release_bytes = 32 * 1024;
// fingerprint.COUNT_ANY
constexpr uint64_t count_any = (uint64_t{1} << Fingerprint::count_bits) - 1;
// The longest that `done` waits in the engine, for a call that it has found unfinished again and again.
constexpr std::int64_t poll_ns_max = 100'000;

bool is_by_rank(Verb verb) { return verb == Verb::reduce_scatter || verb == Verb::all_to_all; }

}  // namespace

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

bool Given::bind(const VerbSpec& spec, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  if (static_cast<size_t>(count) > spec.positional) return false;
  for (Py_ssize_t i = 0; i < count; ++i) (*this)[spec.parameters[static_cast<size_t>(i)].parameter] = args[i];
  const Py_ssize_t named = names != nullptr ? PyTuple_GET_SIZE(names) : 0;
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const word = PyTuple_GET_ITEM(names, i);
    const auto known = std::find_if(spec.parameters.begin(), spec.parameters.end(),
                                    [&](const VerbSpec::Named& one) { return one.word == word; });
    if (known == spec.parameters.end() || (*this)[known->parameter] != nullptr) return false;
    (*this)[known->parameter] = args[count + i];
  }
  return true;
}

// ---- arguments ----

void Call::prepare(const Given& given, bool is_started) {
  read_timeout(given[Parameter::timeout]);
  if (spec_.verb == Verb::split) {
    if (is_started) throw LeftToReference();  // its group is made when it ends, not when a thread waits for it
    prepare_split(given);
  } else if (is_collective())
    prepare_collective(given);
  else
    prepare_message(given);
  if (!is_collective() && !is_started) return;
  // Where the program is. Before the group is looked at: it may make an object, and so run any code.
  if (PyFrameObject* const frame = PyEval_GetFrame(); frame != nullptr) {
    code_ = nb::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
    instruction_ = PyFrame_GetLasti(frame);
  }
}

void Call::read_timeout(PyObject* timeout) {
  timeout_ns_ = group_.deadline_ns;
  if (timeout == nullptr || timeout == Py_None) return;
  double seconds = -1;
  if (PyFloat_CheckExact(timeout)) {
    seconds = PyFloat_AS_DOUBLE(timeout);
  } else if (PyLong_CheckExact(timeout)) {
    int overflow = 0;
    const long whole = PyLong_AsLongAndOverflow(timeout, &overflow);
    if (overflow == 0) seconds = static_cast<double>(whole);
  }
  if (!(seconds >= 0)) throw LeftToReference();  // refuses it
  if (seconds >= 1e9) {                          // longer than any program runs
    timeout_ns_ = -1;
    return;
  }
  timeout_ns_ = static_cast<std::int64_t>(seconds * 1e9);
}

std::int32_t Call::rank_of(PyObject* rank) const {
  if (rank == nullptr || !PyLong_CheckExact(rank)) throw LeftToReference();
  int overflow = 0;
  const long number = PyLong_AsLongAndOverflow(rank, &overflow);
  if (overflow != 0 || number < 0 || number >= group_.size) throw LeftToReference();
  return static_cast<std::int32_t>(number);
}

std::int64_t Call::tag_of_user(PyObject* tag, bool takes_any) const {
  if (tag == nullptr) return takes_any ? -1 : 0;
  if (takes_any && tag == group_.any.ptr()) return -1;
  if (!PyLong_CheckExact(tag)) throw LeftToReference();
  int overflow = 0;
  const long number = PyLong_AsLongAndOverflow(tag, &overflow);
  if (overflow != 0 || number < 0 || static_cast<uint64_t>(number) >= user_tags) throw LeftToReference();
  return number;
}

void Call::prepare_message(const Given& given) {
  const Verb verb = spec_.verb;
  if (verb != Verb::recv) {
    PyObject* const data = given[Parameter::x];
    if (data == nullptr) throw LeftToReference();
    dst_ = rank_of(given[Parameter::dst]);
    if (!group_.is_introduced(static_cast<size_t>(dst_))) throw LeftToReference();
    group_.arguments.see(data, "data", false, x_);
  }
  tag_ = tag_of_user(given[Parameter::tag], verb == Verb::recv);
  if (verb == Verb::send) return;
  PyObject* const buf = given[Parameter::out];
  if (buf == nullptr) throw LeftToReference();
  PyObject* const src = given[Parameter::src];
  if (src == nullptr && verb == Verb::sendrecv) throw LeftToReference();
  src_ = src == nullptr || src == group_.any.ptr() ? any_source : rank_of(src);
  group_.arguments.see(buf, "buf", true, out_);
  if (out_.is_number()) throw LeftToReference();
  const bool overlap = x_.is_given() && x_.count != 0 && out_.count != 0 && x_.data < out_.data + out_.nbytes() &&
                       out_.data < x_.data + x_.nbytes();
  if (overlap) throw LeftToReference();
}

void Call::prepare_collective(const Given& given) {
  const Verb verb = spec_.verb;
  root_ = given[Parameter::root] == nullptr ? 0 : rank_of(given[Parameter::root]);
  const bool is_root = root_ == group_.rank;
  const bool reduces = verb == Verb::all_reduce || verb == Verb::reduce || verb == Verb::reduce_scatter ||
                       verb == Verb::scan || verb == Verb::exscan;
  if (reduces) op_ = op_names.number_of(given[Parameter::op]);
  if (verb != Verb::barrier) {
    PyObject* const x = given[Parameter::x];
    if (x == nullptr) throw LeftToReference();
    PyObject* const out = given[Parameter::out];
    const bool has_out = out != nullptr && out != Py_None;
    const bool is_written =
        (verb == Verb::all_reduce && !has_out) || verb == Verb::broadcast || (verb == Verb::reduce && is_root);
    try {
      group_.arguments.see(x, "x", is_written, x_);
    } catch (nb::python_error&) {
      // A root may broadcast what it cannot write. With some algorithms it gets parts of it back: not into its memory.
      if (verb == Verb::broadcast && is_root) throw LeftToReference();
      throw;
    }
    if (is_by_rank(verb) && (x_.nd == 0 || x_.shape[0] != group_.size)) throw LeftToReference();
    if (has_out && !(verb == Verb::gather && !is_root)) group_.arguments.see(out, "out", true, out_);
  }
  find_decision(given);
  find_target(given);
  if (x_.is_given() && decision_->dtype != x_.dtype) widen();
}

// The mean of 16-bit floats is computed in float32: reduced in memory of our own, and rounded in the end.
void Call::widen() {
  const bool is_in_place = spec_.verb != Verb::reduce_scatter;
  wide_.resize(x_.count + (is_in_place ? 0 : target_count_));
  std::optional<GilReleased> released;
  if (x_.nbytes() >= gil_release_bytes) released.emplace();
  active_kernels().widen[x_.dtype](reinterpret_cast<byte*>(wide_.data()),
                                   is_in_place && target_ != nullptr ? target_ : x_.data, x_.count);
}

// An all_gather of one row per rank, which Python writes and reads.
void Call::prepare_split(const Given& given) {
  static PyObject* const split_row = interned("split_row");
  PyObject* const color = given[Parameter::color];
  if (color == nullptr) throw LeftToReference();
  static PyObject* const zero = PyLong_FromLong(0);
  PyObject* const key = given[Parameter::key] == nullptr ? zero : given[Parameter::key];
  PyObject* const args[] = {helper_.ptr(), color, key};
  const nb::object row = nb::steal(PyObject_VectorcallMethod(split_row, args, 3, nullptr));
  if (!row.is_valid()) throw nb::python_error();
  group_.arguments.see(row.ptr(), "x", false, x_);
  x_.keep();
  find_decision(given);
  find_target(given);
}

void Call::find_decision(const Given& given) {
  DecisionKey key;
  key.verb = static_cast<uint8_t>(spec_.verb);
  key.dtype = x_.dtype;
  key.op = op_;
  key.root = root_;
  if (PyObject* algorithm = given[Parameter::algorithm]; algorithm != nullptr) {
    if (!PyUnicode_CheckExact(algorithm)) throw LeftToReference();
    if (!PyUnicode_CHECK_INTERNED(algorithm)) {
      Py_INCREF(algorithm);
      PyUnicode_InternInPlace(&algorithm);
      key.algorithm = algorithm;
      Py_DECREF(algorithm);
    } else {
      key.algorithm = algorithm;
    }
  }
  const uint64_t width = op_ == OpNames::none ? 1 : op_names.width_of(op_);
  count_ = x_.count / width / static_cast<uint64_t>(is_by_rank(spec_.verb) ? group_.size : 1);
  // As plans/choose.py counts: what is empty is a class of its own.
  key.size_class = count_ == 0 ? -1 : std::bit_width(count_ - 1);
  if (width > 1) {
    key.shape = static_cast<uint64_t>(x_.nd);
    for (int i = 0; i < x_.nd; ++i) key.shape = (key.shape ^ static_cast<uint64_t>(x_.shape[i])) * 0xd6e8feb86659fd93u;
  }
  decision_ = group_.decisions.find(key);
  is_first_ = decision_ == nullptr;
  if (is_first_) decision_ = decide(key, given);
  // A longer one does not fit into a fingerprint, or into 64 bits.
  if (x_.count >= count_any || !decision_->program->accepts(counts())) throw LeftToReference();
  const std::span<const Py_ssize_t> dims(x_.shape, decision_->is_shape_compared ? static_cast<size_t>(x_.nd) : 0);
  fingerprint_ = decision_->fingerprint.with(x_.count, Fingerprint::hash_of(decision_->seed, dims));
}

const Decision* Call::decide(const DecisionKey& key, const Given& given) {
  ++group_.decided;
  nb::object shape = nb::steal(PyTuple_New(x_.nd));
  for (int i = 0; i < x_.nd; ++i) PyTuple_SET_ITEM(shape.ptr(), i, PyLong_FromSsize_t(x_.shape[i]));
  const nb::object op = op_ == OpNames::none ? nb::none() : op_names.name_of(op_);
  PyObject* const algorithm = given[Parameter::algorithm];
  const nb::object decided =
      helper_.attr("decide")(spec_.name, x_.dtype == untyped ? int{plain_bytes} : int{x_.dtype}, op, root_,
                             algorithm == nullptr ? nb::str("auto") : nb::borrow<nb::str>(algorithm), shape);
  if (decided.is_none()) throw LeftToReference();
  const nb::tuple values = nb::cast<nb::tuple>(decided);
  auto decision = std::make_unique<Decision>();
  decision->program = program_of(values[0]);
  decision->piece_elements = nb::cast<uint64_t>(values[1]);
  decision->fingerprint = fingerprint_of(nb::cast<nb::bytes>(values[2]));
  decision->seed = nb::cast<uint64_t>(values[3]);
  decision->is_shape_compared = nb::cast<bool>(values[7]);
  const int code = nb::cast<int>(values[4]);
  const bool is_half =
      x_.dtype == static_cast<uint8_t>(DType::float16) || x_.dtype == static_cast<uint8_t>(DType::bfloat16);
  decision->divisor = nb::cast<std::int64_t>(values[5]);
  const uint8_t dtype = x_.dtype == untyped                 ? plain_bytes
                        : is_half && decision->divisor != 0 ? static_cast<uint8_t>(DType::float32)
                                                            : x_.dtype;
  decision->dtype = dtype;
  if (code >= 0) decision->kernel = active_kernels().reduce[dtype][code];
  decision->itemsize = item_bytes(dtype, code);
  const nb::bytes identity = nb::cast<nb::bytes>(values[6]);
  decision->identity.assign(identity.c_str(), identity.size());
  if (decision->program->reduces && decision->kernel == nullptr)
    throw nb::value_error("the operation is not defined for the dtype");
  Py_XINCREF(key.algorithm);
  return group_.decisions.add(key, std::move(decision));
}

void Call::check_out(const Py_ssize_t* shape, int nd) const {
  if (out_.is_number() || out_.dtype != x_.dtype || out_.nd != nd) throw LeftToReference();
  for (int i = 0; i < nd; ++i)
    if (out_.shape[i] != shape[i]) throw LeftToReference();
  const bool overlap =
      x_.count != 0 && out_.count != 0 && x_.data < out_.data + out_.nbytes() && out_.data < x_.data + x_.nbytes();
  if (overlap) throw LeftToReference();
}

void Call::find_target(const Given&) {
  const Verb verb = spec_.verb;
  const bool is_root = root_ == group_.rank;
  if (verb == Verb::barrier) return;
  if (verb == Verb::broadcast || verb == Verb::reduce || (verb == Verb::all_reduce && !out_.is_given())) {
    target_ = x_.data;
    target_count_ = x_.count;
    return;
  }
  if (verb == Verb::gather && !is_root) return;
  Py_ssize_t shape[Argument::dims_max + 1];
  int nd = 0;
  if (verb == Verb::all_gather || verb == Verb::gather || verb == Verb::split) shape[nd++] = group_.size;
  for (int i = verb == Verb::reduce_scatter ? 1 : 0; i < x_.nd; ++i) shape[nd++] = x_.shape[i];
  target_count_ = 1;
  for (int i = 0; i < nd; ++i) target_count_ *= static_cast<uint64_t>(shape[i]);
  if (out_.is_given()) {
    check_out(shape, nd);
    target_ = out_.data;
    if (verb == Verb::all_reduce) std::memcpy(target_, x_.data, x_.nbytes());
    return;
  }
  is_result_scalar_ = nd == 0;
  result_ = group_.arguments.make(x_, shape, nd);
  target_ = result_.data;
}

void Call::keep() {
  if (x_.is_given()) x_.keep();
  if (out_.is_given()) out_.keep();
}

// ---- running ----

uint64_t Call::poll_bytes() const {
  if (!is_collective()) return std::max(x_.is_given() ? x_.nbytes() : 0, out_.is_given() ? out_.nbytes() : 0);
  return x_.is_given() ? std::max(x_.nbytes(), target_count_ * itemsizes[x_.dtype]) : 0;
}

// The caller holds the engine's lock and the GIL.
void Call::begin() {
  if (is_collective()) return begin_collective();
  if (spec_.verb != Verb::recv) begin_send();
  if (spec_.verb != Verb::send) begin_receive();
}

void Call::begin_collective() {
  Stage stage;
  stage.context = group_.context;
  stage.dtype = decision_->dtype;
  stage.itemsize = decision_->itemsize;
  stage.kernel = decision_->kernel;
  stage.window = group_.window;
  const Verb verb = spec_.verb;
  const bool is_in_place =
      verb == Verb::all_reduce || verb == Verb::broadcast || (verb == Verb::reduce && root_ == group_.rank);
  if (!is_in_place) stage.in = x_.data;
  if (is_in_place || verb != Verb::reduce) stage.out = target_;
  if (!wide_.empty()) {
    auto* const wide = reinterpret_cast<byte*>(wide_.data());
    if (stage.in != nullptr) stage.in = wide;
    if (stage.out != nullptr) stage.out = is_in_place ? wide : wide + x_.count * sizeof(float);
  }
  sequence_ = group_.call_log.next++;
  stage.tag = tag_of(sequence_);
  stage.counts = &count_;
  stage.counts_n = counts().size;
  stage.is_even = counts().is_even;
  stage.piece_elements = decision_->piece_elements;
  stage.members = group_.translation();
  Run& run = group_.completions.make_run();
  operations_[started_] = &run;
  handles_[started_++] = run.handle;
  run.is_watched = true;
  run.fingerprint = fingerprint_;
  run.phase = Operation::Phase::starting;
  run.bind(decision_->program, stage);
  // The first call of a class waits for its receivers: where programs differ from the start, it ends with the error.
  run.start(group_.count_run_ahead(run, is_first_ ? UINT64_MAX : poll_bytes()));
  if (run.phase == Operation::Phase::starting) run.phase = Operation::Phase::active;
}

void Call::begin_send() {
  SendOperation& op = group_.completions.make_send();
  operations_[started_] = &op;
  handles_[started_++] = op.handle;
  op.is_watched = true;
  op.context = group_.context;
  op.tag = static_cast<uint64_t>(tag_);
  op.data = x_.data;
  op.nbytes = x_.nbytes();
  op.header = nullptr;
  op.header_bytes = 0;
  op.dtype = x_.dtype;
  op.lane = Lane::bulk;
  op.sync = false;
  op.outcome = Outcome::closed;
  if (!group_.completions.start(op, group_.members[static_cast<size_t>(dst_)])) op.phase = Operation::Phase::ended;
}

void Call::begin_receive() {
  ReceiveOperation& op = group_.completions.make_receive();
  operations_[started_] = &op;
  handles_[started_++] = op.handle;
  op.is_watched = true;
  op.context = group_.context;
  op.source = src_ == any_source ? any_source : group_.members[static_cast<size_t>(src_)];
  op.any_tag = tag_ < 0;
  op.tag = static_cast<uint64_t>(tag_);
  op.into = out_.data;
  op.capacity = out_.nbytes();
  op.dtype = out_.dtype;
  op.is_probe = op.is_open_ended = op.in_order = false;
  op.outcome = Outcome::closed;
  if (!group_.completions.start(op)) op.phase = Operation::Phase::ended;
}

bool Call::begin_and_poll(bool is_blocking) {
  // Dropped when the call is under way: that may run any code.
  nb::object replaced;
  if (is_collective()) {
    const CallLog::Site site{code_.release().ptr(), instruction_};
    replaced = nb::steal(static_cast<PyObject*>(group_.call_log.remember(group_.call_log.next, fingerprint_, site)));
    if (x_.is_given()) {
      CallLog::Shape& shape = group_.call_log.shape();
      shape.nd = x_.nd;
      std::copy_n(x_.shape, x_.nd, shape.dims.begin());
    }
  }
  const Hold held = group_.completions.engine().hold();
  begin();
  if (is_blocking && !has_ended() && poll_bytes() <= poll_bytes_max)
    group_.completions.engine().poll_briefly([this] { return has_ended(); });
  return has_ended() && take();
}

void Call::look_at_news() {
  if (is_collective() && group_.completions.has_news()) helper_.attr("look_at_news")();
  if (!group_.call_log.fast_path_open) throw LeftToReference();
}

bool Call::take() {
  for (unsigned i = 0; i < started_; ++i)
    if (operations_[i]->outcome != Outcome::done) return false;
  for (unsigned i = 0; i < started_; ++i) {
    Operation& op = *operations_[i];
    if (op.is_receive) {
      auto& receive = static_cast<ReceiveOperation&>(op);
      source_ = receive.met.source;
      met_tag_ = receive.met.tag;
      met_bytes_ = receive.met.nbytes;
      if (!receive.header_held.empty()) header_.swap(receive.header_held);
    }
    group_.completions.recycle(op);
  }
  started_ = 0;
  if (is_collective())
    if (const UnexpectedMessage* const first = group_.completions.first_unmet(group_.context, tag_of(sequence_));
        first != nullptr) [[unlikely]]
      unclaimed_.emplace(first->envelope);
  ++group_.ended;
  return true;
}

std::int64_t Call::attention_at() {
  if (begun_at_ == 0) begun_at_ = now_ns();
  return begun_at_ + (timeout_ns_ >= 0 ? std::min(timeout_ns_, group_.stall_ns) : group_.stall_ns);
}

Call::Waited Call::wait(std::int64_t limit_ns) {
  const std::int64_t attention = attention_at();
  CallLog::InFlightCall flight{sequence_, group_.completions, handles_[0]};
  group_.call_log.flights.push_back(&flight);
  Waited waited = Waited::attention;
  for (;;) {
    bool has_other = false;
    std::int64_t now;
    {
      const GilReleased released;
      Hold held = group_.completions.engine().hold();
      now = now_ns();
      has_other = group_.completions.wait_until(
          held, [this] { return has_ended(); }, std::min({now + slice_ns, attention, limit_ns}), flight.is_recalled);
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
    }
    if (PyErr_CheckSignals() != 0) {
      waited = Waited::interrupted;
      break;
    }
    if (has_other || now >= attention) break;
    if (now >= limit_ns) {
      waited = Waited::limit;
      break;
    }
  }
  std::erase(group_.call_log.flights, &flight);
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
  attention_at();
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
    const Argument& argument = op.is_receive ? out_ : x_;
    const int flags = op.is_receive ? PyBUF_WRITE : PyBUF_READ;
    const nb::object memory = nb::steal(PyMemoryView_FromMemory(reinterpret_cast<char*>(argument.data),
                                                                static_cast<Py_ssize_t>(argument.nbytes()), flags));
    if (!memory.is_valid()) throw nb::python_error();
    operations.append(nb::make_tuple(op.is_receive ? "receive" : "send", handles_[i], op.is_receive ? src_ : dst_, tag_,
                                     memory, argument.dtype));
  }
  const auto object_of = [](const Argument& argument) {
    return argument.is_given() ? nb::borrow(argument.given) : nb::object(nb::none());
  };
  const nb::object memory =
      nb::make_tuple(object_of(x_), object_of(out_), result_.object.is_valid() ? result_.object : nb::none(), keeper);
  const nb::object sequence = sequence_ == CallLog::no_sequence ? nb::none() : nb::object(nb::int_(sequence_));
  const nb::object header = decision_ != nullptr ? nb::object(bytes_of(fingerprint_)) : nb::none();
  const nb::object timeout =
      timeout_ns_ >= 0 ? nb::object(nb::float_(static_cast<double>(timeout_ns_) / 1e9)) : nb::none();
  const nb::object method = nb::steal(interned(how));
  const nb::float_ begun_at(static_cast<double>(begun_at_) / 1e9);
  PyObject* const args[] = {helper_.ptr(),  spec_.word,    sequence.ptr(),   header.ptr(),
                            begun_at.ptr(), timeout.ptr(), operations.ptr(), memory.ptr()};
  PyObject* const carried = call_method(method.ptr(), args, std::size(args));
  if (carried == nullptr) throw nb::python_error();
  return nb::steal(carried);
}

// Nobody may touch the memory when we return. An exception may have left Python before it had the call in hand, or
// while it was cancelling it: then what is still under way is Python's, which hears of its end.
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

PyObject* Call::finish_adopted(nb::object result) { return is_collective() ? finish() : result.release().ptr(); }

// One item, then twice as many again and again.
void Call::fill_with_identity() {
  const uint64_t nbytes = x_.nbytes();
  uint64_t filled = std::min<uint64_t>(decision_->identity.size(), nbytes);
  std::memcpy(target_, decision_->identity.data(), filled);
  for (uint64_t more = 0; filled < nbytes; filled += more) {
    more = std::min(filled, nbytes - filled);
    std::memcpy(target_ + filled, target_, more);
  }
}

PyObject* Call::finish() {
  if (unclaimed_.has_value()) [[unlikely]] {
    // A message waits for a call that has been made here: Python compares, and raises if it was another.
    const CompletionQueue::Unclaimed unclaimed = *unclaimed_;
    unclaimed_.reset();
    helper_.attr("check_unclaimed")(unclaimed.source, unclaimed.sequence,
                                    nb::bytes(unclaimed.header.data(), unclaimed.header.size()));
  }
  const bool is_root = root_ == group_.rank;
  if (decision_ != nullptr && decision_->divisor != 0 && (spec_.verb != Verb::reduce || is_root)) {
    std::optional<GilReleased> released;
    if (target_count_ * itemsizes[x_.dtype] >= gil_release_bytes) released.emplace();
    byte* const sum = wide_.empty() ? target_ : reinterpret_cast<byte*>(wide_.data() + wide_.size() - target_count_);
    active_kernels().divide[decision_->dtype](sum, target_count_, decision_->divisor);
    if (!wide_.empty()) active_kernels().narrow[x_.dtype](target_, sum, target_count_);
  }
  switch (spec_.verb) {
    case Verb::barrier:
    case Verb::send: Py_RETURN_NONE;
    case Verb::split: return make_group().release().ptr();
    case Verb::recv:
    case Verb::sendrecv: return status().release().ptr();
    case Verb::broadcast: return Arguments::give_back(x_);
    case Verb::reduce:
      if (!is_root) Py_RETURN_NONE;
      return Arguments::give_back(x_);
    case Verb::all_reduce:
      if (out_.is_given()) return Py_NewRef(out_.given);
      return Arguments::give_back(x_);
    case Verb::gather:
      if (!is_root) Py_RETURN_NONE;
      break;
    case Verb::exscan:
      if (group_.rank == 0) fill_with_identity();
      break;
    default: break;
  }
  if (out_.is_given()) return Py_NewRef(out_.given);
  return group_.arguments.give(x_, result_, is_result_scalar_);
}

// The communicator that a split makes on this rank, from the rows of all.
nb::object Call::make_group() {
  const nb::object timeout =
      timeout_ns_ >= 0 ? nb::object(nb::float_(static_cast<double>(timeout_ns_) / 1e9)) : nb::none();
  return helper_.attr("make_group")(sequence_, nb::borrow(x_.given), result_.object, timeout);
}

nb::object Call::status() const {
  const std::int32_t rank = src_ != any_source ? src_ : group_.rank_of(source_);
  if (!header_.empty()) helper_.attr("check_introduction")(nb::bytes(header_.data(), header_.size()), rank);
  nb::object values = nb::steal(PyTuple_New(3));
  PyTuple_SET_ITEM(values.ptr(), 0, PyLong_FromLong(rank));
  PyTuple_SET_ITEM(values.ptr(), 1, PyLong_FromUnsignedLongLong(met_tag_));
  PyTuple_SET_ITEM(values.ptr(), 2, PyLong_FromUnsignedLongLong(met_bytes_));
  const nb::object only = nb::steal(PyTuple_Pack(1, values.ptr()));
  // Past the constructor that a named tuple has in Python.
  PyObject* const made = PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(group_.status.ptr()), only.ptr(), nullptr);
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

}  // namespace unisono
