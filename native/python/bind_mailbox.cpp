// The mailbox as a Python class: see unisono/messaging/fast_path.py. Readers wait without the GIL.

#include <cmath>

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include "collective/rank_map.hpp"
#include "engine/completion_queue.hpp"
#include "engine/mailbox.hpp"
#include "python/bind.hpp"

namespace nb = nanobind;

namespace unisono {

engine::CompletionQueue& completions_of(nb::handle engine);

namespace {

using namespace engine;

class PyMailbox {
 public:
  // Ranks are those of the map.
  PyMailbox(nb::object engine, uint64_t context, uint64_t tag, std::shared_ptr<RankMap> rank_map)
      : owner_(std::move(engine)),
        completions_(completions_of(owner_)),
        engine_(completions_.engine()),
        rank_map_(std::move(rank_map)) {
    if (engine_.is_forked()) throw nb::value_error("this engine belongs to the parent process");
    const Hold held = engine_.hold();
    box_ = std::make_shared<Mailbox>(engine_, context, tag);
  }
  ~PyMailbox() {
    if (engine_.is_forked()) return;
    close();
    const Hold held = engine_.hold();
    // Operations under way belong to the engine until they end.
    if (!box_->is_idle()) completions_.keep(std::move(box_));
  }
  PyMailbox(const PyMailbox&) = delete;
  PyMailbox& operator=(const PyMailbox&) = delete;

  bool post(std::int32_t dst, nb::bytes data, uint64_t unsent_bytes_max, bool is_more, nb::sequence lent) {
    const std::int32_t peer = peer_of(dst);
    if (engine_.is_forked()) return true;
    std::vector<LentPayload> payloads;  // before the lock: what is not taken is released without it
    for (const nb::handle one : lent) {
      const auto [tag, payload, number] = nb::cast<std::tuple<uint64_t, nb::handle, uint64_t>>(one);
      auto [view, owner] = view_of(payload, PyBUF_SIMPLE);
      payloads.push_back(
          {tag, number, static_cast<const byte*>(view->buf), static_cast<uint64_t>(view->len), std::move(owner)});
    }
    const Hold held = engine_.hold();
    return box_->post(peer, reinterpret_cast<const byte*>(data.c_str()), data.size(), unsent_bytes_max, is_more,
                      &payloads);
  }

  bool is_lent(uint64_t number) {
    if (engine_.is_forked()) return false;
    const Hold held = engine_.hold();
    return box_->is_lent(number);
  }

  nb::object expect(std::int32_t src, uint64_t tag, nb::handle into, uint64_t number) {
    const std::int32_t peer = peer_of(src);
    if (number == 0) throw nb::value_error("number: allowed: 1 or more");
    if (engine_.is_forked()) return nb::none();
    auto [view, owner] = view_of(into, PyBUF_WRITABLE);
    std::optional<MailboxMessage> ended;  // before the lock: its memory is released without it
    {
      const Hold held = engine_.hold();
      ended = box_->expect(peer, tag, static_cast<byte*>(view->buf), static_cast<uint64_t>(view->len), number,
                           std::move(owner));
    }
    if (!ended.has_value()) return nb::none();
    return nb::make_tuple(static_cast<int>(ended->outcome), ended->nbytes);
  }

  void withdraw(uint64_t number) {
    if (engine_.is_forked()) return;
    const Hold held = engine_.hold();
    box_->withdraw(number);
  }

  nb::list take(double timeout, bool is_front) {
    if (engine_.is_forked()) return {};
    std::vector<MailboxMessage> messages;
    std::vector<Owner> returned;
    {
      const GilReleased release;
      Hold held = engine_.hold();
      const std::int64_t ns = timeout > 0 ? std::llround(std::min(timeout, 1e8) * 1e9) : 0;
      messages = box_->take(held, now_ns() + ns, is_front);
      returned = box_->returned();
    }
    return list_of(messages);
  }

  nb::list drain() {
    if (engine_.is_forked()) return {};
    std::vector<MailboxMessage> messages;
    {
      const Hold held = engine_.hold();
      messages = box_->take_ready();
    }
    return list_of(messages);
  }

  uint64_t batches() {
    const Hold held = engine_.hold();
    return box_->batches();
  }

  void interrupt_wait(bool is_front) {
    if (engine_.is_forked()) return;
    const Hold held = engine_.hold();
    box_->interrupt_wait(is_front);
  }

  void close() {
    if (engine_.is_forked()) return;
    std::vector<MailboxMessage> unread;
    std::vector<Owner> returned;
    const Hold held = engine_.hold();
    box_->close();
    unread = box_->take_ready();
    returned = box_->returned();
  }

 private:
  std::int32_t peer_of(std::int32_t rank) const {
    if (!rank_map_->has_rank(rank) || rank_map_->to_global(rank) >= engine_.size) throw nb::value_error("no such rank");
    return rank_map_->to_global(rank);
  }

  // Messages for Python: (source, bytes), or (source, (number, outcome, nbytes)) for the end of an expected message.
  // Those of ranks that are no members are dropped.
  nb::list list_of(const std::vector<MailboxMessage>& messages) const {
    nb::list result;
    for (const MailboxMessage& message : messages) {
      const std::int32_t source = rank_map_->to_local(message.source);
      if (source == RankMap::none) continue;
      if (message.number == 0)
        result.append(
            nb::make_tuple(source, nb::bytes(reinterpret_cast<const char*>(message.data.get()), message.nbytes)));
      else
        result.append(
            nb::make_tuple(source, nb::make_tuple(message.number, static_cast<int>(message.outcome), message.nbytes)));
    }
    return result;
  }

  static std::pair<Py_buffer*, Owner> view_of(nb::handle data, int flags) {
    auto view = std::make_unique<Py_buffer>();
    if (PyObject_GetBuffer(data.ptr(), view.get(), flags) != 0) throw nb::python_error();
    Py_buffer* raw = view.release();
    return {raw, Owner(raw, [](void* it) {
              PyBuffer_Release(static_cast<Py_buffer*>(it));
              delete static_cast<Py_buffer*>(it);
            })};
  }

  nb::object owner_;
  CompletionQueue& completions_;
  Engine& engine_;
  std::shared_ptr<const RankMap> rank_map_;
  std::shared_ptr<Mailbox> box_;
};

}  // namespace

void bind_mailbox(nb::module_& m) {
  nb::class_<PyMailbox>(m, "Mailbox")
      .def(nb::init<nb::object, uint64_t, uint64_t, std::shared_ptr<RankMap>>(), nb::arg("engine"), nb::arg("context"),
           nb::arg("tag"), nb::arg("rank_map"))
      .def("post", &PyMailbox::post, nb::arg("dst"), nb::arg("data"), nb::arg("unsent_bytes_max"),
           nb::arg("is_more") = false, nb::arg("lent") = nb::tuple())
      .def("is_lent", &PyMailbox::is_lent)
      .def("expect", &PyMailbox::expect)
      .def("withdraw", &PyMailbox::withdraw)
      .def("take", &PyMailbox::take)
      .def("drain", &PyMailbox::drain)
      .def("batches", &PyMailbox::batches)
      .def("interrupt_wait", &PyMailbox::interrupt_wait)
      .def("close", &PyMailbox::close);
}

}  // namespace unisono
