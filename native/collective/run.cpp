#include "collective/run.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/copy.hpp"

namespace unisono::engine {
namespace {

// Local work done at once; longer work waits for its turn between looks at the links.
constexpr uint64_t inline_bytes = 32 * 1024;
// A copy may be long, and must not keep the links waiting.
constexpr uint64_t copy_bytes = 1024 * 1024;
// Sends under way per peer for each receive that may be: enough that a peer never waits for an offer, and few enough
// that each has an offer word.
constexpr size_t sends_per_receive = 4;

// The k-th message to a peer matches its k-th receive and no other: if one is withdrawn, because its sender gives up,
// the next must not fill the gap, or a wrong value would be passed on. Bits that envelope.Tags leaves free hold k.
uint64_t numbered(uint64_t tag, uint64_t number) {
  constexpr int shift = 40, bits = 21;
  return tag + ((number & ((uint64_t{1} << bits) - 1)) << shift);
}

bool is_same_call(const Envelope& envelope, const Fingerprint& mine) {
  return envelope.header_bytes == sizeof mine && std::memcmp(envelope.header, &mine, sizeof mine) == 0;
}

// A row begins with a head, of which the last four bytes say how many bytes of the row are used. 0: all.
constexpr uint64_t row_head_bytes = 8;
uint64_t unused_bytes(const byte* row, uint64_t row_bytes) {
  uint32_t used;
  std::memcpy(&used, row + row_head_bytes - sizeof used, sizeof used);
  return used < row_head_bytes || used > row_bytes ? 0 : row_bytes - used;
}

// A step that is empty moves nothing, and is done as soon as those before it are.
bool is_local(const Piece& p) { return p.step == Step::copy || p.step == Step::reduce || p.count == 0; }

}  // namespace

void RunSend::end(Outcome how) { run_.on_sent(*this, how); }
MatchResult RunReceive::on_match(const Envelope& envelope, bool) { return run_.on_match(*this, envelope); }
void RunReceive::end(Outcome how, std::int32_t) { run_.on_received(*this, how); }

bool RunReceive::has_fixed_buffer() const { return run_.piece(piece).step == Step::recv; }

byte* RunReceive::buffer() {
  const Piece& p = run_.piece(piece);
  if (p.step == Step::recv) return run_.at(p.dst_buf, p.dst);
  if (way == Way::open) way = run_.bound_.waits[piece] == 0 ? Way::direct : Way::staged;
  return way == Way::staged ? staging.at() : nullptr;
}

void RunReceive::write(uint64_t offset, const byte* from, size_t bytes) {
  const Piece& p = run_.piece(piece);
  const size_t item = run_.stage_.itemsize;
  if (cut_bytes != 0) {
    const size_t take = std::min(item - cut_bytes, bytes);
    std::memcpy(cut + cut_bytes, from, take);
    cut_bytes = static_cast<uint8_t>(cut_bytes + take);
    if (cut_bytes < item) return;
    run_.combine(p, offset + take - item, cut, item);
    cut_bytes = 0;
    offset += take;
    from += take;
    bytes -= take;
  }
  const size_t rest = bytes % item;
  run_.combine(p, offset, from, bytes - rest);
  if (rest == 0) return;
  std::memcpy(cut, from + bytes - rest, rest);
  cut_bytes = static_cast<uint8_t>(rest);
}

void Run::bind(std::shared_ptr<const Program> program, const Stage& stage) {
  program_ = std::move(program);
  stage_ = stage;
  bound_.bind(*program_, {stage.counts, stage.counts_n, stage.is_even}, stage.piece_elements);
  parts_[0].assign(stage.in_parts.begin(), stage.in_parts.end());
  parts_[1].assign(stage.out_parts.begin(), stage.out_parts.end());
  has_parts_ = !stage.in_parts.empty() || !stage.out_parts.empty();
  lines_.assign(program_->lines.size(), LineState());
  for (size_t line = 0; line < lines_.size(); ++line) {
    const std::int32_t peer = program_->lines[line].peer;
    lines_[line].peer = stage.peers == nullptr ? peer : stage.peers[peer];
  }
}

// The last part that begins at this element or before: those that are empty come before the one that has it.
byte* Run::in_part(const std::vector<BufferPart>& parts, uint64_t element) const {
  const auto after = std::upper_bound(parts.begin(), parts.end(), element,
                                      [](uint64_t at, const BufferPart& part) { return at < part.start; });
  const BufferPart& part = *std::prev(after);
  return part.data + (element - part.start) * stage_.itemsize;
}

void Run::start(bool runs_ahead) {
  const Program& p = *program_;
  stage_.runs_ahead = runs_ahead;
  outcome = Outcome::done;
  failure.peer = -1;
  failure.header.clear();
  if (bound_.pieces.size() == p.steps.size() && !bound_.has_empty) [[likely]] {
    ready_.assign(p.ready.begin(), p.ready.end());
  } else {
    ready_.clear();
    for (uint32_t i = 0; i < bound_.pieces.size(); ++i)
      if (bound_.waits[i] == 0 && is_local(piece(i))) ready_.push_back(i);
  }
  ready_at_ = 0;
  copied_ = 0;
  const uint64_t* const counts = bound_.counts;
  is_long_ = (counts[static_cast<size_t>(Buffer::in)] + counts[static_cast<size_t>(Buffer::out)]) * stage_.itemsize >
             cache_bytes;
  if (p.reduces) arrived_.assign(bound_.pieces.size(), nullptr);
  dirty_.clear();
  for (uint32_t line = 0; line < lines_.size(); ++line) mark(line);
  left_ = bound_.pieces.size();
  active_ = 0;
  has_failed_ = has_ended_ = is_busy_ = false;
  memory_[static_cast<size_t>(Buffer::in)] = stage_.in;
  memory_[static_cast<size_t>(Buffer::out)] = stage_.out;
  if (const uint64_t bytes = counts[static_cast<size_t>(Buffer::tmp)] * stage_.itemsize; bytes != 0) {
    tmp_ = scratch_.take(bytes);
    if (tmp_.at() == nullptr) fail(Outcome::no_memory, -1);
  }
  memory_[static_cast<size_t>(Buffer::tmp)] = tmp_.at();
  go_on();
  if (has_failed_ && !has_ended_) withdraw();
}

void Run::cancel() {
  if (has_ended_) return;
  fail(Outcome::cancelled, -1);
  withdraw();
}

std::vector<std::int32_t> Run::awaited() const {
  std::vector<std::int32_t> ranks;
  if (has_ended_) return ranks;
  for (const auto& send : sends_)
    if (send->is_active) ranks.push_back(lines_[piece(send->piece).line].peer);
  for (const auto& receive : receives_)
    if (receive->is_active) ranks.push_back(lines_[piece(receive->piece).line].peer);
  for (size_t i = 0; i < lines_.size(); ++i)
    if (lines_[i].is_deserted) ranks.push_back(lines_[i].peer);
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

// ---- going on ----

// Do all that can be done now. A callback that arrives while this function is on the stack only marks work; the outer
// call does it.
void Run::go_on() {
  if (is_busy_ || has_ended_) return;
  is_busy_ = true;
  engine_.cork();
  uint64_t budget = inline_bytes;
  while (!has_failed_) {
    if (!dirty_.empty()) {
      const uint32_t line = dirty_.back();
      dirty_.pop_back();
      lines_[line].is_dirty = false;
      post(line);
      continue;
    }
    if (ready_at_ == ready_.size()) break;
    const uint64_t bytes = bytes_of(piece(ready_[ready_at_]));
    if (bytes > budget) {
      engine_.add(*this);
      break;
    }
    budget -= bytes;
    do_local(ready_[ready_at_]);
  }
  is_busy_ = false;
  engine_.uncork();
  if (left_ == 0 || (has_failed_ && active_ == 0)) conclude();
}

// A turn between looks at the links.
void Run::work() {
  if (has_failed_) return withdraw();
  is_busy_ = true;
  if (ready_at_ < ready_.size()) do_local(ready_[ready_at_]);
  is_busy_ = false;
  go_on();
}

void Run::drop() {
  fail(Outcome::closed, -1);
  withdraw();
}

void Run::mark(uint32_t line) {
  if (std::exchange(lines_[line].is_dirty, true)) return;
  dirty_.push_back(line);
}

// Find the next message of a line; false if there is none left. Steps that are empty are not messages.
bool Run::find_next(const std::vector<uint32_t>& steps, LineState::Queue& queue, uint32_t& next) const {
  while (queue.step < steps.size()) {
    const uint32_t step = steps[queue.step];
    next = bound_.first_piece(step) + queue.piece;
    if (queue.piece < bound_.piece_number(step) && piece(next).count != 0) return true;
    ++queue.step;
    queue.piece = 0;
  }
  return false;
}

void Run::post(uint32_t at) {
  const Line& line = program_->lines[at];
  LineState& state = lines_[at];
  uint32_t next;
  while (!has_failed_ && !state.is_deserted && state.sending < sends_per_receive * stage_.window &&
         find_next(line.sends, state.sends, next) && bound_.waits[next] == 0)
    post_send(at, next);
  while (!has_failed_ && !state.is_deserted && state.receiving < stage_.window &&
         find_next(line.recvs, state.recvs, next)) {
    if (piece(next).step == Step::recv && bound_.waits[next] != 0) return;
    post_recv(at, next);
  }
}

void Run::post_send(uint32_t line, uint32_t index) {
  if (spare_sends_.empty()) {
    sends_.push_back(std::make_unique<RunSend>(*this));
    spare_sends_.push_back(sends_.back().get());
  }
  RunSend& send = *spare_sends_.back();
  spare_sends_.pop_back();
  LineState& state = lines_[line];
  // The first message carries the fingerprint. If this rank receives nothing from the peer, that message is
  // synchronous, so that a mismatch is found before the call returns; a run-ahead message is checked by the receiver
  // instead. From every other peer a fingerprint arrives, which proves that it made the same call.
  const bool is_first = state.sends.number == 0;
  send.tag = numbered(stage_.tag, state.sends.number++);
  ++state.sends.piece;
  send.piece = index;
  const Piece& p = piece(index);
  send.context = stage_.context;
  send.data = at(p.dst_buf, p.dst);
  send.nbytes = bytes_of(p);
  if (is_rows(p)) send.nbytes -= unused_bytes(send.data + send.nbytes - stage_.row_bytes, stage_.row_bytes);
  send.header = reinterpret_cast<const byte*>(&fingerprint);
  send.header_bytes = static_cast<uint16_t>(is_first ? sizeof fingerprint : 0);
  send.dtype = stage_.dtype;
  const bool is_unanswered = is_first && !answers(line);
  send.sync = is_unanswered && !stage_.runs_ahead;
  send.is_ahead = is_unanswered && stage_.runs_ahead;
  send.receive_is_certain = true;
  send.is_active = true;
  ++state.sending;
  ++active_;
  if (engine_.start(send, state.peer)) return;
  on_sent(send, Outcome::closed);
}

void Run::post_recv(uint32_t line, uint32_t index) {
  if (spare_receives_.empty()) {
    receives_.push_back(std::make_unique<RunReceive>(*this));
    spare_receives_.push_back(receives_.back().get());
  }
  RunReceive& receive = *spare_receives_.back();
  spare_receives_.pop_back();
  LineState& state = lines_[line];
  receive.is_first = state.recvs.number == 0;
  receive.tag = numbered(stage_.tag, state.recvs.number++);
  ++state.recvs.piece;
  receive.piece = index;
  receive.context = stage_.context;
  receive.source = state.peer;
  receive.way = RunReceive::Way::open;
  receive.cut_bytes = 0;
  receive.is_active = true;
  ++state.receiving;
  ++active_;
  if (engine_.start(receive)) return;
  on_received(receive, Outcome::closed);
}

// Do the local piece whose turn it is, or a part of it.
void Run::do_local(uint32_t index) {
  const Piece& p = piece(index);
  if (p.count == 0) {
    ++ready_at_;
    finish(index);
    return;
  }
  switch (p.step) {
    case Step::copy: {
      // In parts, which is right because source and target do not overlap, or are the same (a rank's own slot of a
      // gather, given as x): Program and the verbs see to that.
      const uint64_t bytes = std::min(copy_bytes, bytes_of(p) - copied_);
      byte* to = at(p.dst_buf, p.dst) + copied_;
      const byte* from = at(p.src_buf, p.src) + copied_;
      if (to == from) break;
      if (is_long_)
        copy_past_cache(to, from, bytes);
      else
        std::memcpy(to, from, bytes);
      copied_ += bytes;
      if (copied_ < bytes_of(p)) return;
      copied_ = 0;
      break;
    }
    case Step::reduce: combine(p, 0, at(p.src_buf, p.src), bytes_of(p)); break;
    default: {
      RunReceive& receive = *std::exchange(arrived_[index], nullptr);
      combine(p, 0, receive.staging.at(), bytes_of(p));
      release(receive);
      break;
    }
  }
  ++ready_at_;
  finish(index);
}

void Run::combine(const Piece& p, uint64_t first_byte, const byte* from, uint64_t bytes) const {
  if (bytes == 0) return;
  byte* dst = at(p.dst_buf, p.dst) + first_byte;
  stage_.kernel(dst, p.left ? from : dst, p.left ? dst : from, bytes / stage_.itemsize);
}

void Run::finish(uint32_t index) {
  --left_;
  bound_.for_each_after(*program_, index, [&](uint32_t later) {
    if (--bound_.waits[later] != 0) return;
    const Piece& p = piece(later);
    if (is_local(p) || (p.step == Step::recv_reduce && arrived_[later] != nullptr))
      ready_.push_back(later);
    else if (p.step != Step::recv_reduce)
      mark(p.line);
  });
}

// ---- messages ----

void Run::on_sent(RunSend& send, Outcome how) {
  const uint32_t line = piece(send.piece).line;
  send.is_active = false;
  --active_;
  --lines_[line].sending;
  spare_sends_.push_back(&send);
  if (how == Outcome::done) {
    finish(send.piece);
    mark(line);
  } else if (how == Outcome::peer_down) {
    lines_[line].is_deserted = true;
  } else {
    fail(how, lines_[line].peer);
  }
  go_on();
}

MatchResult Run::on_match(RunReceive& receive, const Envelope& envelope) {
  const Piece& p = piece(receive.piece);
  LineState& state = lines_[p.line];
  const bool is_first = receive.is_first;
  // The peer withdrew its first message, so it has given up, and the control message that says why is on its way: the
  // rest of what it sent is void.
  if (is_first ? envelope.header_bytes == 0 : !state.is_introduced) state.is_deserted = true;
  if (state.is_deserted || has_failed_) return MatchResult::reject;
  const uint64_t awaited = bytes_of(p);
  const auto fits_any = [](uint8_t code) { return code == untyped || code == plain_bytes; };
  const bool is_shorter =
      is_rows(p) && envelope.nbytes < awaited && envelope.nbytes >= awaited - stage_.row_bytes + row_head_bytes;
  const bool fits = (envelope.nbytes == awaited || is_shorter) &&
                    (envelope.dtype == stage_.dtype || fits_any(envelope.dtype) || fits_any(stage_.dtype));
  const bool is_same =
      is_first || !fits ? (envelope.header_bytes == 0 && !is_first) || is_same_call(envelope, fingerprint) : true;
  if (!fits || !is_same) {
    refuse(envelope, awaited, !is_same);
    return MatchResult::reject;
  }
  state.is_introduced = true;
  if (p.step == Step::recv_reduce && bound_.waits[receive.piece] != 0 && awaited != 0) {
    if (receive.staging.at() == nullptr) receive.staging = scratch_.take(awaited);
    if (receive.staging.at() == nullptr) {
      outcome = Outcome::no_memory;
      return MatchResult::reject;
    }
  }
  return MatchResult::accept;
}

// Keep the reason: the receive that matched the message ends with it at once.
void Run::refuse(const Envelope& envelope, uint64_t awaited, bool is_header) {
  outcome = Outcome::refused;
  failure.is_header = is_header;
  failure.came = envelope.nbytes;
  failure.awaited = awaited;
  failure.header.assign(reinterpret_cast<const char*>(envelope.header), envelope.header_bytes);
}

void Run::on_received(RunReceive& receive, Outcome how) {
  const uint32_t index = receive.piece;
  const Piece& p = piece(index);
  receive.is_active = false;
  --active_;
  if (how != Outcome::done) {
    release(receive);
    if (how == Outcome::peer_down)
      lines_[p.line].is_deserted = true;
    else if (how != Outcome::refused)
      fail(how, lines_[p.line].peer);
    else if (!lines_[p.line].is_deserted)
      fail(outcome, lines_[p.line].peer);
  } else if (receive.way != RunReceive::Way::staged) {
    release(receive);
    finish(index);
  } else {
    arrived_[index] = &receive;
    if (bound_.waits[index] == 0) ready_.push_back(index);
  }
  go_on();
}

// Free a receive's slot in the window.
void Run::release(RunReceive& receive) {
  const uint32_t line = piece(receive.piece).line;
  if (receive.staging.at() != nullptr) scratch_.give_back(std::exchange(receive.staging, {}));
  --lines_[line].receiving;
  spare_receives_.push_back(&receive);
  mark(line);
}

// ---- ending ----

// The first reason counts. Other messages are withdrawn later: the engine may be iterating over them now.
void Run::fail(Outcome how, std::int32_t peer) {
  if (std::exchange(has_failed_, true)) return;
  outcome = how;
  failure.peer = peer;
  engine_.add(*this);
}

void Run::withdraw() {
  is_busy_ = true;
  for (const auto& send : sends_)
    if (send->is_active) engine_.cancel(*send);
  for (const auto& receive : receives_)
    if (receive->is_active && engine_.cancel(*receive)) {
      receive->is_active = false;
      --active_;
      release(*receive);
    }
  is_busy_ = false;
  if (active_ == 0 && !has_ended_) conclude();
}

void Run::conclude() {
  has_ended_ = true;
  engine_.remove(*this);
  if (left_ != 0)
    for (RunReceive*& receive : arrived_)
      if (receive != nullptr) release(*std::exchange(receive, nullptr));
  if (tmp_.at() != nullptr) scratch_.give_back(std::exchange(tmp_, {}));
  completions_.enqueue(*this);
}

}  // namespace unisono::engine
