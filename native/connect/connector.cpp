#include "connect/connector.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <climits>
#include <cstdio>
#include <fstream>
#include <stdexcept>

// linux/tcp.h since 6.15
#ifndef TCP_RTO_MAX_MS
#define TCP_RTO_MAX_MS 44
#endif

namespace unisono::engine {
namespace {

constexpr char magic[8] = {'u', 'n', 'i', 's', 'o', 'n', 'o', '\n'};
constexpr int ports_tried_max = 16;
// Calls under way at a time. With TLS each costs both sides milliseconds, and a hundred begun at once on a few cores
// would all time out.
constexpr std::ptrdiff_t attempts_max = 16;
// Refusals kept for the log.
constexpr size_t refusals_max = 8;

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

void tune(int fd, std::int64_t silence_ns) {
  const int on = 1, rto_ms_max = 1000;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // Retransmit soon, so that a connection goes on soon after a cut. Linux before 6.15 does not know the second option
  // and waits longer.
  setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &rto_ms_max, sizeof rto_ms_max);
  // The engine declares peers dead by their silence. This bounds how long the system retransmits for a closed socket.
  const auto timeout = static_cast<int>(std::min<std::int64_t>(4 * silence_ns / millisecond, INT_MAX));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, sizeof timeout);
}

bool is_same_user(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
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

// ---- listening ----

class Connector::Listener final : public Watcher {
 public:
  Listener(Connector& connector, Descriptor socket, Medium medium, std::string path)
      : connector_(connector), socket_(std::move(socket)), medium_(medium), path_(std::move(path)) {
    watch();
  }
  ~Listener() override {
    if (watch_ != 0) connector_.poller_.remove(socket_.get(), watch_);
    if (!path_.empty()) unlink(path_.c_str());
  }
  void on_ready(uint32_t) override { connector_.accept_from(socket_.get(), medium_); }
  // While accept fails for want of descriptors, a listener that is always ready would keep this thread busy.
  void pause() {
    if (watch_ != 0) connector_.poller_.remove(socket_.get(), std::exchange(watch_, 0));
  }
  void watch() {
    if (medium_ == Medium::tcp && !connector_.is_ready()) return;
    if (watch_ == 0) watch_ = connector_.poller_.add(socket_.get(), EPOLLIN, *this);
  }
  void leave_file() { path_.clear(); }
  int fd() const { return socket_.get(); }

 private:
  Connector& connector_;
  Descriptor socket_;
  const Medium medium_;
  std::string path_;
  uint64_t watch_ = 0;
};

// ---- a handshake under way ----

class Connector::Handshake final : public Watcher {
 public:
  using State = HandshakeState;
  using Event = HandshakeEvent;

  Handshake(Connector& connector, State state, std::int64_t time_left_ns)
      : connector(connector), state(state), time_left_ns(time_left_ns) {}
  ~Handshake() override { unwatch(); }

  // False if there is no memory for a TLS stream.
  bool take(Descriptor socket) {
    if (connection.medium == Medium::shm) {
      connection.socket = std::move(socket);
      return true;
    }
    tune(socket.get(), connector.settings_.silence_ns);
    if (connector.identity_ == nullptr) {
      connection.stream = std::make_unique<PlainStream>(std::move(socket));
      return true;
    }
    auto made = connector.identity_->wrap(std::move(socket), connection.is_opener);
    tls = made.get();
    connection.stream = std::move(made);
    return tls != nullptr;
  }

  int fd() const { return connection.stream != nullptr ? connection.stream->fd() : connection.socket.get(); }
  void watch(uint32_t events) { watch_ = connector.poller_.add(fd(), events, *this); }

  // Apply an event and do what the table says. It may destroy this handshake, so callers return at once.
  void on(Event event) {
    switch (advance(event)) {
      case HandshakeAction::none: return;
      case HandshakeAction::run_tls: return run_tls();
      case HandshakeAction::send_hello: return send_hello();
      case HandshakeAction::send_challenge: return send_challenge();
      case HandshakeAction::send_introduction: return send_introduction();
      case HandshakeAction::rest: return rest();
      case HandshakeAction::reconnect:
        rest();
        if (attempts == 1) connector.attempt(*this);
        return;
      case HandshakeAction::hand_over: return hand_over();
      case HandshakeAction::keep_open: return keep_open();
      case HandshakeAction::drop: return connector.end(*this);
      case HandshakeAction::report: return connector.report(*this);
    }
  }
  HandshakeAction advance(Event event) {
    const auto& step = handshake_transitions.at(state, event);
    state = step.next;
    return step.action;
  }

  void on_ready(uint32_t) override {
    idle_ns = 0;
    switch (state) {
      case State::connecting: return on_connect_result();
      case State::crossed: return on_crossed_ready();
      case State::tls_connect:
      case State::tls_accept: return run_tls();
      default: return read();
    }
  }

  // The connection is up.
  void on_connected() {
    // From now on TCP repeats what the network loses, and the acceptor's Python may not have given its engine an
    // identity yet. Once only: an acceptor that hangs up again and again does not prolong the handshake.
    if (connection.is_opener && connection.medium == Medium::tcp && !std::exchange(is_reached, true))
      time_left_ns = std::max(
          {time_left_ns, 2 * connector.settings_.silence_ns, tls != nullptr ? connector.settings_.stranger_ns : 0});
    on(tls != nullptr ? Event::connected_tls : Event::connected);
  }

  // An acceptor's caller that has not proven that it knows the secret.
  bool is_stranger() const { return !connection.is_opener && state != State::crossed; }

  // The peer is on this host and slow because the system does not schedule it. It says nothing while connecting: the
  // system accepts connections for a process that does not run.
  bool is_starved() const {
    return pid > 0 && state != State::connecting &&
           time_left_ns > -starved_silences_max * connector.settings_.silence_ns && engine::is_starved(pid);
  }

  bool is_waiting() const { return state == State::due || state == State::resting; }
  // The call has not reached the peer so far.
  bool is_connecting() const { return state == State::connecting || is_waiting(); }

  // Whether the limit of calls under way applies: not to the second connection of a link whose first one is up.
  bool is_limited() const { return connection.medium == Medium::tcp && connection.lane == Lane::control; }
  // Whether it counts as a call under way: not while it waits for its turn, is crossed, or the peer is silent. A peer
  // that was reached has longer than a heartbeat to answer: a hundred ranks with TLS on a few cores need it.
  bool is_under_way(std::int64_t beat_ns) const {
    return connection.is_opener && is_limited() && !is_waiting() && state != State::crossed &&
           idle_ns <= (state == State::connecting ? beat_ns : connector.settings_.silence_ns / 2);
  }

  std::string unreached(const std::string& why) const {
    if (connection.medium == Medium::shm) return "cannot be reached: " + why;
    return "cannot be reached from rank " + std::to_string(connector.rank_) + " at " + address.host() + " port " +
           std::to_string(address.port()) + ": " + why;
  }
  std::string timed_out() const {
    char text[64];
    snprintf(text, sizeof text,
             is_connecting() ? "no answer to a connection in %.1f s" : "no answer to a handshake in %.1f s",
             static_cast<double>(waited_ns) / 1e9);
    if (!connection.is_opener) return text;
    return unreached((is_connecting() || hang_ups != 0) && !trouble.empty() ? trouble : text);
  }

  Connector& connector;
  State state;
  std::int64_t time_left_ns;  // what is left of the handshake's time
  NewConnection connection{};
  TlsStream* tls = nullptr;  // connection.stream, if it is one
  SocketAddress address;
  int attempts = 0;  // to connect
  int hang_ups = 0;  // by the acceptor
  bool is_reached = false;
  std::int32_t pid = 0;  // of the acceptor, if it is on this host
  std::int64_t waited_ns = 0;
  std::int64_t idle_ns = 0;  // since the last event on the socket
  std::string trouble;       // why the last attempt failed
  Admission admission = Admission::unknown;
  Hello hello{};

 private:
  enum class ReadResult : uint8_t {
    more,
    whole,
    over,
    truncated,  // descriptors came with the message, and this process has no free ones
  };

  void unwatch() {
    if (watch_ != 0) connector.poller_.remove(fd(), std::exchange(watch_, 0));
  }

  void rest() {
    unwatch();
    tls = nullptr;
    connection.stream.reset();
    have_ = 0;
  }

  void on_connect_result() {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return connector.on_unreached(*this, error);
    connector.poller_.change(fd(), watch_, EPOLLIN);
    on_connected();
  }

  void run_tls() {
    switch (tls->shake()) {
      case TlsStream::Shake::wants_read: return connector.poller_.change(fd(), watch_, EPOLLIN);
      case TlsStream::Shake::wants_write: return connector.poller_.change(fd(), watch_, EPOLLIN | EPOLLOUT);
      case TlsStream::Shake::hung_up: return connector.on_hang_up(*this);
      case TlsStream::Shake::failed: return connector.refuse(*this, tls->why());
      case TlsStream::Shake::done: break;
    }
    connector.poller_.change(fd(), watch_, EPOLLIN);
    if (connection.is_opener && tls->rank() != connection.rank)
      return connector.refuse(*this, "its certificate is rank " + std::to_string(tls->rank()) + "'s");
    if (connection.is_opener) return on(Event::tls_done);
    on(Event::tls_done);
    read();  // the hello may lie in OpenSSL's buffer, which epoll does not see
  }

  // Read the message that the state awaits, and check it.
  void read() {
    switch (read_message()) {
      case ReadResult::more: return;
      case ReadResult::truncated: return connector.refuse(*this, failure("no descriptor for its memory", EMFILE));
      case ReadResult::over: return connector.on_hang_up(*this);
      case ReadResult::whole: break;
    }
    have_ = 0;
    switch (state) {
      case State::await_hello: return on_hello();
      case State::await_challenge: return on_challenge();
      case State::await_introduction: return on_introduction();
      default: return on_reply();
    }
  }

  ReadResult read_message() {
    struct {
      void* at;
      size_t bytes;
    } place{};
    switch (state) {
      case State::await_hello: place = {&hello, sizeof hello}; break;
      case State::await_challenge: place = {&challenge_, sizeof challenge_}; break;
      case State::await_introduction: place = {&introduction_, sizeof introduction_}; break;
      default: place = {&reply_, sizeof reply_};
    }
    while (have_ < place.bytes) {
      iovec part{static_cast<byte*>(place.at) + have_, place.bytes - have_};
      if (connection.stream != nullptr) {
        const ssize_t n = connection.stream->readv(&part, 1);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return ReadResult::more;
        if (n <= 0) return ReadResult::over;
        have_ += static_cast<size_t>(n);
        continue;
      }
      alignas(cmsghdr) char space[CMSG_SPACE(2 * sizeof(int))];
      msghdr message{};
      message.msg_iov = &part;
      message.msg_iovlen = 1;
      message.msg_control = space;
      message.msg_controllen = sizeof space;
      const ssize_t n = recvmsg(connection.socket.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno == EAGAIN) return ReadResult::more;
      if (n > 0) keep_descriptors(message);
      if (n <= 0) return ReadResult::over;
      if ((message.msg_flags & MSG_CTRUNC) != 0) return ReadResult::truncated;
      have_ += static_cast<size_t>(n);
    }
    return ReadResult::whole;
  }

  // An opener sends two descriptors, the link's memory and its presence page; an acceptor sends its presence page.
  void keep_descriptors(msghdr& message) {
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
      for (size_t i = 0; i < count; ++i) {
        int fd;
        std::memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
        (i + 1 < count ? connection.memory : connection.presence) = Descriptor(fd);
      }
    }
  }

  bool send(const void* data, size_t bytes, const std::vector<int>& descriptors) {
    iovec part{const_cast<void*>(data), bytes};
    // Every message of a handshake fits into the empty buffer of a socket.
    if (connection.stream != nullptr) return connection.stream->writev(&part, 1) == static_cast<ssize_t>(bytes);
    alignas(cmsghdr) char space[CMSG_SPACE(2 * sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    if (!descriptors.empty()) {
      message.msg_control = space;
      message.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
      cmsghdr* c = CMSG_FIRSTHDR(&message);
      c->cmsg_level = SOL_SOCKET;
      c->cmsg_type = SCM_RIGHTS;
      c->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
      std::memcpy(CMSG_DATA(c), descriptors.data(), descriptors.size() * sizeof(int));
    }
    return sendmsg(connection.socket.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
  }

  void send_hello() {
    if (!send(&hello, sizeof hello, {})) on_unsent();
  }

  void on_hello() {
    const bool is_sound = std::memcmp(hello.magic, magic, sizeof magic) == 0 && hello.version == protocol_version &&
                          hello.size == static_cast<uint32_t>(connector.size_) &&
                          hello.to == static_cast<uint32_t>(connector.rank_) && hello.from < hello.size &&
                          hello.from != hello.to && hello.medium == connection.medium &&
                          static_cast<uint8_t>(hello.lane) < lane_count &&
                          hello.eager_credit_bytes == connector.settings_.eager_credit_bytes;
    if (!is_sound) return connector.refuse(*this, "handshake hello names another job, rank, size or protocol version");
    connection.rank = static_cast<std::int32_t>(hello.from);
    if (tls != nullptr && tls->rank() != connection.rank)
      return connector.refuse(*this, "its certificate is rank " + std::to_string(tls->rank()) +
                                         "'s, but it says that it is rank " + std::to_string(connection.rank));
    connection.lane = hello.lane;
    connection.checksum = hello.checksum != 0;
    if (!fill_random(challenge_.nonce, sizeof challenge_.nonce))
      return connector.refuse(*this, failure("no random bytes"));
    on(Event::message);
  }

  void send_challenge() {
    challenge_.proof = connector.prove("acceptor", hello, challenge_.nonce);
    if (!send(&challenge_, sizeof challenge_, {})) on(Event::hang_up);
  }

  void on_challenge() {
    if (!is_equal(challenge_.proof, connector.prove("acceptor", hello, challenge_.nonce)))
      return connector.refuse(*this, "it does not know the job's secret");
    if (connection.medium == Medium::shm) {
      if (!is_same_user(connection.socket.get())) return connector.refuse(*this, "it belongs to another user");
      connection.memory = ShmLink::make_memory();
      if (!connection.memory)
        return connector.refuse(
            *this,
            failure(("no shared memory for a link of " + std::to_string(sizeof(LinkMemory)) + " bytes").c_str()));
    }
    on(Event::message);
  }

  void send_introduction() {
    introduction_.proof = connector.prove("opener", hello, challenge_.nonce);
    introduction_.probe = connector.probe_;
    std::vector<int> descriptors;
    if (connection.medium == Medium::shm) descriptors = {connection.memory.get(), connector.presence_->fd()};
    if (!send(&introduction_, sizeof introduction_, descriptors)) on_unsent();
  }

  void on_unsent() {
    if (errno == EPIPE || errno == ECONNRESET) return connector.on_hang_up(*this);
    connector.refuse(*this, failure("cannot send a handshake"));
  }

  void on_introduction() {
    if (!is_equal(introduction_.proof, connector.prove("opener", hello, challenge_.nonce)))
      return connector.refuse(*this, "it does not know the job's secret");
    if (connection.medium == Medium::shm && (!connection.memory || !connection.presence))
      return connector.refuse(*this, "it sent no memory to share");
    connection.probe = introduction_.probe;
    const Admission said = connector.owner_.admit(connection.rank);
    const bool is_tcp = connection.medium == Medium::tcp;
    reply_ = {is_tcp ? connector.pairs_.admit(connection.rank, connection.lane, said) : said, 0, connector.probe_};
    std::vector<int> descriptors;
    if (connection.medium == Medium::shm && reply_.admission == Admission::welcome)
      descriptors = {connector.presence_->fd()};
    if (!send(&reply_, sizeof reply_, descriptors)) return on(Event::hang_up);
    if (reply_.admission == Admission::welcome) return on(Event::welcome);
    if (reply_.admission != Admission::crossing) return on(Event::turned_away);
    // An earlier call of this rank that was crossed has been replaced by this one.
    std::erase_if(connector.handshakes_, [this](const auto& h) {
      return h->state == State::crossed && !h->connection.is_opener && h->connection.rank == connection.rank;
    });
    on(Event::crossing);
  }

  void on_reply() {
    if (reply_.admission == Admission::crossing) return on(Event::crossing);
    if (reply_.admission == Admission::leaving) return connector.refuse(*this, "left", Admission::leaving);
    if (reply_.admission != Admission::welcome) return connector.refuse(*this, "it refuses the link");
    if (connection.medium == Medium::shm && !connection.presence)
      return connector.refuse(*this, "it sent no presence page");
    connection.probe = reply_.probe;
    on(Event::welcome);
  }

  void keep_open() {
    connection.memory.close();
    connection.presence.close();
  }

  // Nothing is sent on a crossed connection any more: either it has ended, or the wake-up was spurious.
  void on_crossed_ready() {
    byte unused;
    iovec part{&unused, 1};
    ssize_t n;
    do
      n = connection.stream != nullptr ? connection.stream->readv(&part, 1)
                                       : recv(connection.socket.get(), &unused, 1, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno == EAGAIN) return;
    if (connection.is_opener) return connector.refuse(*this, "died: its connection was closed");
    on(Event::hang_up);
  }

  void hand_over() {
    unwatch();
    if (tls != nullptr) tls->trust();
    NewConnection made = std::move(connection);
    Connector& to = connector;
    to.end(*this);
    to.hand_on(std::move(made));
  }

  uint64_t watch_ = 0;
  Challenge challenge_{};
  Introduction introduction_{};
  AdmissionReply reply_{};
  size_t have_ = 0;  // bytes of the awaited message
};

// ---- the connector ----

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
  std::memcpy(h.hello.magic, magic, sizeof magic);
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
  return std::count_if(handshakes_.begin(), handshakes_.end(),
                       [this](const auto& h) { return h->is_under_way(beat_ns_); }) < attempts_max;
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
