// Calls of all_reduce_many: the arrays of each type are reduced as one, all at once.

#include "collective/size_class.hpp"
#include "engine/engine.hpp"
#include "kernels/kernels.hpp"
#include "python/call.hpp"

namespace unisono {

using namespace engine;

static_assert(dtype_count <= stages, "each type has a stage of its own");

void Call::prepare_fused(const Given& given) {
  if (given[Parameter::x] == nullptr) throw LeftToReference();
  op_ = op_names.number_of(given[Parameter::op]);
  const uint64_t width = op_names.width_of(op_);
  fused_.emplace(group_.arguments, given[Parameter::x], width);
  x_.stand_for(fused_->items().ptr());
  x_.keep();
  DecisionKey key;
  key.verb = spec_.number;
  key.op = op_;
  key.algorithm = algorithm_of(given);
  uint64_t all = 0;
  for (FusedArrays::Bundle& bundle : fused_->bundles()) {
    const uint64_t count = bundle.count / width;
    const auto length = static_cast<Py_ssize_t>(bundle.count);
    key.dtype = bundle.dtype;
    key.size_class = size_class(count);
    bundle.decision = decision_for(key, given, {&length, 1});
    if (!bundle.decision->program->accepts({&count, 1, true})) throw LeftToReference();
    all += bundle.count;
  }
  if (all >= count_any) throw LeftToReference();
  // Ranks compare the whole list, with the first message of any of its bundles.
  decision_ = fused_->bundles().front().decision;
  fingerprint_ = decision_->fingerprint.with(all, Fingerprint::hash_of(group_.fingerprint_seed, fused_->compared()));
  fused_->join();
  for (FusedArrays::Bundle& bundle : fused_->bundles())
    if (bundle.decision->dtype != bundle.dtype) bundle.wide = widened(bundle.dtype, bundle.data, bundle.count, 0);
}

void Call::begin_bundles() {
  const uint64_t width = op_names.width_of(op_);
  uint64_t tag = tag_of(sequence_);
  for (const FusedArrays::Bundle& bundle : fused_->bundles()) {
    const uint64_t count = bundle.count / width;
    Stage stage;
    stage.tag = tag++;
    stage.out = bundle.wide.get() != nullptr ? bundle.wide.get() : bundle.data;
    stage.counts = &count;
    stage.counts_n = 1;
    stage.is_even = true;
    begin_run(*bundle.decision, stage);
  }
}

PyObject* Call::finish_fused() {
  for (const FusedArrays::Bundle& bundle : fused_->bundles()) {
    divide(*bundle.decision, bundle.dtype, bundle.data, bundle.count, bundle.wide.get());
    fused_->part(bundle);
  }
  return fused_->give_back();
}

}  // namespace unisono
