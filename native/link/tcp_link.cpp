#include "link/tcp_link.hpp"

#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "base/digest.hpp"
#include "messaging/peer.hpp"

namespace unisono::engine {
namespace {

// Bytes that may wait here for a blocked connection, beside what the credit bounds.
constexpr size_t waiting_bytes_max = 512 * 1024;
// Frames up to short_bytes are copied together and go out in one system call.
constexpr size_t short_bytes = 2048, gathered_bytes_max = 16 * 1024;
// Bytes read into the buffer beside payload that goes straight to its target: a few short frames, and little of the
// payload behind them, which has to be copied.
constexpr size_t beside_bytes = 1024;
// Bytes read per poll, before other links and heartbeats have their turn. Reading 1 MiB into memory that was never
// touched takes a millisecond.
constexpr size_t read_bytes_max = data_frame_bytes;
constexpr int reads_per_poll = 8;
// A busy poll reads the control lane every fourth time.
constexpr unsigned control_turns = 4;

void append(std::vector<byte>& to, uint32_t crc) {
  const byte* raw = reinterpret_cast<const byte*>(&crc);
  to.insert(to.end(), raw, raw + sizeof crc);
}

}  // namespace

Connection::Connection(Peer& peer, Poller& poller, std::unique_ptr<ByteStream> stream, Lane lane, bool checksum,
                       const SocketPolicy& policy)
    : peer_(peer),
      poller_(poller),
      stream_(std::move(stream)),
      checksum_(checksum),
      policy_(policy),
      in_bytes_(frame_bytes_max(lane)),
      in_(new byte[in_bytes_]),
      parser_(peer, lane, checksum, in_bytes_) {
  // Inside a host there is no network to protect. A pacing congestion control (bbr, the default of some systems) made
  // long messages take half as long again; every system has reno and lets any user choose it.
  if (peer_.is_same_host) setsockopt(stream_->fd(), IPPROTO_TCP, TCP_CONGESTION, "reno", 4);
  // Edge-triggered: a thread sleeps only after it has read and written until nothing moved any more.
  watch_ = poller_.add(stream_->fd(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, *this);
}

Connection::~Connection() {
  if (watch_ != 0) poller_.remove(stream_->fd(), watch_);
}

void Connection::on_ready(uint32_t events) {
  if ((events & EPOLLIN) != 0) on(ReadEvent::readable);
  if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) on(ReadEvent::hang_up);
  if ((events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0) {
    on(WriteEvent::writable);
    if (stream_->is_entangled()) on(ReadEvent::readable);
  }
}

bool Connection::is_delivered() const {
  int bytes = 0;
  return writing_ == Writing::closed || is_ended() || ioctl(stream_->fd(), SIOCOUTQ, &bytes) != 0 || bytes == 0;
}

// ---- out ----

// The other end is closed. Reading finds that, too, after all that the peer sent before.
void Connection::close_writing() {
  on(WriteEvent::broken);
  waiting_.clear();
  waiting_at_ = data_left_ = 0;
}

// Write what waits, then `parts`, whose first entry the caller leaves free for it. What the socket does not take is
// kept.
void Connection::write(iovec* parts, int count) {
  const size_t front = waiting_.size() - waiting_at_;
  size_t total = front, written = 0;
  for (int i = 1; i < count; ++i) total += parts[i].iov_len;
  if (writing_ != Writing::blocked) {
    parts[0] = {waiting_.data() + waiting_at_, front};
    const int first = front == 0 ? 1 : 0;
    ssize_t n;
    do n = stream_->writev(parts + first, count - first);
    while (n < 0 && errno == EINTR);
    if (n < 0) {
      if (errno != EAGAIN) return close_writing();
      n = 0;
    }
    written = static_cast<size_t>(n);
    if (written < total) on(WriteEvent::full);
  }
  if (written < front) {
    waiting_at_ += written;
    written = 0;
  } else {
    waiting_.clear();
    waiting_at_ = 0;
    written -= front;
  }
  for (int i = 1; i < count; ++i) {
    const size_t skip = written < parts[i].iov_len ? written : parts[i].iov_len;
    written -= skip;
    const byte* from = static_cast<const byte*>(parts[i].iov_base);
    waiting_.insert(waiting_.end(), from + skip, from + parts[i].iov_len);
  }
}

bool Connection::put(const Head& head, const Body& body) {
  if (writing_ == Writing::closed) return true;
  if (data_left_ != 0) return false;
  const size_t front = waiting_.size() - waiting_at_;
  if (front != 0 && front + body.total() > waiting_bytes_max) return false;
  Head sent = head;
  sent.core = core_here();
  uint32_t head_crc = 0, body_crc = 0;
  int count = 1;
  iovec parts[7];
  parts[count++] = {&sent, sizeof sent};
  if (checksum_) {
    head_crc = crc_of(sent);
    parts[count++] = {&head_crc, sizeof head_crc};
  }
  const int body_at = count;
  if (body.prefix_bytes != 0) parts[count++] = {const_cast<uint64_t*>(body.prefix), body.prefix_bytes};
  if (body.header_bytes != 0) parts[count++] = {const_cast<byte*>(body.header), body.header_bytes};
  if (body.payload_bytes != 0) parts[count++] = {const_cast<byte*>(body.payload), body.payload_bytes};
  if (checksum_ && body.total() != 0) {
    for (int i = body_at; i < count; ++i)
      body_crc = crc32c(body_crc, static_cast<const byte*>(parts[i].iov_base), parts[i].iov_len);
    parts[count++] = {&body_crc, sizeof body_crc};
  }
  if (body.total() > short_bytes) {
    write(parts, count);
    return true;
  }
  for (int i = 1; i < count; ++i) {
    const byte* from = static_cast<const byte*>(parts[i].iov_base);
    waiting_.insert(waiting_.end(), from, from + parts[i].iov_len);
  }
  if (policy_.corked == 0 || waiting_.size() > gathered_bytes_max) push();
  return true;
}

size_t Connection::put_data(uint64_t rendezvous_id, uint64_t offset, const byte* from, uint64_t left) {
  if (writing_ == Writing::closed || data_left_ != 0) return 0;
  if (waiting_at_ != waiting_.size() && writing_ == Writing::blocked) return 0;
  const size_t bytes = left < data_frame_bytes ? left : data_frame_bytes;
  Head head;
  head.word = Head::make_word(Kind::data);
  head.core = core_here();
  head.context = rendezvous_id;
  head.tag = offset;
  head.nbytes = bytes;
  const byte* raw = reinterpret_cast<const byte*>(&head);
  waiting_.insert(waiting_.end(), raw, raw + sizeof head);
  if (checksum_) append(waiting_, crc_of(head));
  data_ = from;
  data_left_ = bytes;
  data_rendezvous_id_ = rendezvous_id;
  if (checksum_) data_crc_ = crc32c(0, from, bytes);
  push();
  return bytes;
}

bool Connection::push() {
  bool moved = false;
  while (writing_ == Writing::open && !is_drained()) {
    iovec parts[2];
    int count = 0;
    const size_t front = waiting_.size() - waiting_at_;
    if (front != 0) parts[count++] = {waiting_.data() + waiting_at_, front};
    if (data_left_ != 0) parts[count++] = {const_cast<byte*>(data_), data_left_};
    const ssize_t n = stream_->writev(parts, count);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN)
        on(WriteEvent::full);
      else
        close_writing();
      break;
    }
    moved = true;
    const size_t written = static_cast<size_t>(n);
    if (written < front + data_left_) on(WriteEvent::full);
    const size_t of_front = written < front ? written : front;
    waiting_at_ += of_front;
    if (waiting_at_ == waiting_.size()) {
      waiting_.clear();
      waiting_at_ = 0;
    }
    const size_t of_data = written - of_front;
    data_ += of_data;
    data_left_ -= of_data;
    if (of_data != 0 && data_left_ == 0 && checksum_) append(waiting_, data_crc_);
  }
  return moved;
}

// ---- in ----

// How much to read into the buffer behind `direct` bytes that go straight to their target.
size_t Connection::room_beside(size_t direct) const {
  const size_t room = in_bytes_ - end_;
  size_t wanted = room;
  if (direct != 0 || (!parser_.is_in_data() && begin_ == end_ && peer_.rendezvous.awaits_data()))
    wanted = beside_bytes;
  else if (parser_.is_in_data() && parser_.data_left() < room)
    wanted = parser_.data_left() + beside_bytes;
  return wanted < room ? wanted : room;
}

bool Connection::pull(bool busy_poll, bool is_discarding) {
  if (is_ended() || (reading_ == Reading::idle && !busy_poll) || fault_ != nullptr) return false;
  bool moved = false;
  size_t taken = 0;
  for (int i = 0; i < reads_per_poll && taken < read_bytes_max; ++i) {
    iovec parts[2];
    int count = 0;
    size_t direct = 0;
    if (is_discarding) {
      parser_.drop();
      begin_ = end_ = 0;
    }
    if (byte* buffer = begin_ == end_ ? parser_.buffer() : nullptr; buffer != nullptr) {
      direct = parser_.data_left() < read_bytes_max ? parser_.data_left() : read_bytes_max;
      parts[count++] = {buffer, direct};
    }
    if (begin_ == end_) begin_ = end_ = 0;
    parts[count++] = {in_.get() + end_, room_beside(direct)};
    const ssize_t n = stream_->readv(parts, count);
    if (n <= 0) {
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) {
        on(ReadEvent::drained);
        break;
      }
      on(ReadEvent::end_of_stream);
      fault_ = stream_->fault();
      break;
    }
    moved = was_heard_ = true;
    const size_t came = static_cast<size_t>(n);
    taken += came;
    const size_t placed = came < direct ? came : direct;
    if (placed != 0) parser_.placed(static_cast<const byte*>(parts[0].iov_base), placed);
    end_ += came - placed;
    if (is_discarding) continue;
    parse();
    if (fault_ != nullptr) break;
    // A short read: the socket is empty, and another call would only confirm that.
    const size_t room = direct + parts[count - 1].iov_len;
    if (came < room && !stream_->is_entangled()) {
      on(ReadEvent::drained);
      if (reading_ == Reading::idle) break;
    }
  }
  return moved;
}

void Connection::parse() {
  const byte* at = in_.get() + begin_;
  fault_ = parser_.parse(at, in_.get() + end_);
  begin_ = static_cast<size_t>(at - in_.get());
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (begin_ != 0 && in_bytes_ - end_ < in_bytes_ / 2) {
    std::memmove(in_.get(), in_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
}

// ---- both lanes ----

TcpLink::TcpLink(Peer& peer, std::unique_ptr<Connection> bulk, std::unique_ptr<Connection> control,
                 SocketPolicy& policy)
    : peer_(peer), policy_(policy) {
  policy_.count(1);
  lanes_[static_cast<size_t>(Lane::bulk)] = std::move(bulk);
  lanes_[static_cast<size_t>(Lane::control)] = std::move(control);
}

bool TcpLink::poll() {
  if (over_ != nullptr) return false;
  bool moved = false;
  bool is_ended = false;
  moved |= at(Lane::bulk).pull(policy_.busy_poll, is_discarding_);
  // The control lane carries less, unless a reply is due; a read in vain is a large part of a small message's latency.
  const bool is_turn = ++turns_ % control_turns == 0 || peer_.awaits_answer();
  // If the bulk lane has ended, the control lane may say why.
  moved |= at(Lane::control).pull((policy_.busy_poll && is_turn) || at(Lane::bulk).is_ended(), is_discarding_);
  for (size_t i = 0; i < lane_count; ++i) {
    const auto& lane = lanes_[i];
    if (!lane->is_drained()) moved |= lane->push_again();
    if (lane->fault() != nullptr) {
      over_ = lane->fault();
      return true;
    }
    // The other lane's goodbye may still be on its way.
    is_ended |= lane->is_ended() && !goodbyes_[i];
  }
  if ((is_ended || has_left()) && !moved) over_ = has_left() ? "left" : "died: its connection was closed";
  return moved;
}

void TcpLink::push() {
  for (const auto& lane : lanes_)
    if (!lane->is_drained()) lane->push();
}

bool TcpLink::was_heard() {
  const bool bulk = lanes_[0]->was_heard(), control = lanes_[1]->was_heard();
  return bulk || control;
}

std::int32_t TcpLink::core() const { return peer_.is_same_host ? peer_.heard_core : -1; }

bool TcpLink::is_starved() const { return peer_.is_starved(); }

void TcpLink::beat() {
  Head head;
  head.word = Head::make_word(Kind::beat);
  at(Lane::control).put(head, Body());
}

void TcpLink::discard_input() {
  Link::discard_input();
  for (const auto& lane : lanes_) lane->abandon_data();
}

void TcpLink::finish() {
  for (const auto& lane : lanes_) lane->finish();
}

}  // namespace unisono::engine
