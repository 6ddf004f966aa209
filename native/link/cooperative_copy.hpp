// Cooperative copy: both ranks copy one long message, the receiver from the front (process_vm_readv) and the sender
// from the back (process_vm_writev). A sender that waits has a core to spare, and two cores copy twice as fast. This
// class only divides the message; Peer copies.
//
// It lies in shared memory, so neither side trusts it: a part is always inside the message, whatever the other side
// wrote.
//
// The sender must not write into a buffer after the receiver has returned it to the user. So every write first touches
// a guard page of the receiver (ShmLink::write). A receiver that drops the sender shuts that page, closes the copy and
// waits for a write in progress (Peer::fence).
//
// A state is a relation between two words (`CooperativeCopy::state_of`), so that claiming a part and closing are one
// compare-and-swap. The table says which relations may follow each other; claims ask it.

#pragma once

#include <algorithm>
#include <atomic>

#include "base/transition_table.hpp"
#include "wire/frame.hpp"

namespace unisono::engine {

// Both sides must agree on this. A shorter message is read before the sender could begin; a longer one does not fit the
// 31 bits of units.
inline bool is_worth_sharing(uint64_t nbytes) { return nbytes >= 128 * 1024 && nbytes < uint64_t{1} << 42; }

struct Part {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// The sender writes one part at a time.
enum class CopyState : uint8_t { unasked, shared, claimed, failed, complete, draining, fenced };
enum class CopyEvent : uint8_t {
  ask,
  claim,
  exhaust,
  exhaust_failed,
  finish,
  report,
  fail,
  recover,
  close,
  fence,
  reset
};
inline constexpr TransitionTable<CopyState, 7, CopyEvent, 11> copy_transitions({
    // the receiver names its buffer and its guard page
    {CopyState::unasked, CopyEvent::ask, CopyState::shared},
    // either side takes a part, and units are left
    {CopyState::shared, CopyEvent::claim, CopyState::shared},
    // the last units are taken: while the sender writes; after a write failed; with nothing left to write
    {CopyState::shared, CopyEvent::exhaust, CopyState::claimed},
    {CopyState::shared, CopyEvent::exhaust_failed, CopyState::failed},
    {CopyState::shared, CopyEvent::finish, CopyState::complete},
    // the sender has written its part, or could not
    {CopyState::shared, CopyEvent::report, CopyState::shared},
    {CopyState::shared, CopyEvent::fail, CopyState::shared},
    {CopyState::claimed, CopyEvent::finish, CopyState::complete},
    {CopyState::claimed, CopyEvent::fail, CopyState::failed},
    // the receiver copies what the sender claimed and did not write
    {CopyState::failed, CopyEvent::recover, CopyState::complete},
    // the receiver drops the sender, which is writing a part; it may return the buffer to the user once that has ended
    {CopyState::shared, CopyEvent::close, CopyState::draining},
    {CopyState::claimed, CopyEvent::close, CopyState::draining},
    {CopyState::draining, CopyEvent::close, CopyState::draining},
    {CopyState::draining, CopyEvent::finish, CopyState::fenced},
    {CopyState::draining, CopyEvent::fail, CopyState::fenced},
    // the receiver drops the sender, which is not writing
    {CopyState::unasked, CopyEvent::fence, CopyState::fenced},
    {CopyState::shared, CopyEvent::fence, CopyState::fenced},
    {CopyState::failed, CopyEvent::fence, CopyState::fenced},
    {CopyState::complete, CopyEvent::fence, CopyState::fenced},
    {CopyState::fenced, CopyEvent::fence, CopyState::fenced},
    // the sender's next RTS: the FIN of the one before has arrived
    {CopyState::unasked, CopyEvent::reset, CopyState::unasked},
    {CopyState::complete, CopyEvent::reset, CopyState::unasked},
    {CopyState::fenced, CopyEvent::reset, CopyState::unasked},
});

class CooperativeCopy {
 public:
  // What the receiver has to do: copy a part, wait for the sender, nothing more, or report corrupt memory.
  enum class Front : uint8_t { part, wait, complete, broken };

  // The sender, before its RTS leaves. relaxed: the frame is published after it.
  void reset() {
    target_.store(0, std::memory_order_relaxed);
    claimed_.store(0, std::memory_order_relaxed);
    written_.store(0, std::memory_order_relaxed);
  }

  // The receiver: the message belongs at `target`.
  void ask(const byte* target, uint64_t guard) {
    guard_.store(guard, std::memory_order_relaxed);
    target_.store(reinterpret_cast<uint64_t>(target), std::memory_order_release);  // after the guard
  }

  // The receiver's next part, of at most `most` bytes.
  Front claim_front(uint64_t nbytes, uint64_t most, Part& part) {
    const uint64_t units = in_units(nbytes);
    uint64_t claimed = claimed_.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t front = front_of(claimed), back = back_of(claimed);
      if (!is_sound(claimed, units)) return Front::broken;
      const uint64_t left = units - front - back;
      if (left == 0) return after_all(claimed, units, nbytes, part);
      // A quarter at first: a sender that waits joins soon; one that is busy leaves the rest to the receiver.
      const uint64_t share = back != 0 ? left / 3 : front == 0 ? left / 4 : left;
      const uint64_t more = std::min({std::max(share, least_of(units)), left, most / unit_bytes});
      // relaxed: the word only divides the message
      if (!claimed_.compare_exchange_weak(claimed, claimed + more, std::memory_order_relaxed)) continue;
      part = part_of(front, front + more, nbytes);
      return Front::part;
    }
  }

  bool is_all_claimed(uint64_t nbytes) const {
    const uint64_t claimed = claimed_.load(std::memory_order_relaxed);
    return front_of(claimed) + back_of(claimed) >= in_units(nbytes);
  }

  // The sender's next part, and the address of the message at the receiver; 0 if it does not ask or nothing is left.
  uint64_t claim_back(uint64_t nbytes, uint64_t most, Part& part, uint64_t& guard) {
    const uint64_t target = target_.load(std::memory_order_acquire);
    if (target == 0) return 0;
    const uint64_t units = in_units(nbytes);
    uint64_t claimed = claimed_.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t front = front_of(claimed), back = back_of(claimed);
      if (!is_sound(claimed, units)) return 0;
      // What the sender wrote matters only after the last claim.
      if (!copy_transitions.allows(state_of(true, claimed, 0, units), CopyEvent::claim)) return 0;
      const uint64_t left = units - front - back;
      const uint64_t more = std::min({std::max(left / 3, least_of(units)), left, most / unit_bytes});
      if (!claimed_.compare_exchange_weak(claimed, claimed + (more << 32), std::memory_order_relaxed)) continue;
      part = part_of(units - back - more, units - back, nbytes);
      guard = guard_.load(std::memory_order_relaxed);
      return target;
    }
  }
  // The sender: the part is written, or could not be. seq_cst: precedes the look at the receiver's presence word.
  void report(const Part& part, bool is_written) {
    if (is_written)
      written_.fetch_add(in_units(part.bytes), std::memory_order_seq_cst);
    else
      written_.fetch_or(failed, std::memory_order_seq_cst);
  }

  // The receiver gives up: the sender claims no more. True if it never claimed anything.
  bool close() { return back_of(claimed_.fetch_or(closed, std::memory_order_seq_cst)) == 0; }
  // Whether the sender has claimed a part and not reported its end.
  bool is_being_written() const {
    const uint64_t written = written_.load(std::memory_order_seq_cst);
    return is_being_written(claimed_.load(std::memory_order_relaxed), written);
  }
  // Where the copy of a message stands. What the sender wrote is read first, so that a part claimed meanwhile counts as
  // being written.
  CopyState state(uint64_t nbytes) const {
    const uint64_t written = written_.load(std::memory_order_seq_cst);
    const bool is_asked = target_.load(std::memory_order_acquire) != 0;
    return state_of(is_asked, claimed_.load(std::memory_order_relaxed), written, in_units(nbytes));
  }

 private:
  static constexpr uint64_t unit_bytes = 4096;
  // At least 64 KiB: a system call costs a quarter of copying that.
  static uint64_t least_of(uint64_t units) { return std::max<uint64_t>(16, units / 32); }
  static constexpr uint64_t closed = uint64_t{1} << 63, failed = uint64_t{1} << 63;

  static uint64_t in_units(uint64_t bytes) { return bytes / unit_bytes + (bytes % unit_bytes != 0); }
  static uint64_t front_of(uint64_t claimed) { return claimed & 0xffffffff; }
  static uint64_t back_of(uint64_t claimed) { return claimed >> 32 & 0x7fffffff; }
  static Part part_of(uint64_t first, uint64_t end, uint64_t nbytes) {
    return {first * unit_bytes, std::min(end * unit_bytes, nbytes) - first * unit_bytes};
  }

  // Whether the word divides the message: anything else was not written by this code.
  static bool is_sound(uint64_t claimed, uint64_t units) {
    return front_of(claimed) <= units && back_of(claimed) <= units - front_of(claimed);
  }
  static bool is_being_written(uint64_t claimed, uint64_t written) {
    return (written & failed) == 0 && back_of(claimed) != written;
  }
  static CopyState state_of(bool is_asked, uint64_t claimed, uint64_t written, uint64_t units) {
    const uint64_t back = back_of(claimed), done = written & ~failed;
    if ((claimed & closed) != 0) return is_being_written(claimed, written) ? CopyState::draining : CopyState::fenced;
    if (!is_asked) return CopyState::unasked;
    if (front_of(claimed) + back < units) return CopyState::shared;
    if (back == done) return CopyState::complete;
    return (written & failed) != 0 ? CopyState::failed : CopyState::claimed;
  }

  Front after_all(uint64_t claimed, uint64_t units, uint64_t nbytes, Part& part) {
    // seq_cst: follows our presence word, if this side is about to sleep; the sender wrote its bytes before
    const uint64_t written = written_.load(std::memory_order_seq_cst);
    const uint64_t back = back_of(claimed), done = written & ~failed;
    if (done > back) return Front::broken;
    switch (state_of(true, claimed, written, units)) {
      case CopyState::complete: return Front::complete;
      case CopyState::claimed: return Front::wait;
      case CopyState::failed:
        part = part_of(units - back, units - done, nbytes);
        written_.store(back, std::memory_order_relaxed);
        return Front::part;
      default: return Front::broken;  // only the receiver closes, and it claims nothing after that
    }
  }

  std::atomic<uint64_t> target_;   // address of the message in the receiver's memory; 0: the receiver does not ask
  std::atomic<uint64_t> guard_;    // address of the receiver's guard page
  std::atomic<uint64_t> claimed_;  // units from the front | units from the back << 32 | closed
  std::atomic<uint64_t> written_;  // units that the sender wrote | failed
};

}  // namespace unisono::engine
