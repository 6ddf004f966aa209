// Arrays that travel together: those of an all_reduce_many.
//
// Arrays of one type are a *bundle*, which travels as one array. It lies in memory of its own while the engine works on
// it, and is copied back in the end. A bundle of one array needs no such memory.

#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/result_memory.hpp"
#include "python/argument.hpp"

namespace unisono {

struct Decision;

class FusedArrays {
 public:
  struct Bundle {
    uint8_t dtype;
    size_t arrays = 0;   // how many
    uint64_t count = 0;  // elements
    const Decision* decision = nullptr;
    engine::byte* data = nullptr;  // from `join` on
    engine::ResultMemory joined;   // of several arrays
    engine::ResultMemory wide;     // of a mean that is computed in another type
  };

  // See a list or a tuple of arrays that hold whole items of `width` elements. Throws LeftToReference for anything
  // else, which the reference path refuses.
  FusedArrays(const Arguments& arguments, PyObject* given, uint64_t width);

  // In the order of their types, as the reference path has them (unisono/comm/vector_collectives.py).
  std::span<Bundle> bundles() { return bundles_; }
  std::span<const Bundle> bundles() const { return bundles_; }
  uint64_t nbytes() const;
  // The arguments, as a tuple of our own that does not change.
  nb::handle items() const { return items_; }
  const std::vector<std::int64_t>& lengths() const { return lengths_; }
  // The type of each array.
  void types(std::vector<uint8_t>& into) const;
  // What ranks compare: type and length of each array. unisono/comm/fingerprint.py has the same in `fused`.
  std::vector<std::int64_t> compared() const;

  // Copy the arrays of each bundle into memory that lies in a row: that of the only one, or new memory.
  void join();
  // Copy what was reduced back into the arrays.
  void part(const Bundle& bundle) const;
  // What was given, or a new list if it holds numbers.
  PyObject* give_back() const;

 private:
  Bundle& bundle_of(uint8_t dtype);
  template <class Visit>
  void for_each_of(const Bundle& bundle, Visit visit) const;

  nb::object given_, items_;
  std::unique_ptr<Argument[]> arrays_;
  size_t number_ = 0;
  std::vector<std::int64_t> lengths_;
  std::vector<Bundle> bundles_;
};

}  // namespace unisono
