// The bytes of one QUIC stream from `append` or `lend` until they are acknowledged. What is lost is sent again from the
// same memory: short frames are copied here, and the payload of long messages stays where it lies.

#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "base/types.hpp"

namespace unisono::engine {

class QuicSendQueue {
 public:
  struct Part {
    const byte* at;
    size_t bytes;
  };

  // Copy bytes to the end.
  void append(const void* from, size_t bytes);
  // Put bytes of others at the end; their memory is in use while `lends(owner)`.
  void lend(const byte* from, size_t bytes, uint64_t owner);
  bool lends(uint64_t owner) const;
  bool lends_any() const { return lent_ != 0; }

  // The next bytes to send for the first time, in at most `count` parts of together about `bytes`; returns their
  // number.
  size_t next(Part* parts, size_t count, size_t bytes) const;
  void sent(size_t bytes);
  // Everything before this offset of the stream has arrived.
  void acknowledged(uint64_t offset);

  uint64_t unsent() const { return end_ - sent_; }
  uint64_t unacknowledged() const { return end_ - base_; }
  // Bytes that were copied and not acknowledged.
  size_t copied() const { return copied_; }

 private:
  // A chunk of copies, or lent memory.
  struct Piece {
    const byte* at = nullptr;
    size_t bytes = 0;
    std::unique_ptr<byte[]> own;
    uint64_t owner = 0;
  };
  static constexpr size_t chunk_bytes = 16 * 1024;
  static constexpr size_t spare_max = 4;

  std::deque<Piece> pieces_;
  std::vector<std::unique_ptr<byte[]>> spare_;
  uint64_t base_ = 0;    // offset of the first piece in the stream
  uint64_t sent_ = 0;    // offset of the first byte that was never sent
  uint64_t end_ = 0;     // offset behind the last byte
  size_t at_piece_ = 0;  // where sent_ lies
  size_t at_byte_ = 0;
  size_t copied_ = 0;
  size_t lent_ = 0;  // pieces
};

}  // namespace unisono::engine
