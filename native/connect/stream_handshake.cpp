#include "connect/stream_handshake.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <utility>

// linux/tcp.h since 6.15
#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

namespace unisono::engine {
namespace {

void tune(int fd, std::int64_t silence_ns) {
  const int on = 1, rto_ms_max = 1000;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // Retransmit soon, so that a connection goes on soon after a cut. Linux before 6.15 does not know the second option
  // and waits longer.
  setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &rto_ms_max, sizeof rto_ms_max);
  // The engine declares peers dead by their silence. This bounds how long the system retransmits for a closed socket.
  const auto timeout = static_cast<int>(std::min<std::int64_t>(4 * silence_ns / millisecond, INT_MAX));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, sizeof timeout);
}

}  // namespace

bool is_same_user(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

bool Connector::Handshake::take(Descriptor socket) {
  if (connection.medium == Medium::shm) {
    connection.socket = std::move(socket);
    return true;
  }
  tune(socket.get(), connector.settings_.silence_ns);
  if (connector.identity_ == nullptr) {
    connection.stream = std::make_unique<PlainStream>(std::move(socket));
    return true;
  }
  auto made = connector.identity_->wrap(std::move(socket), connection.is_opener);
  tls = made.get();
  connection.stream = std::move(made);
  return tls != nullptr;
}

void Connector::Handshake::on(Event event) {
  switch (advance(event)) {
    case HandshakeAction::none: return;
    case HandshakeAction::run_tls: return run_tls();
    case HandshakeAction::send_hello: return send_hello();
    case HandshakeAction::send_challenge: return send_challenge();
    case HandshakeAction::send_introduction: return send_introduction();
    case HandshakeAction::rest: return rest();
    case HandshakeAction::reconnect:
      rest();
      if (attempts == 1) connector.attempt(*this);
      return;
    case HandshakeAction::hand_over: return hand_over();
    case HandshakeAction::keep_open: return keep_open();
    case HandshakeAction::drop: return connector.end(*this);
    case HandshakeAction::report: return connector.report(*this);
  }
}

void Connector::Handshake::on_ready(uint32_t) {
  idle_ns = 0;
  switch (state) {
    case State::connecting: return on_connect_result();
    case State::crossed: return on_crossed_ready();
    case State::tls_connect:
    case State::tls_accept: return run_tls();
    default: return read();
  }
}

void Connector::Handshake::on_connected() {
  // From now on TCP repeats what the network loses, and the acceptor's Python may not have given its engine an
  // identity yet. Once only: an acceptor that hangs up again and again does not prolong the handshake.
  if (connection.is_opener && connection.medium == Medium::tcp && !std::exchange(is_reached, true))
    time_left_ns = std::max(
        {time_left_ns, 2 * connector.settings_.silence_ns, tls != nullptr ? connector.settings_.stranger_ns : 0});
  on(tls != nullptr ? Event::connected_tls : Event::connected);
}

std::string Connector::Handshake::unreached(const std::string& why) const {
  if (connection.medium == Medium::shm) return "cannot be reached: " + why;
  return "cannot be reached from rank " + std::to_string(connector.rank_) + " at " + address.host() + " port " +
         std::to_string(address.port()) + ": " + why;
}

std::string Connector::Handshake::timed_out() const {
  char text[64];
  snprintf(text, sizeof text,
           is_connecting() ? "no answer to a connection in %.1f s" : "no answer to a handshake in %.1f s",
           static_cast<double>(waited_ns) / 1e9);
  if (!connection.is_opener) return text;
  return unreached((is_connecting() || hang_ups != 0) && !trouble.empty() ? trouble : text);
}

void Connector::Handshake::rest() {
  unwatch();
  tls = nullptr;
  connection.stream.reset();
  have_ = 0;
}

void Connector::Handshake::on_connect_result() {
  int error = 0;
  socklen_t length = sizeof error;
  getsockopt(fd(), SOL_SOCKET, SO_ERROR, &error, &length);
  if (error != 0) return connector.on_unreached(*this, error);
  connector.poller_.change(fd(), watch_, EPOLLIN);
  on_connected();
}

void Connector::Handshake::run_tls() {
  switch (tls->shake()) {
    case TlsStream::Shake::wants_read: return connector.poller_.change(fd(), watch_, EPOLLIN);
    case TlsStream::Shake::wants_write: return connector.poller_.change(fd(), watch_, EPOLLIN | EPOLLOUT);
    case TlsStream::Shake::hung_up: return connector.on_hang_up(*this);
    case TlsStream::Shake::failed: return connector.refuse(*this, tls->why());
    case TlsStream::Shake::done: break;
  }
  connector.poller_.change(fd(), watch_, EPOLLIN);
  if (connection.is_opener && tls->rank() != connection.rank)
    return connector.refuse(*this, "its certificate is rank " + std::to_string(tls->rank()) + "'s");
  if (connection.is_opener) return on(Event::tls_done);
  on(Event::tls_done);
  read();  // the hello may lie in OpenSSL's buffer, which epoll does not see
}

void Connector::Handshake::read() {
  switch (read_message()) {
    case ReadResult::more: return;
    case ReadResult::truncated: return connector.refuse(*this, failure("no descriptor for its memory", EMFILE));
    case ReadResult::over: return connector.on_hang_up(*this);
    case ReadResult::whole: break;
  }
  have_ = 0;
  switch (state) {
    case State::await_hello: return on_hello();
    case State::await_challenge: return on_challenge();
    case State::await_introduction: return on_introduction();
    default: return on_reply();
  }
}

Connector::Handshake::ReadResult Connector::Handshake::read_message() {
  struct {
    void* at;
    size_t bytes;
  } place{};
  switch (state) {
    case State::await_hello: place = {&hello, sizeof hello}; break;
    case State::await_challenge: place = {&challenge_, sizeof challenge_}; break;
    case State::await_introduction: place = {&introduction_, sizeof introduction_}; break;
    default: place = {&reply_, sizeof reply_};
  }
  while (have_ < place.bytes) {
    iovec part{static_cast<byte*>(place.at) + have_, place.bytes - have_};
    if (connection.stream != nullptr) {
      const ssize_t n = connection.stream->readv(&part, 1);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) return ReadResult::more;
      if (n <= 0) return ReadResult::over;
      have_ += static_cast<size_t>(n);
      continue;
    }
    alignas(cmsghdr) char space[CMSG_SPACE(2 * sizeof(int))];
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = space;
    message.msg_controllen = sizeof space;
    const ssize_t n = recvmsg(connection.socket.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EAGAIN) return ReadResult::more;
    if (n > 0) keep_descriptors(message);
    if (n <= 0) return ReadResult::over;
    if ((message.msg_flags & MSG_CTRUNC) != 0) return ReadResult::truncated;
    have_ += static_cast<size_t>(n);
  }
  return ReadResult::whole;
}

void Connector::Handshake::keep_descriptors(msghdr& message) {
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
      (i + 1 < count ? connection.memory : connection.presence) = Descriptor(fd);
    }
  }
}

bool Connector::Handshake::send(const void* data, size_t bytes, const std::vector<int>& descriptors) {
  iovec part{const_cast<void*>(data), bytes};
  // Every message of a handshake fits into the empty buffer of a socket.
  if (connection.stream != nullptr) return connection.stream->writev(&part, 1) == static_cast<ssize_t>(bytes);
  alignas(cmsghdr) char space[CMSG_SPACE(2 * sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!descriptors.empty()) {
    message.msg_control = space;
    message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
    cmsghdr* c = CMSG_FIRSTHDR(&message);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
    std::memcpy(CMSG_DATA(c), descriptors.data(), descriptors.size() * sizeof(int));
  }
  return sendmsg(connection.socket.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

void Connector::Handshake::send_hello() {
  if (!send(&hello, sizeof hello, {})) on_unsent();
}

void Connector::Handshake::on_hello() {
  const bool is_sound = std::memcmp(hello.magic, hello_magic, sizeof hello_magic) == 0 &&
                        hello.version == protocol_version && hello.size == static_cast<uint32_t>(connector.size_) &&
                        hello.to == static_cast<uint32_t>(connector.rank_) && hello.from < hello.size &&
                        hello.from != hello.to && hello.medium == connection.medium &&
                        static_cast<uint8_t>(hello.lane) < lane_count &&
                        hello.eager_credit_bytes == connector.settings_.eager_credit_bytes;
  if (!is_sound) return connector.refuse(*this, "handshake hello names another job, rank, size or protocol version");
  connection.rank = static_cast<std::int32_t>(hello.from);
  if (tls != nullptr && tls->rank() != connection.rank)
    return connector.refuse(*this, "its certificate is rank " + std::to_string(tls->rank()) +
                                       "'s, but it says that it is rank " + std::to_string(connection.rank));
  connection.lane = hello.lane;
  connection.checksum = hello.checksum != 0;
  if (!fill_random(challenge_.nonce, sizeof challenge_.nonce))
    return connector.refuse(*this, failure("no random bytes"));
  on(Event::message);
}

void Connector::Handshake::send_challenge() {
  challenge_.proof = connector.prove("acceptor", hello, challenge_.nonce);
  if (!send(&challenge_, sizeof challenge_, {})) on(Event::hang_up);
}

void Connector::Handshake::on_challenge() {
  if (!is_equal(challenge_.proof, connector.prove("acceptor", hello, challenge_.nonce)))
    return connector.refuse(*this, "it does not know the job's secret");
  if (connection.medium == Medium::shm) {
    if (!is_same_user(connection.socket.get())) return connector.refuse(*this, "it belongs to another user");
    connection.memory = ShmLink::make_memory();
    if (!connection.memory)
      return connector.refuse(
          *this, failure(("no shared memory for a link of " + std::to_string(sizeof(LinkMemory)) + " bytes").c_str()));
  }
  on(Event::message);
}

void Connector::Handshake::send_introduction() {
  introduction_.proof = connector.prove("opener", hello, challenge_.nonce);
  introduction_.probe = connector.probe_;
  std::vector<int> descriptors;
  if (connection.medium == Medium::shm) descriptors = {connection.memory.get(), connector.presence_->fd()};
  if (!send(&introduction_, sizeof introduction_, descriptors)) on_unsent();
}

void Connector::Handshake::on_unsent() {
  if (errno == EPIPE || errno == ECONNRESET) return connector.on_hang_up(*this);
  connector.refuse(*this, failure("cannot send a handshake"));
}

void Connector::Handshake::on_introduction() {
  if (!is_equal(introduction_.proof, connector.prove("opener", hello, challenge_.nonce)))
    return connector.refuse(*this, "it does not know the job's secret");
  if (connection.medium == Medium::shm && (!connection.memory || !connection.presence))
    return connector.refuse(*this, "it sent no memory to share");
  connection.probe = introduction_.probe;
  const Admission said = connector.owner_.admit(connection.rank);
  const bool is_tcp = connection.medium == Medium::tcp;
  reply_ = {is_tcp ? connector.pairs_.admit(connection.rank, connection.lane, said) : said, 0, connector.probe_};
  std::vector<int> descriptors;
  if (connection.medium == Medium::shm && reply_.admission == Admission::welcome)
    descriptors = {connector.presence_->fd()};
  if (!send(&reply_, sizeof reply_, descriptors)) return on(Event::hang_up);
  if (reply_.admission == Admission::welcome) return on(Event::welcome);
  if (reply_.admission != Admission::crossing) return on(Event::turned_away);
  // An earlier call of this rank that was crossed has been replaced by this one.
  std::erase_if(connector.handshakes_, [this](const auto& h) {
    return h->state == State::crossed && !h->connection.is_opener && h->connection.rank == connection.rank;
  });
  on(Event::crossing);
}

void Connector::Handshake::on_reply() {
  if (reply_.admission == Admission::crossing) return on(Event::crossing);
  if (reply_.admission == Admission::leaving) return connector.refuse(*this, "left", Admission::leaving);
  if (reply_.admission != Admission::welcome) return connector.refuse(*this, "it refuses the link");
  if (connection.medium == Medium::shm && !connection.presence)
    return connector.refuse(*this, "it sent no presence page");
  connection.probe = reply_.probe;
  on(Event::welcome);
}

void Connector::Handshake::keep_open() {
  connection.memory.close();
  connection.presence.close();
}

void Connector::Handshake::on_crossed_ready() {
  byte unused;
  iovec part{&unused, 1};
  ssize_t n;
  do
    n = connection.stream != nullptr ? connection.stream->readv(&part, 1)
                                     : recv(connection.socket.get(), &unused, 1, MSG_DONTWAIT);
  while (n < 0 && errno == EINTR);
  if (n < 0 && errno == EAGAIN) return;
  if (connection.is_opener) return connector.refuse(*this, "died: its connection was closed");
  on(Event::hang_up);
}

void Connector::Handshake::hand_over() {
  unwatch();
  if (tls != nullptr) tls->trust();
  NewConnection made = std::move(connection);
  Connector& to = connector;
  to.end(*this);
  to.hand_on(std::move(made));
}

}  // namespace unisono::engine
