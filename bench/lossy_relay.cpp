// A relay of datagrams between two ranks that loses some of them: lossy_relay PORT LOST_OF_1000
//
// Prints the port that the opener sends to. What comes from PORT goes back to the opener. For bench/links.py: a relay in
// Python would be slower than the links.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

namespace {

constexpr int batch = 64;
constexpr size_t datagram_bytes = 65'536;

int open_socket() {
  const int made = socket(AF_INET, SOCK_DGRAM, 0), bytes = 4 << 20;
  setsockopt(made, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
  setsockopt(made, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (bind(made, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) exit(1);
  return made;
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) return 2;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int sockets[2] = {open_socket(), open_socket()};  // towards the opener, and towards the acceptor
  sockaddr_in own{}, targets[2]{};
  socklen_t length = sizeof own;
  getsockname(sockets[0], reinterpret_cast<sockaddr*>(&own), &length);
  targets[1] = own;
  targets[1].sin_port = htons(static_cast<uint16_t>(std::atoi(words[1])));
  const auto lost = static_cast<unsigned>(std::atoi(words[2]));
  std::printf("%d\n", ntohs(own.sin_port));
  std::fflush(stdout);
  std::minstd_rand random(7);
  static char memory[batch][datagram_bytes];
  mmsghdr messages[batch]{};
  iovec parts[batch];
  sockaddr_in from[batch];
  for (;;) {
    pollfd ready[2] = {{sockets[0], POLLIN, 0}, {sockets[1], POLLIN, 0}};
    if (poll(ready, 2, -1) < 0) return 1;
    for (int side = 0; side < 2; ++side) {
      if ((ready[side].revents & POLLIN) == 0) continue;
      for (int i = 0; i < batch; ++i) {
        parts[i] = {memory[i], datagram_bytes};
        messages[i].msg_hdr = {&from[i], sizeof from[i], &parts[i], 1, nullptr, 0, 0};
      }
      const int came = recvmmsg(sockets[side], messages, batch, MSG_DONTWAIT, nullptr);
      int kept = 0;
      for (int i = 0; i < came; ++i) {
        if (side == 0) targets[0] = from[i];
        if (random() % 1000 < lost) continue;
        parts[i].iov_len = messages[i].msg_len;
        messages[kept++].msg_hdr = {&targets[1 - side], sizeof own, &parts[i], 1, nullptr, 0, 0};
      }
      for (int sent = 0; sent < kept;) {
        const int n = sendmmsg(sockets[1 - side], messages + sent, static_cast<unsigned>(kept - sent), 0);
        sent += n > 0 ? n : 1;
      }
    }
  }
}
