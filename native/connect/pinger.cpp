#include "connect/pinger.hpp"

#include <algorithm>

namespace unisono::engine {
namespace {

constexpr char magic[8] = {'u', 'n', 'i', 'p', 'i', 'n', 'g', '\n'};
constexpr const char* role = "ping";
// Datagrams handled before other descriptors have their turn.
constexpr int datagrams_per_turn = 64;
// Pings whose replies still count; a reply to an older one says too little about now.
constexpr size_t pings_open_max = 8;

}  // namespace

bool Pinger::open(std::int32_t rank, const std::string& secret, const SocketAddress& address) {
  rank_ = rank;
  secret_ = secret;
  socket_ = Descriptor(::socket(address.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket_ || bind(socket_.get(), address.get(), address.bytes) != 0) return false;
  fd_ = socket_.get();
  watch_ = poller_.add(fd_, EPOLLIN, *this);
  return watch_ != 0;
}

void Pinger::share(std::int32_t rank, const std::string& secret, int socket) {
  rank_ = rank;
  secret_ = secret;
  fd_ = socket;
}

bool Pinger::take(const byte* from, size_t bytes) {
  Datagram came;
  if (bytes != sizeof came || std::memcmp(from, magic, sizeof magic) != 0) return false;
  std::memcpy(&came, from, sizeof came);
  handle(came);
  return true;
}

void Pinger::close() {
  if (watch_ != 0) poller_.remove(socket_.get(), std::exchange(watch_, 0));
  socket_.close();
  fd_ = -1;
}

void Pinger::set_address(std::int32_t rank, const SocketAddress& address) {
  const auto at = static_cast<size_t>(rank);
  if (at >= targets_.size()) targets_.resize(at + 1);
  targets_[at].address = address;
}

void Pinger::ping(std::int32_t rank) {
  uint64_t number;
  if (static_cast<size_t>(rank) >= targets_.size() || !fill_random(&number, sizeof number)) return;
  auto& asked = targets_[rank].asked;
  asked.push_back(number);
  if (asked.size() > pings_open_max) asked.pop_front();
  send(rank, Datagram::Kind::ping, number);
}

void Pinger::send(std::int32_t rank, Datagram::Kind kind, uint64_t number) {
  const Target& to = targets_[rank];
  Datagram datagram{};
  std::memcpy(datagram.magic, magic, sizeof magic);
  datagram.kind = kind;
  datagram.from = static_cast<uint32_t>(rank_);
  datagram.to = static_cast<uint32_t>(rank);
  datagram.number = number;
  datagram.proof = prove(datagram);
  // A datagram that cannot be sent counts as lost: the next ping follows soon.
  [[maybe_unused]] const ssize_t n =
      sendto(fd_, &datagram, sizeof datagram, MSG_DONTWAIT | MSG_NOSIGNAL, to.address.get(), to.address.bytes);
}

void Pinger::on_ready(uint32_t) {
  for (int i = 0; i < datagrams_per_turn && watch_ != 0; ++i) {
    Datagram came;
    // MSG_TRUNC returns the real length, so a longer datagram is ignored. An error concerns one that was sent: go on.
    const ssize_t n = recv(socket_.get(), &came, sizeof came, MSG_DONTWAIT | MSG_TRUNC);
    if (n < 0 && (errno == EAGAIN || errno == EBADF)) return;
    if (n == static_cast<ssize_t>(sizeof came)) handle(came);
  }
}

void Pinger::handle(const Datagram& came) {
  const bool is_ours = std::memcmp(came.magic, magic, sizeof magic) == 0 && came.to == static_cast<uint32_t>(rank_) &&
                       came.from < targets_.size() && came.from != came.to;
  if (!is_ours || !is_equal(came.proof, prove(came))) return;
  const auto from = static_cast<std::int32_t>(came.from);
  if (came.kind == Datagram::Kind::ping)
    return send(from, owner_.is_given_up(from) ? Datagram::Kind::given_up : Datagram::Kind::alive, came.number);
  auto& asked = targets_[from].asked;
  const auto ping = std::find(asked.begin(), asked.end(), came.number);
  if (ping == asked.end()) return;
  asked.erase(asked.begin(), ping + 1);
  ++targets_[from].answers;
  owner_.on_answer(from, came.kind == Datagram::Kind::given_up);
}

Proof Pinger::prove(const Datagram& datagram) const {
  return hmac_sha256(reinterpret_cast<const byte*>(secret_.data()), secret_.size(), reinterpret_cast<const byte*>(role),
                     std::strlen(role), reinterpret_cast<const byte*>(&datagram), offsetof(Datagram, proof));
}

}  // namespace unisono::engine
