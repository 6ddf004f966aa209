// A mailbox: short messages of one context and tag, in both directions, without an operation for each.
//
// Knows who reads. Does not know what is in a message, nor Python. Every call needs the engine's lock.
//
// A *letter* is a message that has come. Letters are taken from the links at once, so that they never use up credit;
// what nobody reads is bounded per sender, and then waits at the sender as any message does.
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
#include <vector>

#include "engine.hpp"

namespace unisono::engine {

struct Letter {
  std::int32_t source = 0;
  uint64_t nbytes = 0;
  std::unique_ptr<byte[]> data;
};

class Mailbox final : private Chore {
 public:
  Mailbox(Engine& engine, uint64_t context, uint64_t tag);
  ~Mailbox() override;
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  // Copy a message and send it. False once the engine is closed.
  bool post(std::int32_t dst, const byte* data, uint64_t nbytes);
  // Wait for letters and take all of them.
  std::vector<Letter> take(Hold& held, std::int64_t deadline, bool is_front);
  void poke(bool is_front);
  // Readers return, receives end. It may be destroyed once `is_idle`.
  void close();
  bool is_idle() const { return active_ == 0; }

 private:
  class Slot;
  class Parcel;
  struct Sender {
    uint64_t queued_bytes = 0;
    size_t offers = 0;        // long messages under way
    bool needs_slot = false;  // no receive is posted
  };

  void work() override;
  void drop() override { is_closed_ = true; }
  void refill(std::int32_t source);
  void open_slot(std::int32_t source);
  void on_letter(Letter letter);
  void wait_in_front(Hold& held, std::int64_t deadline);
  void wait_in_background(Hold& held, std::int64_t deadline);
  std::vector<Letter> letters();

  Engine& engine_;
  const uint64_t context_;
  const uint64_t tag_;
  bool is_closed_ = false;
  bool is_filling_ = false;
  size_t active_ = 0;  // slots and parcels that the engine knows
  std::vector<Sender> senders_;
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<Slot*> spare_slots_;
  std::vector<std::unique_ptr<Parcel>> parcels_;
  std::vector<Parcel*> spare_parcels_;
  std::vector<Letter> queue_;

  size_t fronts_ = 0;
  std::int64_t front_at_ = 0;  // when somebody read in front
  bool is_front_poked_ = false;
  size_t pokes_ = 0;  // of readers in the background
  std::thread::id leader_;
  bool is_leader_here_ = false;
  bool is_leader_resting_ = false;
  std::int64_t leader_left_at_ = 0;
  uint64_t polls_seen_ = 0;
  size_t spares_asleep_ = 0;
  std::condition_variable_any rest_;   // the leader's
  std::condition_variable_any spare_;  // the others'
};

}  // namespace unisono::engine
