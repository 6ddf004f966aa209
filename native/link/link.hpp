// A link to one peer: carries frames, in order on each lane. Peer decides what a frame means.

#pragma once

#include <atomic>
#include <string>
#include <string_view>

#include "base/system.hpp"
#include "base/transition_table.hpp"
#include "link/cooperative_copy.hpp"
#include "wire/frame.hpp"

namespace unisono::engine {

// Payload of a data frame: long enough that its head costs nothing, short enough that other messages get their turn.
inline constexpr size_t data_frame_bytes = 1 << 20;

// The word in shared memory that belongs to an RTS, and says which side may touch the message's memory. Both sides
// change it by compare-and-swap, so that a claim and a withdrawal cannot both succeed. A word outside the enum is a
// fault of the peer and allows nothing.
enum class OfferWord : uint32_t { free, offered, queued, reading, done, withdrawn };
enum class OfferEvent : uint8_t { queue, claim, withdraw, finish, offer, revoke };
inline constexpr size_t offer_word_count = 6;
inline constexpr TransitionTable<OfferWord, offer_word_count, OfferEvent, 6> offer_transitions({
    // receiver: the RTS arrived and no receive matches; a hint for a sender that closes
    {OfferWord::offered, OfferEvent::queue, OfferWord::queued},
    // receiver: a receive matches, and the memory may be read from now on
    {OfferWord::offered, OfferEvent::claim, OfferWord::reading},
    {OfferWord::queued, OfferEvent::claim, OfferWord::reading},
    // sender: the send was cancelled before any receive matched
    {OfferWord::offered, OfferEvent::withdraw, OfferWord::withdrawn},
    {OfferWord::queued, OfferEvent::withdraw, OfferWord::withdrawn},
    // receiver: all bytes were read while the memory was still the sender's to lend
    {OfferWord::reading, OfferEvent::finish, OfferWord::done},
    // sender: a new RTS; the FIN of the one before has arrived, so no other side looks
    {OfferWord::free, OfferEvent::offer, OfferWord::offered},
    {OfferWord::offered, OfferEvent::offer, OfferWord::offered},
    {OfferWord::queued, OfferEvent::offer, OfferWord::offered},
    {OfferWord::reading, OfferEvent::offer, OfferWord::offered},
    {OfferWord::done, OfferEvent::offer, OfferWord::offered},
    {OfferWord::withdrawn, OfferEvent::offer, OfferWord::offered},
    // sender: the peer was declared dead; a read that goes on cannot finish
    {OfferWord::free, OfferEvent::revoke, OfferWord::withdrawn},
    {OfferWord::offered, OfferEvent::revoke, OfferWord::withdrawn},
    {OfferWord::queued, OfferEvent::revoke, OfferWord::withdrawn},
    {OfferWord::reading, OfferEvent::revoke, OfferWord::withdrawn},
    {OfferWord::done, OfferEvent::revoke, OfferWord::withdrawn},
    {OfferWord::withdrawn, OfferEvent::revoke, OfferWord::withdrawn},
});

// Apply an event to a word that the other side may change meanwhile. False if the table does not list the pair.
inline bool change_offer(std::atomic<uint32_t>& word, OfferEvent event) {
  uint32_t seen = word.load(std::memory_order_relaxed);
  // An honest peer changes the word at most twice meanwhile (queued, then reading or withdrawn).
  for (int tries = 0; tries < 3 && seen < offer_word_count; ++tries) {
    const auto from = static_cast<OfferWord>(seen);
    if (!offer_transitions.allows(from, event)) return false;
    const auto to = static_cast<uint32_t>(offer_transitions.next(from, event));
    // acq_rel: what the other side did before its own change has happened
    if (word.compare_exchange_strong(seen, to, std::memory_order_acq_rel)) return true;
  }
  return false;
}

class Link {
 public:
  virtual ~Link() = default;

  // Send a whole frame. False, and nothing is sent, while there is no room.
  virtual bool put(Lane lane, Head head, const Body& body) = 0;
  // Send some payload of a rendezvous after its CTS; returns how many bytes were taken. Their memory stays in use while
  // `holds_data` of that rendezvous id.
  virtual size_t put_data(Lane lane, uint64_t rendezvous_id, uint64_t offset, const byte* from, uint64_t left) = 0;
  virtual bool holds_data(Lane, uint64_t) const { return false; }
  // The peer is ready for frames: give it those that have arrived already.
  virtual void start() {}
  // Give arrived frames to the peer. True if something moved.
  virtual bool poll() = 0;
  // Write short frames that were corked: see SocketPolicy.
  virtual void push() {}
  // Whether everything was handed to the operating system or the ring.
  virtual bool is_drained() const { return true; }
  // The longest payload of an eager frame.
  virtual size_t eager_bytes_max(Lane lane) const = 0;

  // Factor on the eager limit for a message whose receive is certain: a rendezvous would cost two more trips.
  virtual size_t certain_eager_factor() const { return 1; }

  // Copy from the peer's memory (process_vm_readv); false if that fails.
  virtual bool can_read() const { return false; }
  virtual bool read(uint64_t, byte*, size_t) { return false; }
  virtual bool is_alive() const { return true; }
  // The offer word of an RTS of ours / of the peer, by the index of its rendezvous id; nullptr if it has none.
  virtual std::atomic<uint32_t>* own_offer(size_t) { return nullptr; }
  virtual std::atomic<uint32_t>* peers_offer(size_t) { return nullptr; }

  // The same for the state of a cooperative copy.
  virtual CooperativeCopy* own_copy(size_t) { return nullptr; }
  virtual CooperativeCopy* peers_copy(size_t) { return nullptr; }
  // Copy to the peer's memory (process_vm_writev) unless the peer has shut its guard page; false if that fails.
  virtual bool can_write() const { return false; }
  virtual bool write(uint64_t, uint64_t, const byte*, size_t) { return false; }
  // Our own guard page: its address, and how to shut it. The peer begins no write after that; one in progress goes on.
  virtual uint64_t guard() const { return 0; }
  virtual void shut_guard() {}
  virtual void wake_if_asleep() {}

  // Whether nothing is lost if this process exits: everything has reached the peer, or its operating system.
  virtual bool is_delivered() const { return true; }
  // Whether a rank that leaves must wait until the peer has hung up, too: what it has not read would be lost.
  virtual bool needs_hang_up() const { return false; }
  // Whether the peer is runnable and not scheduled.
  virtual bool is_starved() const { return false; }

  // Whether a sign of life came since the last call; send our own.
  virtual bool was_heard() = 0;
  virtual void beat() = 0;
  // Whether the network may delay the peer's heartbeats, so that a silent peer should be pinged by datagram, too.
  virtual bool can_stall() const { return false; }
  // The CPU core that the peer waited on last; -1 if unknown.
  virtual std::int32_t core() const { return -1; }
  // Nothing more will be sent.
  virtual void finish() {}
  // All operations have ended here: from now on throw away what arrives and touch no memory of messages.
  virtual void discard_input() { is_discarding_ = true; }
  virtual const char* name() const = 0;

  // Why the link ended, after all earlier frames were given to the peer; nullptr while it is open.
  const char* over() const { return over_; }
  // The other side ended it, and not by breaking the protocol.
  bool is_hung_up() const { return has_left() || (over_ != nullptr && std::string_view(over_).starts_with("died")); }
  virtual bool has_left() const { return goodbyes_[0] && goodbyes_[1]; }

  virtual void on_goodbye(Lane lane) { goodbyes_[static_cast<size_t>(lane)] = true; }

 protected:
  const char* over_ = nullptr;
  bool goodbyes_[lane_count] = {};
  bool is_discarding_ = false;
};

}  // namespace unisono::engine
