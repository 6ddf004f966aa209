// Programs and the ranks of a group as Python classes.

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "collective/program_call.hpp"
#include "python/bind.hpp"

namespace nb = nanobind;

namespace unisono {

using namespace engine;

namespace {

// A program as Python holds it. Runs share the inner object, whose release never needs the GIL.
struct PyProgram {
  std::shared_ptr<const Program> program;
};

ProgramCall call_of(const PyProgram& given, std::vector<uint64_t> counts, bool is_even, uint64_t piece_elements,
                    std::shared_ptr<RankMap> rank_map) {
  ProgramCall call{given.program, std::move(counts), is_even, piece_elements, std::move(rank_map)};
  if (!call.program->accepts({call.counts.data(), call.counts.size(), is_even}) || piece_elements == 0)
    throw nb::value_error("the counts are not those of the program");
  for (const Line& line : call.program->lines)
    if (call.rank_map != nullptr && !call.rank_map->has_rank(line.peer)) throw nb::value_error("a member is missing");
  return call;
}

}  // namespace

std::shared_ptr<const engine::Program> program_of(nb::handle program) { return nb::cast<PyProgram&>(program).program; }

void bind_program(nb::module_& m) {
  nb::class_<PyProgram>(m, "Program")
      .def(
          "__init__",
          [](PyProgram* self, const std::vector<Program::CutRow>& cuts, const std::vector<Program::PointRow>& points,
             const std::vector<Program::StepRow>& steps, const std::vector<Program::EdgeRow>& edges,
             const std::array<std::int64_t, 2>& lengths, std::int64_t counts, std::int32_t ranks) {
            new (self) PyProgram{std::make_shared<const Program>(cuts, points, steps, edges, lengths, counts, ranks)};
          },
          nb::arg("cuts"), nb::arg("points"), nb::arg("steps"), nb::arg("edges"), nb::arg("lengths"), nb::arg("counts"),
          nb::arg("ranks"));
  nb::class_<RankMap>(m, "RankMap")
      .def(nb::init<std::vector<std::int32_t>>(), nb::arg("peers"))
      .def("__len__", &RankMap::size)
      .def_prop_ro("peers", [](const RankMap& self) { return nb::tuple(nb::cast(self.peers())); })
      .def("to_global",
           [](const RankMap& self, std::int64_t rank) {
             if (!self.has_rank(rank)) throw nb::index_error("no such rank");
             return self.to_global(static_cast<std::int32_t>(rank));
           })
      .def("within",
           [](nb::handle_t<RankMap> self, const RankMap& outer) -> nb::object {
             if (outer.translation() == nullptr) return nb::borrow(self);
             std::vector<std::int32_t> ranks;
             for (const std::int32_t peer : nb::cast<const RankMap&>(self).peers())
               ranks.push_back(outer.to_local(peer));
             return nb::cast(std::make_shared<RankMap>(std::move(ranks)));
           })
      .def("peers_of",
           [](const RankMap& self, const std::vector<std::int32_t>& ranks) {
             nb::list peers;
             for (const std::int32_t rank : ranks) {
               if (!self.has_rank(rank)) throw nb::index_error("no such rank");
               peers.append(self.to_global(rank));
             }
             return nb::tuple(peers);
           })
      .def("to_local", [](const RankMap& self, std::int64_t peer) -> std::optional<std::int32_t> {
        const std::int32_t rank = self.to_local(peer);
        return rank == RankMap::none ? std::nullopt : std::optional(rank);
      });
  nb::class_<ProgramCall>(m, "ProgramCall")
      .def(
          "__init__",
          [](ProgramCall* self, const PyProgram& program, std::vector<uint64_t> counts, bool is_even,
             uint64_t piece_elements, std::shared_ptr<RankMap> rank_map) {
            new (self) ProgramCall(call_of(program, std::move(counts), is_even, piece_elements, std::move(rank_map)));
          },
          nb::arg("program"), nb::arg("counts"), nb::arg("is_even"), nb::arg("piece_elements"),
          nb::arg("rank_map").none());
}

}  // namespace unisono
