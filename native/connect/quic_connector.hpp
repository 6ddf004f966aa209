// The connector of QUIC links: calls ranks, and admits callers whose certificate names a rank of this world. It has the
// one socket of all its links.
//
// A caller that has not shown its certificate, a *stranger*, is bounded in time, bytes and number, with the numbers of
// the TCP connector. While many arrive, a caller first proves its address (QUIC's retry), which costs this rank no
// memory. A datagram that does not begin a QUIC connection gets no answer.

#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/poller.hpp"
#include "connect/connection_owner.hpp"
#include "link/tls_material.hpp"
#include "messaging/peer.hpp"

namespace unisono::engine {

class Pinger;
struct SocketPolicy;

class QuicConnector {
 public:
  // nullptr if this build has no QUIC.
  static std::unique_ptr<QuicConnector> make(ConnectionOwner& owner, Poller& poller, Pinger& pinger,
                                             const SocketPolicy& policy);
  static bool is_built();
  virtual ~QuicConnector() = default;

  // Bind the socket; `card` gets its address and port. Throws std::runtime_error with the reason.
  virtual void open(std::int32_t rank, std::int32_t size, const std::string& secret, const Settings& settings,
                    Card& card) = 0;
  // Set this rank's identity, and begin to read. Throws std::runtime_error.
  virtual void secure(const TlsMaterial& material) = 0;
  virtual bool is_ready() const = 0;
  // Ranks that share this rank's host: their windows share its receive buffer.
  virtual void set_neighbours(size_t ranks_here) = 0;

  virtual void connect(std::int32_t rank, const Card& card) = 0;

  // The same questions as of the connector.
  virtual void forget(std::int32_t rank) = 0;
  virtual bool is_calling(std::int32_t rank) const = 0;
  virtual bool is_connecting(std::int32_t rank) const = 0;
  virtual bool is_crossed(std::int32_t rank) const = 0;
  virtual bool is_connecting() const = 0;
  virtual bool is_busy() const = 0;
  virtual void tick(std::int64_t passed_ns) = 0;
  virtual bool has_caught_up() = 0;
  virtual uint64_t refused() const = 0;
  virtual void take_refusals(std::vector<std::string>& into) = 0;

  // One turn of the socket, if something may wait there. True if something moved.
  virtual bool poll() = 0;
  // Write what was put since the last turn.
  virtual void push() = 0;
  // When the next turn is due at the latest.
  virtual std::int64_t expiry() const = 0;
  // Close the socket; `is_forked`: without sending anything.
  virtual void close(bool is_forked) = 0;
};

}  // namespace unisono::engine
