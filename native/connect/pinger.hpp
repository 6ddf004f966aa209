// The pinger: asks a rank by UDP whether it is alive, and answers such pings. Its port has the number of the TCP port;
// beside QUIC links it shares their socket.
//
// A TCP connection that lost packets waits ever longer before it retransmits, so it is silent for a while after the
// network has healed. The first datagram after that arrives.
//
// Every datagram is authenticated by the job's secret. The reply has the same length and goes to the address on the
// card of the rank that asked, wherever the ping came from. A reply counts once, for a recent ping, whose number is
// random: all members know the secret, but only the one that got the ping can reply to it.

#pragma once

#include <deque>
#include <string>
#include <vector>

#include "base/digest.hpp"
#include "base/poller.hpp"
#include "base/socket_address.hpp"

namespace unisono::engine {

struct Datagram {
  enum class Kind : uint8_t { ping, alive, given_up };

  char magic[8];
  Kind kind;
  uint8_t unused[7];
  uint32_t from;
  uint32_t to;
  uint64_t number;
  Proof proof;
};
static_assert(sizeof(Datagram) == 64);

class PingOwner {
 public:
  virtual ~PingOwner() = default;
  // Whether this rank has declared `rank` dead, which a ping of that rank asks for.
  virtual bool is_given_up(std::int32_t rank) = 0;
  virtual void on_answer(std::int32_t rank, bool is_given_up) = 0;
};

class Pinger final : public Watcher {
 public:
  Pinger(PingOwner& owner, Poller& poller) : owner_(owner), poller_(poller) {}
  ~Pinger() override { close(); }

  // False if the port is not free; errno says why.
  bool open(std::int32_t rank, const std::string& secret, const SocketAddress& address);
  // Send by another owner's socket; that owner passes what arrives there to `take`.
  void share(std::int32_t rank, const std::string& secret, int socket);
  // Whether these bytes are a ping or a reply to one; if so, it is handled.
  bool take(const byte* from, size_t bytes);
  void set_address(std::int32_t rank, const SocketAddress& address);
  void ping(std::int32_t rank);
  // How often a rank has answered.
  uint64_t answers(std::int32_t rank) const {
    return static_cast<size_t>(rank) < targets_.size() ? targets_[rank].answers : 0;
  }
  void close();
  void on_ready(uint32_t events) override;

 private:
  struct Target {
    SocketAddress address;
    std::deque<uint64_t> asked;  // numbers of recent pings without a reply
    uint64_t answers = 0;
  };

  void handle(const Datagram& came);
  void send(std::int32_t rank, Datagram::Kind kind, uint64_t number);
  Proof prove(const Datagram& datagram) const;

  PingOwner& owner_;
  Poller& poller_;
  std::int32_t rank_ = 0;
  std::string secret_;
  Descriptor socket_;
  int fd_ = -1;  // socket_, or one that is shared
  uint64_t watch_ = 0;
  std::vector<Target> targets_;
};

}  // namespace unisono::engine
