// A list whose links live in its elements: adding and removing takes no memory and no search. It does not own its
// elements, and an element is in at most one list per hook.

#pragma once

#include <cstddef>

namespace unisono::engine {

template <class T>
struct ListHook {
  T* before = nullptr;
  T* after = nullptr;
  bool is_in = false;
};

template <class T, ListHook<T> T::* hook>
class IntrusiveList {
 public:
  T* front() const { return first_; }
  T* back() const { return last_; }
  static T* before(const T& item) { return (item.*hook).before; }
  static T* next(const T& item) { return (item.*hook).after; }
  bool empty() const { return first_ == nullptr; }
  std::size_t size() const { return size_; }

  void push_back(T& item) {
    ListHook<T>& h = item.*hook;
    h = {last_, nullptr, true};
    (last_ != nullptr ? (last_->*hook).after : first_) = &item;
    last_ = &item;
    ++size_;
  }

  void push_front(T& item) {
    ListHook<T>& h = item.*hook;
    h = {nullptr, first_, true};
    (first_ != nullptr ? (first_->*hook).before : last_) = &item;
    first_ = &item;
    ++size_;
  }

  void insert_before(T& place, T& item) {
    if (&place == first_) return push_front(item);
    T* before = (place.*hook).before;
    item.*hook = {before, &place, true};
    (before->*hook).after = &item;
    (place.*hook).before = &item;
    ++size_;
  }

  void remove(T& item) {
    ListHook<T>& h = item.*hook;
    (h.before != nullptr ? (h.before->*hook).after : first_) = h.after;
    (h.after != nullptr ? (h.after->*hook).before : last_) = h.before;
    h = {};
    --size_;
  }

  T* pop_front() {
    T* item = first_;
    if (item != nullptr) remove(*item);
    return item;
  }

 private:
  T* first_ = nullptr;
  T* last_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace unisono::engine
