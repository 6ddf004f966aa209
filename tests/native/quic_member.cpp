// A member of a QUIC world that a test makes break the protocol: it has a valid certificate and greeting, and sends on
// its streams the bytes that it is given. tests/support/quic_member.py starts it.
//
//   quic_member RANK SIZE TO ADDRESS PORT FOLDER [deaf]
//
// FOLDER has key.pem, certificate.pem, authority.pem and names, one a line. It prints "linked", reads pieces from its
// standard input (a byte with the stream, four with the length, the bytes), and prints how its connection ended. With
// `deaf` it acknowledges datagrams, but reads nothing of their content.

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "idle_owner.hpp"
#include "link/quic_endpoint.hpp"

using namespace unisono::engine;

namespace {

constexpr uint64_t eager_credit_bytes = 256 * 1024;  // what Config says
constexpr size_t unsent_bytes_max = 4 << 20;         // then standard input waits

class Ignores final : public QuicReader {
 public:
  const char* on_bytes(QuicStream, const byte*, size_t) override { return nullptr; }
};

std::string text_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

TlsMaterial material_of(const std::string& folder) {
  TlsMaterial made{
      text_of(folder + "/key.pem"), text_of(folder + "/certificate.pem"), text_of(folder + "/authority.pem"), {}};
  std::istringstream names(text_of(folder + "/names"));
  for (std::string name; std::getline(names, name);) made.names.push_back(name);
  return made;
}

// Pieces from standard input, to the streams that they name. False at its end.
class Orders {
 public:
  bool carry_out(QuicConnection& connection) {
    char piece[1 << 16];
    const ssize_t n = ::read(0, piece, sizeof piece);
    if (n == 0) return false;
    if (n > 0) came_.append(piece, static_cast<size_t>(n));
    for (uint32_t bytes; came_.size() >= 5; came_.erase(0, 5 + bytes)) {
      std::memcpy(&bytes, came_.data() + 1, sizeof bytes);
      if (came_.size() < 5 + size_t{bytes}) break;
      connection.out(static_cast<QuicStream>(came_[0])).append(came_.data() + 5, bytes);
    }
    return true;
  }

 private:
  std::string came_;
};

}  // namespace

int main(int count, char** words) {
  if (count < 7) return 2;
  const std::int32_t rank = std::atoi(words[1]), size = std::atoi(words[2]), to = std::atoi(words[3]);
  const bool is_deaf = count > 7;
  const QuicIdentity identity(material_of(words[6]), rank);
  Poller poller;
  IdleOwner owner;
  Ignores reader;
  QuicEndpoint endpoint(owner, poller);
  QuicPath path;
  path.remote = SocketAddress::of(words[4], static_cast<uint16_t>(std::atoi(words[5])));
  path.local = SocketAddress::of(words[4], 0);
  path.is_local = true;
  path.datagram_bytes = 1452;
  if (!poller.open() || !endpoint.open(path.local, 1 << 20) || !endpoint.listen()) return 1;
  fcntl(0, F_SETFL, O_NONBLOCK);
  QuicConnection& connection = endpoint.add(QuicConnection::open(
      identity, {rank, size, eager_credit_bytes, uint64_t{1} << 22}, endpoint, path, to, now_ns()));
  Orders orders;
  bool is_linked = false, is_ordered = true;
  while (connection.state() != QuicState::closed && is_ordered) {
    Poller::Events events;
    poller.dispatch(events, poller.wait(events, endpoint.poll(now_ns()) ? 0 : millisecond / 5));
    if (connection.state() != QuicState::linked) continue;
    if (!std::exchange(is_linked, true)) {
      if (!is_deaf) connection.read_by(&reader);
      std::puts("linked");
      std::fflush(stdout);
    }
    uint64_t unsent = 0;
    for (size_t i = 0; i < quic_stream_count; ++i) unsent += connection.out(static_cast<QuicStream>(i)).unsent();
    if (unsent < unsent_bytes_max) is_ordered = orders.carry_out(connection);
    endpoint.on_put(connection, false);
  }
  std::printf("closed: %s %s\n", connection.why().c_str(), connection.reason().c_str());
  if (is_ordered) return 0;
  endpoint.close(connection, Admission::unknown);
}
