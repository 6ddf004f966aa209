// The connector: listens, connects, and lets in who knows the job's secret.
//
// Knows sockets and the four messages of a greeting. Does not know links: a finished greeting is handed on.
//
// A caller that has not proven itself has 5 seconds and 4 KiB, and costs one small object, with TLS 64 KiB. At most
// 256 such callers wait, 128 of one address: a newcomer is never turned away for those who came before, the oldest
// goes instead. Without TLS it gets 64 bytes from us, and only after a sound hello; with TLS our handshake of 1.3 KiB.
//
// With TLS the greeting follows the handshake, and the rank in it must be the certificate's.
//
//   opener                                acceptor
//   Hello     who, to whom, nonce    ->
//                                    <-   Challenge  nonce, proof over both nonces
//   Answer    proof, probe, memory   ->
//                                    <-   Verdict    yes or why not, probe, presence page
//
// If both call at once, the lower rank's call counts. The other one stays open until that is through: whoever dies
// meanwhile is known by its end.

#pragma once

#include <sys/socket.h>

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/digest.hpp"
#include "base/poller.hpp"
#include "connect/pinger.hpp"
#include "link/byte_stream.hpp"
#include "link/shm_link.hpp"
#include "link/tls.hpp"
#include "messaging/peer.hpp"

namespace unisono::engine {

enum class Medium : uint8_t { shm, tcp };

enum class Admission : uint32_t { welcome, crossing, known, unknown, leaving };

struct Hello {
  char magic[8];
  uint32_t version;
  uint32_t size;
  uint32_t from;
  uint32_t to;
  Medium medium;
  Lane lane;
  uint8_t checksum;
  uint8_t unused[5];
  uint64_t eager_credit_bytes;
  byte nonce[32];
};
static_assert(sizeof(Hello) == 72);

struct Challenge {
  byte nonce[32];
  Proof proof;
};

struct Introduction {
  Proof proof;
  Probe probe;
};

struct Verdict {
  Admission ruling;
  uint32_t unused;
  Probe probe;
};

// A greeting that ended well: a stream, or on one host a socket and the memory to share.
struct NewConnection {
  std::int32_t rank;
  Medium medium;
  Lane lane;
  bool checksum;
  bool is_opener;
  std::unique_ptr<ByteStream> stream;
  Descriptor socket;
  Descriptor memory;
  Descriptor presence;
  Probe probe;
};

// Who owns the connector.
class Host : public Pinged {
 public:
  // A caller has proven itself: may it come in?
  virtual Admission admit(std::int32_t rank, Medium medium, Lane lane) = 0;
  virtual void on_connection(NewConnection connection) = 0;
  // A connect was not answered (`unknown`), or refused, perhaps because the other side is leaving.
  virtual void on_refused(std::int32_t rank, const std::string& cause, Admission ruling) = 0;
};

class Connector {
 public:
  Connector(Host& host, Poller& poller);
  ~Connector();

  // Throws std::runtime_error with the reason; only called before any thread runs.
  void open(std::int32_t rank, std::int32_t size, const std::string& directory, std::string secret,
            const Settings& settings, const Presence& presence);
  const Card& card() const { return card_; }
  // Who this rank is on links with TLS; until then nobody is let in by TCP. Throws std::runtime_error.
  void secure(const TlsMaterial& material);
  bool is_ready() const { return !settings_.tls || identity_ != nullptr; }

  // Where a rank is asked whether it lives.
  void cache_decision(std::int32_t rank, const Card& card);
  void ping(std::int32_t rank) { pinger_.ping(rank); }

  void connect(std::int32_t rank, const Card& card, Medium medium, Lane lane, bool checksum);
  // Forget a connect under way, and one that ours crossed.
  void forget(std::int32_t rank);
  // Whether we called this rank and it has not answered to the end.
  bool is_calling(std::int32_t rank) const;
  // Whether that call has not reached it so far.
  bool is_dialling(std::int32_t rank) const;
  // Whether it has answered that it is calling us.
  bool is_crossed(std::int32_t rank) const;
  // Whether a greeting is under way that may lead to a link.
  bool is_greeting() const;
  // So much time has passed: end greetings that take too long.
  void tick(std::int64_t passed_ns);
  bool is_busy() const { return !greetings_.empty(); }
  // Calls wait until others have ended: `dial_due` makes those for which there is room.
  bool has_due() const { return has_due_; }
  void dial_due();
  // Stop listening and forget everybody. `keep_files`: a forked child must leave the parent's socket alone.
  void close(bool keep_files);
  uint64_t refused() const { return refused_; }
  // Who was turned away since the last call and why, for a log: the first few.
  std::vector<std::string> take_refusals();

 private:
  class Listener;
  class Greeting;

  void accept_from(int listener, Medium medium);
  void make_room(const std::string& group);
  void dial(Greeting& greeting);
  bool has_room() const;
  void again(Greeting& greeting);
  void on_unreached(Greeting& greeting, int error);
  void end(Greeting& greeting);
  // A copy of the cause, because it may be the greeting's own.
  void refuse(Greeting& greeting, std::string cause, Admission ruling = Admission::unknown);
  Descriptor listen_at(sockaddr_storage& address, socklen_t bytes);
  Proof prove(const char* role, const Hello& hello, const byte* nonce) const;

  Host& host_;
  Poller& poller_;
  std::int32_t rank_ = 0;
  std::int32_t size_ = 0;
  std::string secret_;
  Settings settings_;
  const Presence* presence_ = nullptr;
  Card card_;
  Descriptor directory_;
  Probe probe_;
  std::unique_ptr<TlsIdentity> identity_;
  std::unique_ptr<Listener> listeners_[2];
  Pinger pinger_;
  std::vector<std::unique_ptr<Greeting>> greetings_;  // in the order in which they began
  bool has_due_ = false;
  std::int64_t beat_ns_ = 0;
  uint64_t refused_ = 0;
  std::deque<std::string> refusals_;
};

// The machine and the namespaces in which shared memory and process ids mean the same.
std::string host_id();

}  // namespace unisono::engine
