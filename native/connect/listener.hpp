// A listening socket. The connector accepts from it.

#pragma once

#include <string>
#include <utility>

#include "connect/connector.hpp"

namespace unisono::engine {

class Connector::Listener final : public Watcher {
 public:
  Listener(Connector& connector, Descriptor socket, Medium medium, std::string path)
      : connector_(connector), socket_(std::move(socket)), medium_(medium), path_(std::move(path)) {
    watch();
  }
  ~Listener() override {
    if (watch_ != 0) connector_.poller_.remove(socket_.get(), watch_);
    if (!path_.empty()) unlink(path_.c_str());
  }
  void on_ready(uint32_t) override { connector_.accept_from(socket_.get(), medium_); }
  // While accept fails for want of descriptors, a listener that is always ready would keep this thread busy.
  void pause() {
    if (watch_ != 0) connector_.poller_.remove(socket_.get(), std::exchange(watch_, 0));
  }
  void watch() {
    if (medium_ == Medium::tcp && !connector_.is_ready()) return;
    if (watch_ == 0) watch_ = connector_.poller_.add(socket_.get(), EPOLLIN, *this);
  }
  void leave_file() { path_.clear(); }
  int fd() const { return socket_.get(); }

 private:
  Connector& connector_;
  Descriptor socket_;
  const Medium medium_;
  std::string path_;
  uint64_t watch_ = 0;
};

}  // namespace unisono::engine
