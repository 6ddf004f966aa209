// The inbox: where messages for this rank on_match its receives.
//
// Knows arrivals and posted receives. Does not know how a message travels: its peer does.

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

  // The receive that takes a message, no longer posted; nullptr if the message has to wait. A message that its
  // sender may still take back is claimed first; `is_gone` if that came too late.
  Receive* take_receive(const Envelope& envelope, bool is_here, RendezvousReceive* offer, MatchResult& match,
                        bool& is_gone);
  // Let a message wait. nullptr without memory.
  UnexpectedMessage* queue(const Envelope& envelope, Peer& peer, const byte* payload, uint64_t held_bytes);
  void remove(UnexpectedMessage& message) {
    matcher_.take(message);
    recycle(message);
  }

  // Let a receive take a message that waits. False if there is none.
  bool serve(Receive& receive);
  void post(Receive& receive) { matcher_.post(receive); }
  void repost(Receive& receive) { matcher_.repost(receive); }
  void withdraw(Receive& receive) { matcher_.withdraw(receive); }

  // Messages whose senders do not wait until they are met, as long as they are not. If the call that they belong to
  // has been made here, and they still wait, it was another call: whoever keeps the calls has to compare.
  using RunAhead = IntrusiveList<UnexpectedMessage, &UnexpectedMessage::in_ahead>;
  const RunAhead& run_ahead() const { return run_ahead_; }
  void add_ahead(UnexpectedMessage& message) { run_ahead_.push_back(message); }
  // Nobody receives in this context any more: messages that came whole, now or later, are dropped, and their credit
  // goes back. One whose sender waits stays: the sender takes it back when it hears of the end.
  void end_context(uint64_t context);
  bool has_ended(uint64_t context) const { return !ended_.empty() && ended_.contains(context); }
  // Nobody has calls of this context to compare with any more.
  void ignore_context(uint64_t context);

  // Bring bytes that are here to their place.
  static void bring(Receive& receive, const byte* payload, uint64_t bytes) {
    if (bytes == 0) return;
    if (byte* to = receive.place(); to != nullptr)
      std::memcpy(to, payload, bytes);
    else
      receive.write(0, payload, bytes);
  }

  // A rank is gone: what only it could serve ends.
  void end_receives_from(std::int32_t rank);
  void end_all(Outcome outcome);
  bool is_idle() const { return matcher_.is_empty(); }
  // Whatever has arrived so far has a number up to this.
  uint64_t newest() const { return matcher_.newest(); }

  // Free a message that is no longer among those that wait.
  void recycle(UnexpectedMessage& message);

 private:
  Matcher matcher_;
  RunAhead run_ahead_;
  std::vector<std::unique_ptr<UnexpectedMessage>> spare_;
  // The contexts that were closed here last, and in which order.
  std::unordered_set<uint64_t> ended_;
  std::deque<uint64_t> ended_order_;
};

}  // namespace unisono::engine
