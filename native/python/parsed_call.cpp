#include "python/parsed_call.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>

#include "collective/size_class.hpp"
#include "kernels/isa.hpp"
#include "python/fingerprint_bytes.hpp"
#include "python/gil_released.hpp"
#include "python/unwinding.hpp"
#include "python/user_files.hpp"

namespace unisono {

using namespace engine;

std::shared_ptr<const Program> program_of(nb::handle program);

namespace {

// unisono/comm/dispatch.py says what each is.
using Decided = std::tuple<nb::object, uint64_t, nb::bytes, int, std::int64_t, nb::bytes, bool, bool, int>;

}  // namespace

// ---- arguments ----

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
  root_ = given[Parameter::root] == nullptr ? 0 : rank_of(given[Parameter::root]);
  if (spec_.has(Fact::reduces)) op_ = op_names.number_of(given[Parameter::op]);
  if (!spec_.has(Fact::empty)) {
    PyObject* const x = given[Parameter::x];
    if (x == nullptr) throw LeftToReference();
    PyObject* const out = given[Parameter::out];
    const bool has_out = out != nullptr && out != Py_None && has_result();
    verb_group_.arguments.see(x, "x", is_in_place() && !has_out && !is_broadcast_here(), x_);
    if (spec_.has(Fact::by_rank) && (x_.nd == 0 || x_.shape[0] != verb_group_.size)) throw LeftToReference();
    if (has_out) verb_group_.arguments.see(out, "out", true, out_);
  }
  if (spec_.has(Fact::cut)) {
    if (given[Parameter::counts] == nullptr) throw LeftToReference();
    parts_.emplace().read(given[Parameter::counts], x_, verb_group_.size, op_names.width_of(op_));
  }
  find_decision(given);
  if (is_broadcast_here() && decision_->writes_out) check_root_is_writable(given[Parameter::x]);
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
  const bool has_target = spec_.has(Fact::in_place);
  const uint64_t more = has_target ? 0 : target_count_;
  wide_count_ = x_.count + more;
  wide_ = widened(x_.dtype, has_target && target_ != nullptr ? target_ : x_.data, x_.count, more);
}

// A copy in float32, with room for `more` elements behind it.
ResultMemory ParsedCall::widened(uint8_t dtype, const byte* from, uint64_t count, uint64_t more) {
  if (count + more == 0) return {};
  std::optional<GilReleased> released;
  if (count * itemsizes[dtype] >= gil_release_bytes) released.emplace();
  ResultMemory wide = ResultMemory::take((count + more) * sizeof(float));
  if (wide.get() == nullptr) {
    released.reset();
    PyErr_NoMemory();
    throw nb::python_error();
  }
  active_kernels().widen[dtype](wide.get(), from, count);
  return wide;
}

// Finish a mean: divide the sum, which is in `wide` if it was computed in float32, and round it.
void ParsedCall::divide(const Decision& decision, uint8_t dtype, byte* target, uint64_t count, byte* wide) {
  if (decision.divisor == 0) return;
  std::optional<GilReleased> released;
  if (count * itemsizes[dtype] >= gil_release_bytes) released.emplace();
  byte* const sum = wide == nullptr ? target : wide;
  active_kernels().divide[decision.dtype](sum, count, decision.divisor);
  if (wide != nullptr) active_kernels().narrow[dtype](target, wide, count);
}

// ---- the decision ----

void ParsedCall::find_decision(const Given& given) {
  DecisionKey key;
  key.verb = spec_.number;
  key.dtype = x_.dtype;
  key.op = op_;
  key.root = root_;
  key.algorithm = algorithm_of(given);
  const uint64_t width = op_ == OpNames::none ? 1 : op_names.width_of(op_);
  count_ = x_.count / width / static_cast<uint64_t>(spec_.has(Fact::by_rank) ? verb_group_.size : 1);
  key.size_class = parts_.has_value() ? parts_->size_class() : size_class(count_);
  // The last axis is one item, and no rank gets a part of one; the reference path refuses it. See ReduceOp.check_shape.
  if (width > 1 &&
      (x_.nd <= (spec_.has(Fact::by_rank) ? 1 : 0) || x_.shape[x_.nd - 1] != static_cast<Py_ssize_t>(width)))
    throw LeftToReference();
  decision_ = decision_for(key, given, {x_.shape, static_cast<size_t>(x_.nd)});
  // A longer one does not fit into a fingerprint, or into 64 bits.
  if (x_.count >= count_any || (decision_->program != nullptr && !decision_->program->accepts(counts())))
    throw LeftToReference();
  fingerprint_ = decision_->fingerprint.with(x_.count, hash_of_call());
}

// Throws LeftToReference if the reference path makes such calls.
const Decision* ParsedCall::decision_for(const DecisionKey& key, const Given& given,
                                         std::span<const Py_ssize_t> shape) {
  const Decision* decision = verb_group_.decisions.find(key);
  if (decision == nullptr) decision = decide(key, given, key.dtype, shape);
  if (decision->program == nullptr && !decision->library.is_valid()) throw LeftToReference();
  return decision;
}

// Of what ranks compare beside the decision and the count.
uint32_t ParsedCall::hash_of_call() const {
  if (parts_.has_value() && !parts_->is_even())
    return Fingerprint::hash_of(verb_group_.fingerprint_seed, parts_->elements());
  const std::span<const Py_ssize_t> dims(x_.shape, decision_->is_shape_compared ? static_cast<size_t>(x_.nd) : 0);
  return Fingerprint::hash_of(verb_group_.fingerprint_seed, dims);
}

// Whether its end shows that every rank has made the same call: what ends here has come from all of them.
bool ParsedCall::shows_all() const {
  if (fused_.has_value())
    return std::any_of(fused_->bundles().begin(), fused_->bundles().end(), [](const FusedArrays::Bundle& bundle) {
      return bundle.count != 0 && bundle.decision->is_synchronizing;
    });
  const Counts given = counts();
  return decision_->is_synchronizing && std::all_of(given.at, given.at + given.size, [](uint64_t n) { return n != 0; });
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
  const auto [runs, piece_elements, fingerprint, code, divisor, identity, is_shape_compared, is_synchronizing, alike] =
      nb::cast<Decided>(decided);
  if (PyCallable_Check(runs.ptr()) != 0)
    decision->library = runs;
  else
    decision->program = program_of(runs);
  decision->piece_elements = piece_elements;
  decision->fingerprint = fingerprint_of(fingerprint);
  decision->is_shape_compared = is_shape_compared;
  decision->is_synchronizing = is_synchronizing;
  const bool is_half =
      given_dtype == static_cast<uint8_t>(DType::float16) || given_dtype == static_cast<uint8_t>(DType::bfloat16);
  decision->divisor = divisor;
  const bool is_row = spec_.has(Fact::announced) && key.stage == 0;
  const uint8_t dtype = given_dtype == untyped || is_row    ? plain_bytes
                        : is_half && decision->divisor != 0 ? static_cast<uint8_t>(DType::float32)
                                                            : given_dtype;
  decision->dtype = dtype;
  if (code >= 0) decision->kernel = active_kernels().reduce[dtype][code];
  decision->itemsize = item_bytes(dtype, code);
  decision->identity.assign(identity.c_str(), identity.size());
  // What a library does is not known.
  decision->writes_out =
      decision->program == nullptr ||
      std::any_of(decision->program->steps.begin(), decision->program->steps.end(),
                  [](const SymbolicStep& step) { return step.step != Step::send && step.dst_buf == Buffer::out; });
  if (decision->program != nullptr && decision->program->reduces && decision->kernel == nullptr)
    throw nb::value_error("the operation is not defined for the dtype");
  // The classes above it for which Python would decide the same.
  const int last = key.size_class + std::min(alike, Fingerprint::count_bits - key.size_class);
  for (DecisionKey longer = key; ++longer.size_class <= last;) {
    Py_XINCREF(key.algorithm);
    verb_group_.decisions.add(longer, std::make_unique<Decision>(*decision));
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
  return spec_.has(Fact::stacked) && decision_->program != nullptr &&
         x_.data == out_.data + static_cast<uint64_t>(verb_group_.rank) * x_.nbytes();
}

void ParsedCall::find_target(const Given&) {
  if (spec_.has(Fact::empty)) return;
  if (spec_.has(Fact::in_place) && !out_.is_given()) {
    target_ = x_.data;
    target_count_ = x_.count;
    return;
  }
  if (!has_result()) return;
  Py_ssize_t shape[Argument::dims_max + 1];
  int nd = 0;
  if (spec_.has(Fact::stacked)) shape[nd++] = verb_group_.size;
  if (parts_.has_value()) shape[nd++] = parts_->rows(verb_group_.rank);
  const bool is_part = parts_.has_value() || (spec_.has(Fact::reduces) && spec_.has(Fact::by_rank));
  for (int i = is_part ? 1 : 0; i < x_.nd; ++i) shape[nd++] = x_.shape[i];
  target_count_ = 1;
  for (int i = 0; i < nd; ++i) target_count_ *= static_cast<uint64_t>(shape[i]);
  if (out_.is_given()) {
    check_out(shape, nd);
    target_ = out_.data;
    if (spec_.has(Fact::in_place) && x_.count != 0) {
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

// ---- results ----

PyObject* ParsedCall::give() {
  if (!has_result() || spec_.has(Fact::empty)) Py_RETURN_NONE;
  byte* const wide = wide_.get();
  const uint64_t before = wide_count_ - target_count_;  // in `wide`, before the sum
  divide(*decision_, x_.dtype, target_, target_count_, wide == nullptr ? nullptr : wide + before * sizeof(float));
  if (spec_.has(Fact::in_place) && !out_.is_given()) return Arguments::give_back(x_);
  if (verb_group_.rank == 0 && !decision_->identity.empty()) fill_with_identity();
  if (out_.is_given()) return Py_NewRef(out_.given);
  return verb_group_.arguments.give(x_, result_, is_result_scalar_);
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

}  // namespace unisono
