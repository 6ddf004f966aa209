// A blocking collective that a library runs, on the caller's thread: the decision is what calls it.

#pragma once

#include "python/parsed_call.hpp"

namespace unisono {

class LibraryCall : public ParsedCall {
 public:
  using ParsedCall::ParsedCall;
  // Throws LeftToReference if the library has not begun it.
  PyObject* run(const Given& given, bool is_started);
};

}  // namespace unisono
