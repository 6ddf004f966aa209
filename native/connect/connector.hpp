// The connector: listens, connects, and admits processes that know the job's secret. What a finished handshake leads
// to, a link over shared memory, TCP or QUIC, goes to the owner.
//
// A caller that has not proven itself, a *stranger*, is bounded in time, bytes and number (Settings, whose numbers come
// from unisono/messaging/strangers.py). It costs one small object, with TLS 64 KiB. A newcomer is never turned away for
// strangers that came before: the oldest goes instead. Without TLS a stranger gets 64 bytes from this rank, and only
// after a sound hello; with TLS the 1.3 KiB of our side of the TLS handshake.

#pragma once

#include <sys/socket.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/poller.hpp"
#include "base/socket_address.hpp"
#include "connect/connection_owner.hpp"
#include "connect/handshake.hpp"
#include "connect/pinger.hpp"
#include "connect/quic_connector.hpp"
#include "connect/tcp_pairs.hpp"
#include "link/byte_stream.hpp"
#include "link/shm_link.hpp"
#include "link/tls.hpp"
#include "messaging/peer.hpp"

namespace unisono::engine {

// The result of a handshake: a stream, or on one host a socket and the memory to share.
struct NewConnection {
  std::int32_t rank;
  Medium medium;
  Lane lane;
  bool checksum;
  bool is_opener;
  std::unique_ptr<ByteStream> stream;
  Descriptor socket;
  Descriptor memory;
  Descriptor presence;
  Probe probe;
};

class Connector {
 public:
  Connector(ConnectionOwner& owner, Poller& poller, SocketPolicy& policy);
  ~Connector();

  // Throws std::runtime_error with the reason. Only called before any thread runs.
  void open(std::int32_t rank, std::int32_t size, const std::string& directory, std::string secret,
            const Settings& settings, const Presence& presence);
  const Card& card() const { return card_; }
  // Set this rank's TLS identity. With TLS or QUIC no caller from outside is accepted before. Throws
  // std::runtime_error.
  void secure(const TlsMaterial& material);
  bool is_ready() const { return quic_ != nullptr ? quic_->is_ready() : !settings_.tls || identity_ != nullptr; }

  // Where the ranks are.
  void set_cards(const std::vector<Card>& cards);
  bool is_here(const Card& card) const { return card.host == card_.host; }
  void ping(std::int32_t rank) { pinger_.ping(rank); }

  // Make a link with a rank, of the kind that the settings and its place demand.
  void connect(std::int32_t rank, const Card& card);
  // Drop the handshake that we opened with a rank, and one of its own that ours crossed.
  void forget(std::int32_t rank);
  // Whether a handshake that we opened with this rank is under way.
  bool is_calling(std::int32_t rank) const;
  // Whether that one has not reached the rank so far.
  bool is_connecting(std::int32_t rank) const;
  // Whether the rank answered that its own connection to us counts instead.
  bool is_crossed(std::int32_t rank) const;
  // Whether a handshake is under way that may lead to a link.
  bool is_connecting() const;
  // End handshakes whose time is over, and connect again those that rest.
  void tick(std::int64_t passed_ns);
  // Whether this rank has read everything that had arrived by the last tick for which this was true.
  bool has_caught_up() { return quic_ == nullptr || quic_->has_caught_up(); }
  bool is_busy() const { return !handshakes_.empty() || (quic_ != nullptr && quic_->is_busy()); }
  // Whether a waiting attempt may be possible now; `connect_due` makes those that are.
  bool has_due() const { return has_due_; }
  void connect_due();

  // Links that share a socket: one turn of it for all, what was put since the last turn, and when the next one is due
  // at the latest.
  bool poll() { return quic_ != nullptr && quic_->poll(); }
  void push() {
    if (quic_ != nullptr) quic_->push();
  }
  std::int64_t expiry() const { return quic_ != nullptr ? quic_->expiry() : never; }

  // Stop listening and drop all handshakes. `keep_files`: a forked child must leave the parent's socket alone.
  void close(bool keep_files);
  // The number of callers that were refused, and, for a log, their addresses and the reasons: the first few since the
  // last call.
  uint64_t refused() const { return refused_ + (quic_ != nullptr ? quic_->refused() : 0); }
  std::vector<std::string> take_refusals();

 private:
  class Listener;
  class Handshake;

  void call(std::int32_t rank, const Card& card, Medium medium, Lane lane);
  void hand_on(NewConnection connection);
  void accept_from(int listener, Medium medium);
  void drop_oldest_stranger(const std::string& group);
  void attempt(Handshake& handshake);
  bool has_free_call() const;
  void on_hang_up(Handshake& handshake);
  void on_unreached(Handshake& handshake, int error);
  void end(const Handshake& handshake);
  void refuse(Handshake& handshake, const std::string& cause, Admission admission = Admission::unknown);
  void report(Handshake& handshake);
  Descriptor listen_at(SocketAddress& address);
  Proof prove(const char* role, const Hello& hello, const byte* nonce) const;

  ConnectionOwner& owner_;
  Poller& poller_;
  SocketPolicy& policy_;
  std::int32_t rank_ = 0;
  std::int32_t size_ = 0;
  std::string secret_;
  Settings settings_{};
  const Presence* presence_ = nullptr;
  Card card_;
  Descriptor directory_;
  Probe probe_;
  std::unique_ptr<TlsIdentity> identity_;
  std::unique_ptr<Listener> listeners_[2];
  Pinger pinger_;
  std::unique_ptr<QuicConnector> quic_;
  TcpPairs pairs_;
  std::vector<std::unique_ptr<Handshake>> handshakes_;  // oldest first
  bool has_due_ = false;
  std::int64_t beat_ns_ = 0;
  uint64_t refused_ = 0;
  std::deque<std::string> refusals_;
};

// Names the machine and the namespaces within which shared memory and process ids mean the same.
std::string host_id();

}  // namespace unisono::engine
