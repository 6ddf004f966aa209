// A link over two TCP connections, one per lane.
//
// Large payload is not copied on either side: it is written from the sender's buffer and read into the receiver's.

#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/poller.hpp"
#include "base/transition_table.hpp"
#include "link/byte_stream.hpp"
#include "link/frame_parser.hpp"
#include "link/link.hpp"

namespace unisono::engine {

class Peer;

// How all links of an engine treat their sockets. It depends on the number of links and on the caller.
struct SocketPolicy {
  size_t links = 0;            // over TCP
  bool shares_socket = false;  // links over QUIC have one
  bool busy_poll = true;       // read without waiting for epoll to report something
  unsigned corked = 0;         // while not 0, short frames wait for `push`: one system call for all

  // With more links one epoll call is cheaper than a read of each socket.
  static constexpr size_t busy_poll_links_max = 2;
  void count(int more) {
    links += static_cast<size_t>(more);
    busy_poll = links <= busy_poll_links_max;
  }
  bool has_sockets() const { return links != 0 || shares_socket; }
};

// The two halves of a connection. They end independently: what the peer sent before it closed can still be read when
// nothing can be written any more.
enum class Reading : uint8_t { idle, ready, draining, ended };
enum class ReadEvent : uint8_t { readable, hang_up, drained, end_of_stream };
inline constexpr TransitionTable<Reading, 4, ReadEvent, 4> read_transitions({
    // epoll reports bytes
    {Reading::idle, ReadEvent::readable, Reading::ready},
    // epoll reports the end, perhaps behind bytes
    {Reading::idle, ReadEvent::hang_up, Reading::draining},
    // a busy poll found nothing
    {Reading::idle, ReadEvent::drained, Reading::idle},
    // a busy poll found the end
    {Reading::idle, ReadEvent::end_of_stream, Reading::ended},
    {Reading::ready, ReadEvent::readable, Reading::ready},
    {Reading::ready, ReadEvent::hang_up, Reading::draining},
    // the socket has no more bytes; epoll reports the next ones
    {Reading::ready, ReadEvent::drained, Reading::idle},
    {Reading::ready, ReadEvent::end_of_stream, Reading::ended},
    {Reading::draining, ReadEvent::readable, Reading::draining},
    {Reading::draining, ReadEvent::hang_up, Reading::draining},
    // epoll reports a hang-up once, so the end must be looked for
    {Reading::draining, ReadEvent::drained, Reading::draining},
    {Reading::draining, ReadEvent::end_of_stream, Reading::ended},
    // epoll may report a closed socket once more
    {Reading::ended, ReadEvent::readable, Reading::ended},
    {Reading::ended, ReadEvent::hang_up, Reading::ended},
});

enum class Writing : uint8_t { open, blocked, closed };
enum class WriteEvent : uint8_t { writable, full, broken };
inline constexpr TransitionTable<Writing, 3, WriteEvent, 3> write_transitions({
    // epoll reports room that was not missed
    {Writing::open, WriteEvent::writable, Writing::open},
    // the socket took less than it was given
    {Writing::open, WriteEvent::full, Writing::blocked},
    // a write failed, or data in the sender's memory had to be let go
    {Writing::open, WriteEvent::broken, Writing::closed},
    // epoll reports room, or the next poll tries without a report
    {Writing::blocked, WriteEvent::writable, Writing::open},
    {Writing::blocked, WriteEvent::broken, Writing::closed},
    // what is put is thrown away
    {Writing::closed, WriteEvent::writable, Writing::closed},
});

class Connection final : public Watcher {
 public:
  Connection(Peer& peer, Poller& poller, std::unique_ptr<ByteStream> stream, Lane lane, bool checksum,
             const SocketPolicy& policy);
  ~Connection() override;

  bool is_watched() const { return watch_ != 0; }
  bool put(const Head& head, const Body& body);
  size_t put_data(uint64_t rendezvous_id, uint64_t offset, const byte* from, uint64_t left);
  bool holds_data(uint64_t rendezvous_id) const { return data_left_ != 0 && data_rendezvous_id_ == rendezvous_id; }
  // Write what waits. True if something moved.
  bool push();
  // The same although the socket was full the last time: it may have room that epoll has not reported yet.
  bool push_again() {
    on(WriteEvent::writable);
    return push();
  }
  // Read what arrived and give it to the peer, or throw it away. True if something moved.
  bool pull(bool busy_poll, bool is_discarding);
  bool is_drained() const { return waiting_at_ == waiting_.size() && data_left_ == 0; }
  void finish() { stream_->finish(); }
  // Give up data that waits in the sender's memory. This cuts the stream in the middle of a frame.
  void abandon_data() {
    if (data_left_ != 0) close_writing();
  }
  void on_ready(uint32_t events) override;

  bool is_delivered() const;
  const char* fault() const { return fault_; }
  const char* name() const { return stream_->name(); }
  bool is_ended() const { return reading_ == Reading::ended; }
  bool was_heard() { return std::exchange(was_heard_, false); }

 private:
  void write(iovec* parts, int count);
  size_t room_beside(size_t direct) const;
  void close_writing();
  void on(ReadEvent event) { reading_ = read_transitions.next(reading_, event); }
  void on(WriteEvent event) { writing_ = write_transitions.next(writing_, event); }
  void parse();

  Peer& peer_;
  Poller& poller_;
  std::unique_ptr<ByteStream> stream_;
  const bool checksum_;
  const SocketPolicy& policy_;
  uint64_t watch_ = 0;
  Reading reading_ = Reading::ready;
  Writing writing_ = Writing::open;
  bool was_heard_ = false;
  const char* fault_ = nullptr;

  // Out: bytes that wait, then the payload of one data frame in the sender's memory.
  std::vector<byte> waiting_;
  size_t waiting_at_ = 0;
  const byte* data_ = nullptr;
  size_t data_left_ = 0;
  uint64_t data_rendezvous_id_ = 0;
  uint32_t data_crc_ = 0;

  // In: a buffer, and what parses it.
  const size_t in_bytes_;
  std::unique_ptr<byte[]> in_;
  size_t begin_ = 0;
  size_t end_ = 0;
  FrameParser parser_;
};

class TcpLink final : public Link {
 public:
  TcpLink(Peer& peer, std::unique_ptr<Connection> bulk, std::unique_ptr<Connection> control, SocketPolicy& policy);
  ~TcpLink() override { policy_.count(-1); }

  bool put(Lane lane, Head head, const Body& body) override { return at(lane).put(head, body); }
  size_t put_data(Lane lane, uint64_t rendezvous_id, uint64_t offset, const byte* from, uint64_t left) override {
    return at(lane).put_data(rendezvous_id, offset, from, left);
  }
  bool holds_data(Lane lane, uint64_t rendezvous_id) const override {
    return lanes_[static_cast<size_t>(lane)]->holds_data(rendezvous_id);
  }
  bool poll() override;
  void push() override;
  bool is_drained() const override { return lanes_[0]->is_drained() && lanes_[1]->is_drained(); }
  bool is_delivered() const override { return lanes_[0]->is_delivered() && lanes_[1]->is_delivered(); }
  bool needs_hang_up() const override { return true; }
  size_t eager_bytes_max(Lane lane) const override { return eager_bytes_max_of(lane); }
  size_t certain_eager_factor() const override { return 4; }
  bool was_heard() override;
  std::int32_t core() const override;
  void beat() override;
  bool can_stall() const override { return true; }
  bool is_starved() const override;
  void finish() override;
  void discard_input() override;
  const char* name() const override { return lanes_[0]->name(); }

 private:
  Connection& at(Lane lane) { return *lanes_[static_cast<size_t>(lane)]; }

  Peer& peer_;
  SocketPolicy& policy_;
  unsigned turns_ = 0;
  std::unique_ptr<Connection> lanes_[lane_count];
};

}  // namespace unisono::engine
