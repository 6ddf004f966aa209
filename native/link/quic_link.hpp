// A link over one QUIC connection. Frames of the control lane, messages with every envelope, and the payload of
// accepted messages travel in a stream each, so that a lost datagram holds up one of them.
//
// Short frames are copied and kept until they are acknowledged. Payload is sent from where it lies, and again from
// there if it was lost: it stays in use until it is acknowledged. Received payload is copied straight to where it
// belongs.

#pragma once

#include <vector>

#include "link/frame_parser.hpp"
#include "link/link.hpp"
#include "link/quic_endpoint.hpp"
#include "link/tcp_link.hpp"

namespace unisono::engine {

class QuicLink final : public Link, public QuicReader {
 public:
  QuicLink(Peer& peer, QuicEndpoint& endpoint, QuicConnection& connection, const SocketPolicy& policy);
  ~QuicLink() override;

  void start() override { connection_.read_by(this); }
  bool put(Lane lane, Head head, const Body& body) override;
  size_t put_data(Lane lane, uint64_t rendezvous_id, uint64_t offset, const byte* from, uint64_t left) override;
  bool holds_data(Lane, uint64_t rendezvous_id) const override {
    return connection_.out(QuicStream::data).lends(rendezvous_id);
  }
  bool poll() override;
  bool is_drained() const override { return is_closed() || !connection_.has_unsent(); }
  bool is_delivered() const override { return is_closed() || connection_.is_acknowledged(); }
  size_t eager_bytes_max(Lane lane) const override { return eager_bytes_max_of(lane); }
  size_t certain_eager_factor() const override { return 4; }
  bool was_heard() override { return connection_.was_heard(); }
  void beat() override;
  bool can_stall() const override { return true; }
  bool is_starved() const override;
  std::int32_t core() const override;
  void push() override { endpoint_.push(); }
  void discard_input() override;
  bool has_left() const override { return Link::has_left() && has_data_ended_; }
  void on_goodbye(Lane lane) override;
  const char* on_bytes(QuicStream stream, const byte* from, size_t bytes) override;
  const char* name() const override { return "quic"; }

 private:
  // What was cut off of the bytes of one stream.
  struct Input {
    FrameParser parser;
    std::vector<byte> rest;
  };

  bool is_closed() const { return connection_.state() == QuicState::closed; }
  void append(QuicStream stream, Head head, const Body& body);

  Peer& peer_;
  QuicEndpoint& endpoint_;
  QuicConnection& connection_;
  const SocketPolicy& policy_;
  Input in_[quic_stream_count];
  QuicStream parsed_ = QuicStream::control;
  bool has_data_ended_ = false;
  std::string end_;  // what `over` points to
};

}  // namespace unisono::engine
