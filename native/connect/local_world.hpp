// The ranks of one process: how their engines get links to each other, without sockets and handshakes.
//
// A rank that opens a link gets an end of it, and so does its peer. Each engine takes its ends when it makes progress.
// The lock is taken after an engine's own, and no engine's lock after it.

#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "link/shm_link.hpp"

namespace unisono::engine {

class LocalWorld {
 public:
  explicit LocalWorld(std::int32_t size) : slots_(static_cast<size_t>(size)) {}

  // One end of a new link, or the end of a rank that has no link to the receiver.
  struct Arrival {
    std::int32_t rank;
    bool has_left;
    std::shared_ptr<const Mapping> memory;
    PresenceView presence;
    std::unique_ptr<LocalDoorbell> doorbell;
    bool is_opener;
  };

  std::int32_t size() const { return static_cast<std::int32_t>(slots_.size()); }
  void enter(std::int32_t rank, std::shared_ptr<const Descriptor> wake, const Presence& presence);
  // Make a link; both ranks get an end of it. Without memory for it, the opener is notified that the other has left.
  void open(std::int32_t from, std::int32_t to);
  // acquire: pairs with the store after an arrival was added
  bool has_arrivals(std::int32_t rank) const { return slots_[rank].has_arrivals.load(std::memory_order_acquire); }
  std::vector<Arrival> take(std::int32_t rank);
  // Every other rank is notified. The presence page may be closed afterwards.
  void leave(std::int32_t rank);

 private:
  struct Slot {
    std::shared_ptr<const Descriptor> wake;
    const Presence* presence = nullptr;  // nullptr before it has entered and after it has left
    std::vector<Arrival> arrivals;
    std::atomic<bool> has_arrivals{false};
  };
  void add(std::int32_t to, Arrival arrival);

  std::mutex mutex_;
  std::vector<Slot> slots_;
  std::set<std::pair<std::int32_t, std::int32_t>> linked_;  // pairs of ranks, the lower one first
};

}  // namespace unisono::engine
