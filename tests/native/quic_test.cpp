// QUIC connections in a world without sockets: a network that loses, doubles, reorders and delays, and a test's clock.
// One case has an endpoint on a socket.
//
// quic_test [one of the cases, such as streams]

#include <cstring>

#include "link/quic_endpoint.hpp"
#include "quic_world.hpp"

using namespace unisono::engine;

namespace {

std::vector<byte> pattern(size_t bytes, unsigned seed) {
  std::vector<byte> made(bytes);
  std::mt19937 random(seed);
  for (auto& one : made) one = static_cast<byte>(random());
  return made;
}

// Every row of the table is in the array, every other pair is refused, and every state can be reached.
void test_machine() {
  size_t listed = 0;
  bool reached[7] = {true, false, true};
  for (int rounds = 0; rounds < 7; ++rounds)
    for (size_t s = 0; s < 7; ++s)
      for (size_t e = 0; e < 5; ++e) {
        const auto state = static_cast<QuicState>(s);
        const auto event = static_cast<QuicEvent>(e);
        if (rounds == 0) listed += quic_transitions.allows(state, event);
        if (reached[s] && quic_transitions.allows(state, event))
          reached[static_cast<size_t>(quic_transitions.next(state, event))] = true;
      }
  must(listed == quic_transitions.row_count, "every row is in the array");
  for (const bool is_reached : reached) must(is_reached, "every state can be reached");
}

// Copies and lent memory in any order, sent and acknowledged in any portions: the stream is what was put.
void test_queue() {
  for (unsigned seed = 1; seed <= 50; ++seed) {
    std::mt19937 random(seed);
    QuicSendQueue queue;
    std::vector<byte> put, got;
    std::vector<std::vector<byte>> lent;
    std::vector<uint64_t> ends;  // of what was lent
    uint64_t acknowledged = 0;
    for (int step = 0; step < 400; ++step) {
      const size_t bytes = random() % 5 == 0 ? random() % 40'000 : random() % 100;
      switch (random() % 4) {
        case 0: {
          const std::vector<byte> made = pattern(bytes, random());
          queue.append(made.data(), made.size());
          put.insert(put.end(), made.begin(), made.end());
          break;
        }
        case 1: {
          lent.push_back(pattern(bytes, random()));
          queue.lend(lent.back().data(), bytes, lent.size());
          put.insert(put.end(), lent.back().begin(), lent.back().end());
          ends.push_back(bytes == 0 ? 0 : put.size());
          break;
        }
        case 2: {
          QuicSendQueue::Part parts[3];
          const size_t count = queue.next(parts, 3, 20'000);
          must((count != 0) == (queue.unsent() != 0), "what is unsent is offered");
          size_t total = 0;
          for (size_t i = 0; i < count; ++i) total += parts[i].bytes;
          must(total <= 20'000, "no more than was asked for");
          size_t take = total == 0 ? 0 : random() % (total + 1);
          queue.sent(take);
          for (size_t i = 0; i < count && take != 0; ++i) {
            const size_t here = std::min(take, parts[i].bytes);
            got.insert(got.end(), parts[i].at, parts[i].at + here);
            take -= here;
          }
          break;
        }
        default: acknowledged += (got.size() - acknowledged) * (random() % 3) / 2; queue.acknowledged(acknowledged);
      }
      must(queue.unsent() == put.size() - got.size(), "the unsent bytes are counted");
      for (size_t i = 0; i < ends.size(); ++i)
        must(queue.lends(i + 1) == (ends[i] > acknowledged), "memory is lent until it is acknowledged");
    }
    must(std::equal(got.begin(), got.end(), put.begin()), "bytes are sent in order");
  }
}

void test_handshake() {
  const TestAuthority authority(2);
  QuicWorld world(authority.material(0), authority.material(1), 1);
  world.weather.delay_ns = 10 * millisecond;
  const std::int64_t began = world.now;
  must(world.link(), "a link is made");
  must(world.ranks[0].connection->rank() == 1 && world.ranks[1].connection->rank() == 0, "certificates name the ranks");
  must(world.ranks[0].linked_at - began == 40 * millisecond, "a link is up after two round trips");
  // Everything that was said is acknowledged, and then nothing is sent any more: heartbeats are not the library's.
  must(world.run(
           [&] { return world.ranks[0].connection->is_acknowledged() && world.ranks[1].connection->is_acknowledged(); },
           second),
       "the greetings are acknowledged");
  world.run([] { return false; }, second);
  const size_t before = world.thrown;
  world.run([] { return false; }, 100 * second);
  must(world.thrown == before, "an idle connection is silent");
}

void expect_refusal(QuicWorld& world, int by, const char* text, int called = 1) {
  world.open(called);
  const auto closed = [&](int i) {
    return world.ranks[i].connection != nullptr && world.ranks[i].connection->state() == QuicState::closed;
  };
  must(world.run([&] { return closed(by); }, 10 * second), "the connection is refused");
  must(!world.ranks[0].is_read && !world.ranks[1].is_read, "no rank is linked");
  const std::string& why = world.ranks[by].connection->why();
  if (why.find(text) == std::string::npos) std::fprintf(stderr, "it says: %s\n", why.c_str());
  must(why.find(text) != std::string::npos, "the refusal says why");
}

void test_strangers() {
  const TestAuthority ours(2), theirs(2), wider(3);
  {
    QuicWorld world(ours.material(0), theirs.material(1), 1);
    expect_refusal(world, 0, "not from this job's seed");
  }
  {
    // It trusts our authority, so that only its own certificate is wrong.
    TlsMaterial mixed = theirs.material(0);
    mixed.authority = ours.material(0).authority;
    QuicWorld world(mixed, ours.material(1), 1);
    expect_refusal(world, 1, "not from this job's seed");
    // The opener is told, so that it does not try again.
    world.ranks[1].goodbye = world.ranks[1].connection->close(Admission::unknown, "", world.now);
    must(world.run([&] { return world.ranks[0].connection->state() == QuicState::closed; }, second), "it is told");
    must(world.ranks[0].connection->is_refused(), "the refusal is TLS's");
  }
  {
    // Called as rank 0's peer, it shows the certificate of another rank.
    QuicWorld world(wider.material(0), wider.material(1), 1);
    expect_refusal(world, 0, "its certificate is rank 1's", 2);
  }
}

void test_admission() {
  const TestAuthority authority(2);
  for (const Admission admission : {Admission::crossing, Admission::known, Admission::unknown, Admission::leaving}) {
    QuicWorld world(authority.material(0), authority.material(1), 1);
    world.ranks[1].admission = admission;
    expect_refusal(world, 0, "closed");
    must(world.ranks[0].connection->admission() == admission && world.ranks[0].connection->is_hung_up(),
         "the opener learns how it was turned away");
  }
}

// Everything that is put on the streams of both sides arrives once, whole and in order, and memory that was lent is not
// read after it has been returned.
void exchange(QuicWorld& world, unsigned seed, size_t bytes_max, std::int64_t for_ns) {
  std::mt19937 random(seed);
  std::vector<byte> put[2][quic_stream_count];
  struct Lent {
    int side;
    uint64_t owner;
    std::vector<byte> bytes;
    bool is_back = false;
  };
  std::vector<Lent> lent;
  lent.reserve(64);
  for (int side = 0; side < 2; ++side)
    for (int i = 0; i < 20; ++i) {
      const auto stream = static_cast<QuicStream>(random() % quic_stream_count);
      std::vector<byte> made = pattern(1 + random() % bytes_max, random());
      auto& all = put[side][static_cast<size_t>(stream)];
      all.insert(all.end(), made.begin(), made.end());
      QuicSendQueue& out = world.ranks[side].connection->out(stream);
      if (stream == QuicStream::data) {
        lent.push_back({side, static_cast<uint64_t>(i), std::move(made)});
        out.lend(lent.back().bytes.data(), lent.back().bytes.size(), lent.back().owner);
      } else {
        out.append(made.data(), made.size());
      }
    }
  const auto settle = [&] {
    for (Lent& one : lent)
      if (!one.is_back && !world.ranks[one.side].connection->out(QuicStream::data).lends(one.owner)) {
        one.is_back = true;
        std::memset(one.bytes.data(), 0xee, one.bytes.size());
      }
    for (int side = 0; side < 2; ++side) {
      const QuicConnection& connection = *world.ranks[side].connection;
      must(connection.state() == QuicState::linked, ("the connection lives: " + connection.why()).c_str());
      if (!world.ranks[side].connection->is_acknowledged()) return false;
    }
    return true;
  };
  must(world.run(settle, for_ns), "everything is acknowledged");
  for (int side = 0; side < 2; ++side)
    for (size_t s = 0; s < quic_stream_count; ++s)
      must(world.ranks[1 - side].came[s] == put[side][s], "every byte arrived once and in order");
}

void test_streams() {
  const TestAuthority authority(2);
  const Weather weathers[] = {
      {},
      {.lost = 0.001},
      {.lost = 0.01},
      {.lost = 0.05, .doubled = 0.05},
      {.doubled = 0.5},
      {.late = 0.3},
      {.lost = 0.05, .doubled = 0.1, .late = 0.2, .delay_ns = 20 * millisecond},
      {.lost = 0.2},
  };
  unsigned seed = 7;
  for (const Weather& weather : weathers)
    for (const size_t datagram : {size_t{0}, size_t{1452}, size_t{32'000}}) {
      QuicWorld world(authority.material(0), authority.material(1), ++seed);
      world.weather = weather;
      for (QuicRank& rank : world.ranks) {
        rank.path.datagram_bytes = datagram;
        rank.path.is_local = datagram != 0;
      }
      must(world.link(), "a link is made in this weather");
      exchange(world, seed, 200'000, 600 * second);
    }
}

// A window of a few KiB, as 64 ranks that share a small receive buffer have.
void test_small_window() {
  const TestAuthority authority(2);
  QuicWorld world(authority.material(0), authority.material(1), 3);
  for (QuicRank& rank : world.ranks) rank.path.window_bytes = rank.path.window_bytes_max = 4096;
  must(world.link(), "a link is made");
  exchange(world, 3, 50'000, 600 * second);
}

// Within a host an answer may come at once. A long message that follows is not held back by a congestion window that
// was computed from a round trip of no time.
void test_long_after_short() {
  const TestAuthority authority(2);
  QuicWorld world(authority.material(0), authority.material(1), 10);
  world.weather.delay_ns = 0;
  must(world.link(), "a link is made");
  for (int i = 0; i < 200; ++i) {
    world.ranks[i % 2].connection->out(QuicStream::messages).append("ping", 4);
    world.run([&] { return world.ranks[i % 2].connection->is_acknowledged(); }, second);
  }
  world.weather.delay_ns = millisecond;
  const std::vector<byte> made = pattern(8 << 20, 10);
  world.ranks[0].connection->out(QuicStream::data).lend(made.data(), made.size(), 1);
  const std::int64_t began = world.now;
  must(world.run([&] { return world.ranks[0].connection->is_acknowledged(); }, 10 * second), "it arrives");
  must(world.now - began < 80 * millisecond, "a round trip carries hundreds of KiB");
}

void test_keys() {
  const TestAuthority authority(2);
  for (const uint64_t packets : {1, 50}) {
    QuicWorld world(authority.material(0), authority.material(1), 4, packets);
    world.weather.lost = 0.01;
    must(world.link(), "a link is made");
    for (unsigned turn = 0; turn < 20; ++turn) {
      exchange(world, turn, 100'000, 600 * second);
      for (QuicRank& rank : world.ranks)
        for (auto& came : rank.came) came.clear();
    }
    for (const QuicRank& rank : world.ranks) must(rank.connection->key_updates() >= 5, "keys were renewed");
  }
}

// A network that is cut for two seconds while data is on its way.
void test_cut() {
  const TestAuthority authority(2);
  for (unsigned seed = 1; seed <= 5; ++seed) {
    QuicWorld world(authority.material(0), authority.material(1), seed);
    must(world.link(), "a link is made");
    world.weather.cut_from = world.now + 2 * millisecond;
    world.weather.cut_to = world.weather.cut_from + 2 * second;
    const std::int64_t began = world.now;
    exchange(world, seed, 2'000'000, 60 * second);
    must(world.now > world.weather.cut_to, "the cut came in the middle");
    must(world.now - began < 6 * second, "it goes on soon after the cut");
  }
}

// On a long path the windows grow with what is read in a round trip: with the first window every 64 MiB would take 64
// round trips.
void test_long_path() {
  const TestAuthority authority(2);
  QuicWorld world(authority.material(0), authority.material(1), 15);
  world.weather.delay_ns = 20 * millisecond;
  for (QuicRank& rank : world.ranks) {
    rank.path.datagram_bytes = 0;
    rank.path.is_local = false;
  }
  must(world.link(), "a link is made");
  const std::vector<byte> made = pattern(64 << 20, 15);
  for (int turn = 0; turn < 2; ++turn) {
    for (auto& came : world.ranks[1].came) came.clear();
    world.ranks[0].connection->out(QuicStream::data).lend(made.data(), made.size(), 1);
    const std::int64_t began = world.now;
    must(world.run([&] { return world.ranks[0].connection->is_acknowledged(); }, 60 * second), "it arrives");
    must(world.ranks[1].came[2] == made, "every byte arrived once and in order");
    const auto first_window = static_cast<std::int64_t>(made.size() / world.ranks[0].path.window_bytes);
    if (turn == 1) must(world.now - began < first_window * 40 * millisecond / 4, "the windows have grown");
  }
}

// Probes find out what the network carries: no datagram is longer.
void test_probed_path() {
  const TestAuthority authority(2);
  for (const size_t carried : {size_t{1200}, size_t{1400}, size_t{1500}}) {
    QuicWorld world(authority.material(0), authority.material(1), 9);
    for (QuicRank& rank : world.ranks) {
      rank.path.datagram_bytes = 0;
      rank.path.is_local = false;
    }
    world.weather.bytes_max = carried;
    must(world.link(), "a link is made");
    exchange(world, 9, 300'000, 60 * second);
    size_t longest = 0;
    for (const QuicRank& rank : world.ranks) longest = std::max(longest, rank.longest);
    if (carried == 1500) must(longest == 1444, "the path was found to carry more");
  }
}

// A path that has carried long datagrams carries only short ones from the middle of a message on, and reports nothing.
void test_black_hole() {
  const TestAuthority authority(2);
  for (const size_t datagram : {size_t{0}, size_t{1452}}) {
    QuicWorld world(authority.material(0), authority.material(1), 11);
    for (QuicRank& rank : world.ranks) {
      rank.path.datagram_bytes = datagram;
      rank.path.is_local = false;
    }
    must(world.link(), "a link is made");
    exchange(world, 11, 300'000, 60 * second);
    for (QuicRank& rank : world.ranks)
      for (auto& came : rank.came) came.clear();
    must(std::max(world.ranks[0].longest, world.ranks[1].longest) > 1400, "long datagrams have passed");
    world.weather.bytes_max = 1300;
    const std::int64_t began = world.now;
    exchange(world, 12, 300'000, 60 * second);
    must(world.now - began < 3 * second, "short ones are tried soon");
    // Later the path carries them again.
    world.weather.bytes_max = SIZE_MAX;
    world.run([] { return false; }, 70 * second);
    for (QuicRank& rank : world.ranks) {
      rank.longest = 0;
      for (auto& came : rank.came) came.clear();
    }
    exchange(world, 13, 300'000, 60 * second);
    must(std::max(world.ranks[0].longest, world.ranks[1].longest) > 1400, "long ones are tried again");
  }
}

// The system refuses a datagram as too long for the path.
void test_too_long() {
  const TestAuthority authority(2);
  QuicWorld world(authority.material(0), authority.material(1), 12);
  for (QuicRank& rank : world.ranks) rank.path.datagram_bytes = 32'000;
  must(world.link(), "a link is made");
  world.weather.bytes_max = 1300;
  for (QuicRank& rank : world.ranks) rank.connection->on_too_long();
  exchange(world, 12, 300'000, 60 * second);
}

// What an acceptor sends behind its greeting waits for the reader, within the window.
void test_early() {
  const TestAuthority authority(2);
  QuicWorld world(authority.material(0), authority.material(1), 13);
  world.ranks[0].is_read = true;  // so its harness does not read
  world.open();
  must(world.run([&] { return world.ranks[1].is_read; }, second), "the acceptor is linked");
  const std::vector<byte> made = pattern(8 << 20, 13);
  world.ranks[1].connection->out(QuicStream::data).lend(made.data(), made.size(), 1);
  world.run([] { return false; }, 5 * second);
  const uint64_t unsent = world.ranks[1].connection->out(QuicStream::data).unsent();
  must(made.size() - unsent <= world.ranks[0].path.window_bytes, "no more than the window is sent");
  world.ranks[0].connection->read_by(&world.ranks[0]);
  must(world.run([&] { return world.ranks[1].connection->is_acknowledged(); }, 10 * second), "it goes on");
  must(world.ranks[0].came[2] == made, "every byte arrived once and in order");
}

// The acceptor's address changes: QUIC cannot move that side, and the opener receives nothing more.
void test_moved_acceptor() {
  const TestAuthority authority(2);
  QuicWorld world(authority.material(0), authority.material(1), 14);
  must(world.link(), "a link is made");
  exchange(world, 14, 10'000, second);
  world.run([] { return false; }, second);
  world.addresses[1] = address_of(3000);
  world.ranks[0].connection->was_heard();
  world.ranks[1].connection->out(QuicStream::messages).append("beat", 4);
  world.run([] { return false; }, 3 * second);
  must(!world.ranks[0].connection->was_heard(), "nothing from the new address is a sign of life");
  must(world.ranks[0].connection->state() == QuicState::linked, "it ends nothing");
}

// The opener's address changes in mid-message, as behind a router that forgets.
void test_rebinding() {
  const TestAuthority authority(2);
  QuicWorld world(authority.material(0), authority.material(1), 5);
  must(world.link(), "a link is made");
  world.run([] { return false; }, 10 * millisecond);
  for (int i = 0; i < 3; ++i) {
    const std::vector<byte> made = pattern(3'000'000, static_cast<unsigned>(i));
    for (QuicRank& rank : world.ranks) {
      for (auto& came : rank.came) came.clear();
      rank.connection->out(QuicStream::data).lend(made.data(), made.size(), 1);
    }
    world.run([&] { return world.ranks[1].came[2].size() > made.size() / 2; }, second);
    world.addresses[0] = address_of(static_cast<uint16_t>(2000 + i));
    must(world.run(
             [&] {
               return world.ranks[0].connection->is_acknowledged() && world.ranks[1].connection->is_acknowledged();
             },
             10 * second),
         "everything arrives from the new address");
    for (const QuicRank& rank : world.ranks) must(rank.came[2] == made, "every byte arrived once and in order");
    must(world.ranks[1].connection->remote() == world.addresses[0], "the acceptor answers the new address");
  }
}

// A host on the path answers the first datagram: the acceptor speaks another version only. No rank says so.
void test_version_negotiation() {
  const TestAuthority authority(2);
  QuicWorld world(authority.material(0), authority.material(1), 17);
  bool is_forged = false;
  world.weather.change = [&](std::vector<byte>& datagram) {
    if (std::exchange(is_forged, true)) return;
    std::vector<byte> forged(5);
    forged[0] = byte{0x80};
    // Its ids, the other way round: each is 8 bytes behind its length.
    forged.insert(forged.end(), datagram.begin() + 14, datagram.begin() + 23);
    forged.insert(forged.end(), datagram.begin() + 5, datagram.begin() + 14);
    forged.insert(forged.end(), {byte{0}, byte{0}, byte{0}, byte{2}});
    world.ranks[0].receive(world.addresses[1], forged, world.now);
  };
  must(world.link() && is_forged, "a link is made");
}

// Copies of what the peer has sent are no signs of life, whatever their order: else a host on the path could hide the
// death of a rank.
void test_replay() {
  const TestAuthority authority(2);
  QuicWorld world(authority.material(0), authority.material(1), 16);
  std::vector<std::vector<byte>> seen;
  world.weather.change = [&](std::vector<byte>& datagram) { seen.push_back(datagram); };
  must(world.link(), "a link is made");
  exchange(world, 16, 300'000, 60 * second);
  QuicRank& rank = world.ranks[1];
  must(seen.size() > 300 && rank.connection->was_heard(), "numbers have outgrown a byte, and signs of life were seen");
  const uint64_t before = rank.connection->datagrams();
  for (int turn = 0; turn < 3; ++turn)
    for (const auto& datagram : seen) rank.receive(world.addresses[0], datagram, world.now);
  must(!rank.connection->was_heard() && rank.connection->datagrams() == before, "copies are no signs of life");
  must(rank.connection->state() == QuicState::linked, "they end nothing");
  world.ranks[0].connection->out(QuicStream::control).append("beat", 4);
  world.run([] { return false; }, second);
  must(rank.connection->was_heard() && rank.connection->datagrams() > before, "what is new is one");
}

// What the peer's bytes mean is the reader's business; if it finds a fault, the connection ends on both sides.
void test_fault() {
  const TestAuthority authority(2);
  QuicWorld world(authority.material(0), authority.material(1), 6);
  must(world.link(), "a link is made");
  world.ranks[1].fault = "nonsense";
  world.ranks[0].connection->out(QuicStream::messages).append("bytes", 5);
  must(world.run([&] { return world.ranks[1].connection->state() == QuicState::closed; }, second), "it is closed");
  must(world.ranks[1].connection->why() == "nonsense", "the reader's words are the cause");
  world.ranks[1].goodbye = world.ranks[1].connection->close(Admission::unknown, "because", world.now);
  must(!world.ranks[1].goodbye.empty(), "the peer is told");
  must(world.run([&] { return world.ranks[0].connection->state() == QuicState::closed; }, second), "the peer knows");
  must(world.ranks[0].connection->is_hung_up(), "the peer knows that the other side closed it");
  must(world.ranks[0].connection->reason() == "because", "the peer knows why");
}

// Datagrams that no connection of this world has made change nothing.
void test_garbage() {
  const TestAuthority authority(2);
  QuicWorld world(authority.material(0), authority.material(1), 8);
  must(world.link(), "a link is made");
  std::mt19937 random(8);
  std::vector<std::vector<byte>> seen;
  for (int i = 0; i < 5000; ++i) {
    std::vector<byte> made = pattern(1 + random() % 1400, random());
    if (made.size() > 9 && random() % 2 == 0) {
      // For a connection that exists: changed, or random behind its id.
      const QuicId id = world.ranks[1].routes.begin()->first;
      made[0] = static_cast<byte>(0x40 | (random() & 0x3f));
      std::memcpy(made.data() + 1, &id, sizeof id);
    }
    world.ranks[1].receive(world.addresses[0], made, world.now);
  }
  must(world.ranks[1].connection->state() == QuicState::linked, "garbage ends nothing");
  exchange(world, 8, 100'000, 60 * second);
}

// What belongs to no connection, counted.
class Strangers final : public QuicEndpointOwner {
 public:
  void on_first(const SocketAddress&, const SocketAddress&, const byte*, size_t, std::int64_t) override { ++came; }
  void on_changed(QuicConnection&) override {}
  void on_unreachable(const SocketAddress&, int) override { ++refused; }
  int came = 0, refused = 0;
};

// The system reports that a port is closed before it gives the datagrams that have come since. The socket is watched
// for edges, so what is not read in that turn might wait for the next datagram.
void test_errors() {
  Poller poller;
  must(poller.open(), "a poller is made");
  Strangers owner;
  QuicEndpoint endpoint(owner, poller);
  SocketAddress address = address_of(0);
  must(endpoint.open(address, 1 << 20) && endpoint.listen(), "an endpoint is made");
  SocketAddress closed = address_of(0), other = closed;
  const auto bound = [](SocketAddress& to) {
    Descriptor socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    must(bind(socket.get(), to.get(), to.bytes) == 0, "a socket is bound");
    getsockname(socket.get(), to.get(), &to.bytes);
    return socket;
  };
  bound(closed);
  const Descriptor sender = bound(other);
  const byte hello[32] = {};
  endpoint.send_one(hello, sizeof hello, address, closed);
  must(sendto(sender.get(), hello, sizeof hello, 0, address.get(), address.bytes) == sizeof hello,
       "a datagram is sent");
  endpoint.poll(now_ns());
  must(owner.came == 1, "the datagram behind the error is read in the same turn");
  endpoint.poll(now_ns());
  must(owner.refused == 1, "the closed port is reported");
}

}  // namespace

int main(int count, char** words) {
  const std::string only = count > 1 ? words[1] : "";
  bool has_run = false;
  const auto run = [&](const char* name, auto test) {
    if (!only.empty() && only != name) return;
    has_run = true;
    test();
  };
  run("machine", test_machine);
  run("queue", test_queue);
  run("handshake", test_handshake);
  run("strangers", test_strangers);
  run("admission", test_admission);
  run("streams", test_streams);
  run("small_window", test_small_window);
  run("long_after_short", test_long_after_short);
  run("keys", test_keys);
  run("cut", test_cut);
  run("long path", test_long_path);
  run("probed path", test_probed_path);
  run("black hole", test_black_hole);
  run("too long", test_too_long);
  run("early", test_early);
  run("moved acceptor", test_moved_acceptor);
  run("rebinding", test_rebinding);
  run("fault", test_fault);
  run("garbage", test_garbage);
  run("errors", test_errors);
  run("replay", test_replay);
  run("version negotiation", test_version_negotiation);
  must(has_run, "the command line names a case");
  std::puts("ok");
}
