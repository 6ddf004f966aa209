// Presence: one page per rank, which its peers on the host map for reading. It says whether the rank sleeps, so that a
// sender knows when to wake it, and counts heartbeats.

#pragma once

#include <fcntl.h>
#include <sched.h>

#include <atomic>

#include "base/system.hpp"
#include "wire/frame.hpp"

namespace unisono::engine {

inline constexpr size_t presence_bytes = 4096;

struct PresencePage {
  // Odd while the rank sleeps. Every change increments it, so that a peer wakes each sleep at most once.
  alignas(line_bytes) std::atomic<uint32_t> word;
  // The CPU core that the rank waited on last. A rank that shares it must let this one run.
  std::atomic<std::int32_t> core;
  // Incremented by the background thread: proof that it runs.
  alignas(line_bytes) std::atomic<uint64_t> beats;
};

// This rank's own page. Peers can map its descriptor only for reading.
class Presence {
 public:
  // False if there is no memory; errno says why.
  bool open() {
    fd_ = make_memory("unisono-presence", presence_bytes);
    if (!fd_) return false;
    memory_ = Mapping::of(fd_.get(), presence_bytes, PROT_READ | PROT_WRITE);
    if (!memory_) return false;
#ifdef F_SEAL_FUTURE_WRITE
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL;
#else
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
#endif
    return fcntl(fd_.get(), F_ADD_SEALS, seals) == 0;
  }

  int fd() const { return fd_.get(); }
  void close() { fd_.close(); }
  bool is_asleep() const { return (page()->word.load(std::memory_order_relaxed) & 1) != 0; }

  // seq_cst: the change precedes the last poll of the rings, as a sender's frame precedes its look at this word.
  void fall_asleep() {
    if (!is_asleep()) page()->word.fetch_add(1, std::memory_order_seq_cst);
  }
  // True if it slept. relaxed: a late sender wakes once too often, which does no harm.
  bool wake_up() {
    if (!is_asleep()) return false;
    page()->word.fetch_add(1, std::memory_order_relaxed);
    return true;
  }
  // relaxed: a hint. Written only if it changed, because peers have the cache line.
  std::int32_t publish_core() {
    const int core = sched_getcpu();
    if (page()->core.load(std::memory_order_relaxed) != core) page()->core.store(core, std::memory_order_relaxed);
    return core;
  }
  void beat() { page()->beats.fetch_add(1, std::memory_order_relaxed); }

 private:
  PresencePage* page() const { return reinterpret_cast<PresencePage*>(memory_.at()); }

  Descriptor fd_;
  Mapping memory_;
};

// Another rank's page.
class PresenceView {
 public:
  bool open(int fd) {
    memory_ = Mapping::of(fd, presence_bytes, PROT_READ);
    return static_cast<bool>(memory_);
  }
  uint32_t word() const { return page()->word.load(std::memory_order_seq_cst); }
  std::int32_t core() const { return page()->core.load(std::memory_order_relaxed); }
  uint64_t beats() const { return page()->beats.load(std::memory_order_relaxed); }

 private:
  const PresencePage* page() const { return reinterpret_cast<const PresencePage*>(memory_.at()); }

  Mapping memory_;
};

}  // namespace unisono::engine
