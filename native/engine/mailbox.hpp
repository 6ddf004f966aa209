// A mailbox: short messages of one context and tag, in both directions, without an operation for each.
//
// Every call needs the engine's lock.
//
// Messages are taken from the links at once, so that they do not use up
// credit. Unread messages are bounded per sender; beyond that they wait at the sender as any message does.
//
// A payload that is too long for one message travels beside it under a tag of its own: *lent* from the sender's memory,
// and *expected* into the receiver's. The end of an expected message is reported as a message, so no other thread has
// to be woken. One of up to `certain_bytes_max` is sent at once, because its receiver always receives it, even if it
// then drops it; and it is sent before its message, so that it is usually there when the message is read. A longer one
// follows its message, so that it is usually expected when its RTS arrives.
//
// One thread reads at a time. A *front* reader waits for an answer and makes progress meanwhile, as every caller does.
// In the background one *leader* among the serving threads makes progress, only while no other thread does, and sleeps
// in the same poll as the rest of the engine, so that one wake-up brings a message to the thread that handles it. A
// leader that leaves with messages is expected back soon; a spare thread takes its place only if it is not.

#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/transition_table.hpp"
#include "engine/engine.hpp"

namespace unisono::engine {

// 64 KiB: what sockets send eagerly (Link::certain_eager_factor).
inline constexpr uint64_t certain_bytes_max = 64 * 1024;

// Keeps memory alive. Only a reader may drop it, because releasing it may run Python, and other callers hold the lock.
using Owner = std::shared_ptr<void>;

struct MailboxMessage {
  std::int32_t source = 0;
  uint64_t nbytes = 0;
  std::unique_ptr<byte[]> data;
  // Of an expected message: its number (else 0), how it ended, and its memory.
  uint64_t number = 0;
  Outcome outcome = Outcome::done;
  Owner owner;
};

// A payload that is lent beside a message.
struct LentPayload {
  uint64_t tag = 0;
  uint64_t number = 0;  // by which it is withdrawn
  const byte* data = nullptr;
  uint64_t nbytes = 0;
  Owner owner;
};

// Where the leader is, the one background thread that makes progress for a mailbox. The other background threads are
// spares. Guarded by the engine's lock.
enum class Leader : uint8_t { absent, polling, resting, away };
enum class LeaderEvent : uint8_t { lead, rest, resume, leave, succeed };
inline constexpr TransitionTable<Leader, 4, LeaderEvent, 5> leader_transitions({
    // the first background thread becomes the leader
    {Leader::absent, LeaderEvent::lead, Leader::polling},
    // the leader looks again
    {Leader::polling, LeaderEvent::lead, Leader::polling},
    // other threads make progress, so the leader sleeps for 0.5 ms
    {Leader::polling, LeaderEvent::rest, Leader::resting},
    // the leader returns with messages, by an interrupt or at its deadline
    {Leader::polling, LeaderEvent::leave, Leader::away},
    // woken by a message, an interrupt or the end of the 0.5 ms
    {Leader::resting, LeaderEvent::resume, Leader::polling},
    // the leader came back
    {Leader::away, LeaderEvent::lead, Leader::polling},
    // the leader came back and returned at once: interrupted or late
    {Leader::away, LeaderEvent::leave, Leader::away},
    // a spare becomes the leader after 1 ms, and returns to run calls that the old one took
    {Leader::away, LeaderEvent::succeed, Leader::away},
});

class Mailbox final : private DeferredWork {
 public:
  Mailbox(Engine& engine, uint64_t context, uint64_t tag);
  ~Mailbox() override;
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Copy a message and send it, with the payloads beside it, which are not copied. False, and nothing is sent or taken,
  // if more than `unsent_bytes_max` bytes wait for the peer. With `is_more` another one follows soon: a socket may keep
  // the message until then, or until the next round of progress, which some thread makes within a millisecond, so that
  // one system call sends several.
  bool post(std::int32_t dst, const byte* data, uint64_t nbytes, uint64_t unsent_bytes_max, bool is_more = false,
            std::vector<LentPayload>* lent = nullptr);
  // Whether it has not ended yet.
  bool is_lent(uint64_t number) const { return lent_.contains(number); }
  // Receive a message of up to `nbytes` into memory. What is returned reports its end if it is here already; else a
  // message does, later.
  std::optional<MailboxMessage> expect(std::int32_t source, uint64_t tag, byte* into, uint64_t nbytes, uint64_t number,
                                       Owner owner);
  // Cancel what was lent or expected and is unmatched. A message reports the end of an expected one.
  void withdraw(uint64_t number);

  // Wait for messages and take all of them.
  std::vector<MailboxMessage> take(Hold& held, std::int64_t deadline, bool is_front);
  // Take all messages that are here.
  std::vector<MailboxMessage> take_ready();
  // The number of times that a reader has left with messages.
  uint64_t batches() const { return batches_; }
  // Take memory that is no longer used.
  std::vector<Owner> returned() { return std::exchange(returned_, {}); }
  void interrupt_wait(bool is_front);
  // End all waits and receives. The mailbox may be destroyed once `is_idle`.
  void close();
  bool is_idle() const { return active_ == 0; }

 private:
  class Slot;
  class OwnedSend;
  class Lent;
  class Expected;
  struct Sender {
    uint64_t queued_bytes = 0;
    uint64_t unsent_bytes = 0;  // posted to this rank, and not taken by its link
    size_t offers = 0;          // rendezvous under way
    bool needs_slot = false;    // no receive is posted for it
  };

  void lend(std::int32_t dst, LentPayload payload);
  void work() override;
  void drop() override { is_closed_ = true; }
  void cork();
  void uncork();
  void refill(std::int32_t source);
  void open_slot(std::int32_t source);
  void on_message(MailboxMessage message);
  void add(MailboxMessage message);
  void wait_in_front(Hold& held, std::int64_t deadline);
  void wait_in_background(Hold& held, std::int64_t deadline);
  void on(LeaderEvent event) { leader_ = leader_transitions.next(leader_, event); }

  Engine& engine_;
  const uint64_t context_;
  const uint64_t tag_;
  bool is_closed_ = false;
  bool is_filling_ = false;
  bool is_corked_ = false;  // the engine is corked until the next round of progress
  size_t active_ = 0;       // operations that the engine refers to
  std::vector<Sender> senders_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<Slot*> spare_slots_;
  std::vector<std::unique_ptr<OwnedSend>> sends_;
  std::vector<OwnedSend*> spare_sends_;
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
