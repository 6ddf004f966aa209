#include "channel.hpp"

#include <sys/socket.h>

namespace unisono::engine {

ssize_t PlainChannel::readv(const iovec* parts, int count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<size_t>(count);
  return recvmsg(socket_.get(), &message, MSG_DONTWAIT);
}

ssize_t PlainChannel::writev(const iovec* parts, int count) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);
  message.msg_iovlen = static_cast<size_t>(count);
  return sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void PlainChannel::finish() { shutdown(socket_.get(), SHUT_WR); }

}  // namespace unisono::engine
