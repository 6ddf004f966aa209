#include "collective/program.hpp"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <string>

namespace unisono::engine {
namespace {

// Coefficients are a few times the number of ranks.
constexpr std::int64_t times_max = std::int64_t{1} << 31;
// No product with the size of an element overflows.
constexpr uint64_t elements_max = uint64_t{1} << 58;

void require(bool holds, const char* fault) {
  if (!holds) throw std::runtime_error(std::string("invalid program: ") + fault);
}

void require(bool holds, size_t step, const char* fault) {
  if (!holds) throw std::runtime_error("invalid program: step " + std::to_string(step) + ": " + fault);
}

bool is_below(std::int64_t index, size_t size) { return index >= 0 && static_cast<size_t>(index) < size; }

}  // namespace

Program::Program(const std::vector<CutRow>& cut_rows, const std::vector<PointRow>& point_rows,
                 const std::vector<StepRow>& step_rows, const std::vector<EdgeRow>& edge_rows,
                 const std::array<std::int64_t, 2>& lengths, std::int64_t count_number, std::int32_t ranks) {
  require(ranks > 0, "no ranks");
  require(count_number >= 0 && count_number < times_max, "the number of counts is negative or 2^31 or more");
  require(step_rows.size() < UINT32_MAX && point_rows.size() < UINT32_MAX, "2^32 or more steps or points");
  count_number_ = static_cast<size_t>(count_number);
  for (const CutRow& row : cut_rows) add_cut(row);
  points_.push_back({0, 0, 0});
  for (const PointRow& row : point_rows) add_point(row);
  for (size_t i = 0; i < 2; ++i) {
    require(is_below(lengths[i], points_.size()), "a length is no point");
    lengths_[i] = static_cast<uint32_t>(lengths[i]);
  }
  std::vector<std::int32_t> line_of(static_cast<size_t>(ranks), -1);
  for (const StepRow& row : step_rows) add_step(row, line_of);
  add_edges(edge_rows);
  // Every atom has at most as many elements as the longest count, and at least one has to fit.
  uint64_t most = 1;
  std::vector<uint64_t> weights(points_.size(), 0);
  for (size_t i = 1; i < points_.size(); ++i) {
    weights[i] = weights[points_[i].base] + points_[i].times;
    require(weights[i] < static_cast<uint64_t>(times_max), "a point sums 2^31 or more atoms");
    most = std::max(most, weights[i]);
  }
  count_max_ = elements_max / most;
}

void Program::add_cut(const CutRow& row) {
  const auto [kind, of, parts] = row;
  require(kind >= 0 && kind <= 3, "unknown kind of cut");
  const Cut cut{static_cast<Cut::Kind>(kind), static_cast<uint32_t>(of), static_cast<uint32_t>(parts)};
  if (cut.kind == Cut::Kind::even) {
    require(is_below(of, kind_of_.size()) && parts_of_[cut.of].second == 0,
            "a cut divides an unknown atom, or one that is divided already");
    require(parts > 0 && parts < times_max, "a cut has no parts");
    parts_of_[cut.of] = {static_cast<uint32_t>(kind_of_.size()), cut.parts};
  } else {
    require(parts == 1, "a cut that is not even has more than one part");
    require(cut.kind != Cut::Kind::count || is_below(of, count_number_), "a cut refers to an unknown count");
    require(cut.kind != Cut::Kind::longest || count_number_ > 0, "the longest count of none");
  }
  kind_of_.insert(kind_of_.end(), cut.parts, cut.kind);
  parts_of_.resize(kind_of_.size());
  cuts_.push_back(cut);
}

void Program::add_point(const PointRow& row) {
  const auto [base, atom, times] = row;
  require(is_below(base, points_.size()) && is_below(atom, kind_of_.size()),
          "a point refers to a later point or an unknown atom");
  require(times > 0 && times < times_max, "a coefficient is 0 or less, or 2^31 or more");
  points_.push_back({static_cast<uint32_t>(base), static_cast<uint32_t>(atom), static_cast<uint64_t>(times)});
}

void Program::add_step(const StepRow& row, std::vector<std::int32_t>& line_of) {
  const auto [kind, peer, dst_buf, dst, dst_stop, src_buf, src, src_stop, left] = row;
  require(kind >= 0 && kind <= 4, steps.size(), "unknown kind");
  SymbolicStep step{};
  step.step = static_cast<Step>(kind);
  step.left = left != 0;
  step.dst_buf = slice_buffer(dst_buf, dst, dst_stop);
  step.dst = static_cast<uint32_t>(dst);
  step.dst_stop = static_cast<uint32_t>(dst_stop);
  const auto index = static_cast<uint32_t>(steps.size());
  if (step.step == Step::copy || step.step == Step::reduce) {
    step.src_buf = slice_buffer(src_buf, src, src_stop);
    step.src = static_cast<uint32_t>(src);
    const auto stop = static_cast<uint32_t>(src_stop);
    require(difference(step.dst_stop, step.dst) == difference(stop, step.src), steps.size(),
            "source and target differ in length");
    require(step.dst_buf != step.src_buf || is_at_most(step.dst_stop, step.src) || is_at_most(stop, step.dst),
            steps.size(), "source and target may overlap");
  } else {
    require(is_below(peer, line_of.size()), steps.size(), "peer is no rank");
    std::int32_t& at = line_of[static_cast<size_t>(peer)];
    if (at < 0) {
      at = static_cast<std::int32_t>(lines.size());
      lines.push_back({static_cast<std::int32_t>(peer), {}, {}});
    }
    step.line = static_cast<uint32_t>(at);
    (step.step == Step::send ? lines[step.line].sends : lines[step.line].recvs).push_back(index);
  }
  // A plan never writes what the rank contributes: it may be read-only.
  require(step.step == Step::send || step.dst_buf != Buffer::in, steps.size(), "writes to the input");
  reduces |= step.step == Step::reduce || step.step == Step::recv_reduce;
  steps.push_back(step);
}

Buffer Program::slice_buffer(std::int64_t buf, std::int64_t start, std::int64_t stop) {
  require(is_below(buf, buffer_count), steps.size(), "unknown buffer");
  require(is_below(start, points_.size()) && is_below(stop, points_.size()), steps.size(),
          "slice refers to an unknown point");
  const auto which = static_cast<Buffer>(buf);
  const auto first = static_cast<uint32_t>(start), last = static_cast<uint32_t>(stop);
  require(is_at_most(first, last), steps.size(), "slice may end before it starts");
  if (which != Buffer::tmp) {
    require(is_at_most(last, lengths_[buf]), steps.size(), "slice may reach beyond its buffer");
  } else if (std::none_of(tmp_stops_.begin(), tmp_stops_.end(), [&](uint32_t at) { return is_at_most(last, at); })) {
    std::erase_if(tmp_stops_, [&](uint32_t at) { return is_at_most(at, last); });
    tmp_stops_.push_back(last);
  }
  return which;
}

void Program::add_edges(const std::vector<EdgeRow>& rows) {
  after_at.assign(steps.size() + 1, 0);
  waits.assign(steps.size(), 0);
  const auto is_local = [&](size_t i) { return steps[i].step == Step::copy || steps[i].step == Step::reduce; };
  for (const auto& [earlier, later, one, other] : rows) {
    require(is_below(later, steps.size()) && is_below(earlier, static_cast<size_t>(later)),
            "a step waits for a later one");
    const bool has_one = one == 0 || (one == 1 && is_local(static_cast<size_t>(earlier)));
    require(has_one && (other == 0 || (other == 1 && is_local(static_cast<size_t>(later)))),
            "an edge refers to a slice that its step does not have");
    ++after_at[static_cast<size_t>(earlier) + 1];
    ++waits[static_cast<size_t>(later)];
  }
  for (size_t i = 0; i < steps.size(); ++i) after_at[i + 1] += after_at[i];
  after.resize(rows.size());
  std::vector<uint32_t> next(after_at.begin(), after_at.end() - 1);
  for (const auto& [earlier, later, one, other] : rows)
    after[next[static_cast<size_t>(earlier)]++] = {static_cast<uint32_t>(later), static_cast<uint8_t>(one),
                                                   static_cast<uint8_t>(other)};
  for (size_t i = 0; i < steps.size(); ++i)
    if (is_local(i) && waits[i] == 0) ready.push_back(static_cast<uint32_t>(i));
}

// The sum between two points, in atoms that are not cut any further. Both paths lead down to a point that they share.
Program::Sum Program::difference(uint32_t stop, uint32_t start) const {
  std::map<uint32_t, std::int64_t> sum;
  while (stop != start) {
    uint32_t& higher = stop > start ? stop : start;
    const Point& point = points_[higher];
    sum[point.atom] += (stop > start ? 1 : -1) * static_cast<std::int64_t>(point.times);
    higher = point.base;
  }
  Sum found;
  for (auto at = sum.begin(); at != sum.end(); at = sum.erase(at)) {
    const auto [atom, times] = *at;
    const auto [first, parts] = parts_of_[atom];
    if (times == 0) continue;
    if (parts == 0) found.emplace_back(atom, times);
    // The parts of an atom come after it.
    for (uint32_t part = first; part < first + parts; ++part) sum[part] += times;
  }
  return found;
}

// Whether a point is at most another for all counts: a count that is missing must be made up for by a longest one.
bool Program::is_at_most(uint32_t one, uint32_t other) const {
  std::int64_t missing = 0, spare = 0;
  for (const auto& [atom, times] : difference(other, one)) {
    if (kind_of_[atom] == Cut::Kind::longest) {
      spare += times;
    } else if (times < 0) {
      if (kind_of_[atom] != Cut::Kind::count) return false;
      missing -= times;
    }
  }
  return missing <= spare;
}

bool Program::accepts(const Counts& given) const {
  if (given.size != (given.is_even && count_number_ > 0 ? 1 : count_number_)) return false;
  return std::all_of(given.at, given.at + given.size, [&](uint64_t count) { return count <= count_max_; });
}

bool Program::stays_within(Buffer buffer, const Counts& given, std::span<const uint64_t> parts) const {
  thread_local std::vector<uint64_t> atoms, at;
  evaluate(given, atoms, at);
  const auto is_within_one = [&](uint64_t start, uint64_t count) {
    uint64_t end = 0;
    for (const uint64_t part : parts)
      if (end += part; end > start) return count <= end - start;
    return count == 0;
  };
  return std::all_of(steps.begin(), steps.end(), [&](const SymbolicStep& step) {
    const uint64_t dst = at[step.dst], count = at[step.dst_stop] - dst;
    if (step.dst_buf == buffer && !is_within_one(dst, count)) return false;
    if (step.step != Step::copy && step.step != Step::reduce) return true;
    return step.src_buf != buffer || is_within_one(at[step.src], count);
  });
}

void Program::evaluate(const Counts& given, std::vector<uint64_t>& atoms, std::vector<uint64_t>& at) const {
  atoms.resize(kind_of_.size());
  size_t next = 0;
  for (const Cut& cut : cuts_) {
    switch (cut.kind) {
      case Cut::Kind::one: atoms[next++] = 1; break;
      case Cut::Kind::count: atoms[next++] = given[cut.of]; break;
      case Cut::Kind::longest: atoms[next++] = *std::max_element(given.at, given.at + given.size); break;
      case Cut::Kind::even: {
        // Part i ends at whole * (i + 1) / parts, rounded down: a step of the whole quotient, and one more whenever
        // the remainders add up to a part.
        const uint64_t each = atoms[cut.of] / cut.parts, rest = atoms[cut.of] % cut.parts;
        uint64_t left_over = 0;
        for (uint32_t part = 0; part < cut.parts; ++part) {
          left_over += rest;
          const bool is_longer = left_over >= cut.parts;
          if (is_longer) left_over -= cut.parts;
          atoms[next++] = each + (is_longer ? 1 : 0);
        }
      }
    }
  }
  at.resize(points_.size());
  at[0] = 0;
  for (size_t i = 1; i < points_.size(); ++i) at[i] = at[points_[i].base] + points_[i].times * atoms[points_[i].atom];
}

void Program::buffer_counts(const std::vector<uint64_t>& at, uint64_t out[buffer_count]) const {
  out[static_cast<size_t>(Buffer::in)] = at[lengths_[0]];
  out[static_cast<size_t>(Buffer::out)] = at[lengths_[1]];
  uint64_t furthest = 0;
  for (const uint32_t stop : tmp_stops_) furthest = std::max(furthest, at[stop]);
  out[static_cast<size_t>(Buffer::tmp)] = furthest;
}

void Program::buffer_counts(const Counts& given, uint64_t out[buffer_count]) const {
  thread_local std::vector<uint64_t> atoms, at;
  evaluate(given, atoms, at);
  buffer_counts(at, out);
}

}  // namespace unisono::engine
