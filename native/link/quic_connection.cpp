#include "link/quic_connection.hpp"

#include <ngtcp2/ngtcp2_crypto_gnutls.h>

#include <algorithm>
#include <cstring>

#include "link/quic_version.hpp"

namespace unisono::engine {
namespace {

// Before a path is known to carry more, and during every handshake.
constexpr size_t datagram_bytes_min = NGTCP2_MAX_UDP_PAYLOAD_SIZE;
// The largest that a probe may find out.
constexpr size_t datagram_bytes_probed_max = 1452;
// The peer acknowledges at the latest after this time. With the default, 25 ms, one lost datagram delays a short
// message by as much.
constexpr std::int64_t ack_delay_ns = millisecond;
// A guess until there is a measurement: a lost first datagram is sent again after three times this.
constexpr std::int64_t first_rtt_ns = 50 * millisecond;
// On one host the library's timers for acknowledgements are due after a microsecond, and would cost a datagram each.
constexpr std::int64_t timer_slack_ns = 200'000;
// The library bounds its congestion window by a multiple of the larger of two: the bytes that a round trip carries, and
// two of the longest datagrams. Within a host round trips take a microsecond and flow control alone protects the
// receiver, so the second bound counts: the library is told of datagrams this long, whatever length it may write. With
// 1,452 bytes the window would stay at 42 KB, less than one batch, as soon as one short message was answered at once.
constexpr size_t datagram_bytes_declared = 65'000;
// Of the connection's window one stream can use this part: a lost datagram of one must not hold up the others.
constexpr uint64_t stream_part_dividend = 3, stream_part_divisor = 4;
constexpr uint64_t close_code_base = 0x100;
constexpr uint64_t crypto_error = 0x100;  // transport error codes of TLS alerts
constexpr size_t parts_max = 8;
// A path that carried long datagrams may cease to. After three probes in a row without an answer they are short for a
// minute; then long ones are tried again, because the peer may only have been silent.
constexpr size_t lost_probes_max = 3;
constexpr std::int64_t short_ns = 60 * second;
// Of the reason in a datagram that closes a connection: it must fit with everything else.
constexpr size_t reason_bytes_max = 512;

ngtcp2_tstamp stamp(std::int64_t now) { return static_cast<ngtcp2_tstamp>(now); }

ngtcp2_path path_of(const SocketAddress& local, const SocketAddress& remote) {
  const auto address = [](const SocketAddress& a) {
    return ngtcp2_addr{const_cast<ngtcp2_sockaddr*>(reinterpret_cast<const ngtcp2_sockaddr*>(a.get())), a.bytes};
  };
  return {address(local), address(remote), nullptr};
}

QuicId id_of(const ngtcp2_cid& cid) {
  QuicId id = 0;
  std::memcpy(&id, cid.data, std::min(cid.datalen, sizeof id));
  return id;
}

ngtcp2_cid random_cid() {
  ngtcp2_cid made{};
  made.datalen = quic_id_bytes;
  if (!fill_random(made.data, made.datalen)) made.datalen = 0;
  return made;
}

// No rank proposes versions, and nothing proves who sent such a datagram: it would end an attempt to connect.
bool is_version_negotiation(const byte* datagram, size_t bytes) {
  uint32_t version = 1;
  if (bytes > sizeof version && (datagram[0] & byte{0x80}) != byte{0})
    std::memcpy(&version, datagram + 1, sizeof version);
  return version == 0;
}

// The connection that reads a datagram: the callback that decrypts it is not told.
thread_local QuicConnection* reading = nullptr;

}  // namespace

// What the library calls. It must not write or destroy the connection.
struct QuicConnection::Callbacks {
  static QuicConnection& of(void* self) { return *static_cast<QuicConnection*>(self); }
  // No exception crosses the library, which is C.
  template <class Work>
  static int guard(void* self, Work work) noexcept {
    try {
      return work(of(self)) ? 0 : NGTCP2_ERR_CALLBACK_FAILURE;
    } catch (const std::exception&) {
      of(self).fault_ = "no memory";  // short enough to need none
      return NGTCP2_ERR_CALLBACK_FAILURE;
    }
  }

  // ngtcp2 0.12 aborts the process if it writes with these keys and knows no version: an opener that sends no transport
  // parameters brings it there.
  static int recv_tx_key(ngtcp2_conn* connection, QuicKeyLevel level, void* self) {
    if (level != application_keys || ngtcp2_conn_get_negotiated_version(connection) != 0) return 0;
    of(self).fault_ = "its greeting has no transport parameters";
    return NGTCP2_ERR_CALLBACK_FAILURE;
  }
  static int handshake_completed(ngtcp2_conn*, void* self) {
    return guard(self, [](QuicConnection& me) { return me.on_certified(); });
  }
  static int recv_stream_data(ngtcp2_conn*, uint32_t flags, int64_t id, uint64_t, const uint8_t* data, size_t bytes,
                              void* self, void*) {
    return guard(self, [=](QuicConnection& me) {
      const auto stream = static_cast<size_t>(id >> 2);
      if ((flags & NGTCP2_STREAM_DATA_FLAG_FIN) != 0 || stream >= quic_stream_count || (id & 2) == 0) {
        me.fault_ = "it ended a stream";
        return false;
      }
      return me.on_stream_bytes(static_cast<QuicStream>(stream), reinterpret_cast<const byte*>(data), bytes);
    });
  }
  static int acked(ngtcp2_conn*, int64_t id, uint64_t offset, uint64_t bytes, void* self, void*) {
    return guard(self, [=](QuicConnection& me) {
      me.out_[static_cast<size_t>(id >> 2)].acknowledged(offset + bytes);
      return true;
    });
  }
  static int extend_max_stream_data(ngtcp2_conn*, int64_t id, uint64_t, void* self, void*) {
    if (const auto stream = static_cast<size_t>(id >> 2); stream < quic_stream_count)
      of(self).is_blocked_[stream] = false;
    return 0;
  }
  static int stream_reset(ngtcp2_conn*, int64_t, uint64_t, uint64_t, void* self, void*) {
    return guard(self, [](QuicConnection& me) {
      me.fault_ = "it reset a stream";
      return false;
    });
  }
  static int stream_stop_sending(ngtcp2_conn*, int64_t, uint64_t, void* self, void*) {
    return guard(self, [](QuicConnection& me) {
      me.fault_ = "it refuses a stream";
      return false;
    });
  }
  // Every host that sees a connection id can send to it. Only the peer can send what decrypts, and only once.
  static int decrypt(uint8_t* to, const ngtcp2_crypto_aead* aead, const ngtcp2_crypto_aead_ctx* key,
                     const uint8_t* from, size_t bytes, const uint8_t* nonce, size_t nonce_bytes, const uint8_t* head,
                     size_t head_bytes) {
    const int error = ngtcp2_crypto_decrypt_cb(to, aead, key, from, bytes, nonce, nonce_bytes, head, head_bytes);
    if (error == 0 && reading != nullptr) reading->on_decrypted(head, head_bytes);
    return error;
  }
  // Its tag proves that it answers a datagram of ours.
  static int recv_retry(ngtcp2_conn* conn, const ngtcp2_pkt_hd* head, void* self) {
    of(self).is_sign_of_life_ = true;
    return ngtcp2_crypto_recv_retry_cb(conn, head, self);
  }
  static int update_key(ngtcp2_conn* conn, uint8_t* rx_secret, uint8_t* tx_secret, ngtcp2_crypto_aead_ctx* rx,
                        uint8_t* rx_iv, ngtcp2_crypto_aead_ctx* tx, uint8_t* tx_iv, const uint8_t* rx_before,
                        const uint8_t* tx_before, size_t bytes, void* self) {
    ++of(self).key_updates_;
    return ngtcp2_crypto_update_key_cb(conn, rx_secret, tx_secret, rx, rx_iv, tx, tx_iv, rx_before, tx_before, bytes,
                                       self);
  }
  static void random(uint8_t* to, size_t bytes, const ngtcp2_rand_ctx*) { fill_random(to, bytes); }
  static int new_id(ngtcp2_conn*, ngtcp2_cid* cid, uint8_t* token, size_t bytes, void* self) {
    cid->datalen = bytes;
    if (!fill_random(cid->data, bytes) || !fill_random(token, NGTCP2_STATELESS_RESET_TOKENLEN))
      return NGTCP2_ERR_CALLBACK_FAILURE;
    return guard(self, [cid](QuicConnection& me) {
      me.route(id_of(*cid));
      return true;
    });
  }
  static int old_id(ngtcp2_conn*, const ngtcp2_cid* cid, void* self) {
    QuicConnection& me = of(self);
    std::erase(me.ids_, id_of(*cid));
    me.routes_.remove(id_of(*cid));
    return 0;
  }

  static ngtcp2_callbacks table() {
    ngtcp2_callbacks made{};
    made.client_initial = ngtcp2_crypto_client_initial_cb;
    made.recv_client_initial = ngtcp2_crypto_recv_client_initial_cb;
    made.recv_crypto_data = ngtcp2_crypto_recv_crypto_data_cb;
    made.recv_retry = recv_retry;
    made.encrypt = ngtcp2_crypto_encrypt_cb;
    made.decrypt = decrypt;
    made.hp_mask = ngtcp2_crypto_hp_mask_cb;
    made.update_key = update_key;
    made.delete_crypto_aead_ctx = ngtcp2_crypto_delete_crypto_aead_ctx_cb;
    made.delete_crypto_cipher_ctx = ngtcp2_crypto_delete_crypto_cipher_ctx_cb;
    made.get_path_challenge_data = ngtcp2_crypto_get_path_challenge_data_cb;
    made.version_negotiation = ngtcp2_crypto_version_negotiation_cb;
    made.recv_tx_key = recv_tx_key;
    made.handshake_completed = handshake_completed;
    made.recv_stream_data = recv_stream_data;
    made.acked_stream_data_offset = acked;
    made.extend_max_stream_data = extend_max_stream_data;
    made.stream_reset = stream_reset;
    made.stream_stop_sending = stream_stop_sending;
    made.rand = random;
    made.get_new_connection_id = new_id;
    made.remove_connection_id = old_id;
    return made;
  }
};

// ---- beginning ----

QuicConnection::QuicConnection(const QuicIdentity& identity, const QuicSettings& settings, QuicRoutes& routes,
                               const QuicPath& path, bool is_opener, std::int32_t rank)
    : identity_(identity),
      settings_(settings),
      routes_(routes),
      path_(path),
      local_(path.local),
      remote_(path.remote),
      is_opener_(is_opener),
      rank_(rank),
      state_(is_opener ? QuicState::calling : QuicState::accepted) {
  reference_.get_conn = [](ngtcp2_crypto_conn_ref* of) {
    return static_cast<QuicConnection*>(of->user_data)->conn_.get();
  };
  reference_.user_data = this;
}

QuicConnection::~QuicConnection() {
  for (const QuicId id : ids_) routes_.remove(id);
}

std::unique_ptr<QuicConnection> QuicConnection::open(const QuicIdentity& identity, const QuicSettings& settings,
                                                     QuicRoutes& routes, const QuicPath& path, std::int32_t rank,
                                                     std::int64_t now) {
  std::unique_ptr<QuicConnection> made(new QuicConnection(identity, settings, routes, path, true, rank));
  const ngtcp2_cid peer = random_cid(), own = random_cid();
  if (peer.datalen == 0 || own.datalen == 0 || !made->start(peer, own, nullptr, nullptr, now)) return nullptr;
  return made;
}

std::unique_ptr<QuicConnection> QuicConnection::accept(const QuicIdentity& identity, const QuicSettings& settings,
                                                       QuicRoutes& routes, const QuicPath& path,
                                                       const ngtcp2_pkt_hd& first, const ngtcp2_cid* original,
                                                       std::int64_t now) {
  std::unique_ptr<QuicConnection> made(new QuicConnection(identity, settings, routes, path, false, -1));
  const ngtcp2_cid own = random_cid();
  if (own.datalen == 0 || !made->start(first.scid, own, &first, original, now)) return nullptr;
  // The opener uses the id that it chose until it has read ours.
  made->route(id_of(first.dcid));
  return made;
}

bool QuicConnection::start(const ngtcp2_cid& peer, const ngtcp2_cid& own, const ngtcp2_pkt_hd* first,
                           const ngtcp2_cid* original, std::int64_t now) {
  session_ = identity_.session(is_opener_);
  if (session_ == nullptr) return false;
  const ngtcp2_callbacks callbacks = Callbacks::table();
  ngtcp2_settings settings;
  ngtcp2_settings_default(&settings);
  settings.initial_ts = stamp(now);
  settings.initial_rtt = first_rtt_ns;
  settings.ack_thresh = 2;
  settings.cc_algo = NGTCP2_CC_ALGO_CUBIC;
  settings.handshake_timeout = UINT64_MAX;  // the owner of the connection bounds its time
  settings.max_tx_udp_payload_size = path_.is_local              ? datagram_bytes_declared
                                     : path_.datagram_bytes != 0 ? path_.datagram_bytes
                                                                 : datagram_bytes_probed_max;
  settings.no_tx_udp_payload_size_shaping = path_.datagram_bytes != 0;
  settings.no_pmtud = path_.datagram_bytes != 0;
  settings.max_window = path_.window_bytes_max;
  settings.max_stream_window = path_.window_bytes_max / stream_part_divisor * stream_part_dividend;
  if (first != nullptr) set_token(settings, *first);

  ngtcp2_transport_params params;
  ngtcp2_transport_params_default(&params);
  params.initial_max_data = path_.window_bytes;
  params.initial_max_stream_data_uni = path_.window_bytes / stream_part_divisor * stream_part_dividend;
  params.initial_max_streams_uni = quic_stream_count;
  params.initial_max_streams_bidi = 0;
  params.max_idle_timeout = 0;  // the engine's own heartbeats detect dead peers
  params.max_ack_delay = ack_delay_ns;
  params.active_connection_id_limit = 4;

  const ngtcp2_path path = path_of(path_.local, path_.remote);
  ngtcp2_conn* made = nullptr;
  int error;
  if (first == nullptr) {
    error = ngtcp2_conn_client_new(&made, &peer, &own, &path, NGTCP2_PROTO_VER_V1, &callbacks, &settings, &params,
                                   nullptr, this);
  } else {
    set_original(params, original != nullptr ? *original : first->dcid);
    if (original != nullptr) {
      params.retry_scid_present = 1;
      params.retry_scid = first->dcid;
    }
    error = ngtcp2_conn_server_new(&made, &peer, &own, &path, first->version, &callbacks, &settings, &params, nullptr,
                                   this);
  }
  if (error != 0) return false;
  conn_.reset(made);
  route(id_of(own));
  gnutls_session_set_ptr(session_.get(), &reference_);
  ngtcp2_conn_set_tls_native_handle(made, session_.get());
  error = is_opener_ ? ngtcp2_crypto_gnutls_configure_client_session(session_.get())
                     : ngtcp2_crypto_gnutls_configure_server_session(session_.get());
  update_expiry();
  return error == 0;
}

void QuicConnection::route(QuicId id) {
  ids_.push_back(id);
  routes_.add(id, *this);
}

// ---- states ----

bool QuicConnection::on_certified() {
  const std::int32_t shown = identity_.rank_of(session_.get());
  if (shown < 0) {
    alert_ = GNUTLS_A_BAD_CERTIFICATE;
    fault_ = "its certificate names no rank of this job";
    return false;
  }
  if (is_opener_ && shown != rank_) {
    alert_ = GNUTLS_A_BAD_CERTIFICATE;
    fault_ = "its certificate is rank " + std::to_string(shown) + "'s";
    return false;
  }
  rank_ = shown;
  for (auto& id : stream_ids_)
    if (ngtcp2_conn_open_uni_stream(conn_.get(), &id, nullptr) != 0) {
      fault_ = "it does not allow three streams";
      return false;
    }
  on(QuicEvent::certified);
  if (is_opener_) greet();
  return true;
}

void QuicConnection::greet() {
  const QuicGreeting greeting{static_cast<uint32_t>(settings_.size), static_cast<uint32_t>(settings_.rank),
                              static_cast<uint32_t>(rank_), 0, settings_.eager_credit_bytes};
  out(QuicStream::control).append(&greeting, sizeof greeting);
}

bool QuicConnection::on_greeting() {
  const bool is_sound = greeting_.size == static_cast<uint32_t>(settings_.size) &&
                        greeting_.from == static_cast<uint32_t>(rank_) &&
                        greeting_.to == static_cast<uint32_t>(settings_.rank) &&
                        greeting_.eager_credit_bytes == settings_.eager_credit_bytes;
  if (!is_sound) {
    fault_ = "its greeting names another job, rank or size";
    return false;
  }
  on(is_opener_ ? QuicEvent::welcome : QuicEvent::greeted);
  return true;
}

void QuicConnection::welcome() {
  on(QuicEvent::welcome);
  greet();
}

bool QuicConnection::on_stream_bytes(QuicStream stream, const byte* from, size_t bytes) {
  if (stream == QuicStream::control && greeting_bytes_ < sizeof greeting_) {
    const size_t take = std::min(bytes, sizeof greeting_ - greeting_bytes_);
    std::memcpy(reinterpret_cast<byte*>(&greeting_) + greeting_bytes_, from, take);
    greeting_bytes_ += take;
    from += take;
    bytes -= take;
    consumed(stream, take);
    if (greeting_bytes_ == sizeof greeting_ && !on_greeting()) return false;
  }
  if (bytes == 0) return true;
  if (reader_ == nullptr) {
    // An opener says nothing before it is welcome; what follows the acceptor's greeting waits for the reader.
    if (state_ != QuicState::linked && !is_opener_) {
      fault_ = "it sent messages before it was admitted";
      return false;
    }
    // Not counted as read: the window bounds it.
    auto& early = early_[static_cast<size_t>(stream)];
    early.insert(early.end(), from, from + bytes);
    return true;
  }
  const char* fault = reader_->on_bytes(stream, from, bytes);
  if (fault != nullptr) fault_ = fault;
  consumed(stream, bytes);
  return fault == nullptr;
}

void QuicConnection::consumed(QuicStream stream, size_t bytes) {
  // Streams of one direction: bit 1; opened by the acceptor: bit 0.
  const std::int64_t id = static_cast<std::int64_t>(stream) << 2 | 2 | (is_opener_ ? 1 : 0);
  ngtcp2_conn_extend_max_stream_offset(conn_.get(), id, bytes);
  ngtcp2_conn_extend_max_offset(conn_.get(), bytes);
}

void QuicConnection::read_by(QuicReader* reader) {
  reader_ = reader;
  for (size_t i = 0; i < quic_stream_count && reader_ != nullptr; ++i) {
    const std::vector<byte> early = std::exchange(early_[i], {});
    if (early.empty()) continue;
    consumed(static_cast<QuicStream>(i), early.size());
    const char* fault = reader_->on_bytes(static_cast<QuicStream>(i), early.data(), early.size());
    if (fault != nullptr) return fail(fault);
  }
}

void QuicConnection::end(QuicEvent event, std::string why) {
  if (state_ == QuicState::closed) return;
  on(event);
  why_ = std::move(why);
  expiry_ = never;
}

void QuicConnection::fail(std::string why) { end(QuicEvent::fail, std::move(why)); }

void QuicConnection::on_error(int error) {
  if (error == NGTCP2_ERR_DRAINING) {
    QuicClose came;
    const bool is_ours = read_close(conn_.get(), came);
    const uint64_t code = came.code;
    is_hung_up_ = true;
    reason_ = came.reason.substr(0, reason_bytes_max);
    if (is_ours && code >= close_code_base && code < close_code_base + admission_count)
      admission_ = static_cast<Admission>(code - close_code_base);
    const bool is_alert = !is_ours && code >= crypto_error && code < crypto_error + 0x100;
    const char* alert =
        is_alert ? gnutls_alert_get_name(static_cast<gnutls_alert_description_t>(code - crypto_error)) : nullptr;
    is_refused_ = alert != nullptr;
    return end(QuicEvent::hang_up,
               alert != nullptr ? std::string("it refused the TLS handshake: ") + alert : "its connection was closed");
  }
  is_mute_ = error == NGTCP2_ERR_DROP_CONN;
  if (is_mute_) return fail("its first datagram begins no handshake");
  if (error == NGTCP2_ERR_CRYPTO) alert_ = ngtcp2_conn_get_tls_alert(conn_.get());
  if (!fault_.empty()) return fail(fault_);
  const std::string refusal = QuicIdentity::verify_error(session_.get());
  if (!refusal.empty()) return fail(refusal);
  if (error == NGTCP2_ERR_CRYPTO) {
    const char* alert = gnutls_alert_get_name(static_cast<gnutls_alert_description_t>(alert_));
    return fail(std::string("no TLS with it: ") + (alert != nullptr ? alert : "the handshake broke off"));
  }
  fail(ngtcp2_strerror(error));
}

std::vector<byte> QuicConnection::close(Admission admission, const std::string& reason, std::int64_t now) {
  reader_ = nullptr;
  const bool was_hung_up = is_hung_up_;
  if (state_ != QuicState::closed) fail("closed here");
  std::vector<byte> said(datagram_bytes_min);
  const QuicClose how{close_code_base + static_cast<uint64_t>(admission), alert_, reason.substr(0, reason_bytes_max)};
  ngtcp2_path_storage path;
  ngtcp2_path_storage_zero(&path);
  ngtcp2_pkt_info info{};
  const ngtcp2_ssize n = was_hung_up || is_mute_ || ngtcp2_conn_is_in_draining_period(conn_.get()) != 0
                             ? 0
                             : write_close(conn_.get(), &path.path, &info, reinterpret_cast<uint8_t*>(said.data()),
                                           said.size(), how, stamp(now));
  said.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return said;
}

// ---- datagrams and time ----

void QuicConnection::receive(const SocketAddress& local, const SocketAddress& from, const byte* datagram, size_t bytes,
                             std::int64_t now) {
  if (state_ == QuicState::closed || is_version_negotiation(datagram, bytes)) return;
  received_bytes_ += bytes;
  const ngtcp2_path path = path_of(local, from);
  const ngtcp2_pkt_info info{};
  is_sign_of_life_ = false;
  reading = this;
  const int error =
      ngtcp2_conn_read_pkt(conn_.get(), &path, &info, reinterpret_cast<const uint8_t*>(datagram), bytes, stamp(now));
  reading = nullptr;
  if (error != 0) return on_error(error);
  if (is_sign_of_life_) {
    was_heard_ = true;
    ++datagrams_;
  }
  update_expiry();
}

// A copy of an earlier packet decrypts, too: it is a sign of life only if its number is the highest so far. The header
// has the number's last bytes (RFC 9000, A.3). Handshakes have a time limit of their own, and their keys are dropped.
void QuicConnection::on_decrypted(const uint8_t* head, size_t bytes) {
  if ((head[0] & 0x80) != 0) {
    is_sign_of_life_ = true;
    return;
  }
  const size_t shown_bytes = 1 + (head[0] & 3);
  std::int64_t number = 0;
  for (size_t i = bytes - shown_bytes; i < bytes; ++i) number = number << 8 | head[i];
  const std::int64_t expected = newest_ + 1, window = std::int64_t{1} << 8 * shown_bytes;
  number |= expected & -window;
  if (number <= expected - window / 2)
    number += window;
  else if (number > expected + window / 2 && number >= window)
    number -= window;
  if (number <= newest_) return;
  newest_ = number;
  is_sign_of_life_ = true;
}

void QuicConnection::expire(std::int64_t now) {
  if (state_ == QuicState::closed) return;
  if (const int error = ngtcp2_conn_handle_expiry(conn_.get(), stamp(now)); error != 0) return on_error(error);
  if (!path_.is_local && now >= short_until_ && probe_timeouts(conn_.get()) >= lost_probes_max)
    short_until_ = now + short_ns;
  update_expiry();
}

void QuicConnection::on_too_long() { short_until_ = never; }

void QuicConnection::update_expiry() {
  const ngtcp2_tstamp at = ngtcp2_conn_get_expiry(conn_.get());
  if (at >= static_cast<ngtcp2_tstamp>(never) - timer_slack_ns)
    expiry_ = never;
  else
    expiry_ = static_cast<std::int64_t>(at) + (!path_.is_local                 ? 0
                                               : is_probe_due(conn_.get(), at) ? path_.probe_slack_ns
                                                                               : timer_slack_ns);
}

size_t QuicConnection::datagram_room(std::int64_t now) const {
  if (now < short_until_) return datagram_bytes_min;
  if (path_.datagram_bytes == 0) return datagram_bytes_probed_max;
  // A handshake that many ranks begin at once must fit into the receiver's buffer.
  return state_ == QuicState::linked ? path_.datagram_bytes : datagram_bytes_min;
}

bool QuicConnection::has_unsent() const {
  return std::any_of(std::begin(out_), std::end(out_), [](const QuicSendQueue& q) { return q.unsent() != 0; });
}

bool QuicConnection::is_acknowledged() const {
  return std::all_of(std::begin(out_), std::end(out_), [](const QuicSendQueue& q) { return q.unacknowledged() == 0; });
}

uint64_t QuicConnection::congestion_window() const { return window_of(conn_.get()); }

bool QuicConnection::write(DatagramSink& sink, std::int64_t now) {
  if (state_ == QuicState::closed) return false;
  const size_t room = datagram_room(now);
  size_t quantum = path_.is_local ? SIZE_MAX : ngtcp2_conn_get_send_quantum(conn_.get());
  ngtcp2_path_storage path;
  ngtcp2_path_storage_zero(&path);
  bool is_full = false;
  while (quantum != 0) {
    byte* to = sink.space(room);
    if (to == nullptr) {
      is_full = true;
      break;
    }
    ngtcp2_pkt_info info{};
    const ngtcp2_ssize n = write_packet(to, room, &path.path, &info, now);
    if (n < 0) {
      sink.send(0, local_, remote_);
      on_error(static_cast<int>(n));
      return false;
    }
    const auto bytes = static_cast<size_t>(n);
    if (bytes != 0 && path.path.remote.addrlen != 0) {
      remote_.bytes = path.path.remote.addrlen;
      std::memcpy(&remote_.storage, path.path.remote.addr, remote_.bytes);
      local_.bytes = path.path.local.addrlen;
      std::memcpy(&local_.storage, path.path.local.addr, local_.bytes);
    }
    sent_bytes_ += bytes;
    sink.send(bytes, local_, remote_);
    if (bytes == 0) break;
    // For tests and for keys that encrypt less than the library's limit. Refused while the last update is not
    // confirmed.
    if (state_ == QuicState::linked && ++packets_ % settings_.rekey_packets == 0)
      ngtcp2_conn_initiate_key_update(conn_.get(), stamp(now));
    quantum -= std::min(quantum, bytes);
    // A packet that was not filled took everything.
    if (bytes < room / 2 && !has_unsent()) break;
  }
  // Without this call the library does not pace.
  if (!path_.is_local) ngtcp2_conn_update_pkt_tx_time(conn_.get(), stamp(now));
  update_expiry();
  return is_full;
}

ngtcp2_ssize QuicConnection::write_packet(byte* to, size_t room, ngtcp2_path* path, ngtcp2_pkt_info* info,
                                          std::int64_t now) {
  auto* dest = reinterpret_cast<uint8_t*>(to);
  for (size_t i = 0; i < quic_stream_count; ++i) {
    if (out_[i].unsent() == 0 || is_blocked_[i] || stream_ids_[i] < 0) continue;
    const bool is_last = std::none_of(out_ + i + 1, std::end(out_), [](const auto& q) { return q.unsent() != 0; });
    QuicSendQueue::Part parts[parts_max];
    const size_t count = out_[i].next(parts, parts_max, room);
    ngtcp2_vec vectors[parts_max];
    for (size_t k = 0; k < count; ++k)
      vectors[k] = {const_cast<uint8_t*>(reinterpret_cast<const uint8_t*>(parts[k].at)), parts[k].bytes};
    ngtcp2_ssize taken = -1;
    const ngtcp2_ssize n =
        ngtcp2_conn_writev_stream(conn_.get(), path, info, dest, room, &taken,
                                  is_last ? NGTCP2_WRITE_STREAM_FLAG_NONE : NGTCP2_WRITE_STREAM_FLAG_MORE,
                                  stream_ids_[i], vectors, count, stamp(now));
    if (taken > 0) out_[i].sent(static_cast<size_t>(taken));
    if (n == NGTCP2_ERR_STREAM_DATA_BLOCKED) {
      is_blocked_[i] = true;
      continue;
    }
    if (n != NGTCP2_ERR_WRITE_MORE) return n;
  }
  return ngtcp2_conn_writev_stream(conn_.get(), path, info, dest, room, nullptr, NGTCP2_WRITE_STREAM_FLAG_NONE, -1,
                                   nullptr, 0, stamp(now));
}

}  // namespace unisono::engine
