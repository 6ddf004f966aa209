// A run: one execution of a program on given memory. The native twin of unisono/plans/execute.py's _Run.
//
// Knows which pieces are ready, posts them in order, and reduces what arrives. Does not know algorithms, links, nor
// its caller: the completion queue reports the end. Everything happens with the engine's lock held: callbacks of
// messages start what became ready, and long local work is done a piece at a time, as deferred work, between polls of
// the links.
//
// What arrives for a reduction is reduced straight out of the ring or of the piece just read, if the pieces before
// it are done when its first bytes come; else it lands in scratch memory and is reduced as soon as they are.
//
// A dead peer does not end a run. Python, which knows the cause, cancels it.

#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/scratch.hpp"
#include "collective/bound_program.hpp"
#include "collective/fingerprint.hpp"
#include "engine/completion_queue.hpp"
#include "kernels/kernels.hpp"

namespace unisono::engine {

class Run;

class RunSend final : public Send {
 public:
  explicit RunSend(Run& run) : run_(run) {}
  void end(Outcome how) override;

  uint32_t piece = 0;
  bool is_active = false;

 private:
  Run& run_;
};

class RunReceive final : public Receive {
 public:
  explicit RunReceive(Run& run) : run_(run) {}
  MatchResult on_match(const Envelope& envelope, bool is_here) override;
  byte* buffer() override;
  bool has_fixed_buffer() const override;
  void write(uint64_t offset, const byte* from, size_t bytes) override;
  void on_taken_back() override { way = Way::open; }
  void end(Outcome how, std::int32_t rank) override;

  uint32_t piece = 0;
  bool is_active = false;
  bool is_first = false;  // of its line: it brings the peer's header
  enum class Way : uint8_t { open, direct, staged };
  Way way = Way::open;  // decided when the first bytes come
  uint8_t cut_bytes = 0;
  byte cut[16];  // the begin of an element whose rest comes with the next bytes
  Scratch::Block staging;

 private:
  Run& run_;
};

// A part of a buffer whose parts do not lie in a row: its memory, and the element that it begins with. Parts are
// ordered; that of `in` is only read.
struct BufferPart {
  uint64_t start;
  byte* data;
};

// What a run works on. `counts`, `peers` and the parts are read while it is bound, not later.
struct Stage {
  uint64_t context = 0;
  uint64_t tag = 0;
  const uint64_t* counts = nullptr;  // as Program::accepts takes them
  size_t counts_n = 0;
  bool is_even = false;  // one count stands for all
  uint64_t piece_elements = UINT64_MAX;
  const std::int32_t* peers = nullptr;  // by rank of the program (RankMap::translation); none: the same
  byte* in = nullptr;
  byte* out = nullptr;
  // Instead of `in` and `out`; every step stays within one: Program::stays_within.
  std::span<const BufferPart> in_parts, out_parts;
  uint8_t dtype = untyped;
  uint64_t itemsize = 1;
  Reduce kernel = nullptr;  // none: the program reduces nothing
  size_t window = 1;        // receives under way per peer
  // What travels are rows of this many bytes, of which each says how many of them it uses: a message ends with the last
  // that is used. 0: something else travels.
  uint64_t row_bytes = 0;
  bool runs_ahead = false;  // a message to a peer that sends nothing back may be unmatched at the end
};

class Run final : public Operation, public DeferredWork {
 public:
  Run(Engine& engine, CompletionQueue& completions, Scratch& scratch)
      : engine_(engine), completions_(completions), scratch_(scratch) {
    is_run = true;
  }

  // The header of the first message to each peer: set before `begin`.
  Fingerprint fingerprint;
  // Bind the program and start; it may end before the call returns.
  void begin(std::shared_ptr<const Program> program, const Stage& stage) {
    bind(std::move(program), stage);
    start(stage.runs_ahead);
  }
  // The same in two steps, for a caller that decides between them whether to run ahead.
  void bind(std::shared_ptr<const Program> program, const Stage& stage);
  void start(bool runs_ahead);
  // From `bind` until the next: the program, and per line of it the peer's rank in the engine, and whether anything is
  // sent to it and comes from it for these counts.
  const Program& program() const { return *program_; }
  std::int32_t peer(size_t line) const { return lines_[line].peer; }
  bool sends_to(size_t line) const { return bound_.moves(program_->lines[line].sends); }
  bool answers(size_t line) const { return bound_.moves(program_->lines[line].recvs); }
  // Withdraw all that is unmatched; the run ends as cancelled once no transfer uses its memory.
  void cancel();
  // The ranks that it waits for now.
  std::vector<std::int32_t> awaited() const;

  // Why it failed, if `outcome` says so: about which peer, and what that sent.
  struct Failure {
    std::int32_t peer = -1;
    bool is_header = false;  // its fingerprint differs; else its length or type
    uint64_t came = 0;
    uint64_t awaited = 0;
    std::string header;
  };
  Failure failure;

  void work() override;
  void drop() override;

 private:
  friend RunSend;
  friend RunReceive;
  struct LineState {
    // The messages of one direction: the step and the piece of it whose turn it is. Both ends know which steps are
    // empty and count the messages that are not.
    struct Queue {
      uint32_t step = 0, piece = 0;
      uint64_t number = 0;
    };
    std::int32_t peer = -1;
    Queue sends, recvs;
    uint32_t sending = 0, receiving = 0;
    bool is_dirty = false;
    bool is_introduced = false;  // its first message has come, with our fingerprint
    bool is_deserted = false;    // the peer is gone, or has given up: its first message was withdrawn
  };

  const Piece& piece(uint32_t index) const { return bound_.pieces[index]; }
  byte* at(Buffer buffer, uint64_t element) const {
    if (has_parts_ && buffer != Buffer::tmp && !parts_[static_cast<size_t>(buffer)].empty()) [[unlikely]]
      return in_part(parts_[static_cast<size_t>(buffer)], element);
    return memory_[static_cast<size_t>(buffer)] + element * stage_.itemsize;
  }
  byte* in_part(const std::vector<BufferPart>& parts, uint64_t element) const;
  uint64_t bytes_of(const Piece& p) const { return p.count * stage_.itemsize; }
  // Of rows: whether a message holds whole ones.
  bool is_rows(const Piece& p) const {
    return stage_.row_bytes != 0 && p.dst % stage_.row_bytes == 0 && p.count % stage_.row_bytes == 0;
  }

  void go_on();
  void post(uint32_t line);
  bool find_next(const std::vector<uint32_t>& steps, LineState::Queue& queue, uint32_t& next) const;
  void post_send(uint32_t line, uint32_t index);
  void post_recv(uint32_t line, uint32_t index);
  void do_local(uint32_t index);
  void combine(const Piece& p, uint64_t first_byte, const byte* from, uint64_t bytes) const;
  void finish(uint32_t index);
  void mark(uint32_t line);
  void on_sent(RunSend& send, Outcome how);
  MatchResult on_match(RunReceive& receive, const Envelope& envelope);
  void on_received(RunReceive& receive, Outcome how);
  void release(RunReceive& receive);
  void fail(Outcome how, std::int32_t peer);
  void refuse(const Envelope& envelope, uint64_t awaited, bool is_header);
  void withdraw();
  void conclude();

  Engine& engine_;
  CompletionQueue& completions_;
  Scratch& scratch_;
  std::shared_ptr<const Program> program_;
  BoundProgram bound_;
  Stage stage_;
  byte* memory_[buffer_count] = {};
  std::vector<BufferPart> parts_[2];  // of `in` and of `out`
  bool has_parts_ = false;
  Scratch::Block tmp_;
  size_t left_ = 0;
  size_t active_ = 0;
  bool is_busy_ = false;  // go_on is on the stack
  bool has_failed_ = false;
  bool has_ended_ = true;
  std::vector<LineState> lines_;
  std::vector<uint32_t> dirty_;
  std::vector<uint32_t> ready_;
  size_t ready_at_ = 0;
  uint64_t copied_ = 0;               // bytes of the copy whose turn it is
  bool is_long_ = false;              // no cache holds what it works on
  std::vector<RunReceive*> arrived_;  // by piece: all bytes are here, the pieces before it are not done
  std::vector<std::unique_ptr<RunSend>> sends_;
  std::vector<std::unique_ptr<RunReceive>> receives_;
  std::vector<RunSend*> spare_sends_;
  std::vector<RunReceive*> spare_receives_;
};

template <class Begin>
void CompletionQueue::start(Run& run, Begin begin) {
  run.phase = Operation::Phase::starting;
  begin();
  if (run.phase == Operation::Phase::ended && (!undispatched_.empty() || is_dispatching_)) {
    // What has ended earlier must be dispatched earlier.
    run.phase = Operation::Phase::active;
    enqueue(run);
  } else if (run.phase == Operation::Phase::starting) {
    run.phase = Operation::Phase::active;
  }
}

}  // namespace unisono::engine
