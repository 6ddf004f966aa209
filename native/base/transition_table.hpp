// A state machine as data: rows of (state, event) -> (next state, action), expanded at compile time into an array.
//
// A pair that no row lists is impossible. Events that a peer can cause are checked with `allows` first, and an
// impossible one closes the connection. Events of this process are applied with `at`, which asserts.

#pragma once

#include <cassert>

#include "base/types.hpp"

namespace unisono::engine {

struct NoAction {};

template <class State, class Event, class Action = NoAction>
struct Transition {
  State from;
  Event event;
  State next;
  Action action{};
};

// `states` and `events` are the numbers of enumerators, which count from 0.
template <class State, size_t states, class Event, size_t events, class Action = NoAction>
class TransitionTable {
 public:
  using Row = Transition<State, Event, Action>;
  struct Step {
    State next{};
    Action action{};
    bool is_listed = false;
  };

  template <size_t count>
  consteval TransitionTable(const Row (&rows)[count]) : row_count(count) {
    // An unlisted pair leaves the state as it is.
    for (size_t state = 0; state < states; ++state)
      for (Step& step : steps_[state]) step.next = static_cast<State>(state);
    for (const Row& row : rows) {
      Step& step = steps_[static_cast<size_t>(row.from)][static_cast<size_t>(row.event)];
      if (step.is_listed) throw "a pair of state and event has two rows";
      step = {row.next, row.action, true};
    }
  }

  constexpr bool allows(State state, Event event) const { return step(state, event).is_listed; }
  constexpr const Step& at(State state, Event event) const {
    assert(allows(state, event));
    return step(state, event);
  }
  constexpr State next(State state, Event event) const { return at(state, event).next; }

  static constexpr size_t state_count = states, event_count = events;
  const size_t row_count;

 private:
  constexpr const Step& step(State state, Event event) const {
    return steps_[static_cast<size_t>(state)][static_cast<size_t>(event)];
  }

  Step steps_[states][events] = {};
};

}  // namespace unisono::engine
