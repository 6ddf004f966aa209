// Messages of a rank to itself. A short one is copied at once, a long one in pieces, between which the links have their
// turn.

#pragma once

#include <deque>

#include "messaging/peer_services.hpp"
#include "messaging/rendezvous_receive.hpp"

namespace unisono::engine {

class Loopback {
 public:
  Loopback(Peer& peer, PeerServices& services) : peer_(peer), services_(services) {}

  void send(Send& send);
  // Withdraw a send that waits for its receive.
  void withdraw(Send& send);
  // An unexpected message has left the queue for its receive. False if it is short, and the caller copies it; else it
  // is copied in pieces, and both operations end with the last.
  bool begin(UnexpectedMessage& message, Receive& receive);
  void copy_piece(RendezvousReceive& copy, size_t scratch_bytes, size_t piece_bytes);
  bool is_copying() const { return copying_ != 0; }
  // An unexpected message was matched, or never will be.
  void on_matched(const UnexpectedMessage& message);
  void on_dropped(const UnexpectedMessage& message);
  void end_all(Outcome outcome);

 private:
  // Whether a message is copied; if not, its send waits for the receive. The first may have any length.
  bool may_keep(uint64_t nbytes) const;
  // Copy in pieces to the receive's buffer, or without a receive to the message's own.
  void start_copy(const byte* from, uint64_t nbytes, Receive* receive, UnexpectedMessage* message, Send* send);
  void end_copy(RendezvousReceive& copy, Outcome outcome);
  // The payload is wanted elsewhere or not at all: drop what was copied.
  void stop_keeping(UnexpectedMessage& message);

  Peer& peer_;  // this rank itself
  PeerServices& services_;
  std::deque<RendezvousReceive> copies_;  // a deque: elements must not move
  size_t copying_ = 0;
  uint64_t kept_bytes_ = 0;  // credit that unexpected messages use
};

}  // namespace unisono::engine
