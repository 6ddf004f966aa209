// What the engine takes from the operating system: owned descriptors and mappings, the clock, and the state of other
// processes.

#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

namespace unisono::engine {

// Nanoseconds of the monotonic clock.
inline std::int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return std::int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

inline constexpr std::int64_t never = INT64_MAX;
inline constexpr std::int64_t millisecond = 1'000'000;
inline constexpr std::int64_t second = 1'000'000'000;

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  asm volatile("yield");
#endif
}

// A failed system call in words: "what: why". A limit that the user can raise is named.
inline std::string failure(const char* what, int error = errno) {
  return std::string(what) + ": " + strerror(error) + (error == EMFILE ? " (raise this rank's ulimit -n)" : "");
}

inline bool fill_random(void* to, std::size_t bytes) { return getrandom(to, bytes, 0) == static_cast<ssize_t>(bytes); }

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Descriptor() { close(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

// Mapped memory. What another process may write into it cannot be trusted.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept : at_(std::exchange(other.at_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(at_, other.at_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (at_ != nullptr) munmap(at_, bytes_);
  }

  // Empty if it fails; errno says why.
  static Mapping of(int fd, std::size_t bytes, int protection) {
    return from(mmap(nullptr, bytes, protection, MAP_SHARED, fd, 0), bytes);
  }
  // Fresh memory of this process alone.
  static Mapping own(std::size_t bytes) {
    return from(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), bytes);
  }

  std::byte* at(std::size_t offset = 0) const { return at_ + offset; }
  explicit operator bool() const { return at_ != nullptr; }
  // Leave it mapped until the process ends.
  void abandon() { at_ = nullptr; }

 private:
  static Mapping from(void* at, std::size_t bytes) {
    Mapping made;
    if (at == MAP_FAILED) return made;
    made.at_ = static_cast<std::byte*>(at);
    made.bytes_ = bytes;
    return made;
  }

  std::byte* at_ = nullptr;
  std::size_t bytes_ = 0;
};

// Whether a process of this host has a thread that is runnable or waits for the disk: it is slow, but neither stopped
// nor gone. False if the system does not say.
inline bool is_starved(int pid) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/task", pid);
  DIR* folder = opendir(path);
  if (folder == nullptr) return false;
  bool found = false;
  while (const dirent* entry = found ? nullptr : readdir(folder)) {
    if (entry->d_name[0] == '.') continue;
    char text[512];
    snprintf(path, sizeof path, "/proc/%d/task/%.16s/stat", pid, entry->d_name);
    const Descriptor file(open(path, O_RDONLY | O_CLOEXEC));
    const ssize_t n = file ? read(file.get(), text, sizeof text - 1) : 0;
    if (n <= 0) continue;
    text[n] = 0;
    // "tid (name) state ...", and a name may hold anything
    const char* end = strrchr(text, ')');
    found = end != nullptr && end[1] == ' ' && (end[2] == 'R' || end[2] == 'D');
  }
  closedir(folder);
  return found;
}

// Whether a process of this host has ended or is exiting: its sockets close before its parent can wait for it. False if
// the system does not say.
inline bool is_gone(int pid) {
  if (pid <= 0) return false;
  char path[64], text[512];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const Descriptor file(open(path, O_RDONLY | O_CLOEXEC));
  const ssize_t n = file ? read(file.get(), text, sizeof text - 1) : 0;
  if (n <= 0) return kill(pid, 0) != 0 && errno == ESRCH;
  text[n] = 0;
  // "pid (name) state ppid pgrp session tty tpgid flags ...", and a name may hold anything
  const char* end = strrchr(text, ')');
  char state;
  unsigned flags;
  constexpr unsigned exiting = 4;  // PF_EXITING of the kernel
  if (end == nullptr || sscanf(end + 1, " %c %*d %*d %*d %*d %*d %u", &state, &flags) != 2) return false;
  return state == 'Z' || state == 'X' || (flags & exiting) != 0;
}

// A memfd whose memory is allocated, so that no access raises SIGBUS later. Empty if it fails; errno says why.
inline Descriptor make_memory(const char* name, std::size_t bytes) {
  Descriptor fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return fd;
  if (const int error = posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes)); error != 0) {
    errno = error;
    return Descriptor();
  }
  return fd;
}

}  // namespace unisono::engine
