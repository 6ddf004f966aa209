// Messages: sends, receives, and unexpected messages that wait for their receive.
//
// An operation derives from Send or Receive. The engine calls the virtual functions with its lock held and keeps no
// reference after `end`, which may therefore start the next operation or return the object to a pool.

#pragma once

#include <memory>

#include "base/intrusive_list.hpp"
#include "wire/frame.hpp"

namespace unisono::engine {

class Peer;
struct UnexpectedMessage;
struct RendezvousReceive;

inline constexpr std::int32_t any_source = -1;
inline constexpr uint64_t user_tags = uint64_t{1} << 31;  // ANY matches only tags below: envelope.TAG_MAX + 1
// Tags of collectives: envelope.Tags. The bits above distinguish the messages of one plan (run.cpp).
inline constexpr uint64_t collective_tag = uint64_t{1} << 62, stages = 16;
inline constexpr uint64_t tag_of(uint64_t sequence) { return collective_tag | sequence * stages; }
inline constexpr uint64_t sequence_of(uint64_t tag) { return (tag & ~collective_tag) / stages; }
// Tags of control messages and RPC frames, which are short: credit.bytes_max.
inline constexpr uint64_t control_tag = uint64_t{1} << 61, call_tag = uint64_t{1} << 60;
inline constexpr bool is_control(uint64_t tag) { return (tag & control_tag) != 0 || tag == call_tag; }
inline constexpr uint8_t untyped = 255;    // envelope.UNTYPED
inline constexpr uint8_t plain_bytes = 5;  // dtypes.DTYPES["uint8"].code: matches any type too

struct Envelope {
  uint64_t context = 0;
  uint64_t tag = 0;
  uint64_t nbytes = 0;
  std::int32_t source = 0;
  uint8_t dtype = untyped;
  uint16_t header_bytes = 0;
  const byte* header = nullptr;
  uint64_t arrival = 0;  // order among all unexpected messages; 0 if a receive was posted
};

// How an operation ended.
enum class Outcome : uint8_t { done, cancelled, peer_down, refused, closed, no_memory };

// An outgoing message. The memory of data and header must stay valid until `end`.
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
  bool sync = false;  // end only when matched
  // The peer will post the receive. A message that has left can then still be received after it was cancelled.
  bool receive_is_certain = false;
  // The sender does not wait for the match; the peer checks that there is one (Inbox::run_ahead).
  bool is_ahead = false;

  // What follows is the engine's.
  enum class State : uint8_t { idle, queued, offered, streaming, ended };
  State state = State::idle;
  bool is_queued = false;  // the peer replied that no receive matches so far
  bool is_fin = false;     // the peer has every byte, and the link has not let go of the memory yet
  Peer* peer = nullptr;
  uint64_t rendezvous_id = 0;
  uint64_t streamed = 0;
  UnexpectedMessage* own = nullptr;  // a message to oneself that waits
  ListHook<Send> hook;
};

// What a receive says to a message that matches its pattern.
enum class MatchResult : uint8_t {
  accept,  // deliver the payload
  defer,   // deliver it once there is memory: Engine::supply
  peek,    // a probe: it ends, the message stays queued
  reject,  // the receive ends, the message stays queued
};

// A receive or probe.
class Receive {
 public:
  virtual ~Receive() = default;

  // `is_here`: the payload came with the envelope, and `defer` is not allowed. The header is valid during the call
  // only.
  virtual MatchResult on_match(const Envelope& envelope, bool is_here) = 0;
  // It said `defer`, and the sender waits: Engine::supply or Engine::give_up must follow.
  virtual void want_memory() {}
  // Its message was withdrawn before any payload came; it waits for another.
  virtual void on_taken_back() {}
  // The buffer for the whole payload; nullptr if it is to be given to `write`, in order.
  virtual byte* buffer() = 0;
  // Whether that is decided before any payload comes.
  virtual bool has_fixed_buffer() const { return true; }
  virtual void write(uint64_t offset, const byte* from, size_t bytes) = 0;
  // The payload is complete, or no more will come.
  virtual void end(Outcome outcome, std::int32_t rank) = 0;

  uint64_t context = 0;
  uint64_t tag = 0;
  std::int32_t source = any_source;
  bool any_tag = false;

  bool is_wild() const { return any_tag || source == any_source; }
  bool matches(const Envelope& e) const {
    return context == e.context && (source == any_source || source == e.source) &&
           (any_tag ? e.tag < user_tags : tag == e.tag);
  }

  // What follows is the engine's.
  uint64_t number = 0;
  RendezvousReceive* incoming = nullptr;  // its rendezvous, until the payload is complete
  bool is_unwanted = false;               // it was cancelled during the rendezvous
  ListHook<Receive> hook;
  bool is_posted() const { return hook.is_in; }
};

// A message that waits for its receive: with its payload, or an RTS.
struct UnexpectedMessage {
  Envelope envelope;
  uint64_t number = 0;
  Peer* peer = nullptr;
  uint64_t rendezvous_id = 0;
  bool has_rendezvous = false;
  bool is_here = false;
  Lane lane = Lane::bulk;
  Send* own = nullptr;  // a message to oneself whose sender waits
  const byte* payload = nullptr;
  ListHook<UnexpectedMessage> in_bucket;
  ListHook<UnexpectedMessage> in_order;
  ListHook<UnexpectedMessage> in_ahead;
  std::unique_ptr<byte[]> heap;
  std::unique_ptr<byte[]> copy;  // of a long message to oneself
  // Header and payload of a small message, fingerprint included.
  byte inside[192];

  // Copy header and payload. False without memory.
  bool hold(const Envelope& of, const byte* bytes, uint64_t count);
};

}  // namespace unisono::engine
