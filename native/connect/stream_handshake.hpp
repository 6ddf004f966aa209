// A handshake under way, over a socket, a TLS stream or, on one host, a Unix socket: connect/handshake.hpp has its
// messages and states. The connector owns it.

#pragma once

#include <string>
#include <utility>
#include <vector>

#include "connect/connector.hpp"

namespace unisono::engine {

// Whether the process at the other end of a Unix socket is this user's.
bool is_same_user(int fd);

class Connector::Handshake final : public Watcher {
 public:
  using State = HandshakeState;
  using Event = HandshakeEvent;

  Handshake(Connector& connector, State state, std::int64_t time_left_ns)
      : connector(connector), state(state), time_left_ns(time_left_ns) {}
  ~Handshake() override { unwatch(); }

  // False if there is no memory for a TLS stream.
  bool take(Descriptor socket);

  int fd() const { return connection.stream != nullptr ? connection.stream->fd() : connection.socket.get(); }
  void watch(uint32_t events) { watch_ = connector.poller_.add(fd(), events, *this); }

  // Apply an event and do what the table says. It may destroy this handshake, so callers return at once.
  void on(Event event);
  HandshakeAction advance(Event event) {
    const auto& step = handshake_transitions.at(state, event);
    state = step.next;
    return step.action;
  }

  void on_ready(uint32_t) override;
  // The connection is up.
  void on_connected();

  // An acceptor's caller that has not proven that it knows the secret.
  bool is_stranger() const { return !connection.is_opener && state != State::crossed; }

  // The peer is on this host and slow because the system does not schedule it. It says nothing while connecting: the
  // system accepts connections for a process that does not run.
  bool is_starved() const {
    return pid > 0 && state != State::connecting &&
           time_left_ns > -starved_silences_max * connector.settings_.silence_ns && engine::is_starved(pid);
  }

  bool is_waiting() const { return state == State::due || state == State::resting; }
  // The call has not reached the peer so far.
  bool is_connecting() const { return state == State::connecting || is_waiting(); }

  // Whether the limit of calls under way applies: not to the second connection of a link whose first one is up.
  bool is_limited() const { return connection.medium == Medium::tcp && connection.lane == Lane::control; }
  // Whether it counts as a call under way: not while it waits for its turn, is crossed, or the peer is silent. A peer
  // that was reached has longer than a heartbeat to answer: a hundred ranks with TLS on a few cores need it.
  bool is_under_way(std::int64_t beat_ns) const {
    return connection.is_opener && is_limited() && !is_waiting() && state != State::crossed &&
           idle_ns <= (state == State::connecting ? beat_ns : connector.settings_.silence_ns / 2);
  }

  std::string unreached(const std::string& why) const;
  std::string timed_out() const;

  Connector& connector;
  State state;
  std::int64_t time_left_ns;  // what is left of the handshake's time
  NewConnection connection{};
  TlsStream* tls = nullptr;  // connection.stream, if it is one
  SocketAddress address;
  int attempts = 0;  // to connect
  int hang_ups = 0;  // by the acceptor
  bool is_reached = false;
  std::int32_t pid = 0;  // of the acceptor, if it is on this host
  std::int64_t waited_ns = 0;
  std::int64_t idle_ns = 0;  // since the last event on the socket
  std::string trouble;       // why the last attempt failed
  Admission admission = Admission::unknown;
  Hello hello{};

 private:
  enum class ReadResult : uint8_t {
    more,
    whole,
    over,
    truncated,  // descriptors came with the message, and this process has no free ones
  };

  void unwatch() {
    if (watch_ != 0) connector.poller_.remove(fd(), std::exchange(watch_, 0));
  }

  void rest();
  void on_connect_result();
  void run_tls();

  // Read the message that the state awaits, and check it.
  void read();
  ReadResult read_message();

  // An opener sends two descriptors, the link's memory and its presence page; an acceptor sends its presence page.
  void keep_descriptors(msghdr& message);
  bool send(const void* data, size_t bytes, const std::vector<int>& descriptors);
  void send_hello();
  void on_hello();
  void send_challenge();
  void on_challenge();
  void send_introduction();
  void on_unsent();
  void on_introduction();
  void on_reply();
  void keep_open();

  // Nothing is sent on a crossed connection any more: either it has ended, or the wake-up was spurious.
  void on_crossed_ready();
  void hand_over();

  uint64_t watch_ = 0;
  Challenge challenge_{};
  Introduction introduction_{};
  AdmissionReply reply_{};
  size_t have_ = 0;  // bytes of the awaited message
};

}  // namespace unisono::engine
