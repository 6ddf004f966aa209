// One rendezvous as its receiver sees it: its states as a table.

#pragma once

#include <cstdint>

#include "base/transition_table.hpp"
#include "link/cooperative_copy.hpp"
#include "messaging/message.hpp"
#include "messaging/send_slots.hpp"

namespace unisono::engine {

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

}  // namespace unisono::engine
