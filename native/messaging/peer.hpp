// A peer: the eager and rendezvous protocol with one rank, over any link. It is the engine's state for that rank, and
// is only touched with the engine's lock held.

#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/transition_table.hpp"
#include "link/link.hpp"
#include "messaging/inbox.hpp"
#include "messaging/message.hpp"

namespace unisono::engine {

// Numbers without a default have their home in Python, which passes them: config.py, messaging/credit.py and
// messaging/strangers.py.
struct Settings {
  uint64_t eager_bytes;
  uint64_t eager_credit_bytes;
  uint64_t control_eager_bytes;
  uint64_t control_credit_bytes;
  uint64_t control_bytes_max;  // of one control message or RPC frame
  uint64_t own_credit_bytes;   // of messages to oneself
  uint64_t message_bytes_max;
  uint64_t recv_bytes_max;  // of a receive that takes the message's own length
  std::int64_t silence_ns;
  // Before authentication.
  uint64_t stranger_bytes_max;
  std::int64_t stranger_ns;
  uint64_t strangers_max;
  uint64_t strangers_per_address_max;

  bool shm = true;
  bool checksum = true;                        // between hosts, without TLS
  bool tls = false;                            // on all connections by TCP
  bool quic = false;                           // instead of TCP
  size_t datagram_bytes = 0;                   // of QUIC; 0: what the path carries
  size_t socket_buffer_bytes = 4 << 20;        // asked of the system for QUIC's socket
  uint64_t rekey_records = uint64_t{1} << 22;  // records that a sender encrypts with one key
  bool neighbours = false;                     // open control links to ranks +-2^k at once
  bool direct_read = true;                     // read the peer's memory where the system allows it
  std::string bind = "127.0.0.1";
  uint16_t port = 0;
  std::string host;  // replaces the machine's id
};

// A peer that is starved of CPU time is declared dead after this many times silence_ns: a minute by default, the
// longest that a process may reasonably hold the GIL.
inline constexpr std::int64_t starved_silences_max = 24;
// Bound on silence_ns, so that every multiple of it fits 64 bits.
inline constexpr std::int64_t silence_ns_max = 1'000'000 * second;

// How to reach a rank.
struct Card {
  std::string host;
  std::string unix_path;  // empty: no shared memory
  std::string address;
  uint16_t port = 0;
  std::int32_t pid = 0;  // 0: unknown
};

class Peer;

// What the engine does for its peers.
class PeerServices {
 public:
  virtual ~PeerServices() = default;
  virtual void open_link(Peer& peer) = 0;
  virtual void start_reading(RendezvousReceive& offer) = 0;
  virtual void stop_reading(RendezvousReceive& offer) = 0;
  // A peer reports that a rank is gone.
  virtual void on_rank_down(uint64_t rank, std::string cause, bool left) = 0;

  Settings settings{};
  Inbox inbox;
};

// A rendezvous id names a message on both sides of a link: the index of its slot, and above 32 bits the number of times
// that the slot was used.
inline size_t index_of(uint64_t rendezvous_id) { return rendezvous_id & 0xffffffff; }
inline constexpr size_t rendezvous_max = 65536;  // credit.RTS_MAX
// Replies that a peer has not read: three for each RTS that it may have sent (queued, CTS, FIN), and some credit.
inline constexpr size_t notes_max = 4 * rendezvous_max;

// The receiving side of a rendezvous: a message that a peer announced by RTS, or sent eagerly and wants confirmed. For
// a long message to oneself it is the copy in progress: `read`, then `copied` or `abort`.
struct RendezvousReceive {
  enum class State : uint8_t { free, queued, awaiting_memory, reading, streaming };
  enum class Event : uint8_t { queue, defer, read, stream, withdraw, complete, copied, abort };
  enum class Reply : uint8_t { none, queued, cts, fin_matched, fin_withdrawn };
  static constexpr TransitionTable<State, 5, Event, 8, Reply> transitions{{
      // no receive matches yet
      {State::free, Event::queue, State::queued, Reply::queued},
      // a receive matches and must get its memory from Python
      {State::free, Event::defer, State::awaiting_memory},
      // the sender's memory can be read directly
      {State::free, Event::read, State::reading},
      // the sender has to stream the bytes
      {State::free, Event::stream, State::streaming, Reply::cts},
      // the sender cancelled, or was faster than our claim
      {State::free, Event::withdraw, State::free, Reply::fin_withdrawn},
      // an eager or empty message, or no memory for it
      {State::free, Event::complete, State::free, Reply::fin_matched},
      // the peer is lost or this rank closes
      {State::free, Event::abort, State::free},
      {State::queued, Event::defer, State::awaiting_memory},
      {State::queued, Event::read, State::reading},
      {State::queued, Event::stream, State::streaming, Reply::cts},
      {State::queued, Event::withdraw, State::free, Reply::fin_withdrawn},
      {State::queued, Event::complete, State::free, Reply::fin_matched},
      {State::queued, Event::abort, State::free},
      {State::awaiting_memory, Event::read, State::reading},
      {State::awaiting_memory, Event::stream, State::streaming, Reply::cts},
      {State::awaiting_memory, Event::withdraw, State::free, Reply::fin_withdrawn},
      {State::awaiting_memory, Event::complete, State::free, Reply::fin_matched},
      {State::awaiting_memory, Event::abort, State::free},
      // the first direct read failed
      {State::reading, Event::stream, State::streaming, Reply::cts},
      // every byte has arrived
      {State::reading, Event::complete, State::free, Reply::fin_matched},
      // a message to oneself is copied
      {State::reading, Event::copied, State::free},
      {State::reading, Event::abort, State::free},
      {State::streaming, Event::withdraw, State::free, Reply::fin_withdrawn},
      {State::streaming, Event::complete, State::free, Reply::fin_matched},
      {State::streaming, Event::abort, State::free},
  }};

  State state = State::free;
  Lane lane = Lane::bulk;
  Peer* peer = nullptr;
  Receive* receive = nullptr;
  UnexpectedMessage* arrived = nullptr;
  uint64_t rendezvous_id = 0;
  uint64_t address = 0;
  uint64_t nbytes = 0;
  uint64_t received = 0;
  CooperativeCopy* shared_copy = nullptr;  // the sender may copy a part
  Send* own = nullptr;                     // of a message to oneself whose sender waits
  ListHook<RendezvousReceive> hook;
};

class Peer {
 public:
  enum class State : uint8_t { unopened, opening, open, down };

  Peer(PeerServices& services, std::int32_t rank, bool is_self) : rank(rank), services_(services), is_self_(is_self) {}

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

  void on_open(std::unique_ptr<Link> opened);

  // -- sending
  void send(Send& send);
  // Withdraw a send. True if it ended as cancelled; false if it was matched and ends by itself.
  bool cancel(Send& send);
  // Put what waits on the link. True if something moved.
  bool flush();
  bool has_backlog() const { return backlog_ != 0; }
  // Nothing is in transit: what is left waits for receives that may never be posted.
  bool is_flushed() const { return backlog_ == 0 && own_copies_ == 0 && are_rendezvous_settled(); }
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
  // The rendezvous of a data frame, for links that read payload straight to its target; nullptr and `fault` if none.
  RendezvousReceive* data_for(const Head& head, const char*& fault);
  // Whether data frames are to come.
  bool awaits_data() const { return awaited_ != 0; }
  // Whether the peer owes a reply to an RTS.
  bool awaits_answer() const { return free_slots_.size() != send_slots_.size(); }
  // Payload is at its target. The last byte completes the receive.
  void on_data(RendezvousReceive& offer, size_t bytes);

  RendezvousReceive& incoming_of(uint64_t rendezvous_id) { return incoming_[index_of(rendezvous_id)]; }
  // Claim an RTS: its sender can no longer withdraw it. False if it was withdrawn before.
  bool claim(RendezvousReceive& offer);
  // Reply to a withdrawn RTS that no longer waits in the inbox.
  void drop(RendezvousReceive& offer);
  // The same for one that does.
  void drop_queued(RendezvousReceive& offer);
  void begin(RendezvousReceive& offer, Receive& receive, MatchResult match);
  // There is memory now for a receive that said `defer`.
  void supply(RendezvousReceive& offer);
  // There will be none: the message counts as matched, and its payload is lost.
  void give_up(RendezvousReceive& offer);
  // Read one piece of a message from the sender's memory; `scratch` serves receives without a buffer. Returns what went
  // wrong, or nullptr.
  const char* read_piece(RendezvousReceive& offer, byte* scratch, size_t scratch_bytes, size_t piece_bytes);
  // An unexpected message was matched: return its credit and confirm it where its sender waits.
  void on_matched(const UnexpectedMessage& message);
  // A message to oneself has left the queue for its receive. False if it is short, and the caller copies it; else it is
  // copied in pieces, and both operations end with the last.
  bool begin_own(UnexpectedMessage& message, Receive& receive);

  // An unexpected message will never be received: return its credit.
  void on_dropped(const UnexpectedMessage& message);

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
  struct SendSlot {
    Send* send = nullptr;
    uint32_t uses = 0;
    bool is_taken = false;
  };

  uint64_t cost(uint64_t nbytes) const { return nbytes + line_bytes; }  // credit.ENVELOPE_BYTES
  uint64_t credit_of(Lane lane) const;
  bool start(Send& send);
  bool take_slot(Send& send);
  void free_slot(uint64_t rendezvous_id);
  SendSlot* slot_of(uint64_t rendezvous_id);
  bool are_rendezvous_settled() const;
  // Apply an event to a rendezvous and send the reply that its table names.
  void advance(RendezvousReceive& offer, RendezvousReceive::Event event);
  // Tell the sender that no receive matches its RTS so far: it need not wait for an answer when it leaves.
  void reply_queued(RendezvousReceive& offer);
  // Complete a rendezvous whose receive ends with it.
  void complete(RendezvousReceive& offer, Outcome outcome);
  // Undo a match: the sender withdrew its RTS, and the receive waits for another message.
  void unmatch(RendezvousReceive& offer);
  void note(Lane lane, Kind kind, uint64_t context, uint8_t dtype = 0, uint64_t nbytes = 0, std::string text = {});
  bool put_note(const Note& note);
  void return_credit(Lane lane, uint64_t bytes);
  void send_to_self(Send& send);
  // Whether a message to oneself is copied; if not, its send waits for the receive. The first may have any length.
  bool may_keep_own(uint64_t nbytes) const;
  // Copy in pieces to the receive's buffer, or without a receive to the message's own.
  void start_copy(const byte* from, uint64_t nbytes, Receive* receive, UnexpectedMessage* message, Send* send);
  void copy_piece(RendezvousReceive& copy, size_t scratch_bytes, size_t piece_bytes);
  void end_copy(RendezvousReceive& copy, Outcome outcome);
  // The payload is wanted elsewhere or not at all: drop what was copied.
  void stop_keeping(UnexpectedMessage& message);
  bool flush_streams();
  void stop_sharing(Send& send);
  // Read a part of a message whose sender shares the copy.
  const char* read_part(RendezvousReceive& offer, size_t piece_bytes);
  // Whether the bytes that were read were the message's: the peer still is the same process and has not revoked its
  // offer. If not, with the fault, or without one if the peer is gone, which will be noticed.
  bool confirm(RendezvousReceive& offer, const char*& fault);
  // Make sure that the sender no longer writes to the receive's buffer.
  void fence(RendezvousReceive& offer);

  const char* on_message(const Head& head, const byte* body, Lane lane);
  const char* on_cts(const Head& head);
  const char* on_fin(const Head& head);
  const char* on_withdraw(const Head& head);

  using Queue = IntrusiveList<Send, &Send::hook>;

  PeerServices& services_;
  const bool is_self_;
  size_t awaited_ = 0;     // rendezvous in state streaming
  size_t backlog_ = 0;     // notes, queued sends and streams
  size_t own_copies_ = 0;  // long messages to oneself that are being copied
  uint64_t eager_max_[lane_count] = {};
  uint64_t certain_eager_max_[lane_count] = {};  // of messages whose receive is certain
  uint64_t control_eager_max_[lane_count] = {};  // of control messages
  Queue queued_[lane_count];
  Queue streams_;
  Queue shared_copies_;  // long messages, which the peer may be reading
  std::deque<Note> notes_;
  std::vector<SendSlot> send_slots_;
  std::vector<uint32_t> free_slots_;
  // By the index of the peer's rendezvous id; for messages to oneself in any order. A deque: elements must not move.
  std::deque<RendezvousReceive> incoming_;
  uint64_t credit_used_[lane_count] = {};  // by our messages at the peer
  uint64_t credit_held_[lane_count] = {};  // by the peer's messages here
  uint64_t credit_due_[lane_count] = {};   // matched, and not yet returned
};

}  // namespace unisono::engine
