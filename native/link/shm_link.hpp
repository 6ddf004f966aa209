// A link through shared memory, between processes or within one. It holds, per direction, two rings, the offer words
// and the state of cooperative copies. A doorbell beside it wakes the peer and reports its end.

#pragma once

#include <atomic>
#include <memory>

#include "link/doorbell.hpp"
#include "link/link.hpp"
#include "link/presence.hpp"
#include "link/ring.hpp"

namespace unisono::engine {

class Peer;

// An eager message takes at most a quarter of its ring: in the control lane, any frame of a remote call
// (python/rpc_frame.cpp).
inline constexpr size_t control_ring_bytes = 72 * 1024;
inline constexpr size_t bulk_ring_bytes = 184 * 1024;
inline constexpr size_t offer_words = 1024;
// An eager message has to leave room for its header and for whole lines.
inline constexpr size_t shm_eager_bytes_max(Lane lane) {
  return ring_frame_bytes_max(lane == Lane::bulk ? bulk_ring_bytes : control_ring_bytes) - header_bytes_max -
         2 * line_bytes;
}
// Long messages of a run are few at a time, and low rendezvous ids are used first.
inline constexpr size_t copy_slots = 64;

// The memory of a link. Direction 0 is the opener's.
struct LinkMemory {
  RingWords rings[2][lane_count];
  alignas(4096) std::atomic<uint32_t> offers[2][offer_words];
  CooperativeCopy copies[2][copy_slots];
  alignas(4096) byte control[2][control_ring_bytes];
  byte bulk[2][bulk_ring_bytes];
};

// A value in a rank's memory, by which its peer tests whether it can read that memory. Address 0: direct
// reads are disabled.
struct Probe {
  uint64_t address = 0;
  byte value[16] = {};
};

// The page that a peer's write touches first (ShmLink::write).
enum class GuardPage : uint8_t { absent, open, shut };
enum class GuardEvent : uint8_t { map, shut };
inline constexpr TransitionTable<GuardPage, 3, GuardEvent, 2> guard_transitions({
    // the peer's memory can be read directly, so the peer may be asked to write here
    {GuardPage::absent, GuardEvent::map, GuardPage::open},
    // a sender is dropped: its writes fail from now on
    {GuardPage::open, GuardEvent::shut, GuardPage::shut},
    // more than one of its messages was under way
    {GuardPage::shut, GuardEvent::shut, GuardPage::shut},
    // no write was ever asked for
    {GuardPage::absent, GuardEvent::shut, GuardPage::absent},
});

class ShmLink final : public Link {
 public:
  // The memory of a new link, sealed; empty without memory (errno says why).
  static Descriptor make_memory();

  // nullptr, and `why`, if the memory or the presence page is not as it should be.
  static std::unique_ptr<ShmLink> open(Peer& peer, Poller& poller, Descriptor socket, const Descriptor& memory,
                                       const Descriptor& presence, bool is_opener, const Probe& probe,
                                       std::string& why);
  // The same within this process, whose memory can be trusted.
  ShmLink(Peer& peer, std::shared_ptr<const Mapping> memory, PresenceView presence, std::unique_ptr<Doorbell> doorbell,
          bool is_opener, const Probe& probe);

  bool put(Lane lane, Head head, const Body& body) override;
  size_t put_data(Lane lane, uint64_t rendezvous_id, uint64_t offset, const byte* from, uint64_t left) override;
  bool poll() override;
  size_t eager_bytes_max(Lane lane) const override { return shm_eager_bytes_max(lane); }
  bool can_read() const override { return can_read_; }
  bool read(uint64_t address, byte* to, size_t bytes) override;
  bool is_alive() const override { return doorbell_->is_alive(); }
  bool is_starved() const override { return is_alive() && engine::is_starved(doorbell_->pid()); }
  std::atomic<uint32_t>* own_offer(size_t index) override {
    return index < offer_words ? &memory()->offers[own_][index] : nullptr;
  }
  std::atomic<uint32_t>* peers_offer(size_t index) override {
    return index < offer_words ? &memory()->offers[1 - own_][index] : nullptr;
  }
  CooperativeCopy* own_copy(size_t index) override {
    return index < copy_slots ? &memory()->copies[own_][index] : nullptr;
  }
  CooperativeCopy* peers_copy(size_t index) override {
    return index < copy_slots && guard_page_ == GuardPage::open ? &memory()->copies[1 - own_][index] : nullptr;
  }
  bool can_write() const override { return can_write_; }
  bool write(uint64_t guard, uint64_t address, const byte* from, size_t bytes) override;
  uint64_t guard() const override { return reinterpret_cast<uint64_t>(guard_.at()); }
  void shut_guard() override;
  void wake_if_asleep() override;
  bool was_heard() override;
  void beat() override {}
  std::int32_t core() const override { return presence_.core(); }
  const char* name() const override { return "shm"; }

 private:
  LinkMemory* memory() const { return reinterpret_cast<LinkMemory*>(mapping_->at()); }
  bool poll_lane(Lane lane);

  Peer& peer_;
  std::shared_ptr<const Mapping> mapping_;
  PresenceView presence_;
  std::unique_ptr<Doorbell> doorbell_;
  const unsigned own_;  // the direction that this side writes
  bool can_read_ = false;
  bool can_write_ = false;
  Mapping guard_;
  GuardPage guard_page_ = GuardPage::absent;
  uint32_t sleep_woken_ = 0;  // the presence word of the peer's sleep that was ended last
  uint64_t beats_seen_ = 0;
  Producer out_[lane_count];
  Consumer in_[lane_count];
};

inline void ShmLink::wake_if_asleep() {
  const uint32_t word = presence_.word();
  if ((word & 1) != 0 && word != sleep_woken_) [[unlikely]] {
    sleep_woken_ = word;
    doorbell_->ring();
  }
}

}  // namespace unisono::engine
