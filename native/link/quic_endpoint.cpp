#include "link/quic_endpoint.hpp"

#include <linux/errqueue.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/udp.h>

#include <algorithm>
#include <array>

#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

namespace unisono::engine {
namespace {

// One system call sends or receives this much, in up to 64 datagrams.
constexpr size_t batch_bytes_max = 64'000, batch_segments_max = 64;
// Messages of up to 64 KiB leave in smaller batches: the peer decrypts one while this rank encrypts the next. A round
// trip of 64 KiB in datagrams of 1,452 bytes, as a multiple of TLS, medians of five rounds: 1.8 with 6,000 bytes, 1.4
// with 12,000, between 1.22 and 1.26 with 16,000 to 33,000, 1.33 with 64,000.
constexpr size_t short_batch_bytes = 24'000, short_message_bytes = 64 * 1024;
constexpr size_t datagram_bytes_max = 65'536;
constexpr int datagrams_per_call = 4, calls_per_turn = 4;
// A closed connection answers what still comes for it, a few times and for a while.
constexpr std::int64_t closed_ns = 2 * second;
constexpr int closed_answers_max = 8;
constexpr size_t closed_max = 1024;
constexpr int errors_per_turn = 64;
// The system counts at least this much of a socket's memory for a datagram, however short.
constexpr std::int64_t datagram_memory_min = 512;
// For the segment size or the length of what was received, and the address of this host.
constexpr size_t control_bytes = CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(in6_pktinfo));

bool is_wildcard(const SocketAddress& address) {
  if (address.storage.ss_family == AF_INET)
    return reinterpret_cast<const sockaddr_in&>(address.storage).sin_addr.s_addr == htonl(INADDR_ANY);
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_addr) != 0;
}

// Append a control message.
template <class Value>
void add_control(msghdr& message, int level, int type, const Value& value) {
  auto* head = reinterpret_cast<cmsghdr*>(static_cast<char*>(message.msg_control) + message.msg_controllen);
  head->cmsg_level = level;
  head->cmsg_type = type;
  head->cmsg_len = CMSG_LEN(sizeof value);
  std::memcpy(CMSG_DATA(head), &value, sizeof value);
  message.msg_controllen += CMSG_SPACE(sizeof value);
}

// Send from this address of the host.
void add_source(msghdr& message, const SocketAddress& from) {
  if (from.storage.ss_family == AF_INET) {
    in_pktinfo info{};
    info.ipi_spec_dst = reinterpret_cast<const sockaddr_in&>(from.storage).sin_addr;
    add_control(message, IPPROTO_IP, IP_PKTINFO, info);
  } else {
    in6_pktinfo info{};
    info.ipi6_addr = reinterpret_cast<const sockaddr_in6&>(from.storage).sin6_addr;
    add_control(message, IPPROTO_IPV6, IPV6_PKTINFO, info);
  }
}

}  // namespace

struct QuicEndpoint::Inbox {
  std::array<std::array<byte, datagram_bytes_max>, datagrams_per_call> datagrams;
  std::array<SocketAddress, datagrams_per_call> from;
  alignas(cmsghdr) std::array<std::array<char, control_bytes>, datagrams_per_call> control;
  std::array<iovec, datagrams_per_call> parts;
  std::array<mmsghdr, datagrams_per_call> messages;
};

QuicEndpoint::QuicEndpoint(QuicEndpointOwner& owner, Poller& poller) : owner_(owner), poller_(poller) {}

QuicEndpoint::~QuicEndpoint() { abandon(); }

bool QuicEndpoint::open(SocketAddress& address, int buffer_bytes) {
  socket_ = Descriptor(::socket(address.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_ || bind(socket_.get(), address.get(), address.bytes) != 0) return false;
  getsockname(socket_.get(), address.get(), &address.bytes);
  local_ = address;
  is_wildcard_ = is_wildcard(address);
  const int fd = socket_.get(), on = 1;
  setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer_bytes, sizeof buffer_bytes);
  setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
  int granted = 0;
  socklen_t length = sizeof granted;
  getsockopt(fd, SOL_SOCKET, SO_RCVBUF, &granted, &length);
  // The system counts a datagram with its own overhead, up to as much again, and reports twice what was asked for.
  receive_bytes_ = static_cast<size_t>(granted) / 4;
  setsockopt(fd, IPPROTO_UDP, UDP_GRO, &on, sizeof on);
  const bool is_v6 = address.storage.ss_family == AF_INET6;
  // No router divides a datagram: the library probes which size passes.
  const int probe = is_v6 ? IPV6_PMTUDISC_PROBE : IP_PMTUDISC_PROBE;
  setsockopt(fd, is_v6 ? IPPROTO_IPV6 : IPPROTO_IP, is_v6 ? IPV6_MTU_DISCOVER : IP_MTU_DISCOVER, &probe, sizeof probe);
  setsockopt(fd, is_v6 ? IPPROTO_IPV6 : IPPROTO_IP, is_v6 ? IPV6_RECVERR : IP_RECVERR, &on, sizeof on);
  if (is_wildcard_)
    setsockopt(fd, is_v6 ? IPPROTO_IPV6 : IPPROTO_IP, is_v6 ? IPV6_RECVPKTINFO : IP_PKTINFO, &on, sizeof on);
  batch_.reset(new byte[batch_bytes_max + datagram_bytes_max]);
  in_ = std::make_unique<Inbox>();
  return true;
}

bool QuicEndpoint::listen() {
  // Edge-triggered: a thread sleeps only after a turn in which nothing moved.
  watch_ = poller_.add(socket_.get(), EPOLLIN | EPOLLOUT | EPOLLERR | EPOLLET, *this);
  is_listening_ = is_readable_ = watch_ != 0;
  return is_listening_;
}

SocketAddress QuicEndpoint::local_to(const SocketAddress& remote) const {
  if (!is_wildcard_) return local_;
  // The system chooses when a socket is connected, which sends nothing.
  const Descriptor probe(::socket(remote.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  SocketAddress found;
  found.bytes = sizeof found.storage;
  if (!probe || ::connect(probe.get(), remote.get(), remote.bytes) != 0 ||
      getsockname(probe.get(), found.get(), &found.bytes) != 0)
    return local_;
  SocketAddress made = local_;
  made.set_host(found);
  return made;
}

void QuicEndpoint::on_ready(uint32_t events) {
  if ((events & EPOLLIN) != 0) is_readable_ = true;
  if ((events & EPOLLERR) != 0) is_readable_ = has_errors_ = true;
}

void QuicEndpoint::abandon() {
  if (watch_ != 0) poller_.remove(socket_.get(), std::exchange(watch_, 0));
  socket_.close();
  put_.clear();
  read_.clear();
  connections_.clear();
  ended_.clear();
  closed_.clear();
  closed_ids_.clear();
  is_listening_ = is_readable_ = false;
  earliest_ = never;
}

// ---- connections ----

QuicConnection& QuicEndpoint::add(std::unique_ptr<QuicConnection> connection) {
  QuicConnection* const key = connection.get();
  const auto [at, is_new] = connections_.emplace(key, std::move(connection));
  mark(put_, *at->second);
  note_expiry(*at->second);
  return *at->second;
}

void QuicEndpoint::close(QuicConnection& connection, Admission admission, const std::string& reason) {
  const auto found = connections_.find(&connection);
  if (found == connections_.end()) return;
  const std::int64_t now = now_ns();
  std::vector<byte> said = connection.close(admission, reason, now);
  if (connection.is_marked) {
    std::erase(put_, &connection);
    std::erase(read_, &connection);
  }
  if (!said.empty()) {
    send_one(said.data(), said.size(), connection.local(), connection.remote());
    if (closed_.size() == closed_max) forget_closed(never);
    auto made = std::make_shared<Closed>(Closed{std::move(said), connection.ids(), now + closed_ns});
    for (const QuicId id : made->ids) closed_ids_[id] = made;
    closed_.push_back(std::move(made));
  }
  std::unique_ptr<QuicConnection> owned = std::move(found->second);
  connections_.erase(found);
  if (busy_ == &connection) ended_.push_back(std::move(owned));
}

QuicConnection* QuicEndpoint::linked_at(const SocketAddress& address) const {
  for (const auto& [connection, owned] : connections_)
    if (connection->state() == QuicState::linked && connection->remote() == address) return connection;
  return nullptr;
}

// Forget closed connections whose time is over, or the oldest.
void QuicEndpoint::forget_closed(std::int64_t now) {
  while (!closed_.empty() && (closed_.front()->until <= now || closed_.size() == closed_max)) {
    for (const QuicId id : closed_.front()->ids)
      if (const auto found = closed_ids_.find(id); found != closed_ids_.end() && found->second == closed_.front())
        closed_ids_.erase(found);
    closed_.pop_front();
    if (now == never) return;
  }
}

void QuicEndpoint::mark(std::vector<QuicConnection*>& list, QuicConnection& connection) {
  if (std::exchange(connection.is_marked, true)) return;
  list.push_back(&connection);
}

void QuicEndpoint::on_put(QuicConnection& connection, bool is_corked) {
  // What reading has marked is written now, too: the acknowledgement is piggybacked on the answer.
  if (connection.is_marked) {
    if (std::erase(read_, &connection) != 0) put_.push_back(&connection);
  } else {
    mark(put_, connection);
  }
  if (!is_corked) push();
}

void QuicEndpoint::push() {
  // Inside a callback of the library nothing can be written; the turn that made it goes on to write.
  if (put_.empty() || busy_ != nullptr) return;
  is_turn_over_ = false;
  write_marked(put_, now_ns());
}

// ---- turns ----

bool QuicEndpoint::poll(std::int64_t now) {
  if (!is_listening_) return false;
  is_turn_over_ = false;
  if (batch_bytes_ != 0) flush();
  if (now >= earliest_) run_timers(now);
  const bool had_marks = !put_.empty() || !read_.empty();
  if (!put_.empty()) write_marked(put_, now);
  if (!read_.empty()) write_marked(read_, now);
  // A connection that could not write everything goes on in the next turn.
  const bool has_more = had_marks && !is_blocked_ && (!put_.empty() || !read_.empty());
  if (has_errors_) read_errors();
  // By now an answer may have come to what this turn has sent: with the time of its beginning the round trip would have
  // taken no time.
  return read(had_marks ? now_ns() : now) || has_more;
}

void QuicEndpoint::run_timers(std::int64_t now) {
  earliest_ = never;
  std::vector<QuicConnection*> due;
  for (const auto& [connection, owned] : connections_) {
    if (connection->expiry() <= now)
      due.push_back(connection);
    else
      note_expiry(*connection);
  }
  for (QuicConnection* connection : due) {
    if (!connections_.contains(connection)) continue;
    busy_ = connection;
    connection->expire(now);
    mark(read_, *connection);
    note_expiry(*connection);
    owner_.on_changed(*connection);
    busy_ = nullptr;
    ended_.clear();
  }
  forget_closed(now);
}

void QuicEndpoint::write_marked(std::vector<QuicConnection*>& list, std::int64_t now) {
  std::vector<QuicConnection*> marked;
  marked.swap(list);
  for (size_t i = 0; i < marked.size(); ++i) {
    // Writing another one may have ended it.
    if (!connections_.contains(marked[i])) continue;
    QuicConnection& connection = *marked[i];
    connection.is_marked = false;
    if (is_blocked_ || is_turn_over_)
      mark(list, connection);
    else
      write(connection, now);
  }
  if (batch_bytes_ != 0) flush();
}

void QuicEndpoint::write(QuicConnection& connection, std::int64_t now) {
  uint64_t unsent = 0;
  for (size_t i = 0; i < quic_stream_count; ++i) unsent += connection.out(static_cast<QuicStream>(i)).unsent();
  batch_limit_ = unsent <= short_message_bytes ? short_batch_bytes : batch_bytes_max;
  writing_ = &connection;
  if (connection.write(*this, now)) mark(read_, connection);
  if (batch_bytes_ != 0) flush();
  writing_ = nullptr;
  note_expiry(connection);
  if (connection.state() != QuicState::closed) return;
  busy_ = &connection;
  owner_.on_changed(connection);
  busy_ = nullptr;
  ended_.clear();
}

// ---- out ----

byte* QuicEndpoint::space(size_t bytes) {
  if (is_blocked_ || is_turn_over_) return nullptr;
  if (batch_bytes_ != 0 && (batch_bytes_ + bytes > batch_limit_ || segments_ == batch_segments_max)) {
    flush();
    is_turn_over_ = true;
    return nullptr;
  }
  return batch_.get() + batch_bytes_;
}

void QuicEndpoint::send(size_t bytes, const SocketAddress& source, const SocketAddress& to) {
  if (bytes == 0) return;
  if (batch_bytes_ != 0 && (bytes > segment_bytes_ || !(to == batch_to_) || !(source == batch_from_))) {
    // It does not fit the datagrams before it.
    const byte* from = batch_.get() + batch_bytes_;
    flush();
    if (is_blocked_) return;  // lost; the library sends its frames again
    std::memmove(batch_.get(), from, bytes);
  }
  if (batch_bytes_ == 0) {
    segment_bytes_ = bytes;
    batch_from_ = source;
    batch_to_ = to;
  }
  batch_bytes_ += bytes;
  ++segments_;
  if (bytes < segment_bytes_) flush();
}

void QuicEndpoint::flush() {
  if (batch_bytes_ == 0) return;
  if (segments_ > 1 && !has_segmentation_) return flush_singly();
  iovec part{batch_.get(), batch_bytes_};
  msghdr message{};
  message.msg_name = batch_to_.get();
  message.msg_namelen = batch_to_.bytes;
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[control_bytes] = {};
  message.msg_control = control;
  if (segments_ > 1) add_control(message, IPPROTO_UDP, UDP_SEGMENT, static_cast<uint16_t>(segment_bytes_));
  if (is_wildcard_) add_source(message, batch_from_);
  // An error of an earlier datagram, perhaps to another address, is reported here, too: try again.
  for (int tries = 0; tries < 4; ++tries) {
    if (sendmsg(socket_.get(), &message, MSG_NOSIGNAL) >= 0) break;
    if (errno == EAGAIN || errno == ENOBUFS) {
      is_blocked_ = true;
      return;
    }
    has_errors_ |= errno == ECONNREFUSED || errno == EHOSTUNREACH;
    // The system cannot cut it on this path (IPsec, no checksums by the card), or a datagram is too long for it.
    if (segments_ > 1 && (errno == EIO || errno == EINVAL || errno == EMSGSIZE)) {
      has_segmentation_ = errno == EMSGSIZE;
      return flush_singly();
    }
    if (errno == EMSGSIZE && writing_ != nullptr) writing_->on_too_long();
    // Too long, or no path: lost, as the network might have done.
    if (errno != ECONNREFUSED && errno != EINTR && errno != EHOSTUNREACH) break;
  }
  is_blocked_ = false;
  batch_bytes_ = segments_ = 0;
}

// One message per datagram, where the system does not cut a batch.
void QuicEndpoint::flush_singly() {
  std::array<mmsghdr, batch_segments_max> messages{};
  std::array<iovec, batch_segments_max> parts;
  alignas(cmsghdr) char control[control_bytes] = {};
  size_t count = 0;
  for (size_t at = 0; at < batch_bytes_; at += segment_bytes_, ++count) {
    parts[count] = {batch_.get() + at, std::min(segment_bytes_, batch_bytes_ - at)};
    msghdr& head = messages[count].msg_hdr;
    head.msg_name = batch_to_.get();
    head.msg_namelen = batch_to_.bytes;
    head.msg_iov = &parts[count];
    head.msg_iovlen = 1;
    if (!is_wildcard_) continue;
    head.msg_control = control;
    add_source(head, batch_from_);
  }
  size_t sent = 0;
  for (int tries = 0; sent < count && tries < 4; ++tries) {
    const int n = sendmmsg(socket_.get(), &messages[sent], static_cast<unsigned>(count - sent), MSG_NOSIGNAL);
    if (n > 0) {
      sent += static_cast<size_t>(n);
      tries = -1;
      continue;
    }
    if (errno == EAGAIN || errno == ENOBUFS) {
      // Keep the rest.
      batch_bytes_ -= sent * segment_bytes_;
      segments_ = count - sent;
      std::memmove(batch_.get(), batch_.get() + sent * segment_bytes_, batch_bytes_);
      is_blocked_ = true;
      return;
    }
    if (errno == EMSGSIZE && writing_ != nullptr) writing_->on_too_long();
    has_errors_ |= errno == ECONNREFUSED || errno == EHOSTUNREACH;
    if (errno != ECONNREFUSED && errno != EINTR && errno != EHOSTUNREACH) break;
  }
  is_blocked_ = false;
  batch_bytes_ = segments_ = 0;
}

void QuicEndpoint::send_one(const byte* datagram, size_t bytes, const SocketAddress& from, const SocketAddress& to) {
  if (!socket_) return;
  iovec part{const_cast<byte*>(datagram), bytes};
  SocketAddress target = to;
  msghdr message{};
  message.msg_name = target.get();
  message.msg_namelen = target.bytes;
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[control_bytes] = {};
  message.msg_control = control;
  if (is_wildcard_) add_source(message, from);
  for (int tries = 0; tries < 4; ++tries) {
    if (sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return;
    if (errno != ECONNREFUSED && errno != EINTR && errno != EHOSTUNREACH) return;
    has_errors_ = true;
  }
}

// ---- in ----

bool QuicEndpoint::has_caught_up() {
  if (!is_listening_) return true;
  if (backlog_ > 0) return false;
  std::array<uint32_t, SK_MEMINFO_VARS> memory{};
  socklen_t length = sizeof memory;
  if (getsockopt(socket_.get(), SOL_SOCKET, SO_MEMINFO, memory.data(), &length) == 0)
    backlog_ = memory[SK_MEMINFO_RMEM_ALLOC] / datagram_memory_min;
  return true;
}

bool QuicEndpoint::read(std::int64_t now) {
  bool moved = false;
  for (int call = 0; call < calls_per_turn; ++call) {
    for (size_t i = 0; i < datagrams_per_call; ++i) {
      in_->parts[i] = {in_->datagrams[i].data(), datagram_bytes_max};
      msghdr& head = in_->messages[i].msg_hdr;
      head = {};
      head.msg_name = in_->from[i].get();
      head.msg_namelen = sizeof in_->from[i].storage;
      head.msg_iov = &in_->parts[i];
      head.msg_iovlen = 1;
      head.msg_control = in_->control[i].data();
      head.msg_controllen = in_->control[i].size();
    }
    const int count = recvmmsg(socket_.get(), in_->messages.data(), datagrams_per_call, MSG_DONTWAIT, nullptr);
    if (count < 0 && errno != EAGAIN) {
      // An error of an earlier datagram is reported in place of what waits to be read.
      has_errors_ |= errno != EINTR;
      continue;
    }
    backlog_ = count < datagrams_per_call ? 0 : backlog_ - count;
    if (count <= 0) {
      is_readable_ = false;
      break;
    }
    moved = true;
    for (int i = 0; i < count; ++i) {
      msghdr& head = in_->messages[i].msg_hdr;
      size_t left = in_->messages[i].msg_len, segment = left;
      in_->from[i].bytes = head.msg_namelen;
      SocketAddress local = local_;
      for (cmsghdr* c = CMSG_FIRSTHDR(&head); c != nullptr; c = CMSG_NXTHDR(&head, c)) {
        if (c->cmsg_level == IPPROTO_UDP && c->cmsg_type == UDP_GRO) {
          int bytes = 0;
          std::memcpy(&bytes, CMSG_DATA(c), sizeof bytes);
          if (bytes > 0) segment = static_cast<size_t>(bytes);
        } else if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO) {
          in_pktinfo info;
          std::memcpy(&info, CMSG_DATA(c), sizeof info);
          reinterpret_cast<sockaddr_in&>(local.storage).sin_addr = info.ipi_spec_dst;
        } else if (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_PKTINFO) {
          in6_pktinfo info;
          std::memcpy(&info, CMSG_DATA(c), sizeof info);
          reinterpret_cast<sockaddr_in6&>(local.storage).sin6_addr = info.ipi6_addr;
        }
      }
      for (const byte* at = in_->datagrams[i].data(); left != 0 && socket_;) {
        const size_t bytes = std::min(left, segment);
        route(local, in_->from[i], at, bytes, now);
        at += bytes;
        left -= bytes;
      }
    }
    if (count < datagrams_per_call || !socket_) break;
  }
  return moved;
}

void QuicEndpoint::route(const SocketAddress& local, const SocketAddress& from, const byte* datagram, size_t bytes,
                         std::int64_t now) {
  ngtcp2_version_cid ids{};
  QuicId id;
  const bool is_ours =
      bytes != 0 &&
      ngtcp2_pkt_decode_version_cid(&ids, reinterpret_cast<const uint8_t*>(datagram), bytes, quic_id_bytes) == 0 &&
      ids.dcidlen == quic_id_bytes;
  if (is_ours) std::memcpy(&id, ids.dcid, sizeof id);
  const auto found = is_ours ? routes_.find(id) : routes_.end();
  if (found == routes_.end()) {
    const auto old = is_ours ? closed_ids_.find(id) : closed_ids_.end();
    if (old == closed_ids_.end()) return owner_.on_first(local, from, datagram, bytes, now);
    Closed& closed = *old->second;
    if (closed.answers++ < closed_answers_max) send_one(closed.datagram.data(), closed.datagram.size(), local, from);
    return;
  }
  QuicConnection& connection = *found->second;
  busy_ = &connection;
  connection.receive(local, from, datagram, bytes, now);
  if (connections_.contains(&connection)) {
    mark(read_, connection);
    note_expiry(connection);
    owner_.on_changed(connection);
  }
  busy_ = nullptr;
  ended_.clear();
}

void QuicEndpoint::read_errors() {
  has_errors_ = false;
  for (int i = 0; i < errors_per_turn; ++i) {
    SocketAddress to;
    alignas(cmsghdr) char control[256];
    byte unused[64];
    iovec part{unused, sizeof unused};
    msghdr message{};
    message.msg_name = to.get();
    message.msg_namelen = sizeof to.storage;
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    if (recvmsg(socket_.get(), &message, MSG_ERRQUEUE | MSG_DONTWAIT) < 0) return;
    to.bytes = message.msg_namelen;
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      const bool is_error = (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_RECVERR) ||
                            (c->cmsg_level == IPPROTO_IPV6 && c->cmsg_type == IPV6_RECVERR);
      if (!is_error) continue;
      sock_extended_err error;
      std::memcpy(&error, CMSG_DATA(c), sizeof error);
      if (error.ee_errno == ECONNREFUSED) owner_.on_unreachable(to, ECONNREFUSED);
    }
  }
}

}  // namespace unisono::engine
