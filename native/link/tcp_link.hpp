// A link over two connections, one per lane. Knows how frames lie in a byte stream; does not know messages.
//
// Large payload goes from the sender's memory to the receiver's without a copy between: written from where it lies,
// read to where it belongs.
//
// With checksums a CRC32C follows every head and every body, so that no length is believed before it is known to be
// what was sent.

#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/poller.hpp"
#include "link/byte_stream.hpp"
#include "link/link.hpp"

namespace unisono::engine {

class Peer;
struct RendezvousReceive;

// How all links of an engine treat their sockets; it depends on how many there are and who is at work.
struct SocketPolicy {
  bool busy_poll = true;  // try to read without having been told that there is something
  unsigned corked = 0;    // short frames wait until whoever raised this calls `push`: one call to the system for all
};

class Connection final : public Watcher {
 public:
  Connection(Peer& peer, Poller& poller, std::unique_ptr<ByteStream> stream, Lane lane, bool checksum,
             const SocketPolicy& manner);
  ~Connection() override;

  bool is_watched() const { return watch_ != 0; }
  bool put(const Head& head, const Body& body);
  size_t put_data(uint64_t rendezvous_id, uint64_t offset, const byte* from, uint64_t left);
  bool holds_data(uint64_t rendezvous_id) const { return data_left_ != 0 && data_ticket_ == rendezvous_id; }
  // Write what waits. True if something moved.
  bool push();
  // The same although the system took no more the last time: room may have come without our being told so far.
  bool push_again() {
    is_blocked_ = false;
    return push();
  }
  // Read what came and give it to the peer. True if something moved.
  bool pull(bool busy_poll, bool is_deaf);
  bool is_drained() const { return waiting_at_ == waiting_.size() && data_left_ == 0; }
  void finish() { stream_->finish(); }
  // Let go of data that waits in the sender's memory: the stream is cut in the middle of a frame.
  void let_go() {
    if (data_left_ != 0) fall_silent();
  }
  void on_ready(uint32_t events) override;

  bool is_delivered() const;
  const char* fault() const { return fault_; }
  const char* name() const { return stream_->name(); }
  bool is_ended() const { return is_ended_; }
  std::int32_t core() const { return core_; }
  bool was_heard() { return std::exchange(was_heard_, false); }

 private:
  void write(iovec* parts, int count);
  size_t room_beside(size_t direct) const;
  void fall_silent();
  const char* parse();
  const char* take_data(bool& is_stuck);

  Peer& peer_;
  Poller& poller_;
  std::unique_ptr<ByteStream> stream_;
  const Lane lane_;
  const bool checksum_;
  const SocketPolicy& manner_;
  uint64_t watch_ = 0;
  bool is_ready_ = true;     // there may be something to read
  bool is_blocked_ = false;  // the system takes no more for now
  bool is_hung_up_ = false;  // the end may be behind the bytes that are there
  bool is_ended_ = false;    // nothing more can be read
  bool is_mute_ = false;     // nothing more can be written; what came before may still be read
  bool was_heard_ = false;
  std::int32_t core_ = -1;  // where its last frame was sent
  const char* fault_ = nullptr;

  // Out: bytes that wait, then the data of one frame where it lies in the sender's memory.
  std::vector<byte> waiting_;
  size_t waiting_at_ = 0;
  const byte* data_ = nullptr;
  size_t data_left_ = 0;
  uint64_t data_ticket_ = 0;
  uint32_t data_crc_ = 0;

  // In: a buffer, and the data frame that is being read.
  const size_t in_bytes_;
  std::unique_ptr<byte[]> in_;
  size_t begin_ = 0;
  size_t end_ = 0;
  RendezvousReceive* into_ = nullptr;
  uint64_t into_done_ = 0;
  uint64_t into_left_ = 0;
  uint32_t into_crc_ = 0;
};

class TcpLink final : public Link {
 public:
  TcpLink(Peer& peer, std::unique_ptr<Connection> bulk, std::unique_ptr<Connection> control,
          const SocketPolicy& manner);

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
  size_t eager_bytes_max(Lane lane) const override;
  size_t certain_eager_factor() const override { return 4; }
  bool was_heard() override;
  std::int32_t core() const override;
  void beat() override;
  bool can_stall() const override { return true; }
  bool is_starved() const override;
  void finish() override;
  void deafen() override;
  const char* name() const override { return lanes_[0]->name(); }

 private:
  Connection& at(Lane lane) { return *lanes_[static_cast<size_t>(lane)]; }

  Peer& peer_;
  const SocketPolicy& manner_;
  unsigned turns_ = 0;
  std::unique_ptr<Connection> lanes_[lane_count];
};

}  // namespace unisono::engine
