// Fuzzing a rank's UDP port and the handshake behind it: what a stranger can send, whose first packets anybody can make
// (their keys follow from an id that they show), and a member's handshake of which the network changes a datagram.

#pragma once

#include <openssl/evp.h>
#include <sys/socket.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "../native/quic_world.hpp"
#include "../native/settings.hpp"
#include "base/digest.hpp"
#include "connect/quic_connector.hpp"
#include "link/tcp_link.hpp"

namespace unisono::engine {

// Makes and reads the packets that open a connection, with the keys of RFC 9001, section 5.
class InitialPacket {
 public:
  using Bytes = std::vector<byte>;
  static constexpr size_t datagram_bytes = 1200, number_bytes = 4, tag_bytes = 16;

  explicit InitialPacket(QuicId id) : id_(id) {
    static constexpr uint8_t salt[] = {0x38, 0x76, 0x2c, 0xf7, 0xf5, 0x59, 0x34, 0xb3, 0x4d, 0x17,
                                       0x9a, 0xe6, 0xa4, 0xc8, 0x0c, 0xad, 0xcc, 0xbb, 0x7f, 0x0a};
    const Proof extracted = hmac_sha256(reinterpret_cast<const byte*>(salt), sizeof salt,
                                        reinterpret_cast<const byte*>(&id_), sizeof id_, nullptr, 0);
    const Proof client = expand(extracted, "client in", 32);
    key_ = expand(client, "quic key", 16);
    iv_ = expand(client, "quic iv", 12);
    mask_key_ = expand(client, "quic hp", 16);
  }

  // Frames in a datagram of the shortest length that a first one may have; frames that do not fit are cut off.
  Bytes seal(const byte* frames, size_t bytes, const Bytes& token, uint32_t number) const {
    Bytes head = {byte{0xc3}, byte{0}, byte{0}, byte{0}, byte{1}, byte{sizeof(QuicId)}};
    append(head, &id_, sizeof id_);
    head.push_back(byte{sizeof(QuicId)});
    append(head, &id_, sizeof id_);
    const size_t token_bytes = std::min<size_t>(token.size(), 63);
    head.push_back(static_cast<byte>(token_bytes));
    append(head, token.data(), token_bytes);
    const size_t length = datagram_bytes - head.size() - 2;
    head.push_back(static_cast<byte>(0x40 | length >> 8));
    head.push_back(static_cast<byte>(length));
    const uint8_t numbered[number_bytes] = {0, 0, 0, static_cast<uint8_t>(number)};
    append(head, numbered, sizeof numbered);
    Bytes body(length - number_bytes - tag_bytes);  // zeros are padding
    std::copy_n(frames, std::min(bytes, body.size()), body.begin());
    Bytes packet = head;
    packet.resize(datagram_bytes);
    crypt(head, numbered[number_bytes - 1], body.data(), body.size(), packet.data() + head.size(), true);
    mask(packet, head.size() - number_bytes, true);
    return packet;
  }

  // The frames of a first datagram that a connection has sent.
  Bytes open(Bytes packet) const {
    size_t at = 5;
    at += 1 + static_cast<uint8_t>(packet[at]);
    at += 1 + static_cast<uint8_t>(packet[at]);
    at += 1 + static_cast<uint8_t>(packet[at]);
    // A number of 1, 2, 4 or 8 bytes, as its first two bits say.
    size_t length = static_cast<size_t>(packet[at]) & 0x3f;
    for (size_t more = (size_t{1} << (static_cast<uint8_t>(packet[at]) >> 6)) - 1; more > 0; --more)
      length = length << 8 | static_cast<uint8_t>(packet[++at]);
    ++at;
    mask(packet, at, false);
    const size_t own = 1 + (static_cast<uint8_t>(packet[0]) & 3);
    const Bytes head(packet.begin(), packet.begin() + static_cast<std::ptrdiff_t>(at + own));
    Bytes body(length - own - tag_bytes);
    crypt(head, static_cast<uint8_t>(head.back()), packet.data() + head.size(), body.size(), body.data(), false);
    return body;
  }

 private:
  struct Free {
    void operator()(EVP_CIPHER_CTX* context) const { EVP_CIPHER_CTX_free(context); }
  };
  using Cipher = std::unique_ptr<EVP_CIPHER_CTX, Free>;

  static const uint8_t* raw(const void* at) { return static_cast<const uint8_t*>(at); }
  static void append(Bytes& to, const void* from, size_t bytes) {
    to.insert(to.end(), static_cast<const byte*>(from), static_cast<const byte*>(from) + bytes);
  }
  static Proof expand(const Proof& secret, const std::string& label, uint8_t bytes) {
    std::string info{'\0', static_cast<char>(bytes), static_cast<char>(6 + label.size())};
    info += "tls13 " + label + '\0' + '\1';
    return hmac_sha256(secret.data(), secret.size(), reinterpret_cast<const byte*>(info.data()), info.size(), nullptr,
                       0);
  }
  void crypt(const Bytes& head, uint8_t number, const byte* from, size_t bytes, byte* to, bool is_sealing) const {
    uint8_t nonce[12];
    std::copy_n(raw(iv_.data()), sizeof nonce, nonce);
    nonce[11] ^= number;
    const Cipher made(EVP_CIPHER_CTX_new());
    int n = 0;
    EVP_CipherInit_ex(made.get(), EVP_aes_128_gcm(), nullptr, raw(key_.data()), nonce, is_sealing ? 1 : 0);
    EVP_CipherUpdate(made.get(), nullptr, &n, raw(head.data()), static_cast<int>(head.size()));
    EVP_CipherUpdate(made.get(), reinterpret_cast<uint8_t*>(to), &n, raw(from), static_cast<int>(bytes));
    if (!is_sealing) return;
    EVP_CipherFinal_ex(made.get(), reinterpret_cast<uint8_t*>(to) + bytes, &n);
    EVP_CIPHER_CTX_ctrl(made.get(), EVP_CTRL_AEAD_GET_TAG, tag_bytes, to + bytes);
  }
  // Hide or show the first byte's low bits and the packet number, which begins at `at`.
  void mask(Bytes& packet, size_t at, bool is_sealing) const {
    const Cipher made(EVP_CIPHER_CTX_new());
    uint8_t bits[32];
    int n = 0;
    EVP_EncryptInit_ex(made.get(), EVP_aes_128_ecb(), nullptr, raw(mask_key_.data()), nullptr);
    EVP_EncryptUpdate(made.get(), bits, &n, raw(packet.data() + at + 4), 16);
    const auto numbered = [&] { return 1 + (static_cast<size_t>(packet[0]) & 3); };
    const size_t before = numbered();
    packet[0] ^= static_cast<byte>(bits[0] & 0x0f);
    const size_t count = is_sealing ? before : numbered();
    for (size_t i = 0; i < count; ++i) packet[at + i] ^= static_cast<byte>(bits[1 + i]);
  }

  QuicId id_;
  Proof key_{}, iv_{}, mask_key_{};
};

// A rank's port, and a stranger's socket.
class Port final : private ConnectionOwner {
 public:
  Port() : pinger_(*this, poller_), authority_(2) {
    must(poller_.open(), "there is a poller");
    connector_ = QuicConnector::make(*this, poller_, pinger_, policy_);
    Card card;
    connector_->open(0, 2, "secret", test_settings(), card);
    connector_->secure(authority_.material(0));
    address_ = SocketAddress::of(card.address, card.port);
    stranger_ = Descriptor(socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    must(static_cast<bool>(stranger_), "there is a socket");
  }
  ~Port() override { connector_->close(false); }

  void take(const std::vector<byte>& datagram) {
    sent_ += datagram.size();
    sendto(stranger_.get(), datagram.data(), datagram.size(), 0, address_.get(), address_.bytes);
    Poller::Events events;
    for (int i = 0; i < 2; ++i) {
      poller_.dispatch(events, poller_.wait(events, 0));
      connector_->poll();
      connector_->push();
    }
    byte answer[2048];
    for (ssize_t n; (n = recv(stranger_.get(), answer, sizeof answer, 0)) > 0;) answered_ += static_cast<size_t>(n);
    if (++taken_ % 64 == 0) connector_->tick(second);
    std::vector<std::string> refusals;
    connector_->take_refusals(refusals);
    must(answered_ <= 3 * sent_, "a stranger gets at most three times what it sends");
  }

 private:
  Admission admit(std::int32_t) override { return unexpected(), Admission::unknown; }
  Peer* on_admitted(std::int32_t) override { return unexpected(), nullptr; }
  void on_link(Peer&, std::unique_ptr<Link>) override { unexpected(); }
  void on_refused(std::int32_t, const std::string&, Admission) override { unexpected(); }
  bool is_given_up(std::int32_t) override { return false; }
  void on_answer(std::int32_t, bool) override { unexpected(); }
  static void unexpected() { must(false, "a stranger is none of this world"); }

  Poller poller_;
  SocketPolicy policy_;
  Pinger pinger_;
  TestAuthority authority_;
  std::unique_ptr<QuicConnector> connector_;
  SocketAddress address_;
  Descriptor stranger_;
  size_t sent_ = 0, answered_ = 0, taken_ = 0;
};

// A handshake of members; the network changes one datagram: the input says which, and what to exclusive-or where.
inline void feed_handshake(const std::vector<byte>& input) {
  static const TestAuthority authority(2);
  static unsigned seed = 0;
  QuicWorld world(authority.material(0), authority.material(1), ++seed);
  const size_t victim = input.size() > 1 ? static_cast<uint8_t>(input[1]) % 8 : 0;
  world.weather.change = [&](std::vector<byte>& datagram) {
    if (world.thrown != victim + 1 || datagram.empty()) return;
    for (size_t i = 2; i + 2 < input.size(); i += 3) {
      const size_t at = static_cast<size_t>(input[i]) << 8 | static_cast<size_t>(input[i + 1]);
      datagram[at % datagram.size()] ^= input[i + 2];
    }
    if (input.size() % 3 == 0) datagram.resize(datagram.size() / 2);
  };
  const bool is_linked = world.link(10 * second);
  const QuicConnection* acceptor = world.ranks[1].connection.get();
  must(!is_linked || (acceptor->rank() == 0 && acceptor->state() == QuicState::linked), "only whole handshakes link");
  // What was damaged on its way is sent again.
  const auto is_closed = [](const QuicRank& rank) {
    return rank.connection != nullptr && rank.connection->state() == QuicState::closed;
  };
  must(is_linked || is_closed(world.ranks[0]) || is_closed(world.ranks[1]), "it links or ends");
}

// The first byte chooses: a raw datagram; frames sealed into one packet, into two of one connection, or into one with a
// token; one in 32 is a handshake of members.
inline void feed_datagram(const std::vector<byte>& input) {
  static Port port;
  static QuicId id = 0;
  if (input.empty()) return;
  const unsigned mode = static_cast<uint8_t>(input[0]);
  const byte* from = input.data() + 1;
  const size_t bytes = input.size() - 1;
  if (mode % 32 == 31) return feed_handshake(input);
  const InitialPacket packet(++id);
  switch (mode % 4) {
    case 0: return port.take({from, from + bytes});
    case 1: return port.take(packet.seal(from, bytes, {}, 0));
    case 2:
      port.take(packet.seal(from, bytes / 2, {}, 0));
      return port.take(packet.seal(from + bytes / 2, bytes - bytes / 2, {}, 1));
    default: {
      const size_t token = bytes == 0 ? 0 : std::min<size_t>(static_cast<uint8_t>(from[0]) % 64, bytes - 1);
      const byte* begin = from + (bytes != 0 ? 1 : 0);
      return port.take(packet.seal(begin + token, static_cast<size_t>(input.data() + input.size() - begin) - token,
                                   {begin, begin + token}, 0));
    }
  }
}

// The first datagram of a member: in each mode its frames or itself, as inputs to change.
inline std::vector<std::vector<byte>> first_datagrams() {
  const TestAuthority authority(2);
  QuicWorld world(authority.material(0), authority.material(1), 1);
  world.open();
  world.ranks[0].work(world.now);
  const std::vector<byte>& whole = world.ranks[0].sent.front().bytes;
  QuicId id;
  std::memcpy(&id, whole.data() + 6, sizeof id);
  const std::vector<byte> frames = InitialPacket(id).open(whole);
  std::vector<std::vector<byte>> made;
  for (const unsigned mode : {0, 1, 2, 3, 31}) {
    made.push_back({static_cast<byte>(mode)});
    const std::vector<byte>& rest = mode % 4 == 0 ? whole : frames;
    // Behind the frames there is only padding.
    made.back().insert(
        made.back().end(), rest.begin(),
        rest.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(rest.size(), mode == 0 ? 1200 : 500)));
  }
  return made;
}

}  // namespace unisono::engine
