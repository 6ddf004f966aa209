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
#include "python/blocking.hpp"
#include "python/fingerprint_bytes.hpp"
#include "python/object_payload.hpp"
#include "python/unwinding.hpp"

namespace unisono {

using namespace engine;

namespace {

// Up to this many bytes a call first looks for its end with the GIL held: letting go and taking it back costs as much
// as the rest of the call, and others wait for microseconds.
constexpr uint64_t poll_bytes_max = 16 * 1024;
// The longest that `done` waits in the engine, for a call that it has found unfinished again and again.
constexpr std::int64_t poll_ns_max = 100'000;
// How long a started call that may need Python for a second stage goes on without it, if no thread waits for it. So
// does a split, whose group other members may use.
constexpr std::int64_t second_stage_ns = 2 * millisecond;

}  // namespace

// ---- arguments ----

void Call::prepare(const Given& given, bool is_started) {
  is_started_ = is_started;
  read_timeout(given[Parameter::timeout]);
  if (spec_.has(Fact::groups))
    prepare_split(given);
  else if (spec_.has(Fact::announced))
    prepare_announced(given);
  else if (spec_.has(Fact::fused))
    prepare_fused(given);
  else if (is_collective())
    prepare_collective(given);
  else
    prepare_message(given, is_started);
  if (is_collective() || is_started) find_site();
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

// What a report says of its arrays.
void Call::note_lengths(const Argument& shown, CallLog::Lengths& lengths) const {
  lengths.are_known = true;
  lengths.types.clear();
  if (fused_.has_value()) {
    lengths.of = fused_->lengths();
    fused_->types(lengths.types);
  } else if (parts_.has_value()) {
    const auto elements = parts_->elements();
    lengths.of.assign(elements.begin(), elements.end());
  } else {
    lengths.of.assign(shown.shape, shown.shape + shown.nd);
  }
}

void Call::keep() {
  if (x_.is_given()) x_.keep();
  if (out_.is_given()) out_.keep();
}

// ---- running ----

uint64_t Call::poll_bytes() const {
  if (announced_) return stage() == 0 ? std::max(count_, target_count_) : announced_->bytes;
  if (fused_) return fused_->nbytes();
  if (!is_collective()) return std::max(x_.is_given() ? x_.nbytes() : 0, out_.is_given() ? out_.nbytes() : 0);
  return x_.is_given() ? std::max(x_.nbytes(), target_count_ * itemsizes[x_.dtype]) : 0;
}

// The caller holds the engine's lock and the GIL.
void Call::begin() {
  if (is_collective()) return begin_collective();
  if (spec_.has(Fact::sends)) begin_send();
  if (spec_.has(Fact::receives)) begin_receive();
}

void Call::begin_collective() {
  if (this->stage() == 0) sequence_ = group_.call_log.next++;
  if (fused_) return begin_bundles();
  Stage stage;
  const bool has_no_in = is_in_place();
  if (!has_no_in) stage.in = x_.data;
  if (has_result()) stage.out = target_;
  if (announced_) {
    stage.in = const_cast<byte*>(in_);
    stage.in_parts = announced_->sent_from;
    stage.out_parts = announced_->received_at;
    if (this->stage() == 0) stage.row_bytes = announced_->row_bytes;
  }
  if (byte* const wide = wide_.get(); wide != nullptr) {
    if (stage.in != nullptr) stage.in = wide;
    if (stage.out != nullptr) stage.out = has_no_in ? wide : wide + x_.count * sizeof(float);
  }
  stage.tag = last_tag();
  const Counts given = counts();
  stage.counts = given.at;
  stage.counts_n = given.size;
  stage.is_even = given.is_even;
  begin_run(*decision_, stage);
}

void Call::begin_run(const Decision& decision, Stage& stage) {
  stage.context = group_.context;
  stage.dtype = decision.dtype;
  stage.itemsize = decision.itemsize;
  stage.kernel = decision.kernel;
  stage.window = group_.window;
  stage.piece_elements = decision.piece_elements;
  stage.peers = group_.rank_map->translation();
  Run& run = group_.completions.make_run();
  operations_[started_] = &run;
  handles_[started_++] = run.handle;
  run.is_watched = true;
  run.fingerprint = fingerprint_;
  run.phase = Operation::Phase::starting;
  run.bind(decision.program, stage);
  // A group's first call of a class waits for its receivers: where programs differ from the start, it ends with the
  // error.
  run.start(group_.count_run_ahead(run, group_.takes_first_call(decision) ? UINT64_MAX : poll_bytes()));
  if (run.phase == Operation::Phase::starting) run.phase = Operation::Phase::active;
}

uint64_t Call::last_tag() const { return tag_of(sequence_) + (fused_ ? fused_->bundles().size() - 1 : stage()); }

bool Call::is_poll_over() const {
  if (has_ended() || wants_memory()) return true;
  if (!spec_.has(Fact::unsized)) return false;
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
  return is_open() && !flight.is_interrupted.load(std::memory_order_relaxed) &&
         !group_.completions.engine().is_closed();
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
    if (const UnexpectedMessage* const first = group_.completions.first_unclaimed(group_.context, last_tag());
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
  return announced_ || spec_.has(Fact::groups) ? std::min(at, begun + second_stage_ns) : at;
}

Call::Waited Call::wait(std::int64_t limit_ns) {
  const std::int64_t attention = attention_at();
  CallLog::InFlightCall flight{sequence_, group_.completions, {handles_, started_}};
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
          held, [this] { return has_ended() || wants_memory(); },
          std::min({now + signal_check_ns, attention, limit_ns}), flight.is_interrupted);
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
    static const std::atomic<bool> never_interrupted{false};
    const std::int64_t pause = std::min<std::int64_t>(poll_ns_max, std::int64_t{idle_polls} * 1000);
    group_.completions.wait_until(held, [this] { return has_ended(); }, now_ns() + pause, never_interrupted);
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
  if (announced_ && is_broadcast_here()) return Py_NewRef(announced_->value.ptr());
  if (announced_ && stage() == 0) return finish_announced(std::move(result));
  const bool is_made = !is_collective() || spec_.has(Fact::groups);
  return is_made ? result.release().ptr() : finish();
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
  if (spec_.has(Fact::groups)) return make_group().release().ptr();
  if (fused_) return finish_fused();
  if (is_collective()) return give();
  if (!spec_.has(Fact::receives)) Py_RETURN_NONE;
  return received().release().ptr();
}

// The communicator that a split makes on this rank, from the rows of all. A started split that needs a second attempt
// gives the work that makes it.
nb::object Call::make_group() {
  const nb::object timeout =
      timeout_ns_ >= 0 ? nb::object(nb::float_(static_cast<double>(timeout_ns_) / 1e9)) : nb::none();
  return adoption_.attr("make_group")(sequence_, nb::borrow(x_.given), result_.object, timeout, is_started_);
}

}  // namespace unisono
