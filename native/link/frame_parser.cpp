#include "link/frame_parser.hpp"

#include <sched.h>

#include "base/digest.hpp"
#include "messaging/peer.hpp"

namespace unisono::engine {
namespace {

constexpr const char* damaged = "checksum mismatch: a message was damaged in transit";

uint32_t crc_at(const byte* from) {
  uint32_t crc;
  std::memcpy(&crc, from, sizeof crc);
  return crc;
}

}  // namespace

uint32_t crc_of(const Head& head) { return crc32c(0, reinterpret_cast<const byte*>(&head), sizeof head); }

uint8_t core_here() {
  const int core = sched_getcpu();
  return core >= 0 && core < UINT8_MAX ? static_cast<uint8_t>(core + 1) : 0;
}

byte* FrameParser::buffer() {
  if (into_ == nullptr || into_left_ == 0) return nullptr;
  byte* start = into_->receive->buffer();
  return start != nullptr ? start + into_->received + into_done_ : nullptr;
}

void FrameParser::placed(const byte* from, size_t bytes) {
  if (checksum_) into_crc_ = crc32c(into_crc_, from, bytes);
  into_done_ += bytes;
  into_left_ -= bytes;
}

const char* FrameParser::parse(const byte*& at, const byte* end) {
  bool is_stuck = false;
  const char* fault = nullptr;
  while (!is_stuck && fault == nullptr)
    fault = into_ != nullptr ? take_data(at, end, is_stuck) : take_head(at, end, is_stuck);
  return fault;
}

bool FrameParser::is_allowed(const Head& head) const {
  const Kind kind = head.kind();
  if (kind == Kind::none || kind == Kind::wrap || static_cast<uint8_t>(kind) >= kind_count) return false;
  if (carries_ == Carries::everything) return true;
  return kind == Kind::goodbye || (kind == Kind::data) == (carries_ == Carries::data_only);
}

// Handle the frame that begins at `at`. `is_stuck` if more bytes are needed.
const char* FrameParser::take_head(const byte*& at, const byte* end, bool& is_stuck) {
  const size_t crc_bytes = checksum_ ? sizeof(uint32_t) : 0;
  const size_t available = static_cast<size_t>(end - at);
  const size_t head_bytes = sizeof(Head) + crc_bytes;
  is_stuck = available < head_bytes;
  wanted_ = head_bytes;
  if (is_stuck) return nullptr;
  Head head;
  std::memcpy(&head, at, sizeof head);
  if (checksum_ && crc_at(at + sizeof head) != crc_of(head)) return damaged;
  if (!is_allowed(head)) return "a frame of unknown kind";
  core_ = std::int32_t{head.core} - 1;
  // Heartbeats come from a background thread, which may run on another core than the caller.
  if (head.kind() != Kind::beat) peer_.heard_core = core_;
  if (head.header_bytes > header_bytes_max) return "a frame's header is too long";
  if (head.kind() == Kind::data) {
    const char* fault = nullptr;
    into_ = peer_.rendezvous.data_for(head, fault);
    if (into_ == nullptr) return fault;
    at += head_bytes;
    into_left_ = head.nbytes;
    into_done_ = 0;
    into_crc_ = 0;
    if (head.nbytes == 0) peer_.rendezvous.on_data(*std::exchange(into_, nullptr), 0);
    return nullptr;
  }
  const size_t front = head.prefix_bytes() + head.header_bytes;
  const uint64_t payload = head.payload_bytes();
  if (payload > frame_bytes_max_ || head_bytes + front + payload + crc_bytes > frame_bytes_max_)
    return "a frame is too long";
  const size_t body = front + payload;
  const size_t total = head_bytes + body + (body != 0 ? crc_bytes : 0);
  is_stuck = available < total;
  wanted_ = total;
  if (is_stuck) return nullptr;
  const byte* frame = at;
  if (checksum_ && body != 0 && crc_at(frame + head_bytes + body) != crc32c(0, frame + head_bytes, body))
    return damaged;
  at += total;
  return peer_.on_frame(head, frame + head_bytes, lane_);
}

// Continue with the data frame that is being read. `is_stuck` if more bytes are needed.
const char* FrameParser::take_data(const byte*& at, const byte* end, bool& is_stuck) {
  const size_t available = static_cast<size_t>(end - at);
  if (into_left_ != 0) {
    size_t take = available < into_left_ ? available : into_left_;
    byte* to = into_->receive->buffer();
    // A receive that reduces gets whole cache lines, so that no element is cut in two.
    if (to == nullptr && take < into_left_) take -= take % line_bytes;
    wanted_ = to != nullptr ? 1 : into_left_ < line_bytes ? into_left_ : line_bytes;
    is_stuck = take == 0;
    if (is_stuck) return nullptr;
    const uint64_t offset = into_->received + into_done_;
    if (to != nullptr)
      std::memcpy(to + offset, at, take);
    else
      into_->receive->write(offset, at, take);
    placed(at, take);
    at += take;
    return nullptr;
  }
  if (checksum_) {
    wanted_ = sizeof into_crc_;
    is_stuck = available < sizeof into_crc_;
    if (is_stuck) return nullptr;
    const uint32_t sent = crc_at(at);
    at += sizeof into_crc_;
    if (sent != into_crc_) return damaged;
  }
  RendezvousReceive& offer = *std::exchange(into_, nullptr);
  peer_.rendezvous.on_data(offer, into_done_);
  return nullptr;
}

}  // namespace unisono::engine
