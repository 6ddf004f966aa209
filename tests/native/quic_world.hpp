// Two ranks with a QUIC connection between them, a network that loses, doubles, reorders and delays datagrams, and a
// clock of the test's own.

#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "link/quic_connection.hpp"
#include "test_authority.hpp"

namespace unisono::engine {

inline void must(bool is_right, const char* what) {
  if (is_right) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

inline SocketAddress address_of(uint16_t port) { return SocketAddress::of("127.0.0.1", port); }

// What the network does to a datagram.
struct Weather {
  double lost = 0;
  double doubled = 0;
  double late = 0;  // by up to `late_ns`, so that others overtake it
  std::int64_t delay_ns = 100'000;
  std::int64_t late_ns = 5 * millisecond;
  size_t bytes_max = SIZE_MAX;  // longer ones are lost
  std::int64_t cut_from = never;
  std::int64_t cut_to = never;
  std::function<void(std::vector<byte>&)> change = {};  // applied to every datagram
};

// One rank: a connection at most, and the bytes that arrived on its streams.
class QuicRank final : public QuicRoutes, public DatagramSink, public QuicReader {
 public:
  struct Datagram {
    SocketAddress to;
    std::vector<byte> bytes;
  };

  QuicRank(int rank, const TlsMaterial& material, uint64_t rekey_packets = UINT64_MAX)
      : settings{rank, 2, 1000, rekey_packets}, identity(material, rank) {
    path.local = address_of(static_cast<uint16_t>(1000 + rank));
    path.datagram_bytes = 1452;
    path.is_local = true;
  }

  void open(const SocketAddress& to, int rank, std::int64_t now) {
    path.remote = to;
    connection = QuicConnection::open(identity, settings, *this, path, rank, now);
    must(connection != nullptr, "a connection is made");
  }

  // A datagram for this rank, of which the first makes a connection.
  void receive(const SocketAddress& from, const std::vector<byte>& datagram, std::int64_t now) {
    ngtcp2_version_cid ids{};
    const auto* data = reinterpret_cast<const uint8_t*>(datagram.data());
    if (datagram.empty() || ngtcp2_pkt_decode_version_cid(&ids, data, datagram.size(), quic_id_bytes) != 0 ||
        ids.dcidlen != quic_id_bytes)
      return;
    QuicId id;
    std::memcpy(&id, ids.dcid, sizeof id);
    const auto found = routes.find(id);
    ngtcp2_pkt_hd first;
    if (found != routes.end())
      found->second->receive(path.local, from, datagram.data(), datagram.size(), now);
    else if (connection == nullptr && does_accept && ngtcp2_accept(&first, data, datagram.size()) == 0) {
      path.remote = from;
      connection = QuicConnection::accept(identity, settings, *this, path, first, nullptr, now);
      must(connection != nullptr, "a connection is accepted");
      connection->receive(path.local, from, datagram.data(), datagram.size(), now);
    }
    if (connection == nullptr) return;
    if (connection->state() == QuicState::waiting && admission == Admission::welcome) connection->welcome();
    if (connection->state() == QuicState::waiting && admission != Admission::welcome && goodbye.empty())
      goodbye = connection->close(admission, "", now);
    if (connection->state() == QuicState::linked && !is_read) {
      is_read = true;
      linked_at = now;
      connection->read_by(this);
    }
  }

  void work(std::int64_t now) {
    if (connection == nullptr) return;
    if (connection->expiry() <= now) connection->expire(now);
    connection->write(*this, now);
    if (!goodbye.empty()) sent.push_back({connection->remote(), std::exchange(goodbye, {})});
  }

  // -- QuicRoutes
  void add(QuicId id, QuicConnection& to) override { routes[id] = &to; }
  void remove(QuicId id) override { routes.erase(id); }
  // -- DatagramSink
  byte* space(size_t bytes) override {
    buffer.resize(bytes);
    return buffer.data();
  }
  void send(size_t bytes, const SocketAddress&, const SocketAddress& to) override {
    longest = std::max(longest, bytes);
    if (bytes != 0) sent.push_back({to, {buffer.data(), buffer.data() + bytes}});
  }
  // -- QuicReader
  const char* on_bytes(QuicStream stream, const byte* from, size_t bytes) override {
    auto& into = came[static_cast<size_t>(stream)];
    into.insert(into.end(), from, from + bytes);
    return fault;
  }

  QuicSettings settings;
  QuicIdentity identity;
  QuicPath path;
  std::map<QuicId, QuicConnection*> routes;
  std::unique_ptr<QuicConnection> connection;
  std::vector<Datagram> sent;
  std::vector<byte> buffer;
  std::vector<byte> came[quic_stream_count];
  std::vector<byte> goodbye;
  const char* fault = nullptr;
  size_t longest = 0;  // datagram that it sent
  Admission admission = Admission::welcome;
  bool does_accept = true;
  bool is_read = false;
  std::int64_t linked_at = 0;
};

// Rank 0 opens, rank 1 accepts.
class QuicWorld {
 public:
  QuicWorld(const TlsMaterial& opener, const TlsMaterial& acceptor, unsigned seed, uint64_t rekey_packets = UINT64_MAX)
      : ranks{{0, opener, rekey_packets}, {1, acceptor, rekey_packets}}, random_(seed) {
    addresses[0] = ranks[0].path.local;
    addresses[1] = ranks[1].path.local;
  }

  void open(int called = 1) { ranks[0].open(addresses[1], called, now); }

  // Go on until `done()`; false if it takes longer than `for_ns` of the test's clock.
  template <class Done>
  bool run(Done done, std::int64_t for_ns) {
    for (const std::int64_t until = now + for_ns; !done();) {
      for (int i = 0; i < 2; ++i) {
        ranks[i].work(now);
        for (auto& one : ranks[i].sent) throw_in(i, std::move(one));
        ranks[i].sent.clear();
      }
      // The next moment at which something happens.
      std::int64_t next = until;
      if (!flying_.empty()) next = std::min(next, flying_.begin()->first);
      for (QuicRank& rank : ranks)
        if (rank.connection != nullptr) next = std::min(next, rank.connection->expiry());
      now = std::max(now, next);
      while (!flying_.empty() && flying_.begin()->first <= now) {
        Flying one = std::move(flying_.begin()->second);
        flying_.erase(flying_.begin());
        ++arrived;
        ranks[one.to].receive(one.from, one.bytes, now);
      }
      if (now >= until) return done();
    }
    return true;
  }
  bool link(std::int64_t for_ns = 60 * second) {
    open();
    return run([&] { return ranks[0].is_read && ranks[1].is_read; }, for_ns);
  }

  std::int64_t now = second;
  QuicRank ranks[2];
  SocketAddress addresses[2];  // that the network shows to the other side
  Weather weather;
  size_t arrived = 0, thrown = 0;

 private:
  struct Flying {
    int to;
    SocketAddress from;
    std::vector<byte> bytes;
  };

  double draw() { return std::uniform_real_distribution<double>(0, 1)(random_); }
  void throw_in(int from, QuicRank::Datagram one) {
    ++thrown;
    if (weather.change) weather.change(one.bytes);
    // Whatever is sent to an address that a rank no longer has is lost.
    const int to = 1 - from;
    if (!(one.to == addresses[to]) || one.bytes.size() > weather.bytes_max ||
        (now >= weather.cut_from && now < weather.cut_to) || draw() < weather.lost)
      return;
    for (int copies = draw() < weather.doubled ? 2 : 1; copies > 0; --copies) {
      std::int64_t at = now + weather.delay_ns;
      if (draw() < weather.late) at += static_cast<std::int64_t>(draw() * static_cast<double>(weather.late_ns));
      flying_.emplace(at, Flying{to, addresses[from], one.bytes});
    }
  }

  std::mt19937 random_;
  std::multimap<std::int64_t, Flying> flying_;
};

}  // namespace unisono::engine
