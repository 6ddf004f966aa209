#include "connect/connector.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
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
constexpr size_t strangers_max = 256;
constexpr size_t strangers_per_address_max = 128;
constexpr std::int64_t stranger_ns = 5 * second;
constexpr int ports_tried_max = 16;
// So many calls are under way at a time: with TLS each takes milliseconds of both sides, and a hundred begun at once on
// a few cores would all take too long.
constexpr std::ptrdiff_t calls_max = 16;
constexpr size_t refusals_max = 8;

[[noreturn]] void fail(const std::string& why) { throw std::runtime_error(why); }

std::string hex(uint64_t value) {
  char text[17];
  snprintf(text, sizeof text, "%016lx", static_cast<unsigned long>(value));
  return text;
}

// A path may be longer than a socket address: then it is reached through its folder's descriptor.
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

socklen_t tcp_address(sockaddr_storage& address, const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0 || found == nullptr) return 0;
  const socklen_t length = found->ai_addrlen;
  std::memcpy(&address, found->ai_addr, length);
  freeaddrinfo(found);
  return length;
}

void tune(int fd, std::int64_t silence_ns) {
  const int on = 1, rto_ms_max = 1000;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  // What the network lost is sent again soon, so that a connection goes on soon after a cut. Systems before 6.15 do not
  // know the second, and wait longer.
  setsockopt(fd, IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, &on, sizeof on);
  setsockopt(fd, IPPROTO_TCP, TCP_RTO_MAX_MS, &rto_ms_max, sizeof rto_ms_max);
  // We give up on peers, by their silence; this is for the system, which sends on for a while what was closed.
  const auto timeout = static_cast<int>(std::min<std::int64_t>(4 * silence_ns / millisecond, INT_MAX));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, sizeof timeout);
}

bool is_same_user(int fd) {
  ucred who{};
  socklen_t length = sizeof who;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &length) == 0 && who.uid == geteuid();
}

std::string host_of(const sockaddr_storage& address, socklen_t length) {
  char host[NI_MAXHOST];
  if (length == 0 || getnameinfo(reinterpret_cast<const sockaddr*>(&address), length, host, sizeof host, nullptr, 0,
                                 NI_NUMERICHOST) != 0)
    return "?";
  return host;
}

uint16_t port_of(const sockaddr_storage& address) {
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

// What counts as one place: an IPv4 address, or the network of an IPv6 one, of which a host has 2^64.
std::string group_of(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET6)
    return std::string(reinterpret_cast<const char*>(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr), 8);
  if (address.ss_family == AF_INET)
    return std::string(reinterpret_cast<const char*>(&reinterpret_cast<const sockaddr_in&>(address).sin_addr), 4);
  return "";
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
  // Without descriptors left, a listener that is always ready would keep us busy.
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

// ---- a greeting under way ----

class Connector::Greeting final : public Watcher {
 public:
  Greeting(Connector& connector, std::int64_t patience_ns) : connector(connector), patience_ns(patience_ns) {}

  // False if there is no memory for it.
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
  // Until the next call.
  void rest() {
    unwatch();
    step = Step::resting;
    tls = nullptr;
    connection.stream.reset();
    have = 0;
  }
  ~Greeting() override { unwatch(); }

  int fd() const { return connection.stream != nullptr ? connection.stream->fd() : connection.socket.get(); }
  void begin(uint32_t events) { watch = connector.poller_.add(fd(), events, *this); }
  void unwatch() {
    if (watch != 0) connector.poller_.remove(fd(), std::exchange(watch, 0));
  }

  void on_ready(uint32_t) override {
    idle_ns = 0;
    // A step may end and destroy this greeting.
    if (step == Step::connecting) return on_connected();
    if (step == Step::crossed) return on_parted();
    if (step == Step::shaking && !shake()) return;
    for (;;) {
      const Reading read = read_message();
      if (read == Reading::more) return;
      if (read == Reading::truncated) return connector.refuse(*this, failure("no descriptor for its memory", EMFILE));
      if (read == Reading::over) return connector.again(*this);
      have = 0;
      switch (step) {
        case Step::await_hello: return on_hello();
        case Step::await_challenge: return on_challenge();
        case Step::await_introduction: return on_introduction();
        case Step::await_verdict: return on_verdict();
        default: return;
      }
    }
  }

  enum class Step : uint8_t {
    resting,
    connecting,
    shaking,
    await_hello,
    await_challenge,
    await_introduction,
    await_verdict,
    crossed,  // the lower rank's own call counts; until that is through, this shows both that the other lives
  };
  // Truncated: descriptors came with the message, and this process has no room for them.
  enum class Reading : uint8_t { more, whole, over, truncated };

  Connector& connector;
  std::int64_t patience_ns;
  Step step = Step::await_hello;
  NewConnection connection{};
  TlsStream* tls = nullptr;  // the connection's stream, if it is one
  sockaddr_storage address{};
  socklen_t address_bytes = 0;
  int calls = 0;
  int hang_ups = 0;         // of the other side
  bool is_reached = false;  // a call of ours was connected
  bool is_due = false;      // to be called again
  std::int32_t pid = 0;     // whom we called, if it is on this host
  std::int64_t waited_ns = 0;
  std::int64_t idle_ns = 0;  // since anything came
  std::string trouble;       // why the last call led to nothing
  uint64_t watch = 0;
  Hello hello{};
  Challenge challenge{};
  Introduction introduction{};
  Verdict verdict{};
  size_t have = 0;
  bool is_proven = false;

  // Whom we called on this host is slow because nobody lets it run.
  bool is_starved() const {
    // The system takes calls for who does not run.
    return pid > 0 && step != Step::connecting &&
           patience_ns > -starved_silences_max * connector.settings_.silence_ns && engine::is_starved(pid);
  }

  // Our call has not reached anybody so far.
  bool is_dialling() const { return connection.is_opener && (step == Step::connecting || step == Step::resting); }

  // Calls by TCP wait for each other. One that belongs to a link whose other half is there does not.
  bool is_limited() const { return connection.medium == Medium::tcp && connection.lane == Lane::control; }
  // Whether it keeps us busy: not if nobody answers, nor if it waits for a call. Whoever was reached and is slow has
  // longer than a heartbeat: a hundred ranks with TLS on a few cores are.
  bool is_work(std::int64_t beat_ns) const {
    return connection.is_opener && is_limited() && step != Step::resting && step != Step::crossed &&
           idle_ns <= (step == Step::connecting ? beat_ns : connector.settings_.silence_ns / 2);
  }

  // Whom we called in vain, in words.
  std::string unreached(const std::string& why) const {
    if (connection.medium == Medium::shm) return "cannot be reached: " + why;
    return "cannot be reached from rank " + std::to_string(connector.rank_) + " at " + host_of(address, address_bytes) +
           " port " + std::to_string(port_of(address)) + ": " + why;
  }
  std::string late() const {
    char text[64];
    const bool is_dialled = is_dialling();
    snprintf(text, sizeof text,
             is_dialled ? "no answer to a connection in %.1f s" : "no answer to a greeting in %.1f s",
             static_cast<double>(waited_ns) / 1e9);
    if (!connection.is_opener) return text;
    return unreached((is_dialled || hang_ups != 0) && !trouble.empty() ? trouble : text);
  }

  // Connected: what comes first.
  void open() {
    // It was reached: what the network loses from now on is sent again, and the other side's Python may not have given
    // its engine an identity yet. Once: whoever accepts and hangs up again and again gets no more time.
    if (connection.is_opener && connection.medium == Medium::tcp && !std::exchange(is_reached, true))
      patience_ns = std::max({patience_ns, 2 * connector.settings_.silence_ns, tls != nullptr ? stranger_ns : 0});
    if (tls == nullptr) {
      step = Step::await_hello;
      if (connection.is_opener) say_hello();
      return;
    }
    step = Step::shaking;
    on_ready(EPOLLIN);
  }

 private:
  void on_connected() {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) return connector.on_unreached(*this, error);
    connector.poller_.change(fd(), watch, EPOLLIN);
    open();
  }

  // Go on with the handshake. True if an acceptor's is done: a hello may be here already.
  bool shake() {
    switch (tls->shake()) {
      case TlsStream::Shake::wants_read: connector.poller_.change(fd(), watch, EPOLLIN); return false;
      case TlsStream::Shake::wants_write: connector.poller_.change(fd(), watch, EPOLLIN | EPOLLOUT); return false;
      case TlsStream::Shake::hung_up: connector.again(*this); return false;
      case TlsStream::Shake::failed: connector.refuse(*this, tls->why()); return false;
      case TlsStream::Shake::done: break;
    }
    connector.poller_.change(fd(), watch, EPOLLIN);
    if (!connection.is_opener) {
      step = Step::await_hello;
      return true;
    }
    if (tls->rank() == connection.rank)
      say_hello();
    else
      connector.refuse(*this, std::string("its certificate is rank ") + std::to_string(tls->rank()) + "'s");
    return false;
  }

  void say_hello() {
    step = Step::await_challenge;
    if (!send(&hello, sizeof hello, {})) on_unsent();
  }

  Reading read_message() {
    struct Place {
      void* at;
      size_t bytes;
    } place{};
    switch (step) {
      case Step::await_hello: place = {&hello, sizeof hello}; break;
      case Step::await_challenge: place = {&challenge, sizeof challenge}; break;
      case Step::await_introduction: place = {&introduction, sizeof introduction}; break;
      default: place = {&verdict, sizeof verdict};
    }
    while (have < place.bytes) {
      iovec part{static_cast<byte*>(place.at) + have, place.bytes - have};
      if (connection.stream != nullptr) {
        const ssize_t n = connection.stream->readv(&part, 1);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0 && errno == EAGAIN) return Reading::more;
        if (n <= 0) return Reading::over;
        have += static_cast<size_t>(n);
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
      if (n < 0 && errno == EAGAIN) return Reading::more;
      if (n > 0) keep_descriptors(message);
      if (n <= 0) return Reading::over;
      if ((message.msg_flags & MSG_CTRUNC) != 0) return Reading::truncated;
      have += static_cast<size_t>(n);
    }
    return Reading::whole;
  }

  // The first is the link's memory if the opener sends two; the last is the presence page.
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

  bool send(const void* data, size_t bytes, std::vector<int> descriptors) {
    iovec part{const_cast<void*>(data), bytes};
    // A greeting fits into an empty socket.
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

  void on_hello() {
    const bool is_sound = std::memcmp(hello.magic, magic, sizeof magic) == 0 && hello.version == protocol_version &&
                          hello.size == static_cast<uint32_t>(connector.size_) &&
                          hello.to == static_cast<uint32_t>(connector.rank_) && hello.from < hello.size &&
                          hello.from != hello.to && hello.medium == connection.medium &&
                          static_cast<uint8_t>(hello.lane) < lane_count &&
                          hello.eager_credit_bytes == connector.settings_.eager_credit_bytes;
    if (!is_sound) return connector.refuse(*this, "its hello is not one of this world");
    connection.rank = static_cast<std::int32_t>(hello.from);
    if (tls != nullptr && tls->rank() != connection.rank)
      return connector.refuse(*this, std::string("its certificate is rank ") + std::to_string(tls->rank()) +
                                         "'s, but it says that it is rank " + std::to_string(connection.rank));
    connection.lane = hello.lane;
    connection.checksum = hello.checksum != 0;
    step = Step::await_introduction;
    if (!fill_random(challenge.nonce, sizeof challenge.nonce))
      return connector.refuse(*this, failure("no random bytes"));
    challenge.proof = connector.prove("acceptor", hello, challenge.nonce);
    if (!send(&challenge, sizeof challenge, {})) connector.end(*this);
  }

  void on_challenge() {
    if (!is_equal(challenge.proof, connector.prove("acceptor", hello, challenge.nonce)))
      return connector.refuse(*this, "it does not know the job's secret");
    introduction.proof = connector.prove("opener", hello, challenge.nonce);
    introduction.probe = connector.probe_;
    std::vector<int> descriptors;
    if (connection.medium == Medium::shm) {
      if (!is_same_user(connection.socket.get())) return connector.refuse(*this, "it belongs to another user");
      connection.memory = ShmLink::make_memory();
      if (!connection.memory)
        return connector.refuse(
            *this,
            failure(("no shared memory for a link of " + std::to_string(sizeof(LinkMemory)) + " bytes").c_str()));
      descriptors = {connection.memory.get(), connector.presence_->fd()};
    }
    step = Step::await_verdict;
    if (!send(&introduction, sizeof introduction, descriptors)) on_unsent();
  }

  void on_unsent() {
    if (errno == EPIPE || errno == ECONNRESET) return connector.again(*this);
    connector.refuse(*this, failure("cannot greet"));
  }

  void on_introduction() {
    if (!is_equal(introduction.proof, connector.prove("opener", hello, challenge.nonce)))
      return connector.refuse(*this, "it does not know the job's secret");
    if (connection.medium == Medium::shm && (!connection.memory || !connection.presence))
      return connector.refuse(*this, "it shows no memory to share");
    is_proven = true;
    connection.probe = introduction.probe;
    verdict = {connector.host_.admit(connection.rank, connection.medium, connection.lane), 0, connector.probe_};
    const bool is_welcome = verdict.ruling == Admission::welcome;
    std::vector<int> descriptors;
    if (connection.medium == Medium::shm && is_welcome) descriptors = {connector.presence_->fd()};
    if (!send(&verdict, sizeof verdict, descriptors)) return connector.end(*this);
    if (verdict.ruling == Admission::crossing) {
      std::erase_if(connector.greetings_, [this](const auto& g) {
        return g->step == Step::crossed && !g->connection.is_opener &&
               g->connection.rank == connection.rank;  // a call before this one
      });
      return cross();
    }
    if (!is_welcome) return connector.end(*this);
    finish();
  }

  void cross() {
    step = Step::crossed;
    connection.memory.close();
    connection.presence.close();
  }

  // Nothing is said any more on a connection that was crossed: it is over, or the system has woken us for nothing.
  void on_parted() {
    byte word;
    iovec part{&word, 1};
    ssize_t n;
    do
      n = connection.stream != nullptr ? connection.stream->readv(&part, 1)
                                       : recv(connection.socket.get(), &word, 1, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0 && errno == EAGAIN) return;
    if (connection.is_opener) return connector.refuse(*this, "died: its connection was closed");
    connector.end(*this);
  }

  void on_verdict() {
    if (verdict.ruling == Admission::crossing) return cross();
    if (verdict.ruling == Admission::leaving) return connector.refuse(*this, "left", Admission::leaving);
    if (verdict.ruling != Admission::welcome) return connector.refuse(*this, "it refuses the link");
    if (connection.medium == Medium::shm && !connection.presence)
      return connector.refuse(*this, "it shows no presence");
    connection.probe = verdict.probe;
    finish();
  }

  void finish() {
    unwatch();
    if (tls != nullptr) tls->trust();
    NewConnection made = std::move(connection);
    Host& host = connector.host_;
    connector.end(*this);
    host.on_connection(std::move(made));
  }
};

// ---- the connector ----

Connector::Connector(Host& host, Poller& poller) : host_(host), poller_(poller), pinger_(host, poller) {}

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
      fail(directory + ": allowed: a folder of one's own with mode 0700");
    card_.unix_path = directory + "/r" + std::to_string(rank) + "-" + hex(salt) + ".sock";
    sockaddr_un address;
    const socklen_t length = unix_address(address, card_.unix_path, directory_.get());
    Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket || length == 0 || bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0)
      fail(failure(("cannot listen on " + card_.unix_path).c_str()));
    listeners_[0] = std::make_unique<Listener>(*this, std::move(socket), Medium::shm, card_.unix_path);
    if (listen(/* owned by the listener */ listeners_[0]->fd(), 4096) != 0) fail(failure("cannot listen"));
  }

  sockaddr_storage address{};
  const socklen_t length = tcp_address(address, settings.bind, settings.port);
  if (length == 0) fail(settings.bind + " is no numeric address");
  Descriptor socket;
  // The same number for datagrams: if it is not free, and any other will do, another one.
  for (int tries = settings.port == 0 ? ports_tried_max : 1; tries > 0; --tries) {
    sockaddr_storage bound = address;
    socket = listen_at(bound, length);
    if (pinger_.open(rank, secret_, bound, length)) {
      address = bound;
      break;
    }
    if (tries == 1)
      fail(failure(("cannot listen on " + settings.bind + " port " + std::to_string(settings.port) + ", UDP").c_str()));
  }
  card_.address = settings.bind;
  card_.port = port_of(address);
  listeners_[1] = std::make_unique<Listener>(*this, std::move(socket), Medium::tcp, "");
}

// Listen for calls; the address gets the port that the system chose.
Descriptor Connector::listen_at(sockaddr_storage& address, socklen_t bytes) {
  Descriptor socket(::socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  if (socket) setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (!socket || bind(socket.get(), reinterpret_cast<sockaddr*>(&address), bytes) != 0 ||
      listen(socket.get(), 4096) != 0)
    fail(failure(("cannot listen on " + settings_.bind + " port " + std::to_string(settings_.port)).c_str()));
  getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &bytes);
  return socket;
}

void Connector::cache_decision(std::int32_t rank, const Card& card) {
  sockaddr_storage address{};
  if (const socklen_t bytes = tcp_address(address, card.address, card.port); bytes != 0)
    pinger_.set_address(rank, address, bytes);
}

void Connector::secure(const TlsMaterial& material) {
  if (!settings_.tls || identity_ != nullptr) fail("allowed: an identity, once, for a rank with TLS");
  if (material.names.size() != static_cast<size_t>(size_)) fail("allowed: one name per rank");
  identity_ = std::make_unique<TlsIdentity>(material, rank_, settings_.rekey_records);
  for (auto& one : listeners_)
    if (one != nullptr) one->watch();
}

void Connector::accept_from(int listener, Medium medium) {
  for (;;) {
    sockaddr_storage from{};
    socklen_t from_bytes = sizeof from;
    Descriptor socket(accept4(listener, reinterpret_cast<sockaddr*>(&from), &from_bytes, SOCK_CLOEXEC | SOCK_NONBLOCK));
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
    make_room(group_of(from));
    auto greeting = std::make_unique<Greeting>(*this, stranger_ns);
    greeting->connection.medium = medium;
    greeting->connection.is_opener = false;
    greeting->address = from;
    greeting->address_bytes = from_bytes;
    if (!greeting->take(std::move(socket))) continue;
    greeting->begin(EPOLLIN);
    Greeting& g = *greeting;
    greetings_.push_back(std::move(greeting));
    g.open();
  }
}

// One of the oldest strangers goes if there are too many, first one from the same address.
void Connector::make_room(const std::string& group) {
  const auto is_stranger = [](const auto& g) { return !g->connection.is_opener && !g->is_proven; };
  const auto is_same = [&](const auto& g) { return is_stranger(g) && group_of(g->address) == group; };
  auto oldest = greetings_.end();
  if (static_cast<size_t>(std::count_if(greetings_.begin(), greetings_.end(), is_same)) >= strangers_per_address_max)
    oldest = std::find_if(greetings_.begin(), greetings_.end(), is_same);
  else if (static_cast<size_t>(std::count_if(greetings_.begin(), greetings_.end(), is_stranger)) >= strangers_max)
    oldest = std::find_if(greetings_.begin(), greetings_.end(), is_stranger);
  if (oldest != greetings_.end()) refuse(**oldest, "too many strangers");
}

void Connector::connect(std::int32_t rank, const Card& card, Medium medium, Lane lane, bool checksum) {
  const bool is_unix = medium == Medium::shm;
  sockaddr_storage address{};
  socklen_t length;
  if (is_unix)
    length = unix_address(reinterpret_cast<sockaddr_un&>(address), card.unix_path, directory_.get());
  else
    length = tcp_address(address, card.address, card.port);
  if (length == 0) return host_.on_refused(rank, "its address makes no sense", Admission::unknown);
  auto greeting = std::make_unique<Greeting>(*this, settings_.silence_ns);
  Greeting& g = *greeting;
  if (card.host == card_.host) g.pid = card.pid;
  g.address = address;
  g.address_bytes = length;
  g.connection.rank = rank;
  g.connection.medium = medium;
  g.connection.lane = lane;
  g.connection.checksum = checksum;
  g.connection.is_opener = true;
  std::memcpy(g.hello.magic, magic, sizeof magic);
  g.hello.version = protocol_version;
  g.hello.size = static_cast<uint32_t>(size_);
  g.hello.from = static_cast<uint32_t>(rank_);
  g.hello.to = static_cast<uint32_t>(rank);
  g.hello.medium = medium;
  g.hello.lane = lane;
  g.hello.checksum = checksum;
  g.hello.eager_credit_bytes = settings_.eager_credit_bytes;
  g.step = Greeting::Step::resting;
  g.is_due = has_due_ = true;
  greetings_.push_back(std::move(greeting));
  dial_due();
}

void Connector::dial_due() {
  // Whoever ends makes room, and moves the others: then once more from the start.
  while (std::exchange(has_due_, false)) {
    bool is_roomy = has_room();
    for (size_t i = 0; i < greetings_.size(); ++i) {
      if (!greetings_[i]->is_due || (!is_roomy && greetings_[i]->is_limited())) continue;
      dial(*greetings_[i]);
      is_roomy = has_room();
    }
  }
}

bool Connector::has_room() const {
  return std::count_if(greetings_.begin(), greetings_.end(), [this](const auto& g) { return g->is_work(beat_ns_); }) <
         calls_max;
}

void Connector::dial(Greeting& g) {
  ++g.calls;
  g.is_due = false;
  g.idle_ns = 0;
  if (!fill_random(g.hello.nonce, sizeof g.hello.nonce)) return refuse(g, failure("no random bytes"));
  Descriptor socket(::socket(g.address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket || !g.take(std::move(socket))) return refuse(g, failure("no socket to reach it"));
  int result;
  do result = ::connect(g.fd(), reinterpret_cast<sockaddr*>(&g.address), g.address_bytes);
  while (result != 0 && errno == EINTR);
  if (result != 0 && errno != EINPROGRESS) return on_unreached(g, errno);
  g.step = Greeting::Step::connecting;
  g.begin(result == 0 ? EPOLLIN : EPOLLOUT);
  if (result == 0) g.open();
}

// The other side hung up in the middle: a dead one will not be there any more, a crowded one will. Once more at once,
// then with every heartbeat, until the greeting's time is over.
void Connector::again(Greeting& g) {
  // A caller that hangs up has found another way, or was just curious: nobody was refused.
  if (!g.connection.is_opener) return end(g);
  ++g.hang_ups;
  g.trouble = "it hung up " + (g.hang_ups == 1 ? "" : std::to_string(g.hang_ups) + " times ") + "during the greeting";
  if (g.connection.medium == Medium::shm) return refuse(g, g.unreached(g.trouble));
  g.rest();
  if (g.calls == 1) dial(g);
}

// Nobody listens there, or the network does not carry us now and may do so soon.
void Connector::on_unreached(Greeting& g, int error) {
  if (error == ECONNRESET) return again(g);
  g.trouble = strerror(error);
  if (error != EHOSTUNREACH && error != ENETUNREACH && error != ENETDOWN && error != ETIMEDOUT)
    return refuse(g, g.unreached(g.trouble));
  g.rest();
}

void Connector::forget(std::int32_t rank) {
  has_due_ = true;
  std::erase_if(greetings_, [rank](const auto& g) {
    return g->connection.rank == rank && (g->connection.is_opener || g->step == Greeting::Step::crossed);
  });
}

bool Connector::is_dialling(std::int32_t rank) const {
  return std::any_of(greetings_.begin(), greetings_.end(),
                     [rank](const auto& g) { return g->connection.rank == rank && g->is_dialling(); });
}

bool Connector::is_crossed(std::int32_t rank) const {
  return std::any_of(greetings_.begin(), greetings_.end(), [rank](const auto& g) {
    return g->connection.is_opener && g->connection.rank == rank && g->step == Greeting::Step::crossed;
  });
}

bool Connector::is_calling(std::int32_t rank) const {
  return std::any_of(greetings_.begin(), greetings_.end(),
                     [rank](const auto& g) { return g->connection.is_opener && g->connection.rank == rank; });
}

bool Connector::is_greeting() const {
  return std::any_of(greetings_.begin(), greetings_.end(), [](const auto& g) {
    return g->connection.is_opener || g->step == Greeting::Step::await_introduction;
  });
}

void Connector::tick(std::int64_t passed_ns) {
  for (auto& one : listeners_)
    if (one != nullptr) one->watch();
  for (const auto& g : greetings_) {
    if (g->connection.is_opener && g->calls == 0) continue;  // not called so far
    g->patience_ns -= passed_ns;
    g->waited_ns += passed_ns;
    g->idle_ns += passed_ns;
  }
  // Whoever was crossed waits for a call, and that has its own time.
  const auto is_late = [](const auto& g) {
    return g->patience_ns <= 0 && g->step != Greeting::Step::crossed && !g->is_starved();
  };
  // From the start each time: anything may have changed.
  for (auto late = greetings_.begin();
       (late = std::find_if(greetings_.begin(), greetings_.end(), is_late)) != greetings_.end();)
    refuse(**late, (*late)->late());
  for (const auto& g : greetings_) g->is_due = g->step == Greeting::Step::resting;
  beat_ns_ = passed_ns;
  has_due_ = true;
  dial_due();
}

void Connector::close(bool keep_files) {
  for (auto& one : listeners_) {
    if (one != nullptr && keep_files) one->leave_file();
    one.reset();
  }
  greetings_.clear();
  pinger_.close();
  directory_.close();
}

void Connector::end(Greeting& greeting) {
  has_due_ = true;
  std::erase_if(greetings_, [&greeting](const auto& g) { return g.get() == &greeting; });
}

void Connector::refuse(Greeting& greeting, std::string cause, Admission ruling) {
  const bool is_opener = greeting.connection.is_opener;
  const std::int32_t rank = greeting.connection.rank;
  if (!is_opener) {
    ++refused_;
    if (refusals_.size() < refusals_max)
      refusals_.push_back(greeting.connection.medium == Medium::shm
                              ? "a caller on this host: " + cause
                              : std::string("a caller from ") + host_of(greeting.address, greeting.address_bytes) +
                                    ": " + cause);
  }
  end(greeting);
  if (is_opener) host_.on_refused(rank, cause, ruling);
}

std::vector<std::string> Connector::take_refusals() {
  std::vector<std::string> taken(refusals_.begin(), refusals_.end());
  refusals_.clear();
  return taken;
}

Proof Connector::prove(const char* role, const Hello& hello, const byte* nonce) const {
  std::vector<byte> words(reinterpret_cast<const byte*>(&hello), reinterpret_cast<const byte*>(&hello) + sizeof hello);
  words.insert(words.end(), nonce, nonce + 32);
  return hmac_sha256(reinterpret_cast<const byte*>(secret_.data()), secret_.size(), reinterpret_cast<const byte*>(role),
                     std::strlen(role), words.data(), words.size());
}

}  // namespace unisono::engine
