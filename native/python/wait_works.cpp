// Waiting for several works at once.

#include <algorithm>
#include <atomic>
#include <deque>
#include <memory>
#include <optional>

#include "engine/engine.hpp"
#include "python/blocking.hpp"
#include "python/work.hpp"

namespace unisono {

using namespace engine;

namespace {

// While it lives, the end of works that Python has adopted makes a thread look that waits in the engine.
class AdoptedEnds {
 public:
  explicit AdoptedEnds(const StartedCall& in) : group_(in.group), engine_(in.native.completions.engine()) {}
  ~AdoptedEnds() {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    for (const nb::object& work : works_) {
      try {
        work.attr("_off_end")(notify_);
      } catch (nb::python_error& error) {
        error.discard_as_unraisable("a wait for several works");
      }
    }
    PyErr_Restore(type, value, trace);
  }
  AdoptedEnds(const AdoptedEnds&) = delete;
  AdoptedEnds& operator=(const AdoptedEnds&) = delete;

  void add(nb::handle work) {
    if (!notify_.is_valid())
      // It may be called when this is gone.
      notify_ = nb::cpp_function([has_ended = has_ended_, group = group_, &engine = engine_] {
        has_ended->store(true, std::memory_order_relaxed);  // relaxed: the lock below orders it
        const Hold held = engine.hold();
        engine.wake_waiters();
      });
    works_.push_back(nb::borrow(work));
    work.attr("_on_end")(notify_);
  }
  size_t size() const { return works_.size(); }
  bool has_one() const { return has_ended_->load(std::memory_order_relaxed); }

 private:
  nb::object group_;  // keeps the engine
  Engine& engine_;
  std::shared_ptr<std::atomic<bool>> has_ended_ = std::make_shared<std::atomic<bool>>(false);
  nb::object notify_;
  std::vector<nb::object> works_;
};

bool has_task_ended(PyObject* work) {
  static PyObject* const word = interned("_has_ended");
  const nb::object has_ended = nb::steal(PyObject_CallMethodNoArgs(work, word));
  if (!has_ended.is_valid()) throw nb::python_error();
  return has_ended.ptr() == Py_True;
}

// Works by how they are waited for.
struct Sorted {
  nb::list ended;  // their places in the list
  std::vector<StartedCall*> active;
  std::vector<PyObject*> adopted;
};

// Settle the works that have ended, and sort all; with `is_one`, up to the first that has ended. Nothing if they cannot
// be waited for in one engine.
std::optional<Sorted> sort(const nb::tuple& works, bool is_one) {
  Sorted sorted;
  for (size_t i = 0; i < works.size(); ++i) {
    PyObject* const work = PyTuple_GET_ITEM(works.ptr(), static_cast<Py_ssize_t>(i));
    if (!PyObject_TypeCheck(work, work_base_type)) throw nb::type_error("allowed: works");
    StartedCall* const one = as_work(work).started;
    if (one == nullptr) return std::nullopt;
    one->check_process();
    if (one->state == StartedCall::State::active && one->call->take_ended()) one->settle();
    one->wait_until_settled();
    if (one->state == StartedCall::State::active && one->call->has_failed()) one->adopt();
    const bool is_adopted = one->state == StartedCall::State::adopted;
    if (is_adopted ? has_task_ended(work) : one->state == StartedCall::State::done) {
      one->see();
      sorted.ended.append(i);
      if (is_one) return sorted;
    } else if (is_adopted) {
      sorted.adopted.push_back(work);
    } else if (!sorted.active.empty() && &one->native.completions != &sorted.active[0]->native.completions) {
      return std::nullopt;
    } else {
      sorted.active.push_back(one);
    }
  }
  return sorted;
}

// Poll briefly, or wait for a slice of time without the GIL, until one of the active works is over or an adopted one
// has ended.
void wait_for_one(const std::vector<StartedCall*>& active, const AdoptedEnds& adopted, bool is_brief,
                  std::int64_t until) {
  const auto is_one_over = [&active, &adopted] {
    return adopted.has_one() ||
           std::any_of(active.begin(), active.end(), [](const StartedCall* one) { return one->call->is_over(); });
  };
  Engine& engine = active[0]->native.completions.engine();
  std::deque<Pinned> pinned;
  for (StartedCall* const one : active) pinned.emplace_back(*one);
  if (is_brief) {
    const Hold held = engine.hold();
    engine.poll_briefly(is_one_over);
  } else {
    const GilReleased released;
    Hold held = engine.hold();
    engine.wait(held, is_one_over, until);
  }
}

}  // namespace

nb::object wait_works(nb::tuple works, double seconds, bool is_one) {
  const std::int64_t begun = now_ns();
  const std::int64_t limit = seconds < 0 ? never : begun + static_cast<std::int64_t>(seconds * 1e9);
  std::optional<AdoptedEnds> adopted_ends;
  for (bool is_first = true;; is_first = false) {
    std::optional<Sorted> sorted = sort(works, is_one);
    if (!sorted.has_value()) return nb::none();
    const auto& [ended, active, adopted] = *sorted;
    const std::int64_t now = now_ns();
    if (ended.size() == 0) check_may_block();
    if (ended.size() != 0 || (!is_first && now >= limit)) return std::move(sorted->ended);
    if (active.empty() || now >= begun + active[0]->native.message_stall_ns) return nb::none();
    if (!adopted_ends.has_value() || adopted_ends->size() != adopted.size()) {
      adopted_ends.emplace(*active[0]);
      for (PyObject* const work : adopted) adopted_ends->add(work);
    }
    wait_for_one(active, *adopted_ends, is_first, std::min(limit, now + signal_check_ns));
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
  }
}

}  // namespace unisono
