#include "link/quic_send_queue.hpp"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace unisono::engine {

void QuicSendQueue::append(const void* from, size_t bytes) {
  const byte* at = static_cast<const byte*>(from);
  copied_ += bytes;
  while (bytes != 0) {
    if (pieces_.empty() || pieces_.back().own == nullptr || pieces_.back().bytes == chunk_bytes) {
      Piece& made = pieces_.emplace_back();
      if (spare_.empty()) {
        made.own.reset(new byte[chunk_bytes]);
      } else {
        made.own = std::move(spare_.back());
        spare_.pop_back();
      }
      made.at = made.own.get();
    }
    Piece& last = pieces_.back();
    const size_t take = std::min(bytes, chunk_bytes - last.bytes);
    std::memcpy(last.own.get() + last.bytes, at, take);
    last.bytes += take;
    end_ += take;
    at += take;
    bytes -= take;
  }
}

void QuicSendQueue::lend(const byte* from, size_t bytes, uint64_t owner) {
  if (bytes == 0) return;
  Piece& made = pieces_.emplace_back();
  made.at = from;
  made.bytes = bytes;
  made.owner = owner;
  end_ += bytes;
  ++lent_;
}

bool QuicSendQueue::lends(uint64_t owner) const {
  return lent_ != 0 && std::any_of(pieces_.begin(), pieces_.end(),
                                   [owner](const Piece& p) { return p.own == nullptr && p.owner == owner; });
}

size_t QuicSendQueue::next(Part* parts, size_t count, size_t bytes) const {
  size_t used = 0, offset = at_byte_;
  for (size_t i = at_piece_; i < pieces_.size() && used < count; ++i, offset = 0) {
    const Piece& piece = pieces_[i];
    if (piece.bytes == offset) continue;
    const size_t take = std::min(piece.bytes - offset, bytes);
    parts[used++] = {piece.at + offset, take};
    bytes -= take;
    if (bytes == 0) break;
  }
  return used;
}

void QuicSendQueue::sent(size_t bytes) {
  assert(bytes <= unsent());
  sent_ += bytes;
  at_byte_ += bytes;
  while (at_piece_ < pieces_.size() && at_byte_ >= pieces_[at_piece_].bytes && at_piece_ + 1 < pieces_.size()) {
    at_byte_ -= pieces_[at_piece_].bytes;
    ++at_piece_;
  }
}

void QuicSendQueue::acknowledged(uint64_t offset) {
  while (!pieces_.empty() && base_ + pieces_.front().bytes <= offset) {
    Piece& first = pieces_.front();
    base_ += first.bytes;
    if (first.own == nullptr) {
      --lent_;
    } else {
      copied_ -= first.bytes;
      if (spare_.size() < spare_max) spare_.push_back(std::move(first.own));
    }
    pieces_.pop_front();
    if (at_piece_ != 0)
      --at_piece_;
    else
      at_byte_ = 0;
  }
}

}  // namespace unisono::engine
