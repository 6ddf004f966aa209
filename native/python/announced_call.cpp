// Calls whose ranks do not know each other's lengths: their first stage, and the result if there is no second.
//
// Every rank, or root, announces its arrays in a row (announcement.hpp); short ones are in the row itself. If anything
// is missing, or a row is not what it should be, Python finishes the call (unisono/comm/vector_collectives.py).

#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/engine.hpp"
#include "kernels/kernels.hpp"
#include "python/announcement.hpp"
#include "python/call.hpp"
#include "python/codec.hpp"
#include "python/object_payload.hpp"

namespace unisono {

using namespace engine;

namespace {

// vector_collectives._FAMILIES
constexpr uint8_t numpy_family = 0, torch_family = 1;
// announcement.ARRAY_BYTES_MAX
constexpr uint64_t array_bytes_max = uint64_t{1} << 48;

std::span<const Py_ssize_t> beyond_first(const Argument& array) {
  return {array.shape + 1, static_cast<size_t>(array.nd - 1)};
}

bool is_alike(const Argument& a, const Argument& b) {
  return a.dtype == b.dtype && a.nd == b.nd && std::equal(a.shape + 1, a.shape + a.nd, b.shape + 1);
}

bool overlap(const Argument& a, const Argument& b) {
  return a.count != 0 && b.count != 0 && a.data < b.data + b.nbytes() && b.data < a.data + a.nbytes();
}

// Whether any two of them share memory.
bool overlap(const Argument* arrays, size_t count) {
  std::vector<std::pair<const byte*, const byte*>> spans;
  for (size_t i = 0; i < count; ++i)
    if (arrays[i].count != 0) spans.emplace_back(arrays[i].data, arrays[i].data + arrays[i].nbytes());
  if (!std::is_sorted(spans.begin(), spans.end())) std::sort(spans.begin(), spans.end());
  const auto shares = [](const auto& one, const auto& next) { return one.second > next.first; };
  return std::adjacent_find(spans.begin(), spans.end(), shares) != spans.end();
}

// Copy with the GIL released, if that is worth it.
template <class Copy>
void copy_long(uint64_t bytes, Copy copy) {
  std::optional<GilReleased> released;
  if (bytes >= gil_release_bytes) released.emplace();
  copy();
}

BlobKind kind_of_blobs(const codec::Packer& packer) {
  const auto& blobs = packer.blobs();
  return blobs.empty() ? BlobKind::array : blobs.size() > 1 ? BlobKind::detached : kind_of_blob(blobs[0].owner);
}

// Keep what travels beside the head of an object until the call is over: one blob where it lies, several in one piece.
// Returns the length.
size_t keep_blobs(const codec::Packer& packer, Announced& mine, size_t number) {
  const auto& blobs = packer.blobs();
  if (blobs.size() > 1) {
    const size_t length = packer.blobs_size();
    const Result joined = Arguments::make_memory(length);
    copy_long(length, [&] { packer.copy_blobs_to(joined.data); });
    mine.pieces.emplace_back(joined.data, length);
    mine.packed.append(joined.object);
    return length;
  }
  if (blobs.empty()) {
    mine.pieces.emplace_back();
    mine.packed.append(nb::bytes("", 0));
    return 0;
  }
  const codec::Packer::Blob& blob = blobs[0];
  const nb::object view = nb::steal(codec::view_of(blob));
  if (!view.is_valid()) throw nb::python_error();
  mine.pieces.emplace_back(blob.data, blob.bytes);
  mine.packed.append(view);
  const BlobKind kind = kind_of_blob(blob.owner);
  if (kind == BlobKind::bytes || kind == BlobKind::ascii) mine.whole[number] = nb::borrow(blob.owner);
  return blob.bytes;
}

// An item of a list or tuple of this length; anything else is Python's to refuse. Asked for each item: looking at the
// one before may have run any code.
PyObject* item_of(PyObject* list, size_t count, size_t i) {
  if (list == nullptr || !(PyList_Check(list) || PyTuple_Check(list)) ||
      static_cast<size_t>(PySequence_Fast_GET_SIZE(list)) != count)
    throw LeftToReference();
  return PySequence_Fast_GET_ITEM(list, static_cast<Py_ssize_t>(i));
}

}  // namespace

void Call::prepare_announced(const Given& given) {
  Announced& mine = announced_.emplace();
  mine.is_gathered = spec_.has(Fact::gathered);
  mine.all_announce = mine.is_gathered || spec_.has(Fact::exchanged);
  root_ = given[Parameter::root] == nullptr ? 0 : rank_of(given[Parameter::root]);
  if (spec_.has(Fact::folds)) {
    PyObject* const fn = given[Parameter::fn];
    if (fn == nullptr || PyCallable_Check(fn) == 0) throw LeftToReference();
    mine.fn = nb::borrow(fn);
  }
  const auto size = static_cast<size_t>(group_.size);
  mine.lengths = spec_.has(Fact::per_rank) ? size : 1;
  mine.row_bytes = Announcement::row_bytes(size, mine.lengths);
  count_ = mine.row_bytes;
  mine.rows = !mine.all_announce ? 1 : has_result() ? size : 0;
  target_count_ = mine.row_bytes * mine.rows;
  // The rows that come, then the one of this rank.
  result_ = group_.arguments.make_bytes(target_count_ + (mine.all_announce ? mine.row_bytes : 0));
  target_ = result_.data;
  in_ = mine.all_announce ? target_ + target_count_ : nullptr;
  PyObject* const out = given[Parameter::out];
  const bool has_out = out != nullptr && out != Py_None;
  if (has_out && !mine.all_announce) {
    group_.arguments.see(out, "out", true, out_);
    if (out_.is_number()) throw LeftToReference();
  }
  PyObject* const x = given[Parameter::x];
  if (mine.all_announce || is_root()) {
    if (spec_.has(Fact::objects))
      announce_objects(x);
    else
      announce_arrays(x);
  }
  if (has_out && mine.all_announce && mine.rows != 0) see_outs(out);
  find_announced_decision(given);
}

// The row that this rank sends.
Announcement Call::own_row() const {
  const Announced& mine = *announced_;
  return {result_.data + (mine.all_announce ? mine.rows * mine.row_bytes : 0), mine.row_bytes, mine.lengths};
}

// The row of a rank, or the one of root.
Announcement Call::row_of(size_t rank) const {
  const Announced& mine = *announced_;
  return {result_.data + rank * mine.row_bytes, mine.row_bytes, mine.lengths};
}

void Call::announce_arrays(PyObject* x) {
  Announced& mine = *announced_;
  const size_t count = mine.lengths;
  mine.parts = std::make_unique<Argument[]>(count);
  mine.part_count = count;
  uint64_t nbytes = 0;
  for (size_t i = 0; i < count; ++i) {
    Argument& part = mine.parts[i];
    const nb::object item = nb::borrow(spec_.has(Fact::per_rank) ? item_of(x, count, i) : x);
    if (!item.is_valid()) throw LeftToReference();
    try {
      group_.arguments.see(item.ptr(), "x", false, part);
    } catch (nb::python_error&) {
      throw LeftToReference();  // refuses it by its name
    }
    part.keep();
    const bool fits_row = part.nd != 0 && static_cast<size_t>(part.nd - 1) <= Announcement::dims_max;
    if (!fits_row || !is_alike(part, mine.parts[0])) throw LeftToReference();
    nbytes += part.nbytes();
  }
  const Argument& first = mine.parts[0];
  if (spec_.has(Fact::by_rank) && first.shape[0] != group_.size) throw LeftToReference();
  if (out_.is_given()) check_scattered();
  uint8_t family = first.form == Form::tensor ? torch_family : numpy_family;
  // Of what Python has viewed, only Python knows the kind that other ranks are to make.
  if (first.form == Form::viewed) family = nb::cast<uint8_t>(adoption_.attr("family_of")(first.held()));
  Announcement said = own_row();
  byte* to = said.write(first.dtype, family, beyond_first(first), nbytes);
  for (size_t i = 0; i < count; ++i) {
    const Argument& part = mine.parts[i];
    said.set_length(i, part.shape[0]);
    if (to == nullptr || part.count == 0) continue;
    std::memcpy(to, part.data, part.nbytes());
    to += part.nbytes();
  }
}

// Root's own `out=` of a scatter: what is wrong with it Python says before anything is sent.
void Call::check_scattered() const {
  const Announced& mine = *announced_;
  const Argument& own = mine.parts[spec_.has(Fact::per_rank) ? static_cast<size_t>(group_.rank) : 0];
  const int cut = spec_.has(Fact::by_rank) ? 1 : 0;
  if (out_.dtype != own.dtype || out_.nd != own.nd - cut ||
      !std::equal(out_.shape, out_.shape + out_.nd, own.shape + cut))
    throw LeftToReference();
  // Root's part may stay where it is.
  if (cut == 1 && out_.data == own.data + static_cast<uint64_t>(group_.rank) * out_.nbytes()) return;
  for (size_t i = 0; i < mine.part_count; ++i)
    if (overlap(mine.parts[i], out_)) throw LeftToReference();
}

// The arrays of `out=` of a verb that gives a list: what is wrong with them Python says before anything is sent.
void Call::see_outs(PyObject* list) {
  Announced& mine = *announced_;
  mine.outs = std::make_unique<Argument[]>(mine.rows);
  mine.given_outs = nb::borrow(list);
  for (size_t i = 0; i < mine.rows; ++i) {
    Argument& out = mine.outs[i];
    const nb::object item = nb::borrow(item_of(list, mine.rows, i));
    if (!item.is_valid()) throw LeftToReference();
    try {
      group_.arguments.see(item.ptr(), "out", true, out);
    } catch (nb::python_error&) {
      throw LeftToReference();  // refuses it by its number
    }
    out.keep();
    if (out.is_number() || out.nd == 0 || !is_alike(out, mine.parts[0])) throw LeftToReference();
    // The array of this rank may be the one that it sends.
    const bool is_sent = mine.part_count == 1 && i == static_cast<size_t>(group_.rank) &&
                         out.data == mine.parts[0].data && out.count == mine.parts[0].count;
    for (size_t part = 0; part < mine.part_count && !is_sent; ++part)
      if (overlap(out, mine.parts[part])) throw LeftToReference();
  }
  if (overlap(mine.outs.get(), mine.rows)) throw LeftToReference();
}

void Call::announce_objects(PyObject* x) {
  Announced& mine = *announced_;
  const size_t count = mine.lengths;
  PyObject* const single = x == nullptr ? Py_None : x;
  if (x == nullptr && mine.all_announce) throw LeftToReference();
  mine.value = nb::borrow(single);
  const uint64_t bytes_max = group_.completions.engine().settings.recv_bytes_max;
  std::vector<codec::Packer> packers(count);
  uint64_t nbytes = 0, head_bytes = 0;
  bool has_blobs = false;
  for (size_t i = 0; i < count; ++i) {
    const nb::object item = nb::borrow(spec_.has(Fact::per_rank) ? item_of(x, count, i) : single);
    if (!packers[i].pack(item.ptr())) throw nb::python_error();
    if (packers[i].size() > bytes_max) throw LeftToReference();  // refuses it
    nbytes += packers[i].size();
    head_bytes += 1 + packers[i].head_size();
    has_blobs = has_blobs || !packers[i].blobs().empty();
  }
  Announcement said = own_row();
  byte* to = said.write(plain_bytes, numpy_family, {}, nbytes);
  byte* heads = nullptr;
  if (to == nullptr) {
    mine.packed = nb::list();
    mine.whole.resize(count);
    if (has_blobs) heads = said.write_heads(head_bytes);
  }
  for (size_t i = 0; i < count; ++i) {
    const codec::Packer& packer = packers[i];
    size_t length = packer.size();
    if (to != nullptr) {
      packer.copy_to(to);
      to += length;
    } else if (heads == nullptr) {
      const Result packed = Arguments::make_memory(length);
      copy_long(length, [&] { packer.copy_to(packed.data); });
      mine.pieces.emplace_back(packed.data, length);
      mine.packed.append(packed.object);
    } else {
      *heads++ = static_cast<byte>(kind_of_blobs(packer));
      packer.copy_head_to(heads);
      heads += packer.head_size();
      length = keep_blobs(packer, mine, i);
    }
    said.set_length(i, static_cast<std::int64_t>(length));
  }
}

void Call::find_announced_decision(const Given& given) {
  Announced& mine = *announced_;
  const Argument* const first = mine.part_count != 0 ? &mine.parts[0] : nullptr;
  DecisionKey key;
  key.verb = spec_.number;
  key.dtype = !mine.all_announce ? untyped : first != nullptr ? first->dtype : plain_bytes;
  key.root = root_;
  key.algorithm = mine.algorithm = algorithm_of(given);
  decision_ = group_.decisions.find(key);
  const auto dims = first != nullptr ? beyond_first(*first) : std::span<const Py_ssize_t>();
  if (decision_ == nullptr) decision_ = decide(key, given, key.dtype == untyped ? plain_bytes : key.dtype, dims);
  if (decision_->program == nullptr || !decision_->program->accepts(counts())) throw LeftToReference();
  if (!mine.all_announce) {
    fingerprint_ = decision_->fingerprint.with(0, Fingerprint::hash_of(group_.fingerprint_seed, {}));
    return;
  }
  std::int64_t values[Argument::dims_max];
  std::copy(dims.begin(), dims.end(), values);
  values[dims.size()] = 0;  // in place of a count
  const std::span<const std::int64_t> hashed(values, dims.size() + 1);
  fingerprint_ = decision_->fingerprint.with(count_any, Fingerprint::hash_of(group_.fingerprint_seed, hashed));
}

// ---- the rows of all ranks ----

// Look at the rows: whether all elements are in them, travel in a second stage, or are for Python to look at.
Call::Rows Call::look_at_rows() {
  Announced& mine = *announced_;
  const uint64_t bytes_max =
      spec_.has(Fact::objects) ? group_.completions.engine().settings.recv_bytes_max : array_bytes_max;
  if (mine.rows == 0) {  // only this rank knows of a gather_v how much it sends
    const uint64_t own = mine.part_count != 0 ? mine.parts[0].count : static_cast<uint64_t>(own_row().length(0));
    mine.counts.assign(static_cast<size_t>(group_.size), 0);
    mine.counts[static_cast<size_t>(group_.rank)] = own;
    return own_row().holds(own * itemsizes[own_row().dtype()]) ? Rows::complete : Rows::lengths_only;
  }
  mine.counts.resize(mine.rows * mine.lengths);
  bool are_here = true;
  for (size_t i = 0; i < mine.rows; ++i) {
    const Announcement row = row_of(i);
    uint64_t* const counts = &mine.counts[i * mine.lengths];
    if (row.dtype() >= dtype_count || !row.counts(itemsizes[row.dtype()], bytes_max, counts)) return Rows::strange;
    if (!is_expected(row) || (mine.outs && mine.outs[i].shape[0] != row.length(own_part()))) return Rows::strange;
    uint64_t all = 0;
    for (size_t part = 0; part < mine.lengths; ++part) all += counts[part];
    are_here = are_here && row.holds(all * itemsizes[row.dtype()]);
  }
  return are_here ? Rows::complete : Rows::lengths_only;
}

// Whether it announces what this rank can take as it is.
bool Call::is_expected(const Announcement& row) const {
  const Announced& mine = *announced_;
  if (spec_.has(Fact::objects))
    return row.dtype() == plain_bytes && row.dims() == 0 && (!row.has_heads() || head_of(row, own_part()));
  if (mine.part_count != 0) {
    const Argument& first = mine.parts[0];
    const auto dims = beyond_first(first);
    if (row.dtype() != first.dtype || row.dims() != dims.size()) return false;
    for (size_t d = 0; d < dims.size(); ++d)
      if (row.dim(d) != dims[d]) return false;
  } else if (!out_.is_given() && (kind_of(row) == Form::none || row.dims() >= Argument::dims_max)) {
    return false;  // only Python can make such a result
  }
  if (out_.is_given() && !fits_out(row)) return false;
  return !spec_.has(Fact::by_rank) || row.length(0) == group_.size;
}

// The kind of array that this rank makes of what root sends: root's, where this process can hold it.
Form Call::kind_of(const Announcement& row) const {
  if (row.family() == torch_family) {
    static PyObject* const word = interned("torch");
    if (nb::steal(PyImport_GetModule(word)).is_valid()) return Form::tensor;
  }
  const bool is_arrays = row.family() == numpy_family || row.family() == torch_family;
  return is_arrays && group_.arguments.has_type(row.dtype()) ? Form::array : Form::none;
}

// The number of the part that this rank gets of a row.
size_t Call::own_part() const { return spec_.has(Fact::per_rank) ? static_cast<size_t>(group_.rank) : 0; }

// Make the result from the rows alone. False if a part cannot be made: Python says why.
bool Call::make_announced_result() {
  Announced& mine = *announced_;
  if (mine.rows == 0) {
    mine.result = nb::none();
  } else if (is_broadcast_here()) {
    mine.result = mine.value;
  } else if (!mine.all_announce) {
    mine.result = part_of(row_of(0), own_part());
  } else if (mine.outs) {
    fill_outs();
    mine.result = mine.given_outs;
  } else {
    nb::object all = nb::steal(PyList_New(group_.size));
    if (!all.is_valid()) throw nb::python_error();
    for (std::int32_t rank = 0; rank < group_.size; ++rank) {
      nb::object part = part_of(row_of(static_cast<size_t>(rank)), own_part());
      if (!part.is_valid()) return false;
      PyList_SET_ITEM(all.ptr(), rank, part.release().ptr());
    }
    mine.result = std::move(all);
  }
  return mine.result.is_valid();
}

bool Call::fits_out(const Announcement& row) const {
  const size_t first = spec_.has(Fact::by_rank) ? 0 : 1;  // the dimension that is a length
  if (out_.dtype != row.dtype() || static_cast<size_t>(out_.nd) != row.dims() + first) return false;
  if (first == 1 && out_.shape[0] != row.length(own_part())) return false;
  for (size_t d = 0; d < row.dims(); ++d)
    if (out_.shape[first + d] != row.dim(d)) return false;
  return true;
}

// A part of a row as the user gets it; nothing if it cannot be made.
nb::object Call::part_of(const Announcement& row, size_t number) const {
  std::span<const byte> data = row.part(number, itemsizes[row.dtype()]);
  if (spec_.has(Fact::objects)) {
    nb::object value = nb::steal(codec::unpack(data.data(), data.size()));
    if (!value.is_valid()) PyErr_Clear();  // Python says what is wrong with it
    return value;
  }
  Py_ssize_t shape[Argument::dims_max + 1];
  int nd = 0;
  if (spec_.has(Fact::by_rank))
    data = data.subspan(data.size() / static_cast<size_t>(group_.size) * static_cast<size_t>(group_.rank),
                        data.size() / static_cast<size_t>(group_.size));
  else
    shape[nd++] = row.length(number);
  for (size_t d = 0; d < row.dims(); ++d) shape[nd++] = row.dim(d);
  if (out_.is_given()) {
    if (!data.empty()) std::memcpy(out_.data, data.data(), data.size());
    return nb::borrow(out_.given);
  }
  Argument plain(row.dtype());
  if (announced_->part_count == 0) plain.form = kind_of(row);
  const Argument& like = announced_->part_count != 0 ? announced_->parts[0] : plain;
  Result made = group_.arguments.make(like, shape, nd);
  if (!data.empty()) std::memcpy(made.data, data.data(), data.size());
  nb::object part = nb::steal(group_.arguments.give(like, made, false));
  if (!part.is_valid()) throw nb::python_error();
  return part;
}

// What the user gets of what came: the objects, or for an all_reduce_object what `fn` makes of them in the order of
// ranks. Nothing is under way any more, so an error of `fn` is one of this rank alone.
PyObject* Call::finish_announced(nb::object result) const {
  if (!announced_->fn.is_valid() || !result.is_valid()) return result.release().ptr();
  nb::object folded = nb::borrow(PyList_GET_ITEM(result.ptr(), 0));
  for (Py_ssize_t rank = 1; rank < group_.size; ++rank)
    folded = announced_->fn(folded, nb::handle(PyList_GET_ITEM(result.ptr(), rank)));
  return folded.release().ptr();
}

// What this rank announced, for Python: arrays, or packed objects as arrays of bytes; None if it announced nothing.
nb::object Call::announced_parts() const {
  const Announced& mine = *announced_;
  if (!mine.all_announce && !is_root()) return nb::none();
  if (mine.packed.is_valid()) return mine.packed;
  nb::list parts;
  if (!spec_.has(Fact::objects)) {
    for (size_t i = 0; i < mine.part_count; ++i) parts.append(nb::borrow(mine.parts[i].given));
    return std::move(parts);
  }
  const Announcement row = own_row();
  for (size_t i = 0; i < mine.lengths; ++i) {
    const std::span<const byte> data = row.part(i, 1);
    const Result packed = group_.arguments.make_bytes(data.size());
    std::memcpy(packed.data, data.data(), data.size());
    parts.append(packed.object);
  }
  return std::move(parts);
}

}  // namespace unisono
