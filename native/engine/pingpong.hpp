// A ping-pong between two engines below Python: what bench/ping.py measures, and the shortest example of how to use
// the engine from C++.

#pragma once

#include <vector>

#include "engine/engine.hpp"

namespace unisono::engine {

class PingSend final : public Send {
 public:
  explicit PingSend(Engine& engine) : engine_(engine) {}
  void end(Outcome how) override {
    is_done = true;
    outcome = how;
    engine_.wake_waiters();
  }
  bool is_done = false;
  Outcome outcome = Outcome::done;

 private:
  Engine& engine_;
};

class PingReceive final : public Receive {
 public:
  PingReceive(Engine& engine, byte* into, size_t nbytes) : engine_(engine), into_(into), nbytes_(nbytes) {}
  MatchResult on_match(const Envelope& envelope, bool) override {
    return envelope.nbytes <= nbytes_ ? MatchResult::accept : MatchResult::reject;
  }
  byte* buffer() override { return into_; }
  void write(uint64_t, const byte*, size_t) override {}
  void end(Outcome how, std::int32_t) override {
    is_done = true;
    outcome = how;
    engine_.wake_waiters();
  }
  bool is_done = false;
  Outcome outcome = Outcome::done;

 private:
  Engine& engine_;
  byte* into_;
  size_t nbytes_;
};

// Seconds for all rounds; negative if the peer went down. Both sides call it, exactly one with is_first.
inline double ping_pong(Engine& engine, std::int32_t peer, size_t nbytes, int rounds, bool is_first) {
  std::vector<byte> out(nbytes + 1), in(nbytes + 1);
  PingSend send(engine);
  PingReceive receive(engine, in.data(), nbytes);
  send.context = receive.context = 0x70696e67;
  send.data = out.data();
  send.nbytes = nbytes;
  receive.source = peer;
  Hold held = engine.hold();
  const std::int64_t start = now_ns();
  for (int i = 0; i < rounds; ++i) {
    receive.is_done = send.is_done = false;
    if (!engine.start(receive)) return -1;
    if (is_first) {
      engine.start(send, peer);
      engine.wait(held, [&] { return receive.is_done && send.is_done; }, never);
    } else {
      engine.wait(held, [&] { return receive.is_done; }, never);
      engine.start(send, peer);
      engine.wait(held, [&] { return send.is_done; }, never);
    }
    if (receive.outcome != Outcome::done || send.outcome != Outcome::done) return -1;
  }
  return static_cast<double>(now_ns() - start) / 1e9;
}

}  // namespace unisono::engine
