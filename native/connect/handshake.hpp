// The handshake that precedes every connection: its four messages, and its states as a table.
//
// With TLS it follows the TLS handshake, and the rank in it must be the certificate's.
//
//   opener                                     acceptor
//   Hello         ranks, settings, nonce  ->
//                                         <-   Challenge     nonce, proof over both nonces
//   Introduction  proof, probe, memory    ->
//                                         <-   AdmissionReply       admission, probe, presence page
//
// If two ranks connect to each other at once, the lower rank's connection counts. The other one is *crossed*: it stays
// open until the first is through, because its end shows that the peer died.

#pragma once

#include "base/digest.hpp"
#include "base/transition_table.hpp"
#include "link/shm_link.hpp"
#include "wire/admission.hpp"
#include "wire/frame.hpp"

namespace unisono::engine {

enum class Medium : uint8_t { shm, tcp };

inline constexpr char hello_magic[8] = {'u', 'n', 'i', 's', 'o', 'n', 'o', '\n'};

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

struct AdmissionReply {
  Admission admission;
  uint32_t unused;
  Probe probe;
};

enum class HandshakeState : uint8_t {
  due,
  resting,
  connecting,
  tls_connect,
  await_challenge,
  await_reply,
  accepted,
  tls_accept,
  await_hello,
  await_introduction,
  crossed,
  linked,
  closed,
};
enum class HandshakeEvent : uint8_t {
  attempt,
  tick,
  connected,
  connected_tls,
  unreachable,
  tls_done,
  message,
  welcome,
  crossing,
  turned_away,
  hang_up,
  fail,
};
enum class HandshakeAction : uint8_t {
  none,
  run_tls,
  send_hello,
  send_challenge,
  send_introduction,
  rest,
  reconnect,
  hand_over,
  keep_open,
  drop,
  report,
};

inline constexpr auto handshake_transitions = [] {
  using State = HandshakeState;
  using Event = HandshakeEvent;
  using Action = HandshakeAction;
  return TransitionTable<State, 13, Event, 12, Action>({
      // fewer than attempts_max attempts are under way
      {State::due, Event::attempt, State::connecting, Action::none},
      // time is up
      {State::due, Event::fail, State::closed, Action::report},
      // the next heartbeat
      {State::resting, Event::tick, State::due, Action::none},
      // the first hang-up is followed at once
      {State::resting, Event::attempt, State::connecting, Action::none},
      // time is up
      {State::resting, Event::fail, State::closed, Action::report},
      {State::connecting, Event::connected, State::await_challenge, Action::send_hello},
      {State::connecting, Event::connected_tls, State::tls_connect, Action::run_tls},
      // the network may be back soon
      {State::connecting, Event::unreachable, State::resting, Action::rest},
      {State::connecting, Event::hang_up, State::resting, Action::reconnect},
      // no process listens there, or time is up
      {State::connecting, Event::fail, State::closed, Action::report},
      {State::tls_connect, Event::tls_done, State::await_challenge, Action::send_hello},
      // a crowded acceptor drops its oldest strangers
      {State::tls_connect, Event::hang_up, State::resting, Action::reconnect},
      // wrong certificate, or time is up
      {State::tls_connect, Event::fail, State::closed, Action::report},
      {State::await_challenge, Event::message, State::await_reply, Action::send_introduction},
      {State::await_challenge, Event::hang_up, State::resting, Action::reconnect},
      // wrong proof, or time is up
      {State::await_challenge, Event::fail, State::closed, Action::report},
      {State::await_reply, Event::welcome, State::linked, Action::hand_over},
      {State::await_reply, Event::crossing, State::crossed, Action::keep_open},
      {State::await_reply, Event::hang_up, State::resting, Action::reconnect},
      // not admitted, or time is up
      {State::await_reply, Event::fail, State::closed, Action::report},
      {State::accepted, Event::connected, State::await_hello, Action::none},
      {State::accepted, Event::connected_tls, State::tls_accept, Action::run_tls},
      {State::tls_accept, Event::tls_done, State::await_hello, Action::none},
      {State::tls_accept, Event::hang_up, State::closed, Action::drop},
      // wrong certificate, too much or too slow
      {State::tls_accept, Event::fail, State::closed, Action::report},
      {State::await_hello, Event::message, State::await_introduction, Action::send_challenge},
      {State::await_hello, Event::hang_up, State::closed, Action::drop},
      // a hello of another job, or time is up
      {State::await_hello, Event::fail, State::closed, Action::report},
      {State::await_introduction, Event::welcome, State::linked, Action::hand_over},
      {State::await_introduction, Event::crossing, State::crossed, Action::keep_open},
      // known already, or this rank leaves
      {State::await_introduction, Event::turned_away, State::closed, Action::drop},
      {State::await_introduction, Event::hang_up, State::closed, Action::drop},
      // wrong proof, or time is up
      {State::await_introduction, Event::fail, State::closed, Action::report},
      // acceptor: another handshake replaces it
      {State::crossed, Event::hang_up, State::closed, Action::drop},
      // opener: the peer died
      {State::crossed, Event::fail, State::closed, Action::report},
  });
}();

}  // namespace unisono::engine
