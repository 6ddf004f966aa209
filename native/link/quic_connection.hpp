// One QUIC connection between two ranks: three streams in each direction, mutual certificates, and a greeting by which
// the acceptor admits the opener. A state machine around ngtcp2: datagrams and the time come in as arguments, datagrams
// go out to a sink. It knows no sockets and no clock.
//
//   opener                                          acceptor
//   TLS client hello                            ->
//                                               <-  TLS certificate
//   TLS certificate, Greeting on `control`      ->
//                                               <-  Greeting on `control`, or CONNECTION_CLOSE with the admission
//
// Each side opens three unidirectional streams. A link is up after two round trips.

#pragma once

#include <ngtcp2/ngtcp2.h>
#include <ngtcp2/ngtcp2_crypto.h>

#include <memory>
#include <string>
#include <vector>

#include "base/socket_address.hpp"
#include "base/system.hpp"
#include "base/transition_table.hpp"
#include "link/quic_identity.hpp"
#include "link/quic_send_queue.hpp"
#include "wire/admission.hpp"

namespace unisono::engine {

// Control frames and RPC; eager messages and every envelope, in the order of sending; the payload of accepted messages.
enum class QuicStream : uint8_t { control, messages, data };
inline constexpr size_t quic_stream_count = 3;

enum class QuicState : uint8_t { calling, greeting, accepted, certified, waiting, linked, closed };
enum class QuicEvent : uint8_t { certified, greeted, welcome, fail, hang_up };
inline constexpr TransitionTable<QuicState, 7, QuicEvent, 5> quic_transitions({
    // TLS is complete: this rank has greeted
    {QuicState::calling, QuicEvent::certified, QuicState::greeting},
    // TLS failed, or its certificate names another rank
    {QuicState::calling, QuicEvent::fail, QuicState::closed},
    // it refused our certificate
    {QuicState::calling, QuicEvent::hang_up, QuicState::closed},
    // the acceptor has greeted, too
    {QuicState::greeting, QuicEvent::welcome, QuicState::linked},
    {QuicState::greeting, QuicEvent::fail, QuicState::closed},
    // it refused our certificate or did not admit us
    {QuicState::greeting, QuicEvent::hang_up, QuicState::closed},
    // TLS is complete
    {QuicState::accepted, QuicEvent::certified, QuicState::certified},
    {QuicState::accepted, QuicEvent::fail, QuicState::closed},
    {QuicState::accepted, QuicEvent::hang_up, QuicState::closed},
    // the opener has greeted: the owner decides whether it is admitted
    {QuicState::certified, QuicEvent::greeted, QuicState::waiting},
    {QuicState::certified, QuicEvent::fail, QuicState::closed},
    {QuicState::certified, QuicEvent::hang_up, QuicState::closed},
    {QuicState::waiting, QuicEvent::welcome, QuicState::linked},
    // not admitted
    {QuicState::waiting, QuicEvent::fail, QuicState::closed},
    {QuicState::waiting, QuicEvent::hang_up, QuicState::closed},
    // the peer broke the protocol, or this side closes
    {QuicState::linked, QuicEvent::fail, QuicState::closed},
    // the peer closed the connection
    {QuicState::linked, QuicEvent::hang_up, QuicState::closed},
    // nothing is sent or received any more
    {QuicState::closed, QuicEvent::fail, QuicState::closed},
    {QuicState::closed, QuicEvent::hang_up, QuicState::closed},
});

// The first bytes of each side's control stream.
struct QuicGreeting {
  uint32_t size;
  uint32_t from;
  uint32_t to;
  uint32_t unused;
  uint64_t eager_credit_bytes;
};
static_assert(sizeof(QuicGreeting) == 24);

// A connection id of ours, as a key.
using QuicId = uint64_t;
inline constexpr size_t quic_id_bytes = sizeof(QuicId);

class QuicConnection;

// Which connection a datagram is for: kept by the owner of the socket.
class QuicRoutes {
 public:
  virtual ~QuicRoutes() = default;
  virtual void add(QuicId id, QuicConnection& connection) = 0;
  virtual void remove(QuicId id) = 0;
};

// Where datagrams go. Between `space` and `send` nothing else is asked of it.
class DatagramSink {
 public:
  virtual ~DatagramSink() = default;
  // Memory for one datagram; nullptr if nothing can be sent now.
  virtual byte* space(size_t bytes) = 0;
  virtual void send(size_t bytes, const SocketAddress& from, const SocketAddress& to) = 0;
};

// What arrives on a connection that is linked.
class QuicReader {
 public:
  virtual ~QuicReader() = default;
  // The next bytes of a stream. Returns what is wrong with them, or nullptr.
  virtual const char* on_bytes(QuicStream stream, const byte* from, size_t bytes) = 0;
};

// How connections treat their path.
struct QuicPath {
  SocketAddress local;
  SocketAddress remote;
  // Bytes of the largest datagram, once the handshake is over; 0: begin with 1,200 and probe for more. Only a path that
  // passes no network, or is known, has a fixed size.
  size_t datagram_bytes = 0;
  // Whether nothing but this host is passed: no pacing, and timers may be late.
  bool is_local = false;
  // By how much the timers of probes may be late within a host. A missing answer there means that the peer is not
  // scheduled. A probe would only fill its buffer: the window does not bound what is sent twice.
  std::int64_t probe_slack_ns = 20 * millisecond;
  uint64_t window_bytes = 1 << 20;      // that the peer may send ahead of our reading
  uint64_t window_bytes_max = 1 << 26;  // the same on a long path
};

struct QuicSettings {
  std::int32_t rank;
  std::int32_t size;
  uint64_t eager_credit_bytes;
  uint64_t rekey_packets;  // that are encrypted with one key
};

class QuicConnection {
 public:
  // nullptr without memory. `first` is the header of the datagram that opens a connection, `original` the id that the
  // opener had chosen before it was asked to validate its address.
  static std::unique_ptr<QuicConnection> open(const QuicIdentity& identity, const QuicSettings& settings,
                                              QuicRoutes& routes, const QuicPath& path, std::int32_t rank,
                                              std::int64_t now);
  static std::unique_ptr<QuicConnection> accept(const QuicIdentity& identity, const QuicSettings& settings,
                                                QuicRoutes& routes, const QuicPath& path, const ngtcp2_pkt_hd& first,
                                                const ngtcp2_cid* original, std::int64_t now);
  ~QuicConnection();
  QuicConnection(const QuicConnection&) = delete;
  QuicConnection& operator=(const QuicConnection&) = delete;

  // -- datagrams and time
  // `local` is the address of ours that it came to.
  void receive(const SocketAddress& local, const SocketAddress& from, const byte* datagram, size_t bytes,
               std::int64_t now);
  // Write what is due. True if the sink had no room for all of it.
  bool write(DatagramSink& sink, std::int64_t now);
  // When `expire` is due; `never` if it is not.
  std::int64_t expiry() const { return expiry_; }
  void expire(std::int64_t now);
  // The system says that the datagrams are too long for the path: they are short from now on.
  void on_too_long();

  // -- states
  QuicState state() const { return state_; }
  bool is_opener() const { return is_opener_; }
  // The rank in the other side's certificate; for an opener the one that it calls.
  std::int32_t rank() const { return rank_; }
  // Acceptor, waiting: admit the opener.
  void welcome();
  // Why it is closed, and for an opener how it was turned away.
  const std::string& why() const { return why_; }
  Admission admission() const { return admission_; }
  bool is_hung_up() const { return is_hung_up_; }
  // The reason that the other side gave, perhaps none.
  const std::string& reason() const { return reason_; }
  // Whether the other side refused the TLS handshake, so that another attempt would not help.
  bool is_refused() const { return is_refused_; }
  // End it for a reason that the datagrams did not bring.
  void give_up(std::string why) { fail(std::move(why)); }
  // Close it: the one datagram that says so, perhaps empty. No memory of others is read any more.
  std::vector<byte> close(Admission admission, const std::string& reason, std::int64_t now);
  // From now on what arrives goes to the reader; first what has arrived already.
  void read_by(QuicReader* reader);

  // -- sending
  QuicSendQueue& out(QuicStream stream) { return out_[static_cast<size_t>(stream)]; }
  const QuicSendQueue& out(QuicStream stream) const { return out_[static_cast<size_t>(stream)]; }
  bool is_acknowledged() const;
  bool has_unsent() const;
  // Bytes that may be on their way at a time.
  uint64_t congestion_window() const;

  // Whether a datagram of the peer came since the last call, and how many came so far. Copies do not count.
  bool was_heard() { return std::exchange(was_heard_, false); }
  uint64_t datagrams() const { return datagrams_; }
  // The address that the peer is reached at.
  const SocketAddress& remote() const { return remote_; }
  const SocketAddress& local() const { return local_; }
  uint64_t received_bytes() const { return received_bytes_; }
  uint64_t sent_bytes() const { return sent_bytes_; }
  // Keys that were made after the handshake's, for the next update, too.
  uint64_t key_updates() const { return key_updates_; }
  const std::vector<QuicId>& ids() const { return ids_; }

  // For its owner: whether it is in a list of connections that must write.
  bool is_marked = false;

 private:
  struct Free {
    void operator()(ngtcp2_conn* conn) const { ngtcp2_conn_del(conn); }
  };
  struct Callbacks;

  QuicConnection(const QuicIdentity& identity, const QuicSettings& settings, QuicRoutes& routes, const QuicPath& path,
                 bool is_opener, std::int32_t rank);
  bool start(const ngtcp2_cid& peer, const ngtcp2_cid& own, const ngtcp2_pkt_hd* first, const ngtcp2_cid* original,
             std::int64_t now);

  void on(QuicEvent event) { state_ = quic_transitions.next(state_, event); }
  void fail(std::string why);
  void on_error(int error);
  void greet();
  bool on_certified();
  bool on_stream_bytes(QuicStream stream, const byte* from, size_t bytes);
  bool on_greeting();
  void end(QuicEvent event, std::string why);
  void consumed(QuicStream stream, size_t bytes);
  void on_decrypted(const uint8_t* head, size_t bytes);
  size_t datagram_room(std::int64_t now) const;
  ngtcp2_ssize write_packet(byte* to, size_t room, ngtcp2_path* path, ngtcp2_pkt_info* info, std::int64_t now);
  void update_expiry();
  void route(QuicId id);

  const QuicIdentity& identity_;
  const QuicSettings settings_;
  QuicRoutes& routes_;
  const QuicPath path_;
  SocketAddress local_, remote_;
  const bool is_opener_;
  std::int32_t rank_;
  QuicState state_;
  Admission admission_ = Admission::unknown;
  bool is_hung_up_ = false;
  bool is_refused_ = false;
  bool is_mute_ = false;  // its end is not sent: what arrived does not prove that there is a connection
  bool was_heard_ = false;
  bool is_sign_of_life_ = false;  // the datagram that is read is new, and the peer's
  std::int64_t newest_ = -1;      // number of its packets
  std::string why_;
  std::string reason_;
  std::string fault_;  // found in a callback
  int alert_ = -1;     // of TLS, which tells the peer why
  std::int64_t short_until_ = 0;
  std::int64_t expiry_ = never;
  uint64_t received_bytes_ = 0;
  uint64_t sent_bytes_ = 0;
  uint64_t datagrams_ = 0;
  uint64_t packets_ = 0;
  uint64_t key_updates_ = 0;

  ngtcp2_crypto_conn_ref reference_{};
  QuicIdentity::Session session_;
  std::unique_ptr<ngtcp2_conn, Free> conn_;
  std::vector<QuicId> ids_;

  QuicReader* reader_ = nullptr;
  QuicGreeting greeting_{};
  size_t greeting_bytes_ = 0;
  std::vector<byte> early_[quic_stream_count];  // that arrived before there was a reader
  QuicSendQueue out_[quic_stream_count];
  std::int64_t stream_ids_[quic_stream_count] = {-1, -1, -1};
  bool is_blocked_[quic_stream_count] = {};  // by flow control
};

}  // namespace unisono::engine
