// A call of a verb: from the raw arguments to the result, for blocking and started calls alike.
//
// The engine runs it. Python is asked for what is rare: the decision for the first call of a class, and everything that
// must be known of a call that does not end well or soon. Python then *adopts* the call: its operations go on, and from
// that moment its errors, stalls, deadlines and interrupts are those of a Task (unisono/comm/adoption.py).
//
// The order of locks: the GIL, then the engine's. No Python object is made or dropped with the engine's lock held.

#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "python/parsed_call.hpp"

namespace unisono {

class Call : public ParsedCall {
 public:
  Call(NativeGroup& group, const VerbSpec& spec, nb::handle adoption)
      : ParsedCall(group, spec, adoption), group_(group) {}

  // Read the arguments and find the decision. Throws LeftToReference, or nb::python_error.
  void prepare(const Given& given, bool is_started);
  // Keep the arguments beyond the caller's frame.
  void keep();
  // Dispatch what has come, before a collective begins. LeftToReference if the fast path is closed then.
  void catch_up();
  // Dispatch what has come for others: the pump has not woken up for it while a thread polled for this call or waited
  // for it. The thread that takes the call does this, or leaves it to the pump.
  void dispatch_completions();
  void leave_dispatch();
  // Start its operations: allowed, numbered and under way while no other thread runs Python.
  void begin();
  // Whether it may run without Python: no message is to be dispatched before it, and no peer that it needs is gone.
  bool is_open() const {
    if (is_collective()) return group_.call_log.fast_path_open;
    return group_.call_log.messages_open && (!spec_.has(Fact::sends) || group_.is_reachable(dst_)) &&
           (!spec_.has(Fact::receives) || group_.is_reachable(src_));
  }
  // (is a send, peer, tag) of messages that have not ended; -1 is any.
  std::vector<std::tuple<bool, std::int32_t, std::int64_t>> messages_under_way() const;
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
  // Whether it only asks what is there: `probe` with timeout=0.
  bool is_poll() const { return is_poll_; }
  // Withdraw a message that is unmatched. False if it has ended.
  bool withdraw();
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
  // Let Python carry it on: `how` is the method of the adoption, which returns a Work. It keeps the memory and `keeper`
  // until the operations have ended.
  nb::object adopt(const char* how, nb::object keeper = nb::none());
  // After it has ended well: what is left to do. A second stage is begun here.
  enum class Next : uint8_t { finish, wait, leave_to_python };
  Next advance(bool is_blocking) {
    return announced_ && !announced_->is_second ? advance_announced(is_blocking) : Next::finish;
  }
  // Its result, once it has ended well.
  PyObject* finish();
  // As above, for one that Python has carried to its end with this result.
  PyObject* finish_adopted(nb::object result);

  bool is_collective() const { return spec_.is_collective(); }
  uint64_t sequence() const { return sequence_; }
  const VerbSpec& spec() const { return spec_; }
  NativeGroup& group() const { return group_; }
  nb::handle adoption() const { return adoption_; }
  nb::handle code() const { return code_; }
  int instruction() const { return instruction_; }
  // When it began; the clock is read when this is asked first.
  std::int64_t begun_at();
  // When Python must look at it at the latest if a thread begins to wait for it now, and if none does.
  std::int64_t attention_at();
  std::int64_t pump_at();

 private:
  void prepare_split(const Given& given);
  void prepare_message(const Given& given, bool is_started);
  void prepare_buffer(const Given& given);
  void prepare_fused(const Given& given);
  void begin_bundles();
  PyObject* finish_fused();
  void prepare_announced(const Given& given);
  void announce_arrays(PyObject* x);
  void announce_objects(PyObject* x);
  void check_scattered() const;
  void see_outs(PyObject* list);
  engine::byte* outs_in_a_row() const;
  bool receive_into_outs();
  void fill_outs();
  void find_announced_decision(const Given& given);
  Announcement own_row() const;
  Announcement row_of(size_t rank) const;
  enum class Rows : uint8_t { complete, lengths_only, strange };
  Rows look_at_rows();
  bool is_expected(const Announcement& row) const;
  Form kind_of(const Announcement& row) const;
  size_t own_part() const;
  bool make_announced_result();
  Next advance_announced(bool is_blocking);
  void prepare_second_stage();
  void find_second_decision(uint8_t dtype);
  void find_parts();
  void join(std::span<const std::span<const engine::byte>> pieces);
  nb::object memory_of_part(const Announcement& row, size_t source);
  bool take_memory_by_part();
  nb::object object_in(const Announcement& row, const nb::object& memory) const;
  PyObject* finish_second_stage();
  nb::object received_list();
  void join_gathered();
  PyObject* finish_announced(nb::object result) const;
  bool fits_out(const Announcement& row) const;
  nb::object part_of(const Announcement& row, size_t number) const;
  nb::object announced_parts() const;
  std::int64_t tag_of_user(PyObject* tag, bool takes_any) const;
  void poll_if_short();
  void note_lengths(const Argument& shown, engine::CallLog::Lengths& lengths) const;
  void begin_collective();
  void begin_run(const Decision& decision, engine::Stage& stage);
  // The tag of its last stage so far.
  uint64_t last_tag() const;
  void begin_send();
  void begin_receive();
  // Whether a receive waits for memory that the caller is to supply.
  bool wants_memory() const { return started_ != 0 && operations_[0]->needs_memory; }
  void supply_memory();
  // With the engine's lock: what a receive that has ended leaves here.
  void take_received(engine::ReceiveOperation& receive);
  // Whether it is of no use to look further with the GIL held.
  bool is_poll_over() const;
  // Whether all its operations have ended, or one of them otherwise than well.
  bool has_ended() const {
    bool have_all = true;
    for (unsigned i = 0; i < started_; ++i)
      if (operations_[i]->phase != engine::Operation::Phase::ended)
        have_all = false;
      else if (operations_[i]->outcome != engine::Outcome::done)
        return true;
    return have_all;
  }
  // With the engine's lock: true if all operations ended well; then they are back in their pools.
  bool take();
  // Give its operations, with what they work on, to the adoption.
  nb::object hand_over(const char* how, nb::object keeper, unsigned count);
  void release(unsigned count);
  bool is_uninterrupted(const engine::CallLog::InFlightCall& flight) const;
  nb::object message_of(unsigned index) const;
  nb::object received();
  nb::object received_object();
  nb::object unpacked(PyObject* made) const;
  nb::object status() const;
  nb::object make_group();
  uint64_t poll_bytes() const;

  NativeGroup& group_;
  std::int32_t dst_ = 0, src_ = 0;  // ranks of the group; src -1: any
  std::int64_t tag_ = 0;            // -1: any
  bool is_poll_ = false;
  bool takes_memory_ = false;  // of an open-ended receive: see ReceiveOperation
  std::int64_t begun_at_ = 0;  // 0: the clock was not read yet
  uint64_t sequence_ = engine::CallLog::no_sequence;
  const engine::byte* in_ = nullptr;  // of a call with announcements: what is read
  bool is_started_ = false;
  // Two messages, or the stages of a collective that run at once.
  unsigned started_ = 0;
  engine::Operation* operations_[engine::stages] = {};
  uint64_t handles_[engine::stages] = {};
  // Of a receive that has ended.
  std::int32_t source_ = 0;
  uint64_t matched_tag_ = 0, matched_bytes_ = 0;
  engine::ResultMemory received_;  // what the engine took for it; else the bytes are in `result_`
  std::string header_;
  std::optional<engine::CompletionQueue::Unclaimed> unclaimed_;
};

}  // namespace unisono
