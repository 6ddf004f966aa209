// CooperativeCopy: one offered message copied by both of its ranks, the receiver from the front and the sender from the
// back.
//
// Knows who has taken which part. Does not copy. A sender that waits for the receiver has a core to spare, and two
// cores copy twice as fast. Lies in memory that both share, so nothing in it is believed: each side keeps what it has
// taken inside the message, whatever the other one wrote.
//
// The sender writes into memory of the receiver, who must be sure that nobody does once it has ended a receive. Every
// write begins with a byte for the receiver's guard page (ShmLink::write): where that page is shut, the system refuses
// the rest.

#pragma once

#include <algorithm>
#include <atomic>

#include "wire/frame.hpp"

namespace unisono::engine {

// Both sides must agree. Shorter messages are over before the sender could begin; longer ones do not fit the word.
inline bool is_worth_help(uint64_t nbytes) { return nbytes >= 128 * 1024 && nbytes < uint64_t{1} << 42; }

struct Part {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

class CooperativeCopy {
 public:
  // What the receiver has to do: go on with a part, wait for the sender, or nothing more.
  enum class Front : uint8_t { part, wait, complete, broken };

  // The sender, before its offer leaves. relaxed: the frame that follows is published after it.
  void reset() {
    place_.store(0, std::memory_order_relaxed);
    taken_.store(0, std::memory_order_relaxed);
    written_.store(0, std::memory_order_relaxed);
  }

  // The receiver: the first byte belongs at `place`.
  void ask(const byte* place, uint64_t guard) {
    guard_.store(guard, std::memory_order_relaxed);
    place_.store(reinterpret_cast<uint64_t>(place), std::memory_order_release);  // after the guard
  }

  // The receiver's next part, of at most `most` bytes.
  Front claim_front(uint64_t nbytes, uint64_t most, Part& part) {
    const uint64_t units = in_units(nbytes);
    uint64_t taken = taken_.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t front = front_of(taken), back = back_of(taken);
      if (front > units || back > units - front) return Front::broken;
      const uint64_t left = units - front - back;
      if (left == 0) return after_all(units, back, nbytes, part);
      // A quarter at first: whoever helps comes soon, or does something else and leaves all of it to us.
      const uint64_t share = back != 0 ? left / 3 : front == 0 ? left / 4 : left;
      const uint64_t more = std::min({std::max(share, least_of(units)), left, most / unit_bytes});
      // relaxed: the word says only who copies what
      if (!taken_.compare_exchange_weak(taken, taken + more, std::memory_order_relaxed)) continue;
      part = part_of(front, front + more, nbytes);
      return Front::part;
    }
  }

  bool is_all_taken(uint64_t nbytes) const {
    const uint64_t taken = taken_.load(std::memory_order_relaxed);
    return front_of(taken) + back_of(taken) >= in_units(nbytes);
  }

  // The sender's next part: where it goes to, or 0 if nobody asks for help or there is nothing left to do.
  uint64_t claim_back(uint64_t nbytes, uint64_t most, Part& part, uint64_t& guard) {
    const uint64_t place = place_.load(std::memory_order_acquire);
    if (place == 0) return 0;
    const uint64_t units = in_units(nbytes);
    uint64_t taken = taken_.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t front = front_of(taken), back = back_of(taken);
      if ((taken & closed) != 0 || front > units || back >= units - front) return 0;
      const uint64_t left = units - front - back;
      const uint64_t more = std::min({std::max(left / 3, least_of(units)), left, most / unit_bytes});
      if (!taken_.compare_exchange_weak(taken, taken + (more << 32), std::memory_order_relaxed)) continue;
      part = part_of(units - back - more, units - back, nbytes);
      guard = guard_.load(std::memory_order_relaxed);
      return place;
    }
  }
  // It is written, or could not be. seq_cst: before the look at the receiver's presence word that follows.
  void report(const Part& part, bool is_written) {
    if (is_written)
      written_.fetch_add(in_units(part.bytes), std::memory_order_seq_cst);
    else
      written_.fetch_or(failed, std::memory_order_seq_cst);
  }

  // The receiver gives up: the sender takes no more. True if it never took anything.
  bool close() { return back_of(taken_.fetch_or(closed, std::memory_order_seq_cst)) == 0; }
  // The sender has taken a part and not said how that ended.
  bool is_being_written() const {
    const uint64_t written = written_.load(std::memory_order_seq_cst);
    return (written & failed) == 0 && back_of(taken_.load(std::memory_order_relaxed)) != written;
  }

 private:
  static constexpr uint64_t unit_bytes = 4096;
  // Not less than 64 KiB, because a call to the system costs a quarter of copying this.
  static uint64_t least_of(uint64_t units) { return std::max<uint64_t>(16, units / 32); }
  static constexpr uint64_t closed = uint64_t{1} << 63, failed = uint64_t{1} << 63;

  static uint64_t in_units(uint64_t bytes) { return bytes / unit_bytes + (bytes % unit_bytes != 0); }
  static uint64_t front_of(uint64_t taken) { return taken & 0xffffffff; }
  static uint64_t back_of(uint64_t taken) { return taken >> 32 & 0x7fffffff; }
  static Part part_of(uint64_t first, uint64_t end, uint64_t nbytes) {
    return {first * unit_bytes, std::min(end * unit_bytes, nbytes) - first * unit_bytes};
  }

  Front after_all(uint64_t units, uint64_t back, uint64_t nbytes, Part& part) {
    // seq_cst: after this side said that it sleeps, if it did; what the sender wrote, it wrote before
    const uint64_t written = written_.load(std::memory_order_seq_cst);
    const uint64_t done = written & ~failed;
    if (done > back) return Front::broken;
    if (done == back) return Front::complete;
    if ((written & failed) == 0) return Front::wait;
    // What it took last is left to us.
    part = part_of(units - back, units - done, nbytes);
    written_.store(back, std::memory_order_relaxed);
    return Front::part;
  }

  std::atomic<uint64_t> place_;    // in the receiver's memory; 0: it does not ask
  std::atomic<uint64_t> guard_;    // there, too
  std::atomic<uint64_t> taken_;    // units from the front, from the back << 32, and whether the receiver has given up
  std::atomic<uint64_t> written_;  // units from the back, and whether the sender has given up
};

}  // namespace unisono::engine
