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
// States of a copy, and what leads from one to the next:
//
//   state     event                           next
//   unasked   ask: the receiver gives target  shared
//   shared    claim_front, claim_back         shared, until all units are claimed: claimed
//   shared    close: the receiver gives up    closed
//   claimed   report(written) of all parts    complete
//   claimed   report(not written)             failed: the receiver copies the sender's unwritten parts
//   failed    claim_front                     complete
//   any       reset: the next RTS             unasked
//
// There is no table of it in code: a state is a relation between the counters, so that claiming a part and closing are
// one compare-and-swap of one word. An enum beside them would need a second atomic step that can disagree with the
// first.

#pragma once

#include <algorithm>
#include <atomic>

#include "wire/frame.hpp"

namespace unisono::engine {

// Both sides must agree on this. A shorter message is read before the sender could begin; a longer one does not fit the
// 31 bits of units.
inline bool is_worth_sharing(uint64_t nbytes) { return nbytes >= 128 * 1024 && nbytes < uint64_t{1} << 42; }

struct Part {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

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
      if (front > units || back > units - front) return Front::broken;
      const uint64_t left = units - front - back;
      if (left == 0) return after_all(units, back, nbytes, part);
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
      if ((claimed & closed) != 0 || front > units || back >= units - front) return 0;
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
    return (written & failed) == 0 && back_of(claimed_.load(std::memory_order_relaxed)) != written;
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

  Front after_all(uint64_t units, uint64_t back, uint64_t nbytes, Part& part) {
    // seq_cst: follows our presence word, if this side is about to sleep; the sender wrote its bytes before
    const uint64_t written = written_.load(std::memory_order_seq_cst);
    const uint64_t done = written & ~failed;
    if (done > back) return Front::broken;
    if (done == back) return Front::complete;
    if ((written & failed) == 0) return Front::wait;
    // The receiver copies what the sender claimed and could not write.
    part = part_of(units - back, units - done, nbytes);
    written_.store(back, std::memory_order_relaxed);
    return Front::part;
  }

  std::atomic<uint64_t> target_;   // address of the message in the receiver's memory; 0: the receiver does not ask
  std::atomic<uint64_t> guard_;    // address of the receiver's guard page
  std::atomic<uint64_t> claimed_;  // units from the front | units from the back << 32 | closed
  std::atomic<uint64_t> written_;  // units that the sender wrote | failed
};

}  // namespace unisono::engine
