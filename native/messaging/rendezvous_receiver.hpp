// The receiving side of all rendezvous with one peer, from RTS to FIN: claims, direct reads, streams and replies.

#pragma once

#include <deque>

#include "messaging/peer_services.hpp"
#include "messaging/rendezvous_receive.hpp"

namespace unisono::engine {

class RendezvousReceiver {
 public:
  RendezvousReceiver(Peer& peer, PeerServices& services) : peer_(peer), services_(services) {}

  RendezvousReceive& of(uint64_t rendezvous_id) { return receives_[index_of(rendezvous_id)]; }
  // Begin the rendezvous that the prefix of a frame names; nullptr and `fault` if there can be none.
  RendezvousReceive* add(const Head& head, const byte* prefix, const char*& fault);
  // No receive matches so far.
  void queue(RendezvousReceive& offer, UnexpectedMessage& message);
  // Claim an RTS: its sender can no longer withdraw it. False if it was withdrawn before.
  bool claim(RendezvousReceive& offer);
  void begin(RendezvousReceive& offer, Receive& receive, MatchResult match);
  // There is memory now for a receive that said `defer`.
  void supply(RendezvousReceive& offer);
  // There will be none: the message counts as matched, and its payload is lost.
  void give_up(RendezvousReceive& offer) { complete(offer, Outcome::no_memory); }
  // The payload came with the announcement, and is matched.
  void confirm_eager(RendezvousReceive& offer) { advance(offer, RendezvousReceive::Event::complete); }
  // Reply to a withdrawn RTS that no longer waits in the inbox.
  void drop(RendezvousReceive& offer);
  // The same for one that does.
  void drop_queued(RendezvousReceive& offer);

  // Read one piece of a message from the sender's memory; `scratch` serves receives without a buffer. Returns what went
  // wrong, or nullptr.
  const char* read_piece(RendezvousReceive& offer, byte* scratch, size_t scratch_bytes, size_t piece_bytes);
  // Whether data frames are to come.
  bool awaits_data() const { return streaming_ != 0; }
  // The rendezvous of a data frame, for links that read payload straight to its target; nullptr and `fault` if none.
  RendezvousReceive* data_for(const Head& head, const char*& fault);
  // Payload is at its target. The last byte completes the receive.
  void on_data(RendezvousReceive& offer, size_t bytes);
  const char* on_withdraw(const Head& head);

  // The peer is lost or this rank closes.
  void end_all(Outcome outcome);

 private:
  // Apply an event to a rendezvous and send the reply that its table names.
  void advance(RendezvousReceive& offer, RendezvousReceive::Event event);
  // Tell the sender that no receive matches its RTS so far: it need not wait for an answer when it leaves.
  void reply_queued(RendezvousReceive& offer);
  // Complete a rendezvous whose receive ends with it.
  void complete(RendezvousReceive& offer, Outcome outcome);
  // Undo a match: the sender withdrew its RTS, and the receive waits for another message.
  void unmatch(RendezvousReceive& offer);
  void wait_for_another(Receive& receive);
  // Read a part of a message whose sender shares the copy.
  const char* read_part(RendezvousReceive& offer, size_t piece_bytes);
  // Whether the bytes that were read were the message's: the peer still is the same process and has not revoked its
  // offer. If not, with the fault, or without one if the peer is gone, which will be noticed.
  bool confirm(RendezvousReceive& offer, const char*& fault);
  // Make sure that the sender no longer writes to the receive's buffer.
  void fence(RendezvousReceive& offer);

  Peer& peer_;
  PeerServices& services_;
  std::deque<RendezvousReceive> receives_;  // by the index of the peer's rendezvous id; a deque: elements must not move
  size_t streaming_ = 0;                    // rendezvous in state streaming
};

}  // namespace unisono::engine
