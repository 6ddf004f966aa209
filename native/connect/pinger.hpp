// The pinger: asks a rank by datagram whether it lives, and answers others.
//
// Knows a UDP socket with the number of the rank's TCP port, and the four fields of a datagram. Does not know links,
// nor when to ask.
//
// A TCP connection that lost packets waits ever longer before it sends again, so it is silent for a while after the
// network has healed. A datagram has no memory: the first one after that arrives.
//
// Every datagram is proven by the job's secret and fits one answer of the same length, which goes to the address on
// the card of the rank that asked, wherever the question came from. An answer counts once, for a recent question, whose
// number is random: all members know the secret, but only who got the question can answer it.

#pragma once

#include <sys/socket.h>

#include <deque>
#include <string>
#include <vector>

#include "base/digest.hpp"
#include "base/poller.hpp"

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

// Who owns the pinger.
class Pinged {
 public:
  virtual ~Pinged() = default;
  // A rank asks: are we still there for it?
  virtual bool is_given_up(std::int32_t rank) = 0;
  virtual void on_answer(std::int32_t rank, bool is_given_up) = 0;
};

class Pinger final : public Watcher {
 public:
  Pinger(Pinged& owner, Poller& poller) : owner_(owner), poller_(poller) {}
  ~Pinger() override { close(); }

  // False if the port is not free; errno says why.
  bool open(std::int32_t rank, const std::string& secret, const sockaddr_storage& address, socklen_t bytes);
  void set_address(std::int32_t rank, const sockaddr_storage& address, socklen_t bytes);
  void ping(std::int32_t rank);
  void close();
  void on_ready(uint32_t events) override;

 private:
  struct Target {
    sockaddr_storage address{};
    socklen_t bytes = 0;
    std::deque<uint64_t> asked;  // the numbers of the last questions, without those before the last that was answered
  };

  void take(const Datagram& came);
  void send(std::int32_t rank, Datagram::Kind kind, uint64_t number);
  Proof prove(const Datagram& datagram) const;

  Pinged& owner_;
  Poller& poller_;
  std::int32_t rank_ = 0;
  std::string secret_;
  Descriptor socket_;
  uint64_t watch_ = 0;
  std::vector<Target> targets_;
};

}  // namespace unisono::engine
