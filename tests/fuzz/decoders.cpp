// Fuzzing what the engine reads from others: frames of a connection, frames in QUIC streams and datagrams, the memory
// of a ring, a greeting at the connector, datagrams at a port. The first two have one corpus; to that of datagrams the
// first one of a member is added.
//
//   decoders <tcp|quic|datagram|ring|connector> <inputs> <seed> <corpus folder>
//
// Each input is a seed of the corpus, changed at random by a generator that gives the same again for the same number.
// Built with sanitizers, it ends at the first bad access. It also ends if memory grows. An input is a file of
// tests/corpus; tests/native/test_corpus.py replays all of them against a real rank.

#include <dirent.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "../native/settings.hpp"
#include "connect/connector.hpp"
#include "link/tcp_link.hpp"
#ifdef UNISONO_QUIC
#include "../native/idle_owner.hpp"
#include "../native/quic_world.hpp"
#include "datagrams.hpp"
#include "link/quic_link.hpp"
#endif

using namespace unisono::engine;

namespace {

using Input = std::vector<byte>;

void check(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

// ---- a peer with something under way ----

class SomeSend final : public Send {
 public:
  void end(Outcome) override {}
};

class SomeReceive final : public Receive {
 public:
  MatchResult on_match(const Envelope& envelope, bool is_here) override {
    // A sender must not make us allocate more than was asked for.
    if (envelope.nbytes > sizeof into_) return MatchResult::reject;
    return is_late_ && !is_here ? MatchResult::defer : MatchResult::accept;
  }
  byte* buffer() override { return is_streamed_ ? nullptr : into_; }
  void write(uint64_t offset, const byte* from, size_t bytes) override { std::memcpy(into_ + offset, from, bytes); }
  void end(Outcome, std::int32_t) override {}
  bool is_late_ = false;
  bool is_streamed_ = false;

 private:
  byte into_[300];
};

class Services final : public PeerServices {
 public:
  void open_link(Peer&) override {}
  void start_reading(RendezvousReceive& offer) override { readers.push_back(offer); }
  void stop_reading(RendezvousReceive& offer) override { readers.remove(offer); }
  void on_rank_down(uint64_t, std::string, bool) override {}
  IntrusiveList<RendezvousReceive, &RendezvousReceive::hook> readers;
};

// One side of a link, with receives that wait and sends that were offered: what the corpus talks about.
class Place {
 public:
  Place() : peer_(services_, 1, false) {
    services_.settings = test_settings();
    services_.settings.eager_bytes = 64;
    services_.settings.eager_credit_bytes = 1024;
  }
  Peer& peer() { return peer_; }

  void open(std::unique_ptr<Link> link) {
    peer_.on_open(std::move(link));
    for (size_t i = 0; i < std::size(receives_); ++i) {
      SomeReceive& receive = receives_[i];
      receive.context = 1 + i / 4;
      receive.tag = i % 4;
      receive.any_tag = i == 3;
      receive.source = i == 2 ? any_source : 1;
      receive.is_late_ = i == 1;
      receive.is_streamed_ = i % 2 == 1;
      if (!services_.inbox.serve(receive)) services_.inbox.post(receive);
    }
    for (size_t i = 0; i < std::size(sends_); ++i) {
      sends_[i].context = 9;
      sends_[i].tag = i;
      sends_[i].data = data_;
      sends_[i].nbytes = i == 0 ? sizeof data_ : i * 20;
      sends_[i].sync = i > 0;
      peer_.send(sends_[i]);
    }
  }

  void live() {
    byte scratch[512];
    for (int i = 0; i < 4 && peer_.link->over() == nullptr; ++i) {
      peer_.link->poll();
      for (size_t turns = services_.readers.size(); turns > 0 && !services_.readers.empty(); --turns)
        if (peer_.read_piece(*services_.readers.front(), scratch, sizeof scratch, sizeof scratch) != nullptr) return;
      for (SomeReceive& receive : receives_)
        if (receive.is_late_ && receive.incoming != nullptr &&
            receive.incoming->state == RendezvousReceive::State::awaiting_memory)
          peer_.rendezvous.supply(*receive.incoming);
      if (peer_.has_backlog() && peer_.link->over() == nullptr) peer_.flush();
    }
  }

  void close() {
    peer_.state = Peer::State::down;
    peer_.end_all(Outcome::peer_down);
    services_.inbox.end_all(Outcome::closed);
    peer_.link.reset();
  }

 private:
  Services services_;
  Peer peer_;
  SomeReceive receives_[6];
  SomeSend sends_[3];
  byte data_[5000] = {};
};

// ---- frames of a connection ----

// A stream in memory: reads return the input, then the end; writes stop once `room` bytes are written.
class InputStream final : public ByteStream {
 public:
  InputStream(int fd, size_t room) : fd_(fd), room_(room) {}
  void append(const byte* from, size_t bytes) { input_.insert(input_.end(), from, from + bytes); }
  void hang_up() { is_over_ = true; }

  ssize_t readv(const iovec* parts, int count) override {
    size_t given = 0;
    for (int i = 0; i < count; ++i) {
      const size_t bytes = std::min(parts[i].iov_len, input_.size() - at_);
      if (bytes != 0) std::memcpy(parts[i].iov_base, input_.data() + at_, bytes);
      at_ += bytes;
      given += bytes;
    }
    return given != 0 || is_over_ ? static_cast<ssize_t>(given) : nothing();
  }
  ssize_t writev(const iovec* parts, int count) override {
    size_t wanted = 0;
    for (int i = 0; i < count; ++i) wanted += parts[i].iov_len;
    const size_t taken = std::min(wanted, room_);
    room_ -= taken;
    return taken != 0 ? static_cast<ssize_t>(taken) : nothing();
  }
  void finish() override {}
  int fd() const override { return fd_; }
  const char* name() const override { return "input"; }

 private:
  static ssize_t nothing() {
    errno = EAGAIN;
    return -1;
  }

  const int fd_;
  size_t room_;
  Input input_;
  size_t at_ = 0;
  bool is_over_ = false;
};

// The first byte says on which lane the rest comes, whether payload is followed by a checksum, and whether the other
// side reads slowly.
void feed_tcp(const Input& input) {
  static Poller poller;
  static const bool is_open = poller.open();
  static const Descriptor events[lane_count] = {Descriptor(eventfd(0, EFD_CLOEXEC)),
                                                Descriptor(eventfd(0, EFD_CLOEXEC))};
  check(is_open && events[0] && events[1], "there is a poller");
  if (input.empty()) return;
  const auto first = static_cast<uint8_t>(input[0]);
  const bool checksum = (first & 2) != 0;
  SocketPolicy policy;
  InputStream* streams[lane_count];
  std::unique_ptr<Connection> lanes[lane_count];
  Place place;
  for (size_t i = 0; i < lane_count; ++i) {
    auto made = std::make_unique<InputStream>(events[i].get(), (first & 4) != 0 ? 1000 : SIZE_MAX);
    streams[i] = made.get();
    lanes[i] =
        std::make_unique<Connection>(place.peer(), poller, std::move(made), static_cast<Lane>(i), checksum, policy);
  }
  InputStream& stream = *streams[first & 1];
  place.open(std::make_unique<TcpLink>(place.peer(), std::move(lanes[0]), std::move(lanes[1]), policy));
  // In two pieces: a frame may be cut anywhere.
  const size_t cut = 1 + (input.size() - 1) / 2;
  for (const auto& [from, to] : {std::pair{size_t{1}, cut}, std::pair{cut, input.size()}}) {
    stream.append(input.data() + from, to - from);
    place.live();
  }
  stream.hang_up();
  place.live();
  place.close();
}

// ---- frames in QUIC streams, and datagrams ----

#ifdef UNISONO_QUIC
// The first byte chooses the stream whose bytes follow; or, above 127, that the rest is a datagram, above 191 with the
// id of a connection.
void feed_quic(const Input& input) {
  static Poller poller;
  static IdleOwner owner;
  static QuicEndpoint endpoint(owner, poller);
  static const TestAuthority authority(2);
  static QuicWorld world(authority.material(0), authority.material(1), 1);
  static const bool is_linked = world.link();
  check(is_linked, "there is a link");
  if (input.empty()) return;
  const auto first = static_cast<uint8_t>(input[0]);
  QuicRank& rank = world.ranks[1];
  if (first > 127) {
    Input datagram(input.begin() + 1, input.end());
    const QuicId id = rank.routes.begin()->first;
    if (first > 191 && datagram.size() > sizeof id) {
      datagram[0] = static_cast<byte>(0x40 | (static_cast<uint8_t>(datagram[0]) & 0x3f));
      std::memcpy(datagram.data() + 1, &id, sizeof id);
    }
    rank.receive(world.addresses[0], datagram, world.now);
    check(rank.connection->state() == QuicState::linked, "a forged datagram ends nothing");
    return;
  }
  Place place;
  SocketPolicy policy;
  policy.corked = 1;  // nothing is sent
  auto made = std::make_unique<QuicLink>(place.peer(), endpoint, *rank.connection, policy);
  QuicLink& link = *made;
  place.open(std::move(made));
  // In two pieces: a frame may be cut anywhere.
  const size_t cut = 1 + (input.size() - 1) / 2;
  const auto stream = static_cast<QuicStream>(first % quic_stream_count);
  for (const auto& [from, to] : {std::pair{size_t{1}, cut}, std::pair{cut, input.size()}}) {
    if (link.on_bytes(stream, input.data() + from, to - from) != nullptr) break;
    place.live();
  }
  place.close();
}
#endif

// ---- the memory of a ring ----

// Bytes 0-15: the lane, then what the peer wrote into the words of our own ring and into an offer word of its own;
// the rest lies in the peer's ring.
void feed_ring(const Input& input) {
  static Poller poller;
  static const bool is_open = poller.open();
  static const Descriptor memory = ShmLink::make_memory();
  static Presence presence;
  static const bool is_present = presence.open();
  static const Mapping view = Mapping::of(memory.get(), sizeof(LinkMemory), PROT_READ | PROT_WRITE);
  check(is_open && is_present && memory && view, "there is memory");
  if (input.size() < 16) return;
  auto* m = reinterpret_cast<LinkMemory*>(view.at());
  const auto first = static_cast<uint8_t>(input[0]);
  const size_t lane = first & 1;
  std::memset(static_cast<void*>(m->rings), 0, sizeof m->rings);
  std::memset(static_cast<void*>(m->offers), 0, 256);
  std::memset(static_cast<void*>(m->offers[1]), 0, 256);
  byte* ring = lane == 0 ? m->bulk[1] : m->control[1];
  const size_t bytes = std::min(input.size() - 16, control_ring_bytes - line_bytes);
  std::memset(m->bulk[1], 0, control_ring_bytes);
  std::memset(m->control[1], 0, control_ring_bytes);
  std::memcpy(ring, input.data() + 16, bytes);
  int pair[2];
  check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "there are sockets");
  const Descriptor far(pair[1]);
  Place place;
  std::string why;
  Descriptor page(dup(presence.fd()));
  auto link = ShmLink::open(place.peer(), poller, Descriptor(pair[0]), memory, page, true, Probe{}, why);
  check(link != nullptr, why.c_str());
  place.open(std::move(link));
  uint64_t head;
  uint32_t word;
  std::memcpy(&head, input.data() + 2, sizeof head);
  std::memcpy(&word, input.data() + 10, sizeof word);
  if ((first & 2) != 0) m->rings[0][lane].head.store(head);
  if ((first & 4) != 0) m->rings[0][lane].wants_room.store(word);
  if ((first & 8) != 0) m->offers[1][static_cast<uint8_t>(input[14]) % 64].store(word);
  if ((first & 16) != 0) m->offers[0][static_cast<uint8_t>(input[15]) % 64].store(word);
  place.live();
  place.close();
}

// ---- a handshake ----

class AdmitAll final : public ConnectionOwner {
 public:
  Admission admit(std::int32_t) override { return Admission::welcome; }
  Peer* on_admitted(std::int32_t) override { return nullptr; }
  void on_link(Peer&, std::unique_ptr<Link>) override {}
  void on_refused(std::int32_t, const std::string&, Admission) override {}
  bool is_given_up(std::int32_t) override { return false; }
  void on_answer(std::int32_t, bool) override {}
};

constexpr char secret[] = "secret";

Proof proof_of(const char* role, const Hello& hello, const byte* nonce) {
  Input words(reinterpret_cast<const byte*>(&hello), reinterpret_cast<const byte*>(&hello) + sizeof hello);
  words.insert(words.end(), nonce, nonce + 32);
  return hmac_sha256(reinterpret_cast<const byte*>(secret), std::strlen(secret), reinterpret_cast<const byte*>(role),
                     std::strlen(role), words.data(), words.size());
}

// The first byte chooses the sender: a stranger (0), with a sound hello (1), with a proof (2), or an acceptor that we
// called (3), with the right proof (4).
void feed_connector(const Input& input, const std::string& folder) {
  static Poller poller;
  static Presence presence;
  static AdmitAll owner;
  static SocketPolicy policy;
  static std::unique_ptr<Connector> connector;
  static Descriptor listener;
  static sockaddr_un address{};
  static std::string path = folder + "/them.sock";
  Settings settings = test_settings();
  if (connector == nullptr) {
    check(poller.open() && presence.open(), "there is memory");
    connector = std::make_unique<Connector>(owner, poller, policy);
    connector->open(0, 2, folder, secret, settings, presence);
    address.sun_family = AF_UNIX;
    std::snprintf(address.sun_path, sizeof address.sun_path, "%s", path.c_str());
    listener = Descriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0));
    unlink(path.c_str());
    check(bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0, "a name is free");
    check(listen(listener.get(), 16) == 0, "it listens");
  }
  if (input.empty()) return;
  const unsigned mode = static_cast<uint8_t>(input[0]) % 5;
  const byte* at = input.data() + 1;
  size_t left = input.size() - 1;
  const auto work = [&] {
    Poller::Events events;
    for (int i = 0; i < 3; ++i) poller.dispatch(events, poller.wait(events, 0));
  };
  Descriptor us;
  const auto say = [&](const void* data, size_t bytes) {
    [[maybe_unused]] const ssize_t n = ::send(us.get(), data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    work();
  };
  // A struct from the input, as far as it goes.
  const auto take = [&](auto& into) {
    const size_t bytes = std::min(left, sizeof into);
    std::memcpy(static_cast<void*>(&into), at, bytes);
    at += bytes;
    left -= bytes;
  };
  if (mode < 3) {
    us = Descriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0));
    sockaddr_un to{};
    to.sun_family = AF_UNIX;
    std::snprintf(to.sun_path, sizeof to.sun_path, "%s", connector->card().unix_path.c_str());
    if (connect(us.get(), reinterpret_cast<sockaddr*>(&to), sizeof to) != 0) return work();
    if (mode > 0) {
      Hello hello{};
      std::memcpy(hello.magic, "unisono\n", 8);
      hello.version = protocol_version;
      hello.size = 2;
      hello.from = 1;
      hello.eager_credit_bytes = settings.eager_credit_bytes;
      say(&hello, sizeof hello);
      Challenge challenge{};
      if (::recv(us.get(), &challenge, sizeof challenge, MSG_DONTWAIT) == sizeof challenge && mode == 2) {
        Introduction introduction{};
        take(introduction);
        introduction.proof = proof_of("opener", hello, challenge.nonce);
        say(&introduction, sizeof introduction);
      }
    }
    say(at, left);
  } else {
    connector->connect(1, Card{connector->card().host, path, "127.0.0.1", 1});
    us = Descriptor(accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK));
    Hello hello{};
    if (us && ::recv(us.get(), &hello, sizeof hello, MSG_DONTWAIT) == sizeof hello && mode == 4) {
      Challenge challenge{};
      take(challenge);
      challenge.proof = proof_of("acceptor", hello, challenge.nonce);
      say(&challenge, sizeof challenge);
    }
    if (us) say(at, left);
  }
  us.close();
  work();
  connector->forget(1);
}

// ---- changing inputs ----

class Mutator {
 public:
  Mutator(unsigned seed, std::vector<Input> corpus) : random_(seed), corpus_(std::move(corpus)) {}

  Input next() {
    Input input = pick();
    for (size_t changes = random_() % 5; changes > 0; --changes) change(input);
    if (input.size() > 8192) input.resize(8192);
    return input;
  }

 private:
  const Input& pick() { return corpus_[random_() % corpus_.size()]; }
  size_t place(const Input& input) { return input.empty() ? 0 : random_() % input.size(); }

  void change(Input& input) {
    static constexpr uint64_t odd[] = {0,
                                       1,
                                       63,
                                       64,
                                       65,
                                       255,
                                       1024,
                                       0x7fff,
                                       0xffff,
                                       0x7fffffff,
                                       0xffffffff,
                                       0x100000000,
                                       0x100000001,
                                       0x7fffffffffffffff,
                                       0xffffffffffffffff};
    if (input.empty()) return input.resize(1 + random_() % 64, static_cast<byte>(random_()));
    switch (random_() % 8) {
      case 0: input[place(input)] ^= static_cast<byte>(1u << random_() % 8); break;
      case 1: input[place(input)] = static_cast<byte>(random_()); break;
      case 2: {
        const uint64_t value = odd[random_() % std::size(odd)];
        const size_t bytes = size_t{1} << random_() % 4, at = place(input) / bytes * bytes;
        if (at + bytes <= input.size()) std::memcpy(input.data() + at, &value, bytes);
        break;
      }
      case 3: input.resize(place(input)); break;
      case 4: {
        const Input& other = pick();
        const size_t at = place(other);
        input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(at), other.end());
        break;
      }
      case 5: {
        const size_t at = place(input), bytes = std::min<size_t>(random_() % 64, input.size() - at);
        const Input piece(input.begin() + static_cast<std::ptrdiff_t>(at),
                          input.begin() + static_cast<std::ptrdiff_t>(at + bytes));
        input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), piece.begin(), piece.end());
        break;
      }
      case 6: {
        const size_t at = place(input), bytes = std::min<size_t>(random_() % 64, input.size() - at);
        input.erase(input.begin() + static_cast<std::ptrdiff_t>(at),
                    input.begin() + static_cast<std::ptrdiff_t>(at + bytes));
        break;
      }
      default:
        for (size_t i = place(input), end = std::min(input.size(), i + 8); i < end; ++i)
          input[i] = static_cast<byte>(random_());
    }
  }

  std::mt19937 random_;
  std::vector<Input> corpus_;
};

std::vector<Input> read_corpus(const std::string& folder) {
  std::vector<std::string> names;
  DIR* listing = opendir(folder.c_str());
  check(listing != nullptr, "the corpus is there");
  while (const dirent* entry = readdir(listing))
    if (entry->d_name[0] != '.') names.push_back(folder + "/" + entry->d_name);
  closedir(listing);
  std::sort(names.begin(), names.end());
  std::vector<Input> corpus;
  for (const std::string& name : names) {
    std::ifstream file(name, std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const auto* raw = reinterpret_cast<const byte*>(text.data());
    corpus.emplace_back(raw, raw + text.size());
  }
  check(!corpus.empty(), "the corpus holds something");
  return corpus;
}

size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  size_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * 4096;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "decoders <tcp|quic|datagram|ring|connector> <inputs> <seed> <corpus folder>\n");
    return 2;
  }
  const std::string decoder = argv[1];
  const size_t count = std::strtoul(argv[2], nullptr, 10);
  char folder[] = "/tmp/unisono-fuzz-XXXXXX";
  check(mkdtemp(folder) != nullptr, "there is a folder");
  std::vector<Input> corpus = read_corpus(argv[4]);
#ifdef UNISONO_QUIC
  if (decoder == "datagram")
    for (Input& made : first_datagrams()) corpus.push_back(std::move(made));
#endif
  const auto feed = [&](const Input& input) {
    if (decoder == "tcp") return feed_tcp(input);
    if (decoder == "ring") return feed_ring(input);
#ifdef UNISONO_QUIC
    if (decoder == "quic") return feed_quic(input);
    if (decoder == "datagram") return feed_datagram(input);
#endif
    check(decoder == "connector", "the decoder is one of tcp, quic, datagram, ring, connector");
    feed_connector(input, folder);
  };
  for (const Input& input : corpus) feed(input);
  Mutator mutator(static_cast<unsigned>(std::strtoul(argv[3], nullptr, 10)), std::move(corpus));
  const std::int64_t start = now_ns();
  size_t before = 0;
  for (size_t i = 0; i < count; ++i) {
    feed(mutator.next());
    // Pools and the sanitizer's own memory have their size by then.
    if (i == count / 2) before = resident_bytes();
  }
  const size_t after = resident_bytes();
  std::printf("%s: %zu inputs in %.0f s, memory grew by %zd KiB in the second half\n", decoder.c_str(), count,
              static_cast<double>(now_ns() - start) / 1e9,
              (static_cast<ssize_t>(after) - static_cast<ssize_t>(before)) / 1024);
  check(after < before + (8 << 20), "memory does not grow");
  unlink((std::string(folder) + "/them.sock").c_str());
}
