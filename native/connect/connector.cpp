#include "connect/connector.hpp"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <stdexcept>

#include "connect/listener.hpp"
#include "connect/stream_handshake.hpp"

namespace unisono::engine {
namespace {

constexpr int ports_tried_max = 16;

[[noreturn]] void fail(const std::string& why) { throw std::runtime_error(why); }

std::string hex(uint64_t value) {
  char text[17];
  snprintf(text, sizeof text, "%016lx", static_cast<unsigned long>(value));
  return text;
}

// A path that is too long for a socket address is reached through its folder's descriptor.
socklen_t unix_address(sockaddr_un& address, const std::string& path, int folder) {
  address = {};
  address.sun_family = AF_UNIX;
  std::string name = path;
  if (name.size() >= sizeof address.sun_path)
    name = "/proc/self/fd/" + std::to_string(folder) + path.substr(path.rfind('/'));
  if (name.size() >= sizeof address.sun_path) return 0;
  std::memcpy(address.sun_path, name.data(), name.size());
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size() + 1);
}

}  // namespace

std::string host_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  std::string id = boot;
  for (const char* space : {"/proc/self/ns/mnt", "/proc/self/ns/net", "/proc/self/ns/pid"}) {
    struct stat about{};
    id += '.';
    id += stat(space, &about) == 0 ? std::to_string(about.st_ino) : "?";
  }
  return id + "." + std::to_string(geteuid());
}

Connector::Connector(ConnectionOwner& owner, Poller& poller, SocketPolicy& policy)
    : owner_(owner), poller_(poller), policy_(policy), pinger_(owner, poller), pairs_(owner, poller, policy) {}

Connector::~Connector() { close(false); }

void Connector::open(std::int32_t rank, std::int32_t size, const std::string& directory, std::string secret,
                     const Settings& settings, const Presence& presence) {
  rank_ = rank;
  size_ = size;
  secret_ = std::move(secret);
  settings_ = settings;
  presence_ = &presence;
  if (!fill_random(probe_.value, sizeof probe_.value)) fail(failure("no random bytes"));
  probe_.address = settings.direct_read ? reinterpret_cast<uint64_t>(&probe_.value) : 0;
  card_.host = settings.host.empty() ? host_id() : settings.host;
  card_.pid = getpid();

  if (settings.shm) {
    uint64_t salt;
    if (!fill_random(&salt, sizeof salt)) fail(failure("no random bytes"));
    directory_ = Descriptor(::open(directory.c_str(), O_DIRECTORY | O_RDONLY | O_CLOEXEC));
    struct stat about{};
    if (!directory_ || fstat(directory_.get(), &about) != 0) fail(failure(directory.c_str()));
    if (about.st_uid != geteuid() || (about.st_mode & 077) != 0)
      fail(directory + ": allowed: a folder of this user with mode 0700");
    card_.unix_path = directory + "/r" + std::to_string(rank) + "-" + hex(salt) + ".sock";
    sockaddr_un address;
    const socklen_t length = unix_address(address, card_.unix_path, directory_.get());
    Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket || length == 0 || bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0)
      fail(failure(("cannot listen on " + card_.unix_path).c_str()));
    listeners_[0] = std::make_unique<Listener>(*this, std::move(socket), Medium::shm, card_.unix_path);
    if (listen(/* owned by the listener */ listeners_[0]->fd(), 4096) != 0) fail(failure("cannot listen"));
  }

  if (settings.quic) {
    quic_ = QuicConnector::make(owner_, poller_, pinger_, policy_);
    if (quic_ == nullptr) fail("this build of unisono has no QUIC");
    policy_.shares_socket = true;
    return quic_->open(rank, size, secret_, settings, card_);
  }
  const SocketAddress address = SocketAddress::of(settings.bind, settings.port);
  if (address.bytes == 0) fail(settings.bind + " is not a numeric address");
  Descriptor socket;
  // UDP gets the number of the TCP port. If that is taken and the caller asked for no fixed port, another is tried.
  for (int tries = settings.port == 0 ? ports_tried_max : 1; tries > 0; --tries) {
    SocketAddress bound = address;
    socket = listen_at(bound);
    if (pinger_.open(rank, secret_, bound)) {
      card_.port = bound.port();
      break;
    }
    if (tries == 1)
      fail(failure(("cannot listen on " + settings.bind + " port " + std::to_string(settings.port) + ", UDP").c_str()));
  }
  card_.address = settings.bind;
  listeners_[1] = std::make_unique<Listener>(*this, std::move(socket), Medium::tcp, "");
}

// `address` gets the port that the system chose.
Descriptor Connector::listen_at(SocketAddress& address) {
  Descriptor socket(::socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  if (socket) setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (!socket || bind(socket.get(), address.get(), address.bytes) != 0 || listen(socket.get(), 4096) != 0)
    fail(failure(("cannot listen on " + settings_.bind + " port " + std::to_string(settings_.port)).c_str()));
  getsockname(socket.get(), address.get(), &address.bytes);
  return socket;
}

void Connector::set_cards(const std::vector<Card>& cards) {
  size_t ranks_here = 0;
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    ranks_here += is_here(cards[rank]);
    if (const SocketAddress address = SocketAddress::of(cards[rank].address, cards[rank].port); address.bytes != 0)
      pinger_.set_address(static_cast<std::int32_t>(rank), address);
  }
  if (quic_ != nullptr) quic_->set_neighbours(ranks_here);
}

void Connector::secure(const TlsMaterial& material) {
  if (quic_ != nullptr) return quic_->secure(material);
  if (!settings_.tls || identity_ != nullptr) fail("allowed: an identity, once, for a rank with TLS");
  if (material.names.size() != static_cast<size_t>(size_)) fail("allowed: one name per rank");
  identity_ = std::make_unique<TlsIdentity>(material, rank_, settings_.rekey_records, settings_.stranger_bytes_max);
  for (auto& one : listeners_)
    if (one != nullptr) one->watch();
}

void Connector::accept_from(int listener, Medium medium) {
  for (;;) {
    SocketAddress from;
    from.bytes = sizeof from.storage;
    Descriptor socket(accept4(listener, from.get(), &from.bytes, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if (errno != EAGAIN)
        for (auto& one : listeners_)
          if (one != nullptr) one->pause();
      return;
    }
    if (medium == Medium::shm && !is_same_user(socket.get())) {
      ++refused_;
      continue;
    }
    drop_oldest_stranger(from.group());
    auto made = std::make_unique<Handshake>(*this, HandshakeState::accepted, settings_.stranger_ns);
    Handshake& h = *made;
    h.connection.medium = medium;
    h.connection.is_opener = false;
    h.address = from;
    if (!h.take(std::move(socket))) continue;
    h.watch(EPOLLIN);
    handshakes_.push_back(std::move(made));
    h.on_connected();
  }
}

// A newcomer is never turned away: if there are too many strangers, the oldest goes, of the same address if that alone
// has too many.
void Connector::drop_oldest_stranger(const std::string& group) {
  const auto is_stranger = [](const auto& h) { return h->is_stranger(); };
  const auto is_same = [&](const auto& h) { return h->is_stranger() && h->address.group() == group; };
  const auto count = [this](auto is_one) {
    return static_cast<size_t>(std::count_if(handshakes_.begin(), handshakes_.end(), is_one));
  };
  auto oldest = handshakes_.end();
  if (count(is_same) >= settings_.strangers_per_address_max)
    oldest = std::find_if(handshakes_.begin(), handshakes_.end(), is_same);
  else if (count(is_stranger) >= settings_.strangers_max)
    oldest = std::find_if(handshakes_.begin(), handshakes_.end(), is_stranger);
  if (oldest != handshakes_.end()) refuse(**oldest, "too many strangers");
}

void Connector::connect(std::int32_t rank, const Card& card) {
  if (settings_.shm && is_here(card) && !card.unix_path.empty()) return call(rank, card, Medium::shm, Lane::control);
  if (quic_ != nullptr) return quic_->connect(rank, card);
  call(rank, card, Medium::tcp, Lane::control);
}

void Connector::call(std::int32_t rank, const Card& card, Medium medium, Lane lane) {
  const bool checksum = settings_.checksum && !settings_.tls && !is_here(card);
  SocketAddress address = SocketAddress::of(card.address, card.port);
  if (medium == Medium::shm)
    address.bytes = unix_address(reinterpret_cast<sockaddr_un&>(address.storage), card.unix_path, directory_.get());
  if (address.bytes == 0) return owner_.on_refused(rank, "its address is not valid", Admission::unknown);
  auto made = std::make_unique<Handshake>(*this, HandshakeState::due, settings_.silence_ns);
  Handshake& h = *made;
  if (card.host == card_.host) h.pid = card.pid;
  h.address = address;
  h.connection.rank = rank;
  h.connection.medium = medium;
  h.connection.lane = lane;
  h.connection.checksum = checksum;
  h.connection.is_opener = true;
  std::memcpy(h.hello.magic, hello_magic, sizeof hello_magic);
  h.hello.version = protocol_version;
  h.hello.size = static_cast<uint32_t>(size_);
  h.hello.from = static_cast<uint32_t>(rank_);
  h.hello.to = static_cast<uint32_t>(rank);
  h.hello.medium = medium;
  h.hello.lane = lane;
  h.hello.checksum = checksum;
  h.hello.eager_credit_bytes = settings_.eager_credit_bytes;
  has_due_ = true;
  handshakes_.push_back(std::move(made));
  connect_due();
}

void Connector::connect_due() {
  // A handshake that ends at once makes way for another one and moves those behind it: then start again.
  while (std::exchange(has_due_, false)) {
    bool may_call = has_free_call();
    for (size_t i = 0; i < handshakes_.size(); ++i) {
      if (handshakes_[i]->state != HandshakeState::due || (!may_call && handshakes_[i]->is_limited())) continue;
      attempt(*handshakes_[i]);
      may_call = has_free_call();
    }
  }
}

bool Connector::has_free_call() const {
  const auto under_way = std::count_if(handshakes_.begin(), handshakes_.end(),
                                       [this](const auto& h) { return h->is_under_way(beat_ns_); });
  return static_cast<size_t>(under_way) < attempts_max;
}

void Connector::attempt(Handshake& h) {
  h.on(HandshakeEvent::attempt);
  ++h.attempts;
  h.idle_ns = 0;
  if (!fill_random(h.hello.nonce, sizeof h.hello.nonce)) return refuse(h, failure("no random bytes"));
  Descriptor socket(::socket(h.address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket || !h.take(std::move(socket))) return refuse(h, failure("no socket to reach it"));
  int result;
  do result = ::connect(h.fd(), h.address.get(), h.address.bytes);
  while (result != 0 && errno == EINTR);
  if (result != 0 && errno != EINPROGRESS) return on_unreached(h, errno);
  h.watch(result == 0 ? EPOLLIN : EPOLLOUT);
  if (result == 0) h.on_connected();
}

// The other side hung up during the handshake. An acceptor that died will not be there any more, a crowded one will: so
// an opener by TCP calls again, once at once and then with every heartbeat, until the handshake's time is over.
void Connector::on_hang_up(Handshake& h) {
  if (h.connection.is_opener) {
    ++h.hang_ups;
    h.trouble =
        "it hung up " + (h.hang_ups == 1 ? "" : std::to_string(h.hang_ups) + " times ") + "during the handshake";
    if (h.connection.medium == Medium::shm) return refuse(h, h.unreached(h.trouble));
  }
  h.on(HandshakeEvent::hang_up);
}

// No process listens there, or the network is down and may be back soon.
void Connector::on_unreached(Handshake& h, int error) {
  if (error == ECONNRESET) return on_hang_up(h);
  h.trouble = strerror(error);
  if (error != EHOSTUNREACH && error != ENETUNREACH && error != ENETDOWN && error != ETIMEDOUT)
    return refuse(h, h.unreached(h.trouble));
  h.on(HandshakeEvent::unreachable);
}

// A handshake has succeeded: make the link, or the next connection for it.
void Connector::hand_on(NewConnection connection) {
  const std::int32_t rank = connection.rank;
  if (connection.medium == Medium::tcp && connection.lane == Lane::bulk)
    return pairs_.complete(rank, std::move(connection.stream), connection.checksum);
  Peer* peer = owner_.on_admitted(rank);
  if (peer == nullptr) return;
  if (connection.medium == Medium::tcp) {
    pairs_.begin(rank, std::move(connection.stream), connection.is_opener);
    if (connection.is_opener) call(rank, peer->card, Medium::tcp, Lane::bulk);
    return;
  }
  std::string why;
  auto link = ShmLink::open(*peer, poller_, std::move(connection.socket), connection.memory, connection.presence,
                            connection.is_opener, connection.probe, why);
  if (link == nullptr) return owner_.on_refused(rank, why, Admission::unknown);
  owner_.on_link(*peer, std::move(link));
}

void Connector::forget(std::int32_t rank) {
  if (quic_ != nullptr) quic_->forget(rank);
  pairs_.forget(rank);
  has_due_ = true;
  std::erase_if(handshakes_, [rank](const auto& h) {
    return h->connection.rank == rank && (h->connection.is_opener || h->state == HandshakeState::crossed);
  });
}

bool Connector::is_connecting(std::int32_t rank) const {
  if (quic_ != nullptr && quic_->is_connecting(rank)) return true;
  return std::any_of(handshakes_.begin(), handshakes_.end(), [rank](const auto& h) {
    return h->connection.rank == rank && h->connection.is_opener && h->is_connecting();
  });
}

bool Connector::is_crossed(std::int32_t rank) const {
  if (quic_ != nullptr && quic_->is_crossed(rank)) return true;
  return std::any_of(handshakes_.begin(), handshakes_.end(), [rank](const auto& h) {
    return h->connection.is_opener && h->connection.rank == rank && h->state == HandshakeState::crossed;
  });
}

bool Connector::is_calling(std::int32_t rank) const {
  if (quic_ != nullptr && quic_->is_calling(rank)) return true;
  return std::any_of(handshakes_.begin(), handshakes_.end(),
                     [rank](const auto& h) { return h->connection.is_opener && h->connection.rank == rank; });
}

bool Connector::is_connecting() const {
  if (quic_ != nullptr && quic_->is_connecting()) return true;
  return std::any_of(handshakes_.begin(), handshakes_.end(), [](const auto& h) {
    return h->connection.is_opener || h->state == HandshakeState::await_introduction;
  });
}

void Connector::tick(std::int64_t passed_ns) {
  if (quic_ != nullptr) quic_->tick(passed_ns);
  for (auto& one : listeners_)
    if (one != nullptr) one->watch();
  for (const auto& h : handshakes_) {
    if (h->connection.is_opener && h->attempts == 0) continue;  // its time has not begun
    h->time_left_ns -= passed_ns;
    h->waited_ns += passed_ns;
    h->idle_ns += passed_ns;
  }
  // A crossed connection waits for another one, which has its own time.
  const auto is_late = [](const auto& h) {
    return h->time_left_ns <= 0 && h->state != HandshakeState::crossed && !h->is_starved();
  };
  // From the start each time: a refusal may remove any of them.
  for (auto late = handshakes_.begin();
       (late = std::find_if(handshakes_.begin(), handshakes_.end(), is_late)) != handshakes_.end();)
    refuse(**late, (*late)->timed_out());
  for (const auto& h : handshakes_)
    if (h->state == HandshakeState::resting) h->on(HandshakeEvent::tick);
  beat_ns_ = passed_ns;
  has_due_ = true;
  connect_due();
}

void Connector::close(bool keep_files) {
  for (auto& one : listeners_) {
    if (one != nullptr && keep_files) one->leave_file();
    one.reset();
  }
  handshakes_.clear();
  pairs_.clear();
  if (quic_ != nullptr) quic_->close(keep_files);
  pinger_.close();
  directory_.close();
}

void Connector::end(const Handshake& handshake) {
  has_due_ = true;
  std::erase_if(handshakes_, [&handshake](const auto& h) { return h.get() == &handshake; });
}

void Connector::refuse(Handshake& handshake, const std::string& cause, Admission admission) {
  handshake.trouble = cause;
  handshake.admission = admission;
  handshake.on(HandshakeEvent::fail);
}

void Connector::report(Handshake& handshake) {
  const NewConnection& connection = handshake.connection;
  const bool is_opener = connection.is_opener;
  const std::int32_t rank = connection.rank;
  const Admission admission = handshake.admission;
  const std::string cause = std::move(handshake.trouble);
  if (!is_opener) {
    ++refused_;
    if (refusals_.size() < refusals_max)
      refusals_.push_back((connection.medium == Medium::shm ? "a caller on this host: "
                                                            : "a caller from " + handshake.address.host() + ": ") +
                          cause);
  }
  end(handshake);
  if (is_opener) owner_.on_refused(rank, cause, admission);
}

std::vector<std::string> Connector::take_refusals() {
  std::vector<std::string> taken(refusals_.begin(), refusals_.end());
  refusals_.clear();
  if (quic_ != nullptr) quic_->take_refusals(taken);
  return taken;
}

Proof Connector::prove(const char* role, const Hello& hello, const byte* nonce) const {
  std::vector<byte> words(reinterpret_cast<const byte*>(&hello), reinterpret_cast<const byte*>(&hello) + sizeof hello);
  words.insert(words.end(), nonce, nonce + 32);
  return hmac_sha256(reinterpret_cast<const byte*>(secret_.data()), secret_.size(), reinterpret_cast<const byte*>(role),
                     std::strlen(role), words.data(), words.size());
}

}  // namespace unisono::engine
