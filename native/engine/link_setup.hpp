// How links to peers come about: which connections are asked for, which are admitted, and which make a link.

#pragma once

#include <memory>
#include <string>
#include <unordered_map>

#include "base/poller.hpp"
#include "connect/connector.hpp"
#include "link/tcp_link.hpp"
#include "messaging/peer.hpp"

namespace unisono::engine {

// What it needs of the engine.
class LinkOwner {
 public:
  virtual ~LinkOwner() = default;
  virtual Peer& peer_of(std::int32_t rank) = 0;
  virtual void on_link(Peer& peer, std::unique_ptr<Link> link) = 0;
  virtual void lose(Peer& peer, const std::string& cause, bool left) = 0;
  // A peer answered a ping. `is_given_up`: it has declared this rank dead.
  virtual void on_ping_answer(Peer& peer, bool is_given_up) = 0;
};

class LinkSetup final : private ConnectionOwner {
 public:
  LinkSetup(LinkOwner& owner, Poller& poller, SocketPolicy& policy, const Settings& settings, std::int32_t rank);
  ~LinkSetup() override;

  Connector& connector() { return connector_; }
  const Connector& connector() const { return connector_; }
  // Ask a peer for a link.
  void open(Peer& peer);
  // Drop what is under way with a peer.
  void forget(const Peer& peer);
  // No peer may connect any more.
  void leave() { is_leaving_ = true; }
  bool is_leaving() const { return is_leaving_; }
  void close(bool keep_files);

 private:
  class HalfOpenLink;

  // -- ConnectionOwner
  Admission admit(std::int32_t from, Medium medium, Lane lane) override;
  void on_connection(NewConnection connection) override;
  void on_refused(std::int32_t to, const std::string& cause, Admission admission) override;
  bool is_given_up(std::int32_t by) override;
  void on_answer(std::int32_t from, bool is_given_up) override;

  LinkOwner& owner_;
  Poller& poller_;
  SocketPolicy& policy_;
  const Settings& settings_;
  const std::int32_t rank_;
  Connector connector_;
  std::unordered_map<std::int32_t, std::unique_ptr<HalfOpenLink>> half_open_links_;
  bool is_leaving_ = false;
};

}  // namespace unisono::engine
