// A mailbox and threads that read it: what rpc/ makes of it, without Python. A question is echoed; a long one travels
// beside its message.

#pragma once

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/mailbox.hpp"

namespace unisono::engine {

class MailboxHarness {
 public:
  MailboxHarness(Engine& engine, int readers) : engine_(engine) {
    {
      const Hold held = engine.hold();
      box_ = std::make_unique<Mailbox>(engine, context, tag_of_messages);
    }
    for (int i = 0; i < readers; ++i) readers_.emplace_back([this] { serve(); });
  }
  ~MailboxHarness() {
    close();
    for (auto& reader : readers_) reader.join();
  }

  // Send bytes to a rank and back, reading in front meanwhile. False if the deadline passes first.
  bool ask(std::int32_t dst, const std::vector<byte>& bytes, std::vector<byte>& back, std::int64_t deadline) {
    const uint64_t call = next_++;
    {
      const std::lock_guard guard(mutex_);
      calls_[call] = Call{};
    }
    send(dst, Words{question, call, next_++, bytes.size()}, bytes);
    for (;;) {
      {
        const std::lock_guard guard(mutex_);
        Call& mine = calls_[call];
        if (mine.is_done) {
          back = std::move(mine.bytes);
          calls_.erase(call);
          return true;
        }
      }
      if (now_ns() >= deadline) return false;
      read(true);
    }
  }

  // Expect a message that is never sent, then withdraw: a message reports the end.
  void expect_and_withdraw(std::int32_t src) {
    const uint64_t number = next_++;
    auto place = std::make_shared<std::vector<byte>>(100);
    byte* at = place->data();
    {
      const std::lock_guard guard(mutex_);
      expected_[number] = [] {};
    }
    std::optional<MailboxMessage> ended;
    {
      const Hold held = engine_.hold();
      ended = box_->expect(src, tag_of_nothing, at, 100, number, std::move(place));
      if (!ended.has_value()) box_->withdraw(number);
    }
    if (ended.has_value()) on_expected(*ended);
  }

  void interrupt_wait(bool is_front) {
    const Hold held = engine_.hold();
    box_->interrupt_wait(is_front);
  }

  void close() {
    is_over_ = true;
    const Hold held = engine_.hold();
    box_->close();
  }

  bool has_expected() {
    const std::lock_guard guard(mutex_);
    return !expected_.empty();
  }

 private:
  static constexpr uint64_t context = 77, tag_of_messages = uint64_t{1} << 40;
  // The other tags are the sender's numbers, small ones: a wait for one of these would take a message of another's.
  static constexpr uint64_t tag_of_nothing = tag_of_messages + 1;
  static constexpr uint64_t question = 1, answer = 2;

  struct Words {
    uint64_t kind, call, number, nbytes;
  };
  struct Call {
    bool is_done = false;
    std::vector<byte> bytes;
  };
  using Place = std::shared_ptr<std::vector<byte>>;

  void serve() {
    while (!is_over_) read(false);
  }

  void read(bool is_front) {
    std::vector<MailboxMessage> messages;
    std::vector<Owner> returned;
    {
      Hold held = engine_.hold();
      messages = box_->take(held, now_ns() + 20 * millisecond, is_front);
      returned = box_->returned();
    }
    for (const MailboxMessage& message : messages) {
      if (message.number != 0)
        on_expected(message);
      else
        on_message(message);
    }
  }

  // The bytes travel beside the message, lent here and expected there.
  void send(std::int32_t dst, const Words& words, const std::vector<byte>& bytes) {
    std::vector<LentPayload> lent;
    if (!bytes.empty()) {
      auto kept = std::make_shared<std::vector<byte>>(bytes);
      const byte* at = kept->data();
      lent.push_back({words.number, next_++, at, bytes.size(), std::move(kept)});
    }
    const Hold held = engine_.hold();
    box_->post(dst, reinterpret_cast<const byte*>(&words), sizeof words, UINT64_MAX, false, &lent);
  }

  void on_message(const MailboxMessage& message) {
    Words words;
    std::memcpy(&words, message.data.get(), sizeof words);
    auto place = std::make_shared<std::vector<byte>>(words.nbytes);
    const std::int32_t from = message.source;
    auto then = [this, words, place, from] { on_complete(from, words, *place); };
    if (words.nbytes == 0) return then();
    const uint64_t number = next_++;
    {
      const std::lock_guard guard(mutex_);
      expected_[number] = then;
    }
    std::optional<MailboxMessage> ended;
    {
      const Hold held = engine_.hold();
      byte* at = place->data();
      ended = box_->expect(from, words.number, at, words.nbytes, number, std::move(place));
    }
    if (ended.has_value()) on_expected(*ended);
  }

  void on_expected(const MailboxMessage& message) {
    std::function<void()> then;
    {
      const std::lock_guard guard(mutex_);
      then = std::move(expected_[message.number]);
      expected_.erase(message.number);
    }
    if (message.outcome == Outcome::done || message.outcome == Outcome::cancelled) then();
  }

  void on_complete(std::int32_t from, const Words& words, const std::vector<byte>& bytes) {
    if (words.kind == question) return send(from, Words{answer, words.call, next_++, words.nbytes}, bytes);
    {
      const std::lock_guard guard(mutex_);
      calls_[words.call] = Call{true, bytes};
    }
    interrupt_wait(true);
  }

  Engine& engine_;
  std::unique_ptr<Mailbox> box_;
  std::atomic<uint64_t> next_{1};
  std::atomic<bool> is_over_{false};
  std::mutex mutex_;
  std::map<uint64_t, Call> calls_;
  std::map<uint64_t, std::function<void()>> expected_;
  std::vector<std::thread> readers_;
};

}  // namespace unisono::engine
