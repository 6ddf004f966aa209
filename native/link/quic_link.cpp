#include "link/quic_link.hpp"

#include "messaging/peer.hpp"

namespace unisono::engine {
namespace {

// Payload that may wait here to be sent: enough for the next turns.
constexpr size_t data_waiting_bytes = 256 * 1024;
// Short frames that are kept until they are acknowledged, beside what the credit bounds: as much as the path takes in a
// round trip, but at least and at most this.
constexpr size_t copied_bytes_min = 512 * 1024;
constexpr size_t copied_bytes_max = 16 * 1024 * 1024;

QuicStream stream_of(Lane lane, Kind kind) {
  if (kind == Kind::data) return QuicStream::data;
  return lane == Lane::control ? QuicStream::control : QuicStream::messages;
}

}  // namespace

QuicLink::QuicLink(Peer& peer, QuicEndpoint& endpoint, QuicConnection& connection, const SocketPolicy& policy)
    : peer_(peer),
      endpoint_(endpoint),
      connection_(connection),
      policy_(policy),
      in_{{{peer, Lane::control, false, frame_bytes_max(Lane::control), FrameParser::Carries::all_but_data}, {}},
          {{peer, Lane::bulk, false, frame_bytes_max(Lane::bulk), FrameParser::Carries::all_but_data}, {}},
          {{peer, Lane::bulk, false, frame_bytes_max(Lane::bulk), FrameParser::Carries::data_only}, {}}} {}

QuicLink::~QuicLink() {
  // The datagram that closes the connection says why, and is repeated; the frame that says so may have been lost.
  const bool is_given_up = peer_.state == Peer::State::down && !peer_.left;
  endpoint_.close(connection_, Admission::leaving, is_given_up ? peer_.cause : "");
}

// ---- out ----

void QuicLink::append(QuicStream stream, Head head, const Body& body) {
  head.core = core_here();
  QuicSendQueue& out = connection_.out(stream);
  out.append(&head, sizeof head);
  if (body.prefix_bytes != 0) out.append(body.prefix, body.prefix_bytes);
  if (body.header_bytes != 0) out.append(body.header, body.header_bytes);
  if (body.payload_bytes != 0) out.append(body.payload, body.payload_bytes);
}

bool QuicLink::put(Lane lane, Head head, const Body& body) {
  if (is_closed()) return true;
  const QuicStream stream = stream_of(lane, head.kind());
  if (const size_t copied = connection_.out(stream).copied(); copied > copied_bytes_min) [[unlikely]]
    if (copied > copied_bytes_max || copied > connection_.congestion_window()) return false;
  append(stream, head, body);
  // The last frame of every stream: no goodbye overtakes data.
  if (head.kind() == Kind::goodbye && lane == Lane::bulk) append(QuicStream::data, head, body);
  endpoint_.on_put(connection_, policy_.corked != 0);
  return true;
}

size_t QuicLink::put_data(Lane, uint64_t rendezvous_id, uint64_t offset, const byte* from, uint64_t left) {
  QuicSendQueue& out = connection_.out(QuicStream::data);
  if (is_closed() || out.unsent() > data_waiting_bytes) return 0;
  const size_t bytes = left < data_frame_bytes ? left : data_frame_bytes;
  Head head;
  head.word = Head::make_word(Kind::data);
  head.context = rendezvous_id;
  head.tag = offset;
  head.nbytes = bytes;
  append(QuicStream::data, head, Body());
  out.lend(from, bytes, rendezvous_id);
  endpoint_.on_put(connection_, policy_.corked != 0);
  return bytes;
}

void QuicLink::beat() {
  Head head;
  head.word = Head::make_word(Kind::beat);
  put(Lane::control, head, Body());
}

// ---- in ----

const char* QuicLink::on_bytes(QuicStream stream, const byte* from, size_t bytes) {
  if (is_discarding_) return nullptr;
  parsed_ = stream;
  auto& [parser, rest] = in_[static_cast<size_t>(stream)];
  const byte* const end = from + bytes;
  while (!rest.empty() && from != end) {
    const size_t missing = parser.wanted() - rest.size();
    const size_t take = std::min(missing, static_cast<size_t>(end - from));
    rest.insert(rest.end(), from, from + take);
    from += take;
    if (take < missing) return nullptr;
    const byte* at = rest.data();
    if (const char* fault = parser.parse(at, rest.data() + rest.size()); fault != nullptr) return fault;
    rest.erase(rest.begin(), rest.begin() + (at - rest.data()));
  }
  if (from == end) return nullptr;
  if (const char* fault = parser.parse(from, end); fault != nullptr) return fault;
  rest.assign(from, end);
  return nullptr;
}

void QuicLink::on_goodbye(Lane lane) {
  if (parsed_ == QuicStream::data)
    has_data_ended_ = true;
  else
    Link::on_goodbye(lane);
}

bool QuicLink::poll() {
  if (over_ != nullptr) return false;
  if (has_left()) {
    over_ = "left";
  } else if (is_closed()) {
    if (connection_.is_hung_up() && peer_.verdict.empty()) peer_.on_verdict(connection_.reason());
    end_ = (connection_.is_hung_up() ? "died: " : "") + connection_.why();
    over_ = end_.c_str();
  }
  return over_ != nullptr;
}

bool QuicLink::is_starved() const { return peer_.is_starved(); }

std::int32_t QuicLink::core() const {
  // The control stream carries heartbeats of the background thread, which runs on another core.
  return peer_.is_same_host ? in_[static_cast<size_t>(QuicStream::messages)].parser.core() : -1;
}

void QuicLink::discard_input() {
  Link::discard_input();
  // Memory of messages that have ended must not be sent again: this cuts the connection in the middle of a frame.
  if (connection_.out(QuicStream::data).lends_any()) connection_.give_up("left in the middle of a message");
}

}  // namespace unisono::engine
