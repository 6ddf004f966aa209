// A peer: the protocol spoken with one rank, whatever the link.
//
// Knows credit, rendezvous ids, offers and what every frame causes. Does not know rings or sockets. It is the engine's
// state for a rank, so it is only touched with the engine's lock held.

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
#include "wire/header_table.hpp"

namespace unisono::engine {

struct Settings {
  uint64_t eager_bytes = 16 * 1024;
  uint64_t eager_credit_bytes = 256 * 1024;
  // Of the control lane, of messages that are news or frames of calls, and to oneself: contract.py.
  uint64_t control_eager_bytes = 16 * 1024;
  uint64_t control_credit_bytes = 1600 * 1024;
  uint64_t control_bytes_max = 256 * 1024;
  uint64_t own_credit_bytes = 64 * 1024 * 1024;
  uint64_t message_bytes_max = uint64_t{1} << 40;
  uint64_t recv_bytes_max = uint64_t{1} << 30;  // of a receive that takes the message's own length
  std::int64_t silence_ns = 5 * second / 2;
  bool shm = true;
  bool checksum = true;                        // between hosts, without TLS
  bool tls = false;                            // on all connections by TCP
  uint64_t rekey_records = uint64_t{1} << 22;  // after so many records a sender takes a new key
  bool neighbours = false;                     // open control links to ranks +-2^k at once
  bool direct_read = true;                     // read the peer's memory where the system allows it
  std::string bind = "127.0.0.1";
  uint16_t port = 0;
  std::string host;  // an id of one's own instead of the machine's
};

// Who seems to be starved has so many times as long: a minute, as long as somebody may hold the GIL.
inline constexpr std::int64_t starved_silences_max = 24;
// Longer is no silence: every multiple of this fits 64 bits. config.py has the same.
inline constexpr std::int64_t silence_ns_max = 1'000'000 * second;

// What peers need to reach a rank.
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
  // A peer says that a rank is gone.
  virtual void on_news(uint64_t rank, std::string cause, bool left) = 0;

  Settings settings;
  Inbox inbox;
};

// A rendezvous_id names a message on both sides of a link: the index of its place, and how often the place was used.
inline size_t index_of(uint64_t rendezvous_id) { return rendezvous_id & 0xffffffff; }
inline constexpr size_t rendezvous_max = 65536;  // contract.OFFERS_MAX
// Answers that a peer has not taken: three for each offer that it may have made (queued, accept, done), and some
// credit.
inline constexpr size_t notes_max = 4 * rendezvous_max;

// The receiving side of a rendezvous: a message that a peer announced by RTS, or sent eagerly and wants confirmed. For
// a long message to oneself it is the copy in progress: `read`, then `copied` or `abort`.
//
//   state            event      next             reply           why
//   free             queue      queued           queued          no receive matches yet
//   free, queued     defer      awaiting_memory  none            a receive matches and must get its memory from Python
//   free, queued,    read       reading          none            the sender's memory can be read directly
//   awaiting_memory
//   free, queued,    stream     streaming        cts             the sender has to stream the bytes
//   awaiting_memory
//   reading          stream     streaming        cts             the first direct read failed
//   all but reading  withdraw   free             fin withdrawn   the sender cancelled, or was faster than our claim
//   free, queued,    complete   free             fin matched     an eager or empty message, or no memory for it
//   awaiting_memory
//   reading,         complete   free             fin matched     every byte is in its place
//   streaming
//   reading          copied     free             none            a message to oneself is copied
//   any              abort      free             none            the peer is lost or this rank closes
struct RendezvousReceive {
  enum class State : uint8_t { free, queued, awaiting_memory, reading, streaming };
  enum class Event : uint8_t { queue, defer, read, stream, withdraw, complete, copied, abort };
  enum class Reply : uint8_t { none, queued, cts, fin_matched, fin_withdrawn };
  static constexpr TransitionTable<State, 5, Event, 8, Reply> transitions{{
      {State::free, Event::queue, State::queued, Reply::queued},
      {State::free, Event::defer, State::awaiting_memory},
      {State::free, Event::read, State::reading},
      {State::free, Event::stream, State::streaming, Reply::cts},
      {State::free, Event::withdraw, State::free, Reply::fin_withdrawn},
      {State::free, Event::complete, State::free, Reply::fin_matched},
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
      {State::reading, Event::stream, State::streaming, Reply::cts},
      {State::reading, Event::complete, State::free, Reply::fin_matched},
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
  CooperativeCopy* help = nullptr;  // its sender may copy a part
  Send* own = nullptr;              // of a message to oneself, if its sender waits
  ListHook<RendezvousReceive> hook;
};

class Peer {
 public:
  enum class State : uint8_t { unopened, opening, open, down };

  Peer(PeerServices& around, std::int32_t rank, bool is_self) : rank(rank), services_(around), is_self_(is_self) {}

  const std::int32_t rank;
  State state = State::unopened;
  Card card;
  bool is_same_host = false;
  std::string cause;  // why it is down
  bool left = false;
  bool is_rumoured = false;  // others say that it is gone, and `cause` why; but a greeting with it is under way
  // For so long nothing was heard of it, and nothing came by its link, by the looks that the admit could take.
  std::int64_t silent_ns = 0;
  std::int64_t stalled_ns = 0;
  std::string verdict;  // it has given us up, and why: its link ends
  std::unique_ptr<Link> link;

  void on_open(std::unique_ptr<Link> opened);

  // -- sending
  void send(Send& send);
  // Take it back before it was met. True if it ended as withdrawn here and now.
  bool cancel(Send& send);
  // Put what waits on the link. True if something moved.
  bool flush();
  bool has_backlog() const { return backlog_ != 0; }
  // Nothing is on its way: what is left waits for a receive that nobody may ever post.
  bool is_flushed() const { return backlog_ == 0 && own_copies_ == 0 && are_rendezvous_settled(); }
  // Copy a part of what was offered, if the receiver is at it. True if there was one.
  bool help(size_t piece_bytes);
  void tell_down(std::int32_t gone, const std::string& cause, Fate fate);
  // Tell it, if it can still be told, that we hang up on it, and why.
  void give_up_on(const std::string& cause);
  // It is on this host, and could run if it were let. By a socket that cannot be told from who computes and is cut off:
  // so there is an end to it.
  bool is_starved() const {
    return is_same_host && card.pid > 0 && silent_ns < starved_silences_max * services_.settings.silence_ns &&
           engine::is_starved(card.pid);
  }

  // -- receiving
  // A frame came whole; its lengths were checked against its place. Returns what is wrong with it, or nullptr.
  const char* on_frame(const Head& head, const byte* body, Lane lane);
  // For links that bring data straight to its place: whose it is, or nullptr with what is wrong.
  RendezvousReceive* data_for(const Head& head, const char*& fault);
  // Whether data of offers that we accepted is to come.
  bool awaits_data() const { return awaited_ != 0; }
  // Whether the peer owes us an answer to an offer.
  bool awaits_answer() const { return free_slots_.size() != send_slots_.size(); }
  // Bytes are in their place. Ends the receive with the last.
  void on_data(RendezvousReceive& offer, size_t bytes);

  RendezvousReceive& incoming_of(uint64_t rendezvous_id) { return incoming_[index_of(rendezvous_id)]; }
  // Make sure that an offer's sender does not take it back any more.
  bool claim(RendezvousReceive& offer);
  // An offer was taken back, and nobody knows of it any more.
  void drop(RendezvousReceive& offer);
  // The same for a message that waits in the inbox.
  void take_back(RendezvousReceive& offer);
  void begin(RendezvousReceive& offer, Receive& receive, MatchResult match);
  // There is memory now for a receive that said `later`.
  void supply(RendezvousReceive& offer);
  // There will be none: the message counts as met, and its bytes are lost.
  void give_up(RendezvousReceive& offer);
  // Read one piece of an offer from the sender's memory; `scratch` serves receives without a place.
  // Returns what went wrong, or nullptr.
  const char* read_piece(RendezvousReceive& offer, byte* scratch, size_t scratch_bytes, size_t piece_bytes);
  // A message that waited has met its receive: give its credit back, tell who wants to know.
  void on_met(const UnexpectedMessage& message);
  // A message to oneself has left the queue for its receive. False if it is short, and to be copied at once; else it is
  // copied in pieces, and both end with the last.
  bool begin_own(UnexpectedMessage& message, Receive& receive);

  // A message that waited will never be received: give its credit back.
  void on_dropped(const UnexpectedMessage& message);

  // -- ending
  // End everything that needs this peer.
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

  uint64_t cost(uint64_t nbytes) const { return nbytes + line_bytes; }  // contract.ENVELOPE_BYTES
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
  // Undo a match: the sender takes its offer back, and the receive waits for another message.
  void part(RendezvousReceive& offer);
  void note(Lane lane, Kind kind, uint64_t context, uint8_t dtype = 0, uint64_t nbytes = 0, std::string text = {});
  bool put_note(const Note& note);
  void return_credit(Lane lane, uint64_t bytes);
  void send_to_self(Send& send);
  // Whether a message to oneself is copied, or waits where it is for its receive. The first may have any length.
  bool may_keep_own(uint64_t nbytes) const;
  // Copy in pieces to the receive's place, or without a receive to the message's own copy.
  void start_copy(const byte* from, uint64_t nbytes, Receive* receive, UnexpectedMessage* message, Send* send);
  void copy_piece(RendezvousReceive& copy, size_t scratch_bytes, size_t piece_bytes);
  void end_copy(RendezvousReceive& copy, Outcome outcome);
  // Its bytes are wanted elsewhere, or not at all: forget what was copied.
  void stop_keeping(UnexpectedMessage& message);
  bool flush_streams();
  void leave_rendezvous(Send& send);
  // Read a part of an offer whose sender helps.
  const char* read_part(RendezvousReceive& offer, size_t piece_bytes);
  // Still the same process, and it did not take us for dead meanwhile: then these were its bytes. Else with the
  // fault, or none if it is gone, which will be noticed.
  bool confirm(RendezvousReceive& offer, const char*& fault);
  // Nobody writes to its place any more.
  void fence(RendezvousReceive& offer);

  const char* on_message(const Head& head, const byte* body, Lane lane);
  const char* on_cts(const Head& head);
  const char* on_fin(const Head& head);
  const char* on_withdraw(const Head& head);

  using Queue = IntrusiveList<Send, &Send::hook>;

  PeerServices& services_;
  const bool is_self_;
  size_t awaited_ = 0;     // offers in state streaming
  size_t backlog_ = 0;     // notes, queued sends and streams
  size_t own_copies_ = 0;  // of long messages to oneself, under way
  uint64_t eager_max_[lane_count] = {};
  uint64_t certain_eager_max_[lane_count] = {};  // of those that are sure to be received
  Queue queued_[lane_count];
  Queue streams_;
  Queue rendezvous_sends_;  // long ones, which the peer may be reading
  std::deque<Note> notes_;
  std::vector<SendSlot> send_slots_;
  std::vector<uint32_t> free_slots_;
  // By rendezvous_id of the peer, and of oneself in any order; a deque, because elements must not move.
  std::deque<RendezvousReceive> incoming_;
  HeaderTable headers_sent_[lane_count];
  HeaderTable headers_came_[lane_count];
  uint64_t credit_used_[lane_count] = {};  // of ours with the peer
  uint64_t credit_held_[lane_count] = {};  // of the peer's with us
  uint64_t credit_due_[lane_count] = {};   // met, and not yet given back
};

}  // namespace unisono::engine
