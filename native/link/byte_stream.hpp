// A stream of bytes to one process over a socket, plain or encrypted.

#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include "base/system.hpp"

namespace unisono::engine {

// Calls return as readv and writev do: -1 with EAGAIN when nothing can move now. Bytes that were not taken must be the
// first ones of the next call, in any division.
class ByteStream {
 public:
  virtual ~ByteStream() = default;
  virtual ssize_t readv(const iovec* parts, int count) = 0;
  virtual ssize_t writev(const iovec* parts, int count) = 0;
  virtual void finish() = 0;  // shut the writing half down
  virtual int fd() const = 0;
  virtual const char* name() const = 0;
  // Whether reading may have to wait for room to write, as with TLS.
  virtual bool is_entangled() const { return false; }
  // What was wrong with the bytes that arrived; nullptr if the stream simply ended.
  virtual const char* fault() const { return nullptr; }
};

class PlainStream final : public ByteStream {
 public:
  explicit PlainStream(Descriptor socket) : socket_(std::move(socket)) {}
  ssize_t readv(const iovec* parts, int count) override;
  ssize_t writev(const iovec* parts, int count) override;
  void finish() override;
  int fd() const override { return socket_.get(); }
  const char* name() const override { return "tcp"; }

 private:
  Descriptor socket_;
};

}  // namespace unisono::engine
