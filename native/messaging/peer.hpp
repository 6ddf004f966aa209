// A peer: the eager and rendezvous protocol with one rank, over any link. It is the engine's state for that rank, and
// is only touched with the engine's lock held.

#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "link/link.hpp"
#include "messaging/loopback.hpp"
#include "messaging/peer_services.hpp"
#include "messaging/rendezvous_receiver.hpp"
#include "messaging/send_slots.hpp"

namespace unisono::engine {

// Replies that a peer has not read: three for each RTS that it may have sent (queued, CTS, FIN), and some credit.
inline constexpr size_t notes_max = 4 * rendezvous_max;

class Peer {
 public:
  enum class State : uint8_t { unopened, opening, open, down };

  Peer(PeerServices& services, std::int32_t rank, bool is_self);

  const std::int32_t rank;
  State state = State::unopened;
  Card card;
  bool is_same_host = false;
  std::int32_t heard_core = -1;  // CPU core that sent the last frame of either lane; -1: unknown
  std::string cause;             // why it is down
  bool left = false;
  bool is_rumoured = false;  // others report it gone, and `cause` why, while a handshake with it is under way
  // Time without a sign of life, and without bytes on its link. Only time in which this rank was scheduled counts.
  std::int64_t silent_ns = 0;
  std::int64_t stalled_ns = 0;
  std::string verdict;  // it has declared this rank dead, and why; its link ends
  std::unique_ptr<Link> link;
  RendezvousReceiver rendezvous;  // messages that the peer announced

  void on_open(std::unique_ptr<Link> opened);

  // -- sending
  void send(Send& send);
  // Withdraw a send. True if it ended as cancelled; false if it was matched and ends by itself.
  bool cancel(Send& send);
  // Put what waits on the link. True if something moved.
  bool flush();
  bool has_backlog() const { return backlog_ != 0; }
  // Nothing is in transit: what is left waits for receives that may never be posted.
  bool is_flushed() const {
    return backlog_ == 0 && !(loopback_ && loopback_->is_copying()) && are_rendezvous_settled();
  }
  // Copy a part of a message whose receiver shares the copy. True if there was one.
  bool copy_for_receiver(size_t piece_bytes);
  // Report that a rank is gone.
  void send_down(std::int32_t gone, const std::string& cause, Fate fate);
  // Send the verdict that this peer is dead, if it can still be reached, and hang up.
  void declare_dead(const std::string& cause);
  // The peer has declared this rank dead, in its own words.
  void on_verdict(const std::string& why);
  // The peer is on this host, runnable and not scheduled. Behind a socket that looks the same as a process that
  // computes and is cut off, so there is a limit.
  bool is_starved() const {
    return is_same_host && card.pid > 0 && silent_ns < starved_silences_max * services_.settings.silence_ns &&
           engine::is_starved(card.pid);
  }

  // -- receiving
  // Handle a whole frame, whose lengths fit its buffer. Returns what is wrong with it, or nullptr.
  const char* on_frame(const Head& head, const byte* body, Lane lane);
  // Whether the peer owes a reply to an RTS.
  bool awaits_answer() const { return !send_slots_.is_empty(); }
  // Read or copy one piece of a message; see RendezvousReceiver::read_piece.
  const char* read_piece(RendezvousReceive& offer, byte* scratch, size_t scratch_bytes, size_t piece_bytes);
  // An unexpected message was matched: return its credit and confirm it where its sender waits.
  void on_matched(const UnexpectedMessage& message);
  // A message to oneself has left the queue for its receive: see Loopback::begin. False for any other.
  bool begin_own(UnexpectedMessage& message, Receive& receive) {
    return loopback_.has_value() && loopback_->begin(message, receive);
  }
  // An unexpected message will never be received: return its credit.
  void on_dropped(const UnexpectedMessage& message);

  // -- for the rendezvous
  // Send a frame without payload, as soon as the link takes it.
  void note(Lane lane, Kind kind, uint64_t context, uint8_t dtype = 0, uint64_t nbytes = 0, std::string text = {});
  void return_credit(Lane lane, uint64_t bytes);

  // -- ending
  // End every operation that needs this peer.
  void end_all(Outcome outcome);
  void say_goodbye();

 private:
  struct Note {
    Lane lane;
    Head head;
    std::string text;
  };

  uint64_t credit_of(Lane lane) const;
  bool start(Send& send);
  bool are_rendezvous_settled() const;
  bool put_note(const Note& note);
  bool flush_streams();
  void stop_sharing(Send& send);

  const char* on_message(const Head& head, const byte* body, Lane lane);
  const char* on_cts(const Head& head);
  const char* on_fin(const Head& head);

  using Queue = IntrusiveList<Send, &Send::hook>;

  PeerServices& services_;
  std::optional<Loopback> loopback_;  // if the peer is this rank itself
  size_t backlog_ = 0;                // notes, queued sends and streams
  uint64_t eager_max_[lane_count] = {};
  uint64_t certain_eager_max_[lane_count] = {};  // of messages whose receive is certain
  uint64_t control_eager_max_[lane_count] = {};  // of control messages
  Queue queued_[lane_count];
  Queue streams_;
  Queue shared_copies_;  // long messages, which the peer may be reading
  std::deque<Note> notes_;
  SendSlots send_slots_;
  uint64_t credit_used_[lane_count] = {};  // by our messages at the peer
  uint64_t credit_held_[lane_count] = {};  // by the peer's messages here
  uint64_t credit_due_[lane_count] = {};   // matched, and not yet returned
};

}  // namespace unisono::engine
