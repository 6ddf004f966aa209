// The handshake that precedes every connection: its four messages, and its states as a table.
//
// With TLS it follows the TLS handshake, and the rank in it must be the certificate's.
//
//   opener                                     acceptor
//   Hello         ranks, settings, nonce  ->
//                                         <-   Challenge     nonce, proof over both nonces
//   Introduction  proof, probe, memory    ->
//                                         <-   Verdict       admission, probe, presence page
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

enum class Medium : uint8_t { shm, tcp, quic };

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

//   state               event          next                action             why
//   opener
//   due                 dial           connecting          none               a place among the calls under way is free
//   due                 fail           closed              report             time is up
//   resting             tick           due                 none               the next heartbeat
//   resting             dial           connecting          none               the first hang-up is followed at once
//   resting             fail           closed              report             time is up
//   connecting          connected      await_challenge     send_hello
//   connecting          connected_tls  tls_connect         run_tls
//   connecting          unreachable    resting             rest               the network may carry the call soon
//   connecting          hang_up        resting             redial
//   connecting          fail           closed              report             nobody listens there, or time is up
//   tls_connect         tls_done       await_challenge     send_hello
//   tls_connect         hang_up        resting             redial             a crowded acceptor drops old callers
//   tls_connect         fail           closed              report             wrong certificate, or time is up
//   await_challenge     message        await_verdict       send_introduction
//   await_challenge     hang_up        resting             redial
//   await_challenge     fail           closed              report             wrong proof, or time is up
//   await_verdict       welcome        linked              hand_over
//   await_verdict       crossing       crossed             keep_open
//   await_verdict       hang_up        resting             redial
//   await_verdict       fail           closed              report             not admitted, or time is up
//   acceptor
//   accepted            connected      await_hello         none
//   accepted            connected_tls  tls_accept          run_tls
//   tls_accept          tls_done       await_hello         none
//   tls_accept          hang_up        closed              drop
//   tls_accept          fail           closed              report             wrong certificate, too much or too slow
//   await_hello         message        await_introduction  send_challenge
//   await_hello         hang_up        closed              drop
//   await_hello         fail           closed              report             not of this world, or time is up
//   await_introduction  welcome        linked              hand_over
//   await_introduction  crossing       crossed             keep_open
//   await_introduction  turned_away    closed              drop               known already, or this rank leaves
//   await_introduction  hang_up        closed              drop
//   await_introduction  fail           closed              report             wrong proof, or time is up
//   both
//   crossed             hang_up        closed              drop               acceptor: another handshake replaces it
//   crossed             fail           closed              report             opener: the peer died
enum class HandshakeState : uint8_t {
  due,
  resting,
  connecting,
  tls_connect,
  await_challenge,
  await_verdict,
  accepted,
  tls_accept,
  await_hello,
  await_introduction,
  crossed,
  linked,
  closed,
};
enum class HandshakeEvent : uint8_t {
  dial,
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
  redial,
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
      {State::due, Event::dial, State::connecting, Action::none},
      {State::due, Event::fail, State::closed, Action::report},
      {State::resting, Event::tick, State::due, Action::none},
      {State::resting, Event::dial, State::connecting, Action::none},
      {State::resting, Event::fail, State::closed, Action::report},
      {State::connecting, Event::connected, State::await_challenge, Action::send_hello},
      {State::connecting, Event::connected_tls, State::tls_connect, Action::run_tls},
      {State::connecting, Event::unreachable, State::resting, Action::rest},
      {State::connecting, Event::hang_up, State::resting, Action::redial},
      {State::connecting, Event::fail, State::closed, Action::report},
      {State::tls_connect, Event::tls_done, State::await_challenge, Action::send_hello},
      {State::tls_connect, Event::hang_up, State::resting, Action::redial},
      {State::tls_connect, Event::fail, State::closed, Action::report},
      {State::await_challenge, Event::message, State::await_verdict, Action::send_introduction},
      {State::await_challenge, Event::hang_up, State::resting, Action::redial},
      {State::await_challenge, Event::fail, State::closed, Action::report},
      {State::await_verdict, Event::welcome, State::linked, Action::hand_over},
      {State::await_verdict, Event::crossing, State::crossed, Action::keep_open},
      {State::await_verdict, Event::hang_up, State::resting, Action::redial},
      {State::await_verdict, Event::fail, State::closed, Action::report},
      {State::accepted, Event::connected, State::await_hello, Action::none},
      {State::accepted, Event::connected_tls, State::tls_accept, Action::run_tls},
      {State::tls_accept, Event::tls_done, State::await_hello, Action::none},
      {State::tls_accept, Event::hang_up, State::closed, Action::drop},
      {State::tls_accept, Event::fail, State::closed, Action::report},
      {State::await_hello, Event::message, State::await_introduction, Action::send_challenge},
      {State::await_hello, Event::hang_up, State::closed, Action::drop},
      {State::await_hello, Event::fail, State::closed, Action::report},
      {State::await_introduction, Event::welcome, State::linked, Action::hand_over},
      {State::await_introduction, Event::crossing, State::crossed, Action::keep_open},
      {State::await_introduction, Event::turned_away, State::closed, Action::drop},
      {State::await_introduction, Event::hang_up, State::closed, Action::drop},
      {State::await_introduction, Event::fail, State::closed, Action::report},
      {State::crossed, Event::hang_up, State::closed, Action::drop},
      {State::crossed, Event::fail, State::closed, Action::report},
  });
}();

}  // namespace unisono::engine
