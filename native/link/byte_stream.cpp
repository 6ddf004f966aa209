#include "link/byte_stream.hpp"

#include <sys/socket.h>

namespace unisono::engine {

ssize_t PlainStream::readv(const iovec* parts, int count) {
  // recv is a quarter cheaper than recvmsg, and a spinning caller makes it all the time.
  if (count == 1) return recv(socket_.get(), parts->iov_base, parts->iov_len, MSG_DONTWAIT);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<size_t>(count);
  return recvmsg(socket_.get(), &message, MSG_DONTWAIT);
}

ssize_t PlainStream::writev(const iovec* parts, int count) {
  if (count == 1) return send(socket_.get(), parts->iov_base, parts->iov_len, MSG_DONTWAIT | MSG_NOSIGNAL);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<size_t>(count);
  return sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void PlainStream::finish() { shutdown(socket_.get(), SHUT_WR); }

}  // namespace unisono::engine
