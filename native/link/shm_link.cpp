#include "link/shm_link.hpp"

#include <sys/stat.h>
#include <sys/uio.h>

#include "messaging/peer.hpp"

namespace unisono::engine {
namespace {

// Frames handled per poll, so that other links get their turn.
constexpr int frames_per_poll = 64;

// Several data frames fit into a bulk ring, so that the reader works while the writer writes.
constexpr size_t data_bytes = 32 * 1024;

constexpr size_t guard_bytes = 4096;

bool is_sealed_to(const Descriptor& fd, size_t bytes) {
  struct stat about;
  if (fstat(fd.get(), &about) != 0 || static_cast<size_t>(about.st_size) != bytes) return false;
  const int seals = fcntl(fd.get(), F_GET_SEALS);
  return seals >= 0 && (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) == (F_SEAL_SHRINK | F_SEAL_GROW);
}

}  // namespace

Descriptor ShmLink::make_memory() {
  Descriptor fd = engine::make_memory("unisono-link", sizeof(LinkMemory));
  if (fd && fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) fd.close();
  return fd;
}

std::unique_ptr<ShmLink> ShmLink::open(Peer& peer, Poller& poller, Descriptor socket, const Descriptor& memory,
                                       const Descriptor& presence, bool is_opener, const Probe& probe,
                                       std::string& why) {
  // Memory that the peer could shrink would raise SIGBUS here.
  if (!is_sealed_to(memory, sizeof(LinkMemory)) || !is_sealed_to(presence, presence_bytes)) {
    why = "its shared memory has a wrong size or no seals";
    return nullptr;
  }
  auto mapping = std::make_shared<Mapping>(Mapping::of(memory.get(), sizeof(LinkMemory), PROT_READ | PROT_WRITE));
  PresenceView view;
  if (!*mapping || !view.open(presence.get())) {
    why = failure("cannot map shared memory");
    return nullptr;
  }
  auto doorbell = SocketDoorbell::open(poller, std::move(socket), why);
  if (doorbell == nullptr) return nullptr;
  return std::make_unique<ShmLink>(peer, std::move(mapping), std::move(view), std::move(doorbell), is_opener, probe);
}

ShmLink::ShmLink(Peer& peer, std::shared_ptr<const Mapping> mapping, PresenceView presence,
                 std::unique_ptr<Doorbell> doorbell, bool is_opener, const Probe& probe)
    : peer_(peer),
      mapping_(std::move(mapping)),
      presence_(std::move(presence)),
      doorbell_(std::move(doorbell)),
      own_(is_opener ? 0 : 1) {
  LinkMemory* m = memory();
  const unsigned peers = 1 - own_;
  constexpr auto bulk = static_cast<size_t>(Lane::bulk), control = static_cast<size_t>(Lane::control);
  out_[bulk] = Producer(&m->rings[own_][bulk], m->bulk[own_], bulk_ring_bytes);
  out_[control] = Producer(&m->rings[own_][control], m->control[own_], control_ring_bytes);
  in_[bulk] = Consumer(&m->rings[peers][bulk], m->bulk[peers], bulk_ring_bytes);
  in_[control] = Consumer(&m->rings[peers][control], m->control[peers], control_ring_bytes);
  // After a direct read the doorbell must confirm that the process id still was the peer's.
  byte seen[sizeof probe.value];
  can_read_ = probe.address != 0 && doorbell_->is_certain() && read(probe.address, seen, sizeof seen) &&
              std::memcmp(seen, probe.value, sizeof seen) == 0 && is_alive();
  can_write_ = can_read_;
  if (can_read_) guard_ = Mapping::own(guard_bytes);
  if (guard_) guard_page_ = guard_transitions.next(guard_page_, GuardEvent::map);
}

bool ShmLink::put(Lane lane, Head head, const Body& body) {
  Producer& out = out_[static_cast<size_t>(lane)];
  const size_t bytes = in_lines(sizeof(Head) + body.total());
  byte* at = out.reserve(bytes);
  if (at == nullptr) [[unlikely]] {
    if (out.is_broken()) over_ = "corrupt ring index in shared memory";
    return false;
  }
  // All but the first word, which publishes the frame.
  std::memcpy(at + sizeof head.word, reinterpret_cast<const byte*>(&head) + sizeof head.word,
              sizeof head - sizeof head.word);
  byte* to = at + sizeof head;
  if (body.prefix_bytes != 0) std::memcpy(to, body.prefix, body.prefix_bytes);
  to += body.prefix_bytes;
  if (body.header_bytes != 0) std::memcpy(to, body.header, body.header_bytes);
  to += body.header_bytes;
  if (body.payload_bytes != 0) std::memcpy(to, body.payload, body.payload_bytes);
  out.publish(bytes, Head::make_word(head.kind(), head.flags(), bytes / line_bytes));
  wake_if_asleep();
  return true;
}

size_t ShmLink::put_data(Lane lane, uint64_t rendezvous_id, uint64_t offset, const byte* from, uint64_t left) {
  const size_t most = lane == Lane::bulk ? data_bytes : control_ring_bytes / 8;
  Body body;
  body.payload = from;
  body.payload_bytes = left < most ? left : most;
  Head head;
  head.word = Head::make_word(Kind::data);
  head.context = rendezvous_id;
  head.tag = offset;
  head.nbytes = body.payload_bytes;
  return put(lane, head, body) ? body.payload_bytes : 0;
}

bool ShmLink::poll() {
  if (over_ != nullptr) [[unlikely]]
    return false;
  // Read before the rings: whatever a dead peer published is in them by then.
  const bool was_ended = doorbell_->has_ended();
  if (was_ended && doorbell_->shares_process()) goodbyes_[0] = goodbyes_[1] = true;
  if (is_discarding_) [[unlikely]] {
    if (was_ended) over_ = "died: its link was closed";
    return false;
  }
  bool moved = poll_lane(Lane::bulk);
  moved |= poll_lane(Lane::control);
  if ((was_ended || has_left()) && !moved && over_ == nullptr) [[unlikely]]
    over_ = has_left() ? "left" : "died: its link was closed";
  return moved;
}

bool ShmLink::poll_lane(Lane lane) {
  Consumer& from = in_[static_cast<size_t>(lane)];
  Head head;
  const byte* body;
  for (int i = 0; i < frames_per_poll; ++i) {
    switch (from.look(head, body)) {
      case Consumer::Look::nothing: return i != 0;
      case Consumer::Look::broken: over_ = "corrupt frame in a shared-memory ring"; return true;
      case Consumer::Look::frame: break;
    }
    const size_t room = from.body_bytes();
    const uint64_t payload = head.payload_bytes();
    // In steps, so that no sum of lengths from outside can overflow.
    const size_t front = head.prefix_bytes() + head.header_bytes;
    if (front > room || payload > room - front || head.header_bytes > header_bytes_max) {
      over_ = "a frame is longer than its slot in the ring";
      return true;
    }
    if (const char* fault = peer_.on_frame(head, body, lane); fault != nullptr) {
      over_ = fault;
      return true;
    }
    if (from.release()) wake_if_asleep();
  }
  return true;
}

bool ShmLink::read(uint64_t address, byte* to, size_t bytes) {
  while (bytes > 0) {
    const iovec local{to, bytes};
    const iovec remote{reinterpret_cast<void*>(address), bytes};
    const ssize_t n = process_vm_readv(doorbell_->pid(), &local, 1, &remote, 1, 0);
    if (n <= 0) {
      if (n < 0 && errno == EINTR) continue;
      return false;
    }
    to += n;
    address += static_cast<uint64_t>(n);
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

bool ShmLink::write(uint64_t guard, uint64_t address, const byte* from, size_t bytes) {
  byte probe{};
  const iovec local[] = {{&probe, sizeof probe}, {const_cast<byte*>(from), bytes}};
  const iovec remote[] = {{reinterpret_cast<void*>(guard), sizeof probe}, {reinterpret_cast<void*>(address), bytes}};
  // The system writes the pieces in order and stops at the first that is not writable: the guard page, once it is shut.
  can_write_ = is_alive() && process_vm_writev(doorbell_->pid(), local, 2, remote, 2, 0) ==
                                 static_cast<ssize_t>(sizeof probe + bytes);
  return can_write_;
}

void ShmLink::shut_guard() {
  const GuardPage was = std::exchange(guard_page_, guard_transitions.next(guard_page_, GuardEvent::shut));
  if (was != GuardPage::open) return;
  mprotect(guard_.at(), guard_bytes, PROT_NONE);
  // A stopped peer may come back and write at any time, so nothing else may ever be mapped here. The memory goes, the
  // address range stays reserved.
  madvise(guard_.at(), guard_bytes, MADV_DONTNEED);
  guard_.abandon();
}

bool ShmLink::was_heard() {
  const uint64_t beats = presence_.beats();
  return std::exchange(beats_seen_, beats) != beats || doorbell_->shares_process();
}

}  // namespace unisono::engine
