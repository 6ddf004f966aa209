// The one UDP socket of a rank, and the QUIC connections that share it. It finds the connection of each datagram by its
// id, writes in batches, and knows which timer is due first. The owner decides which ranks to connect to and to admit.
//
// A turn: expired timers and the connections that reading has marked, then reading. So an acknowledgement is
// piggybacked on the answer that the last turn's datagrams caused.

#pragma once

#include <sys/socket.h>

#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "base/poller.hpp"
#include "link/quic_connection.hpp"

namespace unisono::engine {

class QuicEndpointOwner {
 public:
  virtual ~QuicEndpointOwner() = default;
  // A datagram that belongs to no connection.
  virtual void on_first(const SocketAddress& local, const SocketAddress& from, const byte* datagram, size_t bytes,
                        std::int64_t now) = 0;
  // Something happened to a connection that has no reader yet.
  virtual void on_changed(QuicConnection& connection) = 0;
  // An ICMP message says that no process listens at an address. It can be forged.
  virtual void on_unreachable(const SocketAddress& to, int error) = 0;
};

class QuicEndpoint final : public QuicRoutes, public DatagramSink, public Watcher {
 public:
  QuicEndpoint(QuicEndpointOwner& owner, Poller& poller);
  ~QuicEndpoint() override;

  // False if the address is not free; errno says why. `address` gets the port that the system chose. `buffer_bytes` is
  // asked of the system for each direction.
  bool open(SocketAddress& address, int buffer_bytes);
  // Begin to read: until then datagrams wait in the socket's buffer. False if the system has no room for it; errno says
  // why.
  bool listen();
  int fd() const { return socket_.get(); }
  // The address that datagrams to `remote` come from.
  SocketAddress local_to(const SocketAddress& remote) const;
  // Bytes of datagrams that the socket keeps for certain while no thread reads.
  size_t receive_bytes() const { return receive_bytes_; }

  QuicConnection& add(std::unique_ptr<QuicConnection> connection);
  // Close a connection and forget it. If the peer missed the close, it is repeated when the peer sends something.
  // `reason`: why this rank gives the peer up, if it does.
  void close(QuicConnection& connection, Admission admission, const std::string& reason = "");
  bool has(QuicConnection& connection) const { return connections_.contains(&connection); }
  // The linked connection whose peer is at an address; nullptr if there is none.
  QuicConnection* linked_at(const SocketAddress& address) const;
  // Something was put on a connection: write it, or let it wait for `push`.
  void on_put(QuicConnection& connection, bool is_corked);
  void push();

  // One turn. True if something moved.
  bool poll(std::int64_t now);
  // Whether a datagram may wait that no turn has read.
  bool is_readable() const { return is_readable_; }
  // Whether everything was read that had arrived when this last became true.
  bool has_caught_up();
  // The time of the first timer.
  std::int64_t expiry() const { return earliest_; }
  // Close the socket without sending anything: a forked child must not use the parent's keys.
  void abandon();

  // -- QuicRoutes
  void add(QuicId id, QuicConnection& connection) override { routes_[id] = &connection; }
  void remove(QuicId id) override { routes_.erase(id); }
  // -- DatagramSink
  byte* space(size_t bytes) override;
  void send(size_t bytes, const SocketAddress& from, const SocketAddress& to) override;
  // -- Watcher
  void on_ready(uint32_t events) override;

  // A single datagram that is not part of a connection. It may be lost.
  void send_one(const byte* datagram, size_t bytes, const SocketAddress& from, const SocketAddress& to);

 private:
  // What a closed connection still answers.
  struct Closed {
    std::vector<byte> datagram;
    std::vector<QuicId> ids;
    std::int64_t until;
    int answers = 0;
  };

  void write(QuicConnection& connection, std::int64_t now);
  void mark(std::vector<QuicConnection*>& list, QuicConnection& connection);
  void write_marked(std::vector<QuicConnection*>& list, std::int64_t now);
  void note_expiry(const QuicConnection& connection) {
    if (connection.expiry() < earliest_) earliest_ = connection.expiry();
  }
  void run_timers(std::int64_t now);
  bool read(std::int64_t now);
  void route(const SocketAddress& local, const SocketAddress& from, const byte* datagram, size_t bytes,
             std::int64_t now);
  void flush();
  void flush_singly();
  void read_errors();
  void forget_closed(std::int64_t now);

  QuicEndpointOwner& owner_;
  Poller& poller_;
  Descriptor socket_;
  uint64_t watch_ = 0;
  SocketAddress local_;
  bool is_wildcard_ = false;  // bound to all addresses of this host
  size_t receive_bytes_ = 0;
  bool is_listening_ = false;
  bool is_readable_ = false;
  bool has_errors_ = false;
  std::int64_t backlog_ = 0;  // datagrams that may still be unread of those that had arrived at `has_caught_up`
  std::unordered_map<QuicId, QuicConnection*> routes_;
  std::unordered_map<QuicConnection*, std::unique_ptr<QuicConnection>> connections_;
  QuicConnection* busy_ = nullptr;  // that handles a datagram or a timer: not to be destroyed
  std::vector<std::unique_ptr<QuicConnection>> ended_;
  std::vector<QuicConnection*> put_, read_;  // marked by `on_put`, and by what was read
  std::int64_t earliest_ = never;
  std::deque<std::shared_ptr<Closed>> closed_;
  std::unordered_map<QuicId, std::shared_ptr<Closed>> closed_ids_;

  // Out: datagrams of one length to one address, for one system call.
  std::unique_ptr<byte[]> batch_;
  size_t batch_bytes_ = 0;
  size_t batch_limit_ = 0;
  size_t segment_bytes_ = 0;
  size_t segments_ = 0;
  SocketAddress batch_from_, batch_to_;
  QuicConnection* writing_ = nullptr;
  bool has_segmentation_ = true;  // the system cuts a batch into datagrams
  bool is_blocked_ = false;       // the socket took no more
  bool is_turn_over_ = false;     // a batch has left: read before the next one

  // In.
  struct Inbox;
  std::unique_ptr<Inbox> in_;
};

}  // namespace unisono::engine
