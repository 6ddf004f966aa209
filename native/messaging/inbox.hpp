// The inbox: posted receives and the unexpected-message queue of a rank. Peer decides how the payload travels.

#pragma once

#include <cstring>
#include <deque>
#include <unordered_set>
#include <vector>

#include "messaging/matcher.hpp"

namespace unisono::engine {

class Inbox {
 public:
  ~Inbox();

  // Take the receive that matches a message; nullptr if the message has to wait. A message that its sender may still
  // withdraw is claimed first; `is_gone` if the claim came too late.
  Receive* take_receive(const Envelope& envelope, bool is_here, RendezvousReceive* offer, MatchResult& match,
                        bool& is_gone);
  // Add an unexpected message. nullptr without memory.
  UnexpectedMessage* queue(const Envelope& envelope, Peer& peer, const byte* payload, uint64_t held_bytes);
  void remove(UnexpectedMessage& message) {
    matcher_.take(message);
    recycle(message);
  }

  // Match a receive with an unexpected message. False if there is none.
  bool serve(Receive& receive);
  void post(Receive& receive) { matcher_.post(receive); }
  void repost(Receive& receive) { matcher_.repost(receive); }
  void withdraw(Receive& receive) { matcher_.withdraw(receive); }

  // Unexpected messages whose senders run ahead, that is, do not wait for the match. If the collective with that
  // sequence number has already run here, the ranks called different collectives: the owner of the call log compares.
  using RunAhead = IntrusiveList<UnexpectedMessage, &UnexpectedMessage::in_ahead>;
  const RunAhead& run_ahead() const { return run_ahead_; }
  void add_ahead(UnexpectedMessage& message) { run_ahead_.push_back(message); }
  // No receive will be posted in this context: eager messages, present and future, are dropped and their credit is
  // returned. A message whose sender waits stays, and its sender withdraws it when it learns of the end.
  void end_context(uint64_t context);
  // Whether an unexpected message of this context waits.
  bool has_unexpected(uint64_t context) const;
  bool has_ended(uint64_t context) const { return !ended_.empty() && ended_.contains(context); }
  // Stop watching run-ahead messages of this context.
  void ignore_context(uint64_t context);

  // Copy payload to a receive.
  static void deliver(Receive& receive, const byte* payload, uint64_t bytes) {
    if (bytes == 0) return;
    if (byte* to = receive.buffer(); to != nullptr)
      std::memcpy(to, payload, bytes);
    else
      receive.write(0, payload, bytes);
  }

  // A rank is gone: end receives that only it could match.
  void end_receives_from(std::int32_t rank);
  void end_all(Outcome outcome);
  bool is_idle() const { return matcher_.is_empty(); }
  // Every posted receive, in the order of posting.
  std::vector<Receive*> all_posted() const { return matcher_.all_posted(); }
  // The highest number of an unexpected message so far.
  uint64_t newest() const { return matcher_.newest(); }

  // Reuse a message that has left the queue.
  void recycle(UnexpectedMessage& message);

 private:
  Matcher matcher_;
  RunAhead run_ahead_;
  std::vector<std::unique_ptr<UnexpectedMessage>> spare_;
  // Contexts that ended here, the oldest first in `ended_order_`.
  std::unordered_set<uint64_t> ended_;
  std::deque<uint64_t> ended_order_;
};

}  // namespace unisono::engine
