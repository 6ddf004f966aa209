// Runs the steps on standard input against the matcher and prints what each search finds: one side of the table of
// cases in tests/support/matching_cases.py, whose other side is the Python matcher.
//
// A step is a verb and its words, separated by spaces: post NAME SOURCE CONTEXT TAG, queue NAME SOURCE CONTEXT TAG,
// withdraw NAME, repost NAME, take NAME, receive SOURCE CONTEXT TAG, offer SOURCE CONTEXT TAG, state, reset.
// ANY is -1. An answer is a name, or - for nothing.

#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <string>

#include "messaging/matcher.hpp"

namespace unisono::engine {
namespace {

class NamedReceive final : public Receive {
 public:
  MatchResult on_match(const Envelope&, bool) override { return MatchResult::accept; }
  byte* buffer() override { return nullptr; }
  void write(uint64_t, const byte*, size_t) override {}
  void end(Outcome, std::int32_t) override {}

  std::string name;
};

struct NamedMessage : UnexpectedMessage {
  std::string name;
};

void read_pattern(NamedReceive& receive) {
  std::string tag;
  std::cin >> receive.source >> receive.context >> tag;
  receive.any_tag = tag == "-1";
  receive.tag = receive.any_tag ? 0 : std::stoull(tag);
}

void read_envelope(Envelope& envelope) { std::cin >> envelope.source >> envelope.context >> envelope.tag; }

struct Table {
  Matcher matcher;
  std::map<std::string, std::unique_ptr<NamedReceive>> receives;
  std::map<std::string, std::unique_ptr<NamedMessage>> messages;
};

bool step(Table& table, const std::string& verb) {
  std::string name;
  if (verb == "post") {
    auto receive = std::make_unique<NamedReceive>();
    std::cin >> receive->name;
    read_pattern(*receive);
    table.matcher.post(*receive);
    table.receives[receive->name] = std::move(receive);
  } else if (verb == "queue") {
    auto message = std::make_unique<NamedMessage>();
    std::cin >> message->name;
    read_envelope(message->envelope);
    table.matcher.queue(*message);
    table.messages[message->name] = std::move(message);
  } else if (verb == "withdraw") {
    std::cin >> name;
    table.matcher.withdraw(*table.receives.at(name));
  } else if (verb == "repost") {
    std::cin >> name;
    table.matcher.repost(*table.receives.at(name));
  } else if (verb == "take") {
    std::cin >> name;
    table.matcher.take(*table.messages.at(name));
  } else if (verb == "receive") {
    NamedReceive pattern;
    read_pattern(pattern);
    const UnexpectedMessage* found = table.matcher.find_arrived(pattern);
    std::cout << (found == nullptr ? "-" : static_cast<const NamedMessage*>(found)->name) << '\n';
  } else if (verb == "offer") {
    Envelope envelope;
    read_envelope(envelope);
    const Receive* found = table.matcher.find_posted(envelope);
    std::cout << (found == nullptr ? "-" : static_cast<const NamedReceive*>(found)->name) << '\n';
  } else if (verb == "state") {
    std::cout << (table.matcher.is_empty() ? "empty" : "posted");
    for (const Receive* receive : table.matcher.all_posted())
      std::cout << ' ' << static_cast<const NamedReceive*>(receive)->name;
    std::cout << '\n';
  } else {
    return false;
  }
  return true;
}

}  // namespace
}  // namespace unisono::engine

int main() {
  auto table = std::make_unique<unisono::engine::Table>();
  std::string verb;
  while (std::cin >> verb) {
    if (verb == "reset") {
      table = std::make_unique<unisono::engine::Table>();
    } else if (!unisono::engine::step(*table, verb)) {
      std::fprintf(stderr, "not a step: %s\n", verb.c_str());
      return 1;
    }
  }
  return 0;
}
