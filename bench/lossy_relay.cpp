// A relay of datagrams between two ranks that loses some of them and delays all:
//
//   lossy_relay PORT LOST_OF_1000 [DELAY_MS ADDRESS BIND]
//
// Prints the port that the opener sends to. What comes from PORT, at ADDRESS, goes back to the opener. For bench/links.py
// and for tests of long paths: a relay in Python would be slower than the links.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <vector>

namespace {

constexpr int batch = 64;
constexpr size_t datagram_bytes = 65'536;

using Clock = std::chrono::steady_clock;

struct Kept {
  Clock::time_point due;
  std::vector<char> bytes;
};

int open_socket(const char* address) {
  const int made = socket(AF_INET, SOCK_DGRAM, 0), bytes = 4 << 20;
  setsockopt(made, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
  setsockopt(made, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  sockaddr_in own{};
  own.sin_family = AF_INET;
  inet_pton(AF_INET, address, &own.sin_addr);
  if (bind(made, reinterpret_cast<sockaddr*>(&own), sizeof own) != 0) exit(1);
  return made;
}

void send_all(int socket, mmsghdr* messages, int count) {
  for (int sent = 0; sent < count;) {
    const int n = sendmmsg(socket, messages + sent, static_cast<unsigned>(count - sent), 0);
    sent += n > 0 ? n : 1;
  }
}

}  // namespace

int main(int count, char** words) {
  if (count != 3 && count != 6) return 2;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const std::chrono::milliseconds delay(count > 3 ? std::atoi(words[3]) : 0);
  const char* bound = count > 3 ? words[5] : "127.0.0.1";
  const int sockets[2] = {open_socket(bound), open_socket(bound)};  // towards the opener, and towards the acceptor
  sockaddr_in own{}, targets[2]{};
  socklen_t length = sizeof own;
  getsockname(sockets[0], reinterpret_cast<sockaddr*>(&own), &length);
  targets[1] = own;
  inet_pton(AF_INET, count > 3 ? words[4] : "127.0.0.1", &targets[1].sin_addr);
  targets[1].sin_port = htons(static_cast<uint16_t>(std::atoi(words[1])));
  const auto lost = static_cast<unsigned>(std::atoi(words[2]));
  std::printf("%d\n", ntohs(own.sin_port));
  std::fflush(stdout);
  std::minstd_rand random(7);
  static char memory[batch][datagram_bytes];
  mmsghdr messages[batch]{};
  iovec parts[batch];
  sockaddr_in from[batch];
  std::deque<Kept> kept[2];  // by the side that it came from
  for (;;) {
    timespec wait{1, 0};
    for (const auto& waiting : kept)
      if (!waiting.empty()) {
        const auto left = std::max(waiting.front().due - Clock::now(), Clock::duration::zero());
        if (left < std::chrono::seconds(1))
          wait = {0, std::min<long>(wait.tv_sec != 0 ? 999'999'999 : wait.tv_nsec, static_cast<long>(left.count()))};
      }
    pollfd ready[2] = {{sockets[0], POLLIN, 0}, {sockets[1], POLLIN, 0}};
    if (ppoll(ready, 2, &wait, nullptr) < 0) return 1;
    for (int side = 0; side < 2; ++side) {
      while (!kept[side].empty() && kept[side].front().due <= Clock::now()) {
        const Kept& first = kept[side].front();
        sendto(sockets[1 - side], first.bytes.data(), first.bytes.size(), 0,
               reinterpret_cast<sockaddr*>(&targets[1 - side]), sizeof own);
        kept[side].pop_front();
      }
      if ((ready[side].revents & POLLIN) == 0) continue;
      for (int i = 0; i < batch; ++i) {
        parts[i] = {memory[i], datagram_bytes};
        messages[i].msg_hdr = {&from[i], sizeof from[i], &parts[i], 1, nullptr, 0, 0};
      }
      const int came = recvmmsg(sockets[side], messages, batch, MSG_DONTWAIT, nullptr);
      int now = 0;
      for (int i = 0; i < came; ++i) {
        if (side == 0) targets[0] = from[i];
        if (random() % 1000 < lost) continue;
        if (delay.count() != 0) {
          kept[side].push_back({Clock::now() + delay, {memory[i], memory[i] + messages[i].msg_len}});
          continue;
        }
        parts[i].iov_len = messages[i].msg_len;
        messages[now++].msg_hdr = {&targets[1 - side], sizeof own, &parts[i], 1, nullptr, 0, 0};
      }
      send_all(sockets[1 - side], messages, now);
    }
  }
}
