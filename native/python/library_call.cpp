#include "python/library_call.hpp"

#include "python/fingerprint_bytes.hpp"

namespace unisono {

using namespace engine;

PyObject* LibraryCall::run(const Given& given, bool is_started) {
  // A library makes calls with equal lengths.
  if (is_started || !spec_.is_collective() || spec_.has(Fact::groups) || spec_.has(Fact::announced) ||
      spec_.has(Fact::fused) || spec_.has(Fact::cut))
    throw LeftToReference();
  read_timeout(given[Parameter::timeout]);
  prepare_collective(given);
  find_site();
  if (!verb_group_.call_log.fast_path_open) throw LeftToReference();
  const Arguments& arguments = verb_group_.arguments;
  nb::object operand = nb::none(), result = nb::none();
  if (x_.is_given() && !is_in_place()) operand = arguments.array(x_);
  if (target_ != nullptr && has_result()) {
    if (!result_.object.is_valid())
      result = arguments.array(out_.is_given() ? out_ : x_);
    else
      result = x_.form == Form::viewed ? nb::object(result_.object.attr("flat")) : result_.object;
  }
  const nb::object timeout =
      timeout_ns_ >= 0 ? nb::object(nb::float_(static_cast<double>(timeout_ns_) / 1e9)) : nb::none();
  const nb::object has_run = decision_->library(adoption_, count_, bytes_of(fingerprint_), operand, result,
                                                code_.is_valid() ? code_ : nb::none(), instruction_, timeout);
  if (!nb::cast<bool>(has_run)) throw LeftToReference();
  ++verb_group_.ended;
  return give();
}

}  // namespace unisono
