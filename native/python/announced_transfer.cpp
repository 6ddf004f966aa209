// Calls whose ranks do not know each other's lengths: the second stage, in which what did not fit into the rows travels
// by a plan for the counts that the rows have announced.

#include <nanobind/stl/string.h>

#include <cstring>
#include <numeric>
#include <optional>

#include "collective/size_class.hpp"
#include "engine/engine.hpp"
#include "kernels/kernels.hpp"
#include "python/announcement.hpp"
#include "python/blob_memory.hpp"
#include "python/call.hpp"
#include "python/object_payload.hpp"

namespace unisono {

using namespace engine;

namespace {

// A part of received memory as a buffer of its own.
nb::object part_of_memory(const Result& memory, uint64_t offset, uint64_t nbytes) {
  PyObject* const own =
      make_blob(Py_NewRef(memory.object.ptr()), memory.data + offset, static_cast<Py_ssize_t>(nbytes), true);
  if (own == nullptr) throw nb::python_error();
  return nb::steal(own);
}

}  // namespace

Call::Next Call::advance_announced(bool is_blocking) {
  switch (look_at_rows()) {
    case Rows::complete: return make_announced_result() ? Next::finish : Next::leave_to_python;
    case Rows::strange: return Next::leave_to_python;
    case Rows::lengths_only: break;
  }
  if (!group_.call_log.fast_path_open) return Next::leave_to_python;
  try {
    prepare_second_stage();
  } catch (const LeftToReference&) {
    return Next::leave_to_python;
  } catch (nb::python_error& error) {
    error.discard_as_unraisable("a collective");  // Python tries again, and tells the others if it fails, too
    return Next::leave_to_python;
  }
  announced_->is_second = true;
  const Hold held = group_.completions.engine().hold();
  begin_collective();
  if (is_blocking) poll_if_short();
  return has_ended() && take() ? Next::finish : Next::wait;
}

void Call::prepare_second_stage() {
  Announced& mine = *announced_;
  const Announcement row = mine.rows != 0 ? row_of(0) : own_row();
  const uint8_t dtype = row.dtype();
  const size_t itemsize = itemsizes[dtype], size = static_cast<size_t>(group_.size);
  const auto rank = static_cast<size_t>(group_.rank);
  uint64_t received = 0;  // elements that come to this rank
  if (spec_.has(Fact::by_rank)) {
    received = mine.counts[0] / size;
    mine.counts.assign(size, received);
  } else if (spec_.has(Fact::per_rank)) {
    for (size_t source = 0; source < mine.rows; ++source) received += mine.counts[source * size + rank];
  } else if (mine.is_gathered) {
    // What is in a row has come. The rest goes straight to root: the others know no length but their own.
    for (size_t i = 0; i < mine.rows; ++i)
      if (row_of(i).holds(mine.counts[i] * itemsize)) mine.counts[i] = 0;
    if (is_root()) received = std::accumulate(mine.counts.begin(), mine.counts.end(), uint64_t{0});
  } else {
    received = std::accumulate(mine.counts.begin(), mine.counts.end(), uint64_t{0});
  }
  find_second_decision(dtype);
  find_parts();
  if (is_broadcast_here()) {
    // Some algorithms give root parts of it back: not into the user's memory.
    if (decision_->writes_out && own_row().has_heads()) join(mine.pieces);
    mine.received.object = mine.sent;
    target_ = const_cast<byte*>(std::exchange(in_, nullptr));
    return;
  }
  if (spec_.broadcasts()) in_ = nullptr;
  if (spec_.has(Fact::objects) && take_memory_by_part()) return;
  if (!mine.all_announce) {
    if (out_.is_given()) {
      target_ = out_.data;
      return;
    }
    if (mine.part_count == 0) {
      mine.plain.form = kind_of(row);
      mine.plain.dtype = dtype;
    }
    Py_ssize_t shape[Argument::dims_max + 1];
    int nd = 0;
    if (spec_.has(Fact::per_rank)) shape[nd++] = row.length(rank);
    for (size_t d = 0; d < row.dims(); ++d) shape[nd++] = row.dim(d);
    mine.received = group_.arguments.make(mine.part_count == 0 ? mine.plain : mine.parts[0], shape, nd);
  } else if (byte* const row = outs_in_a_row(); row != nullptr) {
    target_ = row;
    return;
  } else if (receive_into_outs()) {
    return;
  } else {
    mine.received = Arguments::make_memory(received * itemsize);
  }
  target_ = mine.received.data;
}

// Where the parts that come may go as they are: to `out=` if its arrays follow each other in memory, and none of them
// has come in a row already.
byte* Call::outs_in_a_row() const {
  const Announced& mine = *announced_;
  byte *begin = nullptr, *end = nullptr;
  for (size_t i = 0; mine.outs && i < mine.rows; ++i) {
    const Argument& out = mine.outs[i];
    if (out.count == 0) continue;
    if ((end != nullptr && out.data != end) || (mine.is_gathered && mine.counts[i] == 0)) return nullptr;
    if (begin == nullptr) begin = out.data;
    end = out.data + out.nbytes();
  }
  return begin;
}

// Receive each part into its array of `out=`, if no step of the program has to do with several of them.
bool Call::receive_into_outs() {
  Announced& mine = *announced_;
  if (!mine.outs) return false;
  std::vector<uint64_t> lengths;
  uint64_t start = 0;
  for (size_t i = 0; i < mine.rows; ++i) {
    const bool has_come = mine.is_gathered && mine.counts[i] == 0;  // in a row
    lengths.push_back(has_come ? 0 : mine.outs[i].count);
    mine.received_at.push_back({start, mine.outs[i].data});
    start += lengths.back();
  }
  const Counts counts{mine.counts.data(), mine.counts.size(), mine.counts.size() == 1};
  if (decision_->program->stays_within(Buffer::out, counts, lengths)) return true;
  mine.received_at.clear();
  return false;
}

// Copy into the arrays of `out=` what has not come there: what was in the rows, or lies in memory of the second stage.
void Call::fill_outs() {
  const Announced& mine = *announced_;
  const byte* came = mine.received.data;  // none: it has come where it belongs
  std::optional<GilReleased> released;
  if (mine.is_second && mine.bytes >= gil_release_bytes) released.emplace();
  for (size_t i = 0; i < mine.rows; ++i) {
    const Argument& out = mine.outs[i];
    if (out.count == 0) continue;
    const Announcement row = row_of(i);
    if (!mine.is_second || (mine.is_gathered && mine.counts[i] == 0)) {
      std::memcpy(out.data, row.part(own_part(), itemsizes[out.dtype]).data(), out.nbytes());
    } else if (came != nullptr) {
      std::memcpy(out.data, came, out.nbytes());
      came += out.nbytes();
    }
  }
}

// What this rank sends: from where it lies, unless the program sends several parts in one message.
void Call::find_parts() {
  Announced& mine = *announced_;
  in_ = nullptr;
  if (!mine.all_announce && !is_root()) return;
  std::vector<std::span<const byte>> pieces;
  nb::list kept;
  for (size_t i = 0; i < mine.part_count; ++i) {
    pieces.emplace_back(mine.parts[i].data, mine.parts[i].nbytes());
    if (mine.parts[i].held().is_valid()) kept.append(mine.parts[i].held());
  }
  if (mine.packed.is_valid()) {
    kept = mine.packed;
    pieces = mine.pieces;
  } else if (mine.part_count == 0) {  // objects in the row of this rank
    for (size_t i = 0; i < mine.lengths; ++i) pieces.push_back(own_row().part(i, 1));
  }
  mine.sent = kept;
  if (pieces.size() == 1) {
    in_ = pieces[0].data();
    return;
  }
  std::vector<uint64_t> elements;
  for (const auto& piece : pieces) {
    const uint64_t start = std::accumulate(elements.begin(), elements.end(), uint64_t{0});
    mine.sent_from.push_back({start, const_cast<byte*>(piece.data())});  // it is only read
    elements.push_back(piece.size() / decision_->itemsize);
  }
  const Counts counts{mine.counts.data(), mine.counts.size(), mine.counts.size() == 1};
  if (decision_->program->stays_within(Buffer::in, counts, elements)) return;
  mine.sent_from.clear();
  join(pieces);
}

void Call::join(std::span<const std::span<const byte>> pieces) {
  uint64_t all = 0;
  for (const auto& piece : pieces) all += piece.size();
  const Result joined = Arguments::make_memory(all);
  announced_->sent = joined.object;
  in_ = joined.data;
  std::optional<GilReleased> released;
  if (all >= gil_release_bytes) released.emplace();
  byte* to = joined.data;
  for (const auto& piece : pieces) {
    if (!piece.empty()) std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  }
}

// Memory of the object that a part becomes. An immutable object that this rank sends to itself is used as it is.
nb::object Call::memory_of_part(const Announcement& row, size_t source) {
  Announced& mine = *announced_;
  const auto nbytes = static_cast<size_t>(row.length(own_part()));
  const size_t own = mine.lengths == 1 ? 0 : static_cast<size_t>(group_.rank);
  const bool is_own = source == static_cast<size_t>(group_.rank);
  PyObject* memory;
  if (is_own && own < mine.whole.size() && mine.whole[own].is_valid()) {
    byte* const data = const_cast<byte*>(mine.pieces[own].data());  // copied to itself, which is left out
    memory = make_blob(mine.whole[own].inc_ref().ptr(), data, static_cast<Py_ssize_t>(nbytes), false);
  } else {
    memory = memory_for(row.has_heads() ? head_of(row, own_part())->kind : BlobKind::array, nbytes);
  }
  if (memory == nullptr) throw nb::python_error();
  return nb::steal(memory);
}

// Take memory for each part that comes, if no step of the program has to do with several of them.
bool Call::take_memory_by_part() {
  Announced& mine = *announced_;
  const auto sources = mine.all_announce ? static_cast<size_t>(group_.size) : 1;
  std::vector<uint64_t> lengths(sources);
  if (!has_result()) return false;
  for (size_t i = 0; i < sources; ++i) {
    const bool is_here = mine.is_gathered && mine.counts[i] == 0;
    lengths[i] = is_here ? 0 : static_cast<uint64_t>(row_of(i).length(own_part()));
  }
  const Counts counts{mine.counts.data(), mine.counts.size(), mine.counts.size() == 1};
  if (sources != 1 && !decision_->program->stays_within(Buffer::out, counts, lengths)) return false;
  nb::list kept;
  uint64_t start = 0;
  for (size_t i = 0; i < sources; ++i) {
    nb::object memory = nb::none();
    byte* data = nullptr;
    if (lengths[i] != 0) {
      memory = memory_of_part(row_of(i), mine.all_announce ? i : static_cast<size_t>(root_));
      data = data_of_blob(memory.ptr());
      kept.append(memory);
    }
    mine.received_at.push_back({start, data});
    mine.received_in.push_back(std::move(memory));
    start += lengths[i];
  }
  mine.received.object = kept;
  if (sources == 1) {
    target_ = mine.received_at[0].data;
    mine.received_at.clear();
  }
  return true;
}

// The object in a received part. If it cannot be made, this rank alone is concerned: all have what they need.
nb::object Call::object_in(const Announcement& row, const nb::object& memory) const {
  const auto nbytes = static_cast<size_t>(row.length(own_part()));
  byte* const data = nbytes != 0 ? data_of_blob(memory.ptr()) : nullptr;
  if (!row.has_heads()) return unpacked(codec::unpack(data, nbytes, memory.ptr()));
  const ObjectHead head = *head_of(row, own_part());
  if (head.kind == BlobKind::detached)
    return unpacked(codec::unpack_beside(head.bytes.data(), head.bytes.size(), data, nbytes, memory.ptr()));
  PyObject* const only = memory.ptr();
  return unpacked(codec::unpack_parts(head.bytes.data(), head.bytes.size(), &only, nbytes != 0 ? 1 : 0));
}

void Call::find_second_decision(uint8_t dtype) {
  Announced& mine = *announced_;
  const bool is_all_to_all = mine.all_announce && spec_.has(Fact::per_rank);
  DecisionKey key;
  key.verb = spec_.number;
  key.dtype = dtype;
  key.root = root_;
  key.algorithm = mine.algorithm;
  key.stage = 1;
  const bool is_uniform = !mine.is_gathered && is_even(mine.counts);
  // As in plans/choose.py, all uneven ones of an all_to_all are one class. So are those of a gather_v, of which no rank
  // but root knows all.
  if (!mine.is_gathered && (!is_all_to_all || (is_uniform && mine.counts[0] != 0)))
    key.size_class = 1 + size_class(mine.counts);
  decision_ = group_.decisions.find(key);
  if (decision_ == nullptr) {
    ++group_.decided;
    nb::list counts;
    for (const uint64_t count : mine.counts) counts.append(count);
    const nb::object algorithm = mine.algorithm != nullptr ? nb::borrow(mine.algorithm) : nb::object(nb::str("auto"));
    const nb::object decided =
        adoption_.attr("decide_second_stage")(spec_.name, int{dtype}, root_, algorithm, nb::tuple(counts));
    decision_ = keep_decision(key, dtype, decided);
  }
  const uint64_t all = std::accumulate(mine.counts.begin(), mine.counts.end(), uint64_t{0});
  if (all >= count_any) throw LeftToReference();
  mine.bytes = all * itemsizes[dtype];
  const uint64_t none = 0;
  const std::span<const uint64_t> hashed = mine.is_gathered ? std::span(&none, 1)  // in place of a count
                                           : is_uniform     ? std::span<const uint64_t>()
                                                            : std::span<const uint64_t>(mine.counts);
  fingerprint_ = decision_->fingerprint.with(mine.is_gathered ? count_any : all,
                                             Fingerprint::hash_of(group_.fingerprint_seed, hashed));
  // No matrix is needed for counts that are all the same.
  if (is_uniform) mine.counts.resize(1);
  if (!decision_->program->accepts({mine.counts.data(), mine.counts.size(), is_uniform})) throw LeftToReference();
}

PyObject* Call::finish_second_stage() {
  Announced& mine = *announced_;
  if (!has_result()) Py_RETURN_NONE;
  if (is_broadcast_here()) return Py_NewRef(mine.value.ptr());
  if (!mine.all_announce) {
    if (spec_.has(Fact::objects)) return object_in(row_of(0), mine.received_in[0]).release().ptr();
    if (out_.is_given()) return Py_NewRef(out_.given);
    return group_.arguments.give(mine.part_count == 0 ? mine.plain : mine.parts[0], mine.received, false);
  }
  if (mine.outs) {
    fill_outs();
    return Py_NewRef(mine.given_outs.ptr());
  }
  return received_list().release().ptr();
}

// The received bytes, cut by sender.
nb::object Call::received_list() {
  const Announced& mine = *announced_;
  const Announcement first = row_of(0);
  const Argument* const like = mine.part_count != 0 ? &mine.parts[0] : nullptr;
  const auto length_of = [&](std::int32_t rank) { return row_of(static_cast<size_t>(rank)).length(own_part()); };
  if (like != nullptr && like->form == Form::viewed) {
    if (mine.is_gathered) join_gathered();
    nb::list lengths, dims;
    for (std::int32_t rank = 0; rank < group_.size; ++rank) lengths.append(length_of(rank));
    for (size_t d = 0; d < first.dims(); ++d) dims.append(first.dim(d));
    const nb::object given = nb::borrow(like->given);
    return adoption_.attr("cut")(mine.received.object, given, int{first.dtype()}, lengths, nb::tuple(dims));
  }
  nb::object all = nb::steal(PyList_New(group_.size));
  if (!all.is_valid()) throw nb::python_error();
  Py_ssize_t shape[Argument::dims_max + 1];
  for (size_t d = 0; d < first.dims(); ++d) shape[d + 1] = first.dim(d);
  uint64_t offset = 0;
  for (std::int32_t rank = 0; rank < group_.size; ++rank) {
    shape[0] = length_of(rank);
    uint64_t nbytes = static_cast<uint64_t>(shape[0]) * itemsizes[first.dtype()];
    for (size_t d = 0; d < first.dims(); ++d) nbytes *= static_cast<uint64_t>(first.dim(d));
    const auto row = static_cast<size_t>(rank);
    const bool is_here = mine.is_gathered && mine.counts[row] == 0;
    nb::object part;
    if (like != nullptr)
      part = is_here ? part_of(row_of(row), 0)
                     : nb::steal(group_.arguments.part(*like, mine.received, offset, shape,
                                                       static_cast<int>(first.dims()) + 1));
    else if (is_here)
      part = unpacked(codec::unpack(row_of(row).part(0, 1).data(), nbytes));
    else
      part = object_in(row_of(row), mine.received_in.empty() ? part_of_memory(mine.received, offset, nbytes)
                                                             : mine.received_in[row]);
    if (!part.is_valid()) throw nb::python_error();
    PyList_SET_ITEM(all.ptr(), rank, part.release().ptr());
    if (!is_here) offset += nbytes;
  }
  return all;
}

// Put what was in rows and what came later into the order of ranks.
void Call::join_gathered() {
  Announced& mine = *announced_;
  const size_t itemsize = itemsizes[row_of(0).dtype()];
  std::vector<std::span<const byte>> pieces;
  const byte* came = mine.received.data;
  for (size_t rank = 0; rank < mine.rows; ++rank) {
    if (mine.counts[rank] == 0) {
      pieces.push_back(row_of(rank).part(0, itemsize));
      continue;
    }
    pieces.emplace_back(came, mine.counts[rank] * itemsize);
    came += mine.counts[rank] * itemsize;
  }
  uint64_t all = 0;
  for (const auto& piece : pieces) all += piece.size();
  Result joined = Arguments::make_memory(all);
  byte* to = joined.data;
  for (const auto& piece : pieces) {
    if (!piece.empty()) std::memcpy(to, piece.data(), piece.size());
    to += piece.size();
  }
  mine.received = std::move(joined);
}

}  // namespace unisono
