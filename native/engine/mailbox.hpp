// A mailbox: short messages of one context and tag, in both directions, without an operation for each.
//
// Knows who reads. Does not know what is in a message, nor Python. Every call needs the engine's lock.
//
// A *letter* is a message that has come. Letters are taken from the links at once, so that they never use up credit;
// what nobody reads is bounded per sender, and then waits at the sender as any message does.
//
// What is too long for a letter goes beside it, under tags of its own: *lent* from where it lies, and *expected* where
// it is to stay. Who reads letters also reads that an expected message has come: so there is nobody to wake for it.
//
// One reads at a time. In front: who waits for an answer, and makes progress meanwhile as every caller does. In the
// background: one *leader* among the threads that serve. It makes progress only while nobody else does, and sleeps
// in the same poll as everything, so that one wake-up brings a letter to the thread that handles it. When the leader
// leaves with letters it is expected back soon; the next thread takes its place only if it is not.

#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/transition_table.hpp"
#include "engine/engine.hpp"

namespace unisono::engine {

// Keeps memory where it is. Only a reader may let go of it: others hold the engine's lock.
using Owner = std::shared_ptr<void>;

struct MailboxMessage {
  std::int32_t source = 0;
  uint64_t nbytes = 0;
  std::unique_ptr<byte[]> data;
  // Of a message that was expected: its number, how it ended, and the place where it is.
  uint64_t number = 0;
  Outcome outcome = Outcome::done;
  Owner owner;
};

// Where the leader is, the one background thread that makes progress for a mailbox. The other background threads are
// spares. Guarded by the engine's lock.
//
//   state    event    next     who and why
//   absent   lead     polling  the first background thread becomes the leader
//   polling  lead     polling  the leader looks again
//   polling  rest     resting  other threads make progress, so the leader sleeps for 0.5 ms
//   polling  leave    away     the leader returns with letters, by an interrupt or at its deadline
//   resting  resume   polling  woken by a letter, an interrupt or the end of the 0.5 ms
//   away     lead     polling  the leader came back
//   away     leave    away     the leader came back and returned at once: interrupted or late
//   away     succeed  away     a spare becomes the leader after 1 ms, and returns to run calls that the old one took
enum class Leader : uint8_t { absent, polling, resting, away };
enum class LeaderEvent : uint8_t { lead, rest, resume, leave, succeed };
inline constexpr TransitionTable<Leader, 4, LeaderEvent, 5> leader_transitions({
    {Leader::absent, LeaderEvent::lead, Leader::polling},
    {Leader::polling, LeaderEvent::lead, Leader::polling},
    {Leader::polling, LeaderEvent::rest, Leader::resting},
    {Leader::polling, LeaderEvent::leave, Leader::away},
    {Leader::resting, LeaderEvent::resume, Leader::polling},
    {Leader::away, LeaderEvent::lead, Leader::polling},
    {Leader::away, LeaderEvent::leave, Leader::away},
    {Leader::away, LeaderEvent::succeed, Leader::away},
});

class Mailbox final : private DeferredWork {
 public:
  Mailbox(Engine& engine, uint64_t context, uint64_t tag);
  ~Mailbox() override;
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Copy a message and send it. False, and nothing is sent, if more than `unsent_bytes_max` wait for the peer.
  bool post(std::int32_t dst, const byte* data, uint64_t nbytes, uint64_t unsent_bytes_max);
  // Send a long message from where it lies. False once the engine is closed.
  bool lend(std::int32_t dst, uint64_t tag, const byte* data, uint64_t nbytes, uint64_t number, Owner owner);
  // Whether it is still on its way.
  bool is_lent(uint64_t number) const { return lent_.contains(number); }
  // Receive a message of up to so many bytes where it is to stay. A letter tells its end.
  void expect(std::int32_t source, uint64_t tag, byte* into, uint64_t nbytes, uint64_t number, Owner owner);
  // Take back what was lent or expected and has not met its counterpart; a letter tells of the latter.
  void withdraw(uint64_t number);

  // Wait for letters and take all of them.
  std::vector<MailboxMessage> take(Hold& held, std::int64_t deadline, bool is_front);
  // Those that are here.
  std::vector<MailboxMessage> letters();
  // How often somebody has left with letters.
  uint64_t batches() const { return batches_; }
  // Memory that nobody needs any more.
  std::vector<Owner> returned() { return std::exchange(returned_, {}); }
  void interrupt_wait(bool is_front);
  // Readers return, receives end. It may be destroyed once `is_idle`.
  void close();
  bool is_idle() const { return active_ == 0; }

 private:
  class Slot;
  class OwnedSend;
  class Lent;
  class Expected;
  struct Sender {
    uint64_t queued_bytes = 0;
    uint64_t unsent_bytes = 0;  // posted to it, and not taken by its link
    size_t offers = 0;          // long messages under way
    bool needs_slot = false;    // no receive is posted
  };

  void work() override;
  void drop() override { is_closed_ = true; }
  void refill(std::int32_t source);
  void open_slot(std::int32_t source);
  void on_letter(MailboxMessage letter);
  void add(MailboxMessage letter);
  void wait_in_front(Hold& held, std::int64_t deadline);
  void wait_in_background(Hold& held, std::int64_t deadline);
  void on(LeaderEvent event) { leader_ = leader_transitions.next(leader_, event); }

  Engine& engine_;
  const uint64_t context_;
  const uint64_t tag_;
  bool is_closed_ = false;
  bool is_filling_ = false;
  size_t active_ = 0;  // slots and parcels that the engine knows
  std::vector<Sender> senders_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<Slot*> spare_slots_;
  std::vector<std::unique_ptr<OwnedSend>> parcels_;
  std::vector<OwnedSend*> spare_parcels_;
  std::vector<std::unique_ptr<Send>> all_lent_;
  std::vector<Lent*> spare_lent_;
  std::unordered_map<uint64_t, Lent*> lent_;
  std::vector<std::unique_ptr<Receive>> all_expected_;
  std::vector<Expected*> spare_expected_;
  std::unordered_map<uint64_t, Expected*> expected_;
  std::vector<Owner> returned_;
  std::vector<MailboxMessage> queue_;
  uint64_t batches_ = 0;

  size_t front_readers_ = 0;
  std::int64_t front_read_at_ = 0;  // when a front reader last returned
  bool is_front_interrupted_ = false;
  size_t background_interrupts_ = 0;  // each ends the wait of one background reader
  Leader leader_ = Leader::absent;
  std::thread::id leader_id_;  // none while absent
  std::int64_t leader_left_at_ = 0;
  uint64_t polls_seen_ = 0;
  size_t spares_asleep_ = 0;
  std::condition_variable_any rest_;   // the resting leader waits here
  std::condition_variable_any spare_;  // and the spares here
};

}  // namespace unisono::engine
