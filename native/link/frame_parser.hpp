// Frames out of a stream of bytes, wherever it is cut: whole frames go to the peer, the payload of data frames to its
// target. With checksums a CRC32C follows every head and every body, so that no length is used before it was checked.
//
// It keeps no bytes. An incomplete step's bytes stay with the caller, which passes them again with what follows.

#pragma once

#include "link/link.hpp"

namespace unisono::engine {

class Peer;
struct RendezvousReceive;

// The longest frame of a lane. An eager message is at most half as long: in the control lane, any frame of a remote
// call (python/rpc_frame.cpp).
inline constexpr size_t frame_bytes_max(Lane lane) { return lane == Lane::bulk ? 160 * 1024 : 40 * 1024; }
inline constexpr size_t eager_bytes_max_of(Lane lane) {
  return frame_bytes_max(lane) / 2 - header_bytes_max - 2 * line_bytes;
}

class FrameParser {
 public:
  // Which frames a stream may carry: on some links the payload of accepted messages has a stream of its own.
  enum class Carries : uint8_t { everything, all_but_data, data_only };

  FrameParser(Peer& peer, Lane lane, bool checksum, size_t frame_bytes_max, Carries carries = Carries::everything)
      : peer_(peer), lane_(lane), checksum_(checksum), frame_bytes_max_(frame_bytes_max), carries_(carries) {}

  // Handle what lies between `at` and `end`, and move `at` behind what was used. Returns what is wrong, or nullptr.
  const char* parse(const byte*& at, const byte* end);
  // How many bytes the next step needs, counted from where `parse` stopped.
  size_t wanted() const { return wanted_; }

  // Whether the next bytes are payload of a data frame, and how many.
  bool is_in_data() const { return into_ != nullptr; }
  uint64_t data_left() const { return into_ != nullptr ? into_left_ : 0; }
  // Where that payload belongs: a caller may read straight to it and then call `placed`. nullptr if it must be parsed.
  byte* buffer();
  void placed(const byte* from, size_t bytes);
  // Forget the data frame that is being read.
  void drop() { into_ = nullptr; }

  std::int32_t core() const { return core_; }

 private:
  const char* take_head(const byte*& at, const byte* end, bool& is_stuck);
  const char* take_data(const byte*& at, const byte* end, bool& is_stuck);
  bool is_allowed(const Head& head) const;

  Peer& peer_;
  const Lane lane_;
  const bool checksum_;
  const size_t frame_bytes_max_;
  const Carries carries_;
  size_t wanted_ = sizeof(Head);
  std::int32_t core_ = -1;  // CPU core that sent the last frame

  // The data frame that is being read.
  RendezvousReceive* into_ = nullptr;
  uint64_t into_done_ = 0;
  uint64_t into_left_ = 0;
  uint32_t into_crc_ = 0;
};

// The checksum of a head, as it follows it on the stream.
uint32_t crc_of(const Head& head);
// The CPU core of this thread, as a head carries it.
uint8_t core_here();

}  // namespace unisono::engine
