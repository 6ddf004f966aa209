// Messages: what is sent, what waits to be received, what has arrived and waits.
//
// Knows what both ends of a message must say and may be told. Does not know links. Whoever starts an operation
// derives from Send or Receive: the engine calls the virtual functions with its lock held and keeps no reference
// after `end`, which is therefore the place to start the next operation or to hand the object back to a pool.

#pragma once

#include <memory>

#include "base/intrusive_list.hpp"
#include "wire/frame.hpp"

namespace unisono::engine {

class Peer;
struct UnexpectedMessage;
struct RendezvousReceive;

inline constexpr std::int32_t any_source = -1;
inline constexpr uint64_t user_tags = uint64_t{1} << 31;  // ANY meets only tags below: values.TAG_MAX + 1
// Of collectives: contract.Tags. A plan's own messages are told apart by the bits above (run.cpp).
inline constexpr uint64_t collective_tag = uint64_t{1} << 62, stages = 16;
inline constexpr uint64_t tag_of(uint64_t sequence) { return collective_tag | sequence * stages; }
inline constexpr uint64_t sequence_of(uint64_t tag) { return (tag & ~collective_tag) / stages; }
// News and frames of calls, which are short: contract.bytes_max.
inline constexpr uint64_t control_tag = uint64_t{1} << 61, call_tag = uint64_t{1} << 60;
inline constexpr bool is_control(uint64_t tag) { return (tag & control_tag) != 0 || tag == call_tag; }
inline constexpr uint8_t untyped = 255;    // contract.UNTYPED
inline constexpr uint8_t plain_bytes = 5;  // values.DTYPES["uint8"].code: fits any type too

struct Envelope {
  uint64_t context = 0;
  uint64_t tag = 0;
  uint64_t nbytes = 0;
  std::int32_t source = 0;
  uint8_t dtype = untyped;
  uint16_t header_bytes = 0;
  const byte* header = nullptr;
  uint64_t arrival = 0;  // its place among all that waited here; 0 if it did not have to wait
};

// How an operation ended.
enum class Outcome : uint8_t { done, cancelled, peer_down, refused, closed, no_memory };

// A message on its way out. The memory of data and header stays where it is until `end`.
class Send {
 public:
  virtual ~Send() = default;
  virtual void end(Outcome outcome) = 0;

  uint64_t context = 0;
  uint64_t tag = 0;
  const byte* data = nullptr;
  uint64_t nbytes = 0;
  const byte* header = nullptr;
  uint16_t header_bytes = 0;
  uint8_t dtype = untyped;
  Lane lane = Lane::bulk;
  bool sync = false;  // end only when met
  bool receive_is_certain =
      false;              // the peer will ask for it; if it is taken back after it has left, it may still be received
  bool is_ahead = false;  // it should be met, but nobody waits for that: the peer is to look after it

  // What follows is the engine's.
  enum class State : uint8_t { idle, queued, offered, streaming, ended };
  State state = State::idle;
  bool is_queued = false;  // the peer says that no receive wants it so far
  Peer* peer = nullptr;
  uint64_t rendezvous_id = 0;
  uint64_t streamed = 0;
  UnexpectedMessage* own = nullptr;  // a message to oneself that waits
  ListHook<Send> hook;
};

// What a receive says to a message that fits its pattern.
enum class MatchResult : uint8_t {
  accept,  // bring the bytes
  defer,   // bring them once there is memory: Engine::supply
  peek,    // a probe: it ends, the message stays
  reject,  // it ends, the message stays
};

// A receive or probe that waits for a message, and where its bytes go.
class Receive {
 public:
  virtual ~Receive() = default;

  // `is_here`: the bytes came with the envelope; `later` is then no answer. The envelope's header is only lent.
  virtual MatchResult on_match(const Envelope& envelope, bool is_here) = 0;
  // It said `later`, and the sender waits: Engine::supply or Engine::give_up must follow.
  virtual void want_memory() {}
  // Its message was taken back before any byte came; it waits for another.
  virtual void on_taken_back() {}
  // Memory for all bytes of the message; nullptr if they are to be given to `write`, in order.
  virtual byte* place() = 0;
  // Whether that is decided before any byte comes.
  virtual bool has_fixed_place() const { return true; }
  virtual void write(uint64_t offset, const byte* from, size_t bytes) = 0;
  // Every byte is in its place, or none will come any more.
  virtual void end(Outcome outcome, std::int32_t rank) = 0;

  uint64_t context = 0;
  uint64_t tag = 0;
  std::int32_t source = any_source;
  bool any_tag = false;

  bool is_wild() const { return any_tag || source == any_source; }
  bool meets(const Envelope& e) const {
    return context == e.context && (source == any_source || source == e.source) &&
           (any_tag ? e.tag < user_tags : tag == e.tag);
  }

  // What follows is the engine's.
  uint64_t number = 0;
  RendezvousReceive* incoming = nullptr;  // the offer it took, until all bytes are here
  bool is_unwanted = false;               // somebody tried to cancel it while it had such an offer
  ListHook<Receive> hook;
  bool is_posted() const { return hook.is_in; }
};

// A message that waits for its receive: with its bytes, or an offer of them.
struct UnexpectedMessage {
  Envelope envelope;
  uint64_t number = 0;
  Peer* peer = nullptr;
  uint64_t rendezvous_id = 0;
  bool has_ticket = false;
  bool is_here = false;
  Lane lane = Lane::bulk;
  Send* own = nullptr;  // a message to oneself whose sender waits
  const byte* payload = nullptr;
  ListHook<UnexpectedMessage> in_bucket;
  ListHook<UnexpectedMessage> in_order;
  ListHook<UnexpectedMessage> in_ahead;
  std::unique_ptr<byte[]> heap;
  std::unique_ptr<byte[]> copy;  // of a long message to oneself
  // Enough for a small message with its fingerprint.
  byte inside[192];

  // Copy header and payload in. False without memory.
  bool hold(const Envelope& of, const byte* bytes, uint64_t count);
};

}  // namespace unisono::engine
