// What the join gave a rank for authenticated links, and the ranks that certificates name.

#pragma once

#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/types.hpp"

namespace unisono::engine {

// A rank's key and certificate and the authority that it trusts, as PEM; `names[r]` is the URI in rank r's certificate.
struct TlsMaterial {
  std::string key;
  std::string certificate;
  std::string authority;
  std::vector<std::string> names;
};

// The rank of each name.
class RankNames {
 public:
  // Throws std::runtime_error if two ranks have one name, or one has none.
  explicit RankNames(const std::vector<std::string>& names) {
    for (size_t i = 0; i < names.size(); ++i)
      if (names[i].empty() || !ranks_.emplace(names[i], static_cast<std::int32_t>(i)).second)
        throw std::runtime_error("allowed: a different name for every rank");
  }
  // Negative if it names no rank of this job.
  std::int32_t rank_of(const std::string& name) const {
    const auto found = ranks_.find(name);
    return found != ranks_.end() ? found->second : -1;
  }

 private:
  std::unordered_map<std::string, std::int32_t> ranks_;
};

}  // namespace unisono::engine
