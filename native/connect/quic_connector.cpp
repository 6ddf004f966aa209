#include "connect/quic_connector.hpp"

#include <ngtcp2/ngtcp2_crypto.h>

#include <algorithm>
#include <list>
#include <map>
#include <stdexcept>

#include "connect/pinger.hpp"
#include "link/quic_link.hpp"
#include "link/quic_version.hpp"

namespace unisono::engine {
namespace {

// With more strangers than this, a newcomer proves its address first.
constexpr size_t strangers_unproven_max = 16;
// The datagrams of a handshake are padded, and repeated by us: a stranger may send, and gets, this many times the bytes
// of one over TCP.
constexpr uint64_t padding_factor = 4;
constexpr std::int64_t retry_ns = 60 * second;
// Windows: of one peer by itself, and the least that makes progress.
constexpr uint64_t window_bytes = 2 * 1024 * 1024;
constexpr uint64_t window_bytes_min = 2048;
// Between hosts: at first, and on a long path, of which one stream gets three quarters, 75.5 MB: 10 Gb/s x 50 ms are
// 62.5 MB.
constexpr uint64_t window_bytes_first = 1024 * 1024;
constexpr uint64_t window_bytes_first_min = 128 * 1024;
constexpr uint64_t window_bytes_long = 96 * 1024 * 1024;
// Each rank of this host may have to wait for its turn on a core.
constexpr std::int64_t probe_slack_ns = 10 * millisecond, probe_slack_ns_max = 250 * millisecond;
// In the best case two of them fill a batch of the socket.
constexpr size_t datagram_bytes_local = 32 * 1000;
// A rank whose port is reported closed (ICMP) is pinged `asks_max` times in 0.4 s. It counts as dead if it answers no
// ping and `refusals_needed` reports arrive. Linux sends six reports in a burst, and then one a second.
constexpr std::int64_t ask_ns = 80 * millisecond;
constexpr int asks_max = 5, refusals_needed = 3;

// A rank that is called.
struct Call {
  enum class State : uint8_t { due, under_way, resting, crossed };

  std::int32_t rank = 0;
  SocketAddress address;
  std::int32_t pid = 0;  // if it is on this host
  State state = State::due;
  QuicConnection* connection = nullptr;
  std::int64_t time_left_ns = 0;
  std::int64_t waited_ns = 0;
  int attempts = 0;
  int refusals = 0;        // of its port, by ICMP
  uint64_t datagrams = 0;  // that came of this attempt
  bool is_reached = false;
  std::string trouble;
};

struct Stranger {
  QuicConnection* connection;
  SocketAddress address;
  std::int64_t time_left_ns;
};

// A linked rank whose port answered as closed.
struct Suspicion {
  std::int32_t rank;
  QuicConnection* connection;
  uint64_t datagrams;  // that had come by then
  uint64_t answers;    // to pings
  int asks = 0;
  int refusals = 1;
  std::int64_t next_at = 0;
};

class RealQuicConnector final : public QuicConnector, private QuicEndpointOwner {
 public:
  RealQuicConnector(ConnectionOwner& owner, Poller& poller, Pinger& pinger, const SocketPolicy& policy)
      : owner_(owner), pinger_(pinger), policy_(policy), endpoint_(*this, poller) {}

  void open(std::int32_t rank, std::int32_t size, const std::string& secret, const Settings& settings,
            Card& card) override {
    rank_ = rank;
    size_ = size;
    settings_ = settings;
    host_ = card.host;
    SocketAddress address = SocketAddress::of(settings.bind, settings.port);
    if (address.bytes == 0) throw std::runtime_error(settings.bind + " is not a numeric address");
    if (!endpoint_.open(address, static_cast<int>(settings.socket_buffer_bytes)))
      throw std::runtime_error(
          failure(("cannot bind UDP " + settings.bind + " port " + std::to_string(settings.port)).c_str()));
    if (!fill_random(token_secret_, sizeof token_secret_)) throw std::runtime_error(failure("no random bytes"));
    card.address = settings.bind;
    card.port = address.port();
    pinger_.share(rank, secret, endpoint_.fd());
    neighbours_ = static_cast<size_t>(size);
  }

  void secure(const TlsMaterial& material) override {
    if (identity_ != nullptr) throw std::runtime_error("allowed: an identity, once");
    if (material.names.size() != static_cast<size_t>(size_)) throw std::runtime_error("allowed: one name per rank");
    identity_ = std::make_unique<QuicIdentity>(material, rank_);
    if (!endpoint_.listen()) throw std::runtime_error(failure("cannot watch the UDP socket"));
  }
  bool is_ready() const override { return identity_ != nullptr; }
  void set_neighbours(size_t ranks_here) override { neighbours_ = ranks_here; }

  void connect(std::int32_t rank, const Card& card) override {
    Call made;
    made.rank = rank;
    made.address = SocketAddress::of(card.address, card.port);
    if (made.address.bytes == 0) return owner_.on_refused(rank, "its address is not valid", Admission::unknown);
    if (card.host == host_) made.pid = card.pid;
    made.time_left_ns = settings_.silence_ns;
    calls_.push_back(std::move(made));
    connect_due();
  }

  void forget(std::int32_t rank) override {
    for (auto call = calls_.begin(); call != calls_.end();) {
      if (call->rank != rank) {
        ++call;
        continue;
      }
      QuicConnection* connection = call->connection;
      call = calls_.erase(call);
      if (connection != nullptr) endpoint_.close(*connection, Admission::known);
    }
  }
  bool is_calling(std::int32_t rank) const override { return call_of(rank) != nullptr; }
  bool is_connecting(std::int32_t rank) const override {
    const Call* call = call_of(rank);
    return call != nullptr && call->state != Call::State::crossed && !call->is_reached;
  }
  bool is_crossed(std::int32_t rank) const override {
    const Call* call = call_of(rank);
    return call != nullptr && call->state == Call::State::crossed;
  }
  bool is_connecting() const override {
    return !calls_.empty() || std::any_of(strangers_.begin(), strangers_.end(), [](const Stranger& s) {
      return s.connection->state() == QuicState::certified;
    });
  }
  bool is_busy() const override { return !calls_.empty() || !strangers_.empty(); }

  void tick(std::int64_t passed_ns) override;
  bool has_caught_up() override { return endpoint_.has_caught_up(); }
  uint64_t refused() const override { return refused_; }
  void take_refusals(std::vector<std::string>& into) override {
    into.insert(into.end(), refusals_.begin(), refusals_.end());
    refusals_.clear();
  }

  bool poll() override {
    // A rank without QUIC links, as on a single host, does not pay for a system call.
    const std::int64_t now = now_ns();
    if (links_ == 0 && !is_busy() && !endpoint_.is_readable() && now < endpoint_.expiry()) return false;
    if (!suspicions_.empty()) ask_suspects(now);
    return endpoint_.poll(now);
  }
  void push() override { endpoint_.push(); }
  std::int64_t expiry() const override {
    std::int64_t first = endpoint_.expiry();
    for (const Suspicion& each : suspicions_) first = std::min(first, each.next_at);
    return first;
  }
  void close(bool is_forked) override {
    if (!is_forked) {
      while (!calls_.empty()) forget(calls_.front().rank);
      while (!strangers_.empty()) {
        QuicConnection& connection = *strangers_.front().connection;
        strangers_.pop_front();
        endpoint_.close(connection, Admission::leaving);
      }
    }
    calls_.clear();
    strangers_.clear();
    suspicions_.clear();
    endpoint_.abandon();
  }

 private:
  // -- QuicEndpointOwner
  void on_first(const SocketAddress& local, const SocketAddress& from, const byte* datagram, size_t bytes,
                std::int64_t now) override;
  void on_changed(QuicConnection& connection) override;
  void on_unreachable(const SocketAddress& to, int error) override;

  const Call* call_of(std::int32_t rank) const {
    const auto found = std::find_if(calls_.begin(), calls_.end(), [rank](const Call& c) { return c.rank == rank; });
    return found != calls_.end() ? &*found : nullptr;
  }
  QuicPath path_to(const SocketAddress& local, const SocketAddress& remote) const;
  QuicSettings quic_settings() const {
    return {rank_, size_, settings_.eager_credit_bytes, std::max<uint64_t>(settings_.rekey_records, 1)};
  }
  void connect_due();
  void attempt(Call& call);
  void on_call_changed(std::list<Call>::iterator call);
  void on_stranger_changed(std::list<Stranger>::iterator stranger);
  // Both sides have greeted: the owner gets the link.
  void hand_on(std::int32_t rank, QuicConnection& connection);
  void refuse(std::list<Call>::iterator call, const std::string& cause, Admission admission = Admission::unknown);
  void note_refusal(const Stranger& stranger, const std::string& cause);
  void drop_oldest_stranger(const std::string& group);
  void ask_for_address(const ngtcp2_pkt_hd& first, const SocketAddress& local, const SocketAddress& from,
                       std::int64_t now);
  void ask_suspects(std::int64_t now);
  std::string unreached(const Call& call, const std::string& why) const {
    return "cannot be reached from rank " + std::to_string(rank_) + " at " + call.address.host() + " port " +
           std::to_string(call.address.port()) + ", UDP: " + why;
  }

  ConnectionOwner& owner_;
  Pinger& pinger_;
  const SocketPolicy& policy_;
  std::int32_t rank_ = 0;
  std::int32_t size_ = 0;
  Settings settings_{};
  std::string host_;
  size_t neighbours_ = 1;
  byte token_secret_[32] = {};
  std::unique_ptr<QuicIdentity> identity_;
  std::list<Call> calls_;
  std::list<Stranger> strangers_;  // oldest first
  std::list<Suspicion> suspicions_;
  size_t links_ = 0;                // that were made so far
  std::vector<const Peer*> peers_;  // by rank, once they have had a link
  uint64_t refused_ = 0;
  std::vector<std::string> refusals_;
  QuicEndpoint endpoint_;
};

// ---- calls ----

QuicPath RealQuicConnector::path_to(const SocketAddress& local, const SocketAddress& remote) const {
  QuicPath path;
  path.local = local;
  path.remote = remote;
  path.is_local = remote.has_host_of(path.local);
  if (path.is_local) {
    // One buffer serves all peers of this host: together they must not be able to fill it.
    const uint64_t share = endpoint_.receive_bytes() / std::max<size_t>(neighbours_ - (neighbours_ > 1), 1);
    path.window_bytes = std::clamp(share, window_bytes_min, window_bytes);
    path.window_bytes_max = path.window_bytes;
    path.probe_slack_ns = std::min(static_cast<std::int64_t>(neighbours_) * probe_slack_ns, probe_slack_ns_max);
    path.datagram_bytes = settings_.datagram_bytes != 0 ? settings_.datagram_bytes : datagram_bytes_local;
  } else {
    // At first they share the buffer, too. The window grows with what is read in a round trip; then a peer's pacing and
    // congestion control keep it from filling the buffer.
    path.window_bytes =
        std::clamp(endpoint_.receive_bytes() / static_cast<size_t>(size_), window_bytes_first_min, window_bytes_first);
    path.window_bytes_max = window_bytes_long;
    path.datagram_bytes = settings_.datagram_bytes;
  }
  return path;
}

void RealQuicConnector::connect_due() {
  size_t under_way = 0;
  for (const Call& call : calls_) under_way += call.state == Call::State::under_way;
  for (Call& call : calls_) {
    if (call.state != Call::State::due) continue;
    if (under_way++ >= attempts_max) return;
    attempt(call);
  }
}

void RealQuicConnector::attempt(Call& call) {
  const QuicPath path = path_to(endpoint_.local_to(call.address), call.address);
  auto made = QuicConnection::open(*identity_, quic_settings(), endpoint_, path, call.rank, now_ns());
  call.state = Call::State::under_way;
  ++call.attempts;
  if (made == nullptr) {
    call.trouble = "no memory for a connection";
    call.state = Call::State::resting;
    return;
  }
  call.connection = &endpoint_.add(std::move(made));
}

void RealQuicConnector::on_call_changed(std::list<Call>::iterator call) {
  QuicConnection& connection = *call->connection;
  call->is_reached |= connection.datagrams() != 0;
  // It lives: each datagram gives it more time, as heartbeats do later, though not for ever.
  if (connection.datagrams() != std::exchange(call->datagrams, connection.datagrams()) &&
      call->waited_ns < starved_silences_max * settings_.silence_ns)
    call->time_left_ns = std::max({call->time_left_ns, 2 * settings_.silence_ns, settings_.stranger_ns});
  call->refusals = connection.datagrams() != 0 ? 0 : call->refusals;
  if (connection.state() == QuicState::linked) {
    const std::int32_t rank = call->rank;
    calls_.erase(call);
    hand_on(rank, connection);
    return connect_due();
  }
  if (connection.state() != QuicState::closed) return;
  const Admission admission = connection.admission();
  const bool is_hung_up = connection.is_hung_up() && !connection.is_refused();
  const std::string why = connection.why();
  call->connection = nullptr;
  endpoint_.close(connection, Admission::unknown);
  if (is_hung_up && admission == Admission::crossing) {
    call->state = Call::State::crossed;
    return connect_due();
  }
  if (is_hung_up && admission == Admission::leaving) return refuse(call, "left", Admission::leaving);
  if (is_hung_up && admission == Admission::known) return refuse(call, "it refuses the link");
  if (is_hung_up) {
    // A crowded acceptor drops old callers: call again with the next heartbeat.
    call->trouble = "it hung up during the handshake";
    call->state = Call::State::resting;
    return connect_due();
  }
  refuse(call, why);
}

void RealQuicConnector::refuse(std::list<Call>::iterator call, const std::string& cause, Admission admission) {
  const std::int32_t rank = call->rank;
  QuicConnection* connection = call->connection;
  calls_.erase(call);
  if (connection != nullptr) endpoint_.close(*connection, Admission::unknown);
  owner_.on_refused(rank, cause, admission);
  connect_due();
}

void RealQuicConnector::tick(std::int64_t passed_ns) {
  if (identity_ == nullptr) return;
  for (Call& call : calls_) {
    if (call.attempts == 0 || call.state == Call::State::crossed) continue;
    call.time_left_ns -= passed_ns;
    call.waited_ns += passed_ns;
  }
  const auto is_late = [this](const Call& call) {
    const bool is_starved = call.pid > 0 && call.time_left_ns > -starved_silences_max * settings_.silence_ns &&
                            engine::is_starved(call.pid);
    return call.time_left_ns <= 0 && call.attempts != 0 && call.state != Call::State::crossed && !is_starved;
  };
  // From the start each time: a refusal may remove any of them.
  for (auto late = calls_.begin(); (late = std::find_if(calls_.begin(), calls_.end(), is_late)) != calls_.end();) {
    char text[64];
    snprintf(text, sizeof text, "no answer to a handshake in %.1f s", static_cast<double>(late->waited_ns) / 1e9);
    refuse(late, unreached(*late, late->trouble.empty() ? text : late->trouble));
  }
  for (Call& call : calls_)
    if (call.state == Call::State::resting) call.state = Call::State::due;
  for (Stranger& stranger : strangers_) stranger.time_left_ns -= passed_ns;
  const auto is_slow = [](const Stranger& s) { return s.time_left_ns <= 0; };
  for (auto slow = strangers_.begin();
       (slow = std::find_if(strangers_.begin(), strangers_.end(), is_slow)) != strangers_.end();) {
    char text[64];
    snprintf(text, sizeof text, "no answer to a handshake in %.1f s", static_cast<double>(settings_.stranger_ns) / 1e9);
    note_refusal(*slow, text);
    QuicConnection& connection = *slow->connection;
    strangers_.erase(slow);
    endpoint_.close(connection, Admission::unknown);
  }
  connect_due();
}

// ---- callers ----

void RealQuicConnector::on_first(const SocketAddress& local, const SocketAddress& from, const byte* datagram,
                                 size_t bytes, std::int64_t now) {
  if (pinger_.take(datagram, bytes)) return;
  ngtcp2_pkt_hd first;
  const auto* data = reinterpret_cast<const uint8_t*>(datagram);
  if (identity_ == nullptr || ngtcp2_accept(&first, data, bytes) != 0) return;
  if (first.dcid.datalen != quic_id_bytes || first.version != NGTCP2_PROTO_VER_V1) return;
  ngtcp2_cid original{};
  const bool has_token = token_bytes(first) != 0;
  if (has_token) {
    const bool is_sound =
        ngtcp2_crypto_verify_retry_token(&original, token_of(first), token_bytes(first),
                                         reinterpret_cast<const uint8_t*>(token_secret_), sizeof token_secret_,
                                         first.version, reinterpret_cast<const ngtcp2_sockaddr*>(from.get()),
                                         from.bytes, &first.dcid, retry_ns, static_cast<ngtcp2_tstamp>(now)) == 0;
    if (!is_sound) return;
  } else if (strangers_.size() >= strangers_unproven_max) {
    return ask_for_address(first, local, from, now);
  }
  drop_oldest_stranger(from.group());
  auto made = QuicConnection::accept(*identity_, quic_settings(), endpoint_, path_to(local, from), first,
                                     has_token ? &original : nullptr, now);
  if (made == nullptr) return;
  QuicConnection& connection = endpoint_.add(std::move(made));
  strangers_.push_back({&connection, from, settings_.stranger_ns});
  connection.receive(local, from, datagram, bytes, now);
  on_stranger_changed(std::prev(strangers_.end()));
}

void RealQuicConnector::ask_for_address(const ngtcp2_pkt_hd& first, const SocketAddress& local,
                                        const SocketAddress& from, std::int64_t now) {
  ngtcp2_cid id{};
  id.datalen = quic_id_bytes;
  uint8_t token[NGTCP2_CRYPTO_MAX_RETRY_TOKENLEN], packet[512];
  if (!fill_random(id.data, id.datalen)) return;
  const ngtcp2_ssize token_length =
      ngtcp2_crypto_generate_retry_token(token, reinterpret_cast<const uint8_t*>(token_secret_), sizeof token_secret_,
                                         first.version, reinterpret_cast<const ngtcp2_sockaddr*>(from.get()),
                                         from.bytes, &id, &first.dcid, static_cast<ngtcp2_tstamp>(now));
  if (token_length < 0) return;
  const ngtcp2_ssize n = ngtcp2_crypto_write_retry(packet, sizeof packet, first.version, &first.scid, &id, &first.dcid,
                                                   token, static_cast<size_t>(token_length));
  if (n > 0) endpoint_.send_one(reinterpret_cast<const byte*>(packet), static_cast<size_t>(n), local, from);
}

// A newcomer is never turned away: if there are too many strangers, the oldest goes, of the same address if that alone
// has too many.
void RealQuicConnector::drop_oldest_stranger(const std::string& group) {
  const auto is_same = [&](const Stranger& s) { return s.address.group() == group; };
  auto oldest = strangers_.end();
  if (static_cast<size_t>(std::count_if(strangers_.begin(), strangers_.end(), is_same)) >=
      settings_.strangers_per_address_max)
    oldest = std::find_if(strangers_.begin(), strangers_.end(), is_same);
  else if (strangers_.size() >= settings_.strangers_max)
    oldest = strangers_.begin();
  if (oldest == strangers_.end()) return;
  note_refusal(*oldest, "too many strangers");
  QuicConnection& connection = *oldest->connection;
  strangers_.erase(oldest);
  endpoint_.close(connection, Admission::unknown);
}

void RealQuicConnector::on_stranger_changed(std::list<Stranger>::iterator stranger) {
  QuicConnection& connection = *stranger->connection;
  const uint64_t bytes_max = padding_factor * settings_.stranger_bytes_max;
  if (connection.state() == QuicState::accepted && connection.received_bytes() > bytes_max)
    connection.give_up("it sent more than a stranger may");
  if (connection.state() == QuicState::accepted && connection.sent_bytes() > bytes_max)
    connection.give_up("it asked for more than a stranger gets");
  if (connection.state() == QuicState::closed) {
    if (!connection.is_hung_up()) note_refusal(*stranger, connection.why());
    strangers_.erase(stranger);
    return endpoint_.close(connection, Admission::unknown);
  }
  if (connection.state() != QuicState::waiting) return;
  strangers_.erase(stranger);
  const Admission admission = owner_.admit(connection.rank());
  if (admission != Admission::welcome) return endpoint_.close(connection, admission);
  connection.welcome();
  endpoint_.on_put(connection, true);
  hand_on(connection.rank(), connection);
}

void RealQuicConnector::hand_on(std::int32_t rank, QuicConnection& connection) {
  Peer* peer = owner_.on_admitted(rank);
  if (peer == nullptr) return endpoint_.close(connection, Admission::known);
  ++links_;
  if (peers_.empty()) peers_.resize(static_cast<size_t>(size_));
  peers_[static_cast<size_t>(rank)] = peer;
  owner_.on_link(*peer, std::make_unique<QuicLink>(*peer, endpoint_, connection, policy_));
}

void RealQuicConnector::note_refusal(const Stranger& stranger, const std::string& cause) {
  ++refused_;
  if (refusals_.size() < refusals_max) refusals_.push_back("a caller from " + stranger.address.host() + ": " + cause);
}

void RealQuicConnector::on_changed(QuicConnection& connection) {
  if (calls_.empty() && strangers_.empty()) return;
  const auto is_it = [&](const auto& each) { return each.connection == &connection; };
  if (const auto call = std::find_if(calls_.begin(), calls_.end(), is_it); call != calls_.end())
    return on_call_changed(call);
  if (const auto stranger = std::find_if(strangers_.begin(), strangers_.end(), is_it); stranger != strangers_.end())
    on_stranger_changed(stranger);
}

// ---- ports that answer as closed ----

void RealQuicConnector::on_unreachable(const SocketAddress& to, int) {
  const auto call = std::find_if(calls_.begin(), calls_.end(), [&](const Call& c) {
    return c.address == to && c.state == Call::State::under_way && !c.is_reached;
  });
  // The socket of a rank is bound before its card is known.
  if (call != calls_.end() && (++call->refusals >= refusals_needed || is_gone(call->pid)))
    return refuse(call, unreached(*call, strerror(ECONNREFUSED)));
  for (Suspicion& each : suspicions_)
    if (endpoint_.has(*each.connection) && each.connection->remote() == to) {
      ++each.refusals;
      return;
    }
  if (QuicConnection* connection = endpoint_.linked_at(to); connection != nullptr)
    suspicions_.push_back(
        {connection->rank(), connection, connection->datagrams(), pinger_.answers(connection->rank())});
}

// An ICMP message can be forged, but a forger cannot keep a living rank from answering: ping it. On this host the
// system knows whether it lives, even if it is stopped or starved.
void RealQuicConnector::ask_suspects(std::int64_t now) {
  for (auto each = suspicions_.begin(); each != suspicions_.end();) {
    const bool is_over = !endpoint_.has(*each->connection) || each->connection->state() != QuicState::linked;
    if (is_over || each->connection->datagrams() != each->datagrams || pinger_.answers(each->rank) != each->answers) {
      each = suspicions_.erase(each);
      continue;
    }
    if (now >= each->next_at) {
      const Peer* here = static_cast<size_t>(each->rank) < peers_.size() ? peers_[each->rank] : nullptr;
      if (here != nullptr && !here->is_same_host) here = nullptr;
      if (here != nullptr && is_gone(here->card.pid)) {
        each->connection->give_up("died: its port was closed");
        each = suspicions_.erase(each);
        continue;
      }
      if (each->asks == asks_max) {
        if (each->refusals >= refusals_needed && here == nullptr)
          each->connection->give_up("died: its port was closed");
        each = suspicions_.erase(each);
        continue;
      }
      ++each->asks;
      each->next_at = now + ask_ns;
      pinger_.ping(each->rank);
    }
    ++each;
  }
}

}  // namespace

std::unique_ptr<QuicConnector> QuicConnector::make(ConnectionOwner& owner, Poller& poller, Pinger& pinger,
                                                   const SocketPolicy& policy) {
  return std::make_unique<RealQuicConnector>(owner, poller, pinger, policy);
}

bool QuicConnector::is_built() { return true; }

}  // namespace unisono::engine
