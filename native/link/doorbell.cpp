#include "link/doorbell.hpp"

#include <poll.h>
#include <sys/syscall.h>

namespace unisono::engine {

std::unique_ptr<SocketDoorbell> SocketDoorbell::open(Poller& poller, Descriptor socket, std::string& why) {
  std::unique_ptr<SocketDoorbell> doorbell(new SocketDoorbell(poller));
  ucred other{};
  socklen_t length = sizeof other;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &other, &length) != 0) {
    why = failure("cannot get the process id of its socket");
    return nullptr;
  }
  doorbell->pid_ = other.pid;
  doorbell->pidfd_ = Descriptor(static_cast<int>(syscall(SYS_pidfd_open, other.pid, 0)));
  doorbell->socket_ = std::move(socket);
  doorbell->watch_ = poller.add(doorbell->socket_.get(), EPOLLIN | EPOLLRDHUP | EPOLLET, *doorbell);
  if (doorbell->pidfd_) doorbell->pid_watch_ = poller.add(doorbell->pidfd_.get(), EPOLLIN, *doorbell);
  if (doorbell->watch_ == 0) {
    why = failure("cannot watch the socket");
    return nullptr;
  }
  return doorbell;
}

SocketDoorbell::~SocketDoorbell() {
  if (watch_ != 0) poller_.remove(socket_.get(), watch_);
  if (pid_watch_ != 0) poller_.remove(pidfd_.get(), pid_watch_);
}

void SocketDoorbell::ring() {
  const char one = 1;
  // A full socket holds a wake-up already; a closed one reports its end by an event.
  [[maybe_unused]] const ssize_t n = ::send(socket_.get(), &one, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

bool SocketDoorbell::is_alive() const {
  pollfd p{pidfd_.get(), POLLIN, 0};
  int ended;
  // A pending signal interrupts even a poll that does not wait.
  do ended = ::poll(&p, 1, 0);
  while (ended < 0 && errno == EINTR);
  return ended == 0;
}

void SocketDoorbell::on_ready(uint32_t) {
  bool has_ended = false;
  char wakes[256];
  for (;;) {
    const ssize_t n = ::recv(socket_.get(), wakes, sizeof wakes, MSG_DONTWAIT);
    if (n > 0) continue;
    if (n == 0 || (errno != EAGAIN && errno != EINTR)) has_ended = true;
    if (n == 0 || errno != EINTR) break;
  }
  if (has_ended || (pidfd_ && !is_alive())) is_ended_.store(true, std::memory_order_release);
}

}  // namespace unisono::engine
