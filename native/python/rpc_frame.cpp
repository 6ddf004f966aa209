// Frames of remote calls as Python functions, without nanobind's wrapping: every call makes and reads two. This file is
// the home of their byte layout; unisono/rpc/frame.py says what they mean.
//
//   Head | name, UTF-8 | table: a u64 for each blob | value
//
// The value is an object of the typed codec in parts (python/codec.hpp). Its *blobs*, which are bytes, text and arrays
// of at least `blob_bytes`, travel beside the frame, each as a message of its own, from the memory where they lie into
// the memory of the object that they become. The table has the kind and the length of each, so that the receiver can
// take that memory. A value that makes the frame too long is *detached*: it is the first blob itself, together with its
// own blobs if these are too many.

#include <cmath>
#include <cstring>

#include "engine/mailbox.hpp"
#include "python/bind.hpp"
#include "python/blob_memory.hpp"
#include "python/blocking.hpp"
#include "python/codec.hpp"

namespace unisono {
namespace {

using codec::byte;
using codec::Packer;
using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;

// The longest frame: one eager message of the control lane, whose limits are no less (messaging/credit.py, and those of
// the links: link/frame_parser.hpp, link/shm_link.hpp).
constexpr size_t frame_bytes_max = 16 * 1024;
// Copying less costs less than a message of its own, and what is shorter fits into a frame.
constexpr size_t blob_bytes = 15 * 1024;
constexpr size_t blobs_max = 256;
// Of one call or answer with its blobs.
constexpr uint64_t message_bytes_max = uint64_t{1} << 30;
constexpr uint8_t kinds_max = 9;  // unisono/rpc/frame.py

struct Head {
  uint8_t kind = 0;
  uint8_t unused = 0;
  uint16_t name_bytes = 0;
  uint32_t blobs = 0;
  uint64_t call = 0;
  uint64_t number = 0;
  uint64_t count = 0;
  double timeout_s = NAN;  // NaN: none
};
static_assert(sizeof(Head) == 40);

constexpr int kind_bits = 56;

uint64_t entry(BlobKind kind, size_t bytes) { return static_cast<uint64_t>(kind) << kind_bits | bytes; }

PyObject* malformed(const char* why) {
  PyErr_Format(codec::kinds().protocol_error, "a malformed frame: %s", why);
  return nullptr;
}

bool has_arguments(const char* name, Py_ssize_t given, Py_ssize_t least, Py_ssize_t most) {
  if (given >= least && given <= most) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd to %zd arguments, not %zd", name, least, most, given);
  return false;
}

// -- packing ----------------------------------------------------------------------------------------------------------

bool read_head(PyObject* const* args, Head& head) {
  head.kind = static_cast<uint8_t>(PyLong_AsLong(args[0]));
  head.call = PyLong_AsUnsignedLongLong(args[1]);
  head.number = PyLong_AsUnsignedLongLong(args[2]);
  if (args[4] != Py_None) head.timeout_s = PyFloat_AsDouble(args[4]);
  head.count = PyLong_AsUnsignedLongLong(args[5]);
  return !PyErr_Occurred();
}

// The blobs as memoryviews, after the detached value if there is one. Takes the reference to that.
PyObject* parts_of(const Packer& packer, PyObject* detached, bool is_one_piece) {
  const size_t own = is_one_piece ? 0 : packer.blobs().size();
  PyObject* const parts = PyTuple_New(static_cast<Py_ssize_t>(own + (detached != nullptr ? 1 : 0)));
  Py_ssize_t at = 0;
  bool is_done = parts != nullptr;
  if (is_done && detached != nullptr) {
    PyObject* const part = PyMemoryView_FromObject(detached);
    is_done = part != nullptr;
    if (is_done) PyTuple_SET_ITEM(parts, at++, part);
  }
  for (size_t i = 0; is_done && i < own; ++i) {
    PyObject* const part = codec::view_of(packer.blobs()[i]);
    is_done = part != nullptr;
    if (is_done) PyTuple_SET_ITEM(parts, at++, part);
  }
  Py_XDECREF(detached);
  if (is_done) return parts;
  Py_XDECREF(parts);
  return nullptr;
}

// pack_frame(kind, call, number, name, timeout_s, count, value, path_text=None) -> (frame, blobs)
PyObject* pack_frame(PyObject*, PyObject* const* args, Py_ssize_t given) {
  if (!has_arguments("pack_frame", given, 7, 8)) return nullptr;
  Head head;
  if (!read_head(args, head)) return nullptr;
  Py_ssize_t name_bytes = 0;
  const char* const name = PyUnicode_AsUTF8AndSize(args[3], &name_bytes);
  if (name == nullptr) return nullptr;
  head.name_bytes = static_cast<uint16_t>(name_bytes);

  Packer packer(blob_bytes);
  if (!packer.pack(args[6], given == 8 && args[7] != Py_None ? args[7] : nullptr)) return nullptr;
  const bool is_one_piece = packer.blobs().size() > blobs_max;
  const size_t own_blobs = is_one_piece ? 0 : packer.blobs().size();
  const size_t before = sizeof head + static_cast<size_t>(name_bytes) + sizeof(uint64_t) * own_blobs;
  const bool is_detached = is_one_piece || before + packer.head_size() > frame_bytes_max;
  const size_t value_bytes = is_detached ? sizeof(uint64_t) : packer.head_size();
  head.blobs = static_cast<uint32_t>(own_blobs + (is_detached ? 1 : 0));

  PyObject* const frame = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(before + value_bytes));
  if (frame == nullptr) return nullptr;
  auto* at = reinterpret_cast<byte*>(PyBytes_AS_STRING(frame));
  const auto put = [&at](const void* data, size_t bytes) {
    std::memcpy(at, data, bytes);
    at += bytes;
  };
  const auto put_entry = [&put](BlobKind kind, size_t bytes) {
    const uint64_t one = entry(kind, bytes);
    put(&one, sizeof one);
  };
  put(&head, sizeof head);
  put(name, static_cast<size_t>(name_bytes));
  if (is_detached) put_entry(BlobKind::detached, is_one_piece ? packer.size() : packer.head_size());
  for (size_t i = 0; i < own_blobs; ++i) put_entry(kind_of_blob(packer.blobs()[i].owner), packer.blobs()[i].bytes);
  if (!is_detached) packer.copy_head_to(at);

  PyObject* const detached = !is_detached ? nullptr : is_one_piece ? packer.to_bytes() : packer.head_to_bytes();
  PyObject* const parts = is_detached && detached == nullptr ? nullptr : parts_of(packer, detached, is_one_piece);
  PyObject* const made = parts != nullptr ? PyTuple_Pack(2, frame, parts) : nullptr;
  Py_XDECREF(parts);
  Py_DECREF(frame);
  return made;
}

// -- reading ----------------------------------------------------------------------------------------------------------

// A frame from another rank, checked: its parts lie within it, and its blobs are no more than an agent sends.
class Frame {
 public:
  // False with a ProtocolError set.
  bool open(PyObject* data) {
    if (!PyBytes_CheckExact(data)) {
      PyErr_SetString(PyExc_TypeError, "a frame is bytes");
      return false;
    }
    const auto* const start = reinterpret_cast<const byte*>(PyBytes_AS_STRING(data));
    const auto bytes = static_cast<size_t>(PyBytes_GET_SIZE(data));
    if (bytes < sizeof head) return malformed("it is cut short") != nullptr;
    std::memcpy(&head, start, sizeof head);
    const size_t table_bytes = sizeof(uint64_t) * head.blobs;
    if (head.kind >= kinds_max) return malformed("its kind is unknown") != nullptr;
    if (head.blobs > blobs_max + 1 || head.name_bytes + table_bytes > bytes - sizeof head)
      return malformed("it is cut short") != nullptr;
    name = start + sizeof head;
    table = name + head.name_bytes;
    value = table + table_bytes;
    value_bytes = static_cast<size_t>(start + bytes - value);
    return are_lengths_possible() || malformed("the lengths of its blobs are inconsistent") != nullptr;
  }

  BlobKind kind(size_t i) const { return static_cast<BlobKind>(entry_at(i) >> kind_bits); }
  size_t bytes(size_t i) const { return entry_at(i) & ((uint64_t{1} << kind_bits) - 1); }
  bool is_detached() const { return head.blobs != 0 && kind(0) == BlobKind::detached; }

  Head head;
  const byte* name = nullptr;
  const byte* table = nullptr;
  const byte* value = nullptr;
  size_t value_bytes = 0;
  uint64_t blob_bytes_all = 0;

 private:
  uint64_t entry_at(size_t i) const {
    uint64_t one;
    std::memcpy(&one, table + sizeof one * i, sizeof one);
    return one;
  }
  bool are_lengths_possible() {
    for (size_t i = 0; i < head.blobs; ++i) {
      const bool is_whole = kind(i) == BlobKind::detached;
      if (kind(i) > BlobKind::detached || (is_whole && i != 0)) return false;
      if (bytes(i) < (is_whole ? codec::prefix_bytes + 1 : blob_bytes) || bytes(i) > message_bytes_max) return false;
      blob_bytes_all += bytes(i);
    }
    return blob_bytes_all <= message_bytes_max && is_detached() == (value_bytes == 0);
  }
};

PyTypeObject* frame_type = nullptr;

// open_frame(data) -> Frame
PyObject* open_frame(PyObject*, PyObject* data) {
  Frame frame;
  if (!frame.open(data)) return nullptr;
  PyObject* const made = PyStructSequence_New(frame_type);
  if (made == nullptr) return nullptr;
  const Head& head = frame.head;
  PyObject* const name = PyUnicode_DecodeUTF8(reinterpret_cast<const char*>(frame.name), head.name_bytes, nullptr);
  if (name == nullptr) {
    PyErr_Clear();
    Py_DECREF(made);
    return malformed("its name is no UTF-8");
  }
  PyObject* const fields[] = {PyLong_FromLong(head.kind),
                              PyLong_FromUnsignedLongLong(head.call),
                              PyLong_FromUnsignedLongLong(head.number),
                              name,
                              std::isnan(head.timeout_s) ? Py_NewRef(Py_None) : PyFloat_FromDouble(head.timeout_s),
                              PyLong_FromUnsignedLongLong(head.count),
                              PyLong_FromUnsignedLongLong(frame.blob_bytes_all),
                              Py_NewRef(data)};
  bool is_done = true;
  Py_ssize_t at = 0;
  for (PyObject* const field : fields) {
    is_done &= field != nullptr;
    PyStructSequence_SetItem(made, at++, field);
  }
  if (is_done) return made;
  Py_DECREF(made);
  return nullptr;
}

// frame_memory(data) -> a list of buffers, one for each blob
PyObject* frame_memory(PyObject*, PyObject* data) {
  Frame frame;
  if (!frame.open(data)) return nullptr;
  PyObject* const made = PyList_New(static_cast<Py_ssize_t>(frame.head.blobs));
  for (size_t i = 0; made != nullptr && i < frame.head.blobs; ++i) {
    PyObject* const memory = memory_for(frame.kind(i), frame.bytes(i));
    if (memory == nullptr) {
      Py_DECREF(made);
      return nullptr;
    }
    PyList_SET_ITEM(made, static_cast<Py_ssize_t>(i), memory);
  }
  return made;
}

// frame_lengths(data) -> the lengths of the blobs
PyObject* frame_lengths(PyObject*, PyObject* data) {
  Frame frame;
  if (!frame.open(data)) return nullptr;
  PyObject* const made = PyList_New(static_cast<Py_ssize_t>(frame.head.blobs));
  for (size_t i = 0; made != nullptr && i < frame.head.blobs; ++i) {
    PyObject* const length = PyLong_FromSize_t(frame.bytes(i));
    if (length == nullptr) {
      Py_DECREF(made);
      return nullptr;
    }
    PyList_SET_ITEM(made, static_cast<Py_ssize_t>(i), length);
  }
  return made;
}

PyObject* detached_value(PyObject* const* memory, size_t blobs) {
  Py_buffer view;
  if (PyObject_GetBuffer(memory[0], &view, PyBUF_SIMPLE) != 0) return nullptr;
  const auto* const start = static_cast<const byte*>(view.buf);
  const auto bytes = static_cast<size_t>(view.len);
  PyObject* const made = blobs == 1 ? codec::unpack(start, bytes, view.readonly ? nullptr : memory[0])
                                    : codec::unpack_parts(start, bytes, memory + 1, blobs - 1);
  PyBuffer_Release(&view);
  return made;
}

// frame_value(data, memory=()) -> the value; it keeps the memory, which is that of `frame_memory`, filled
PyObject* frame_value(PyObject*, PyObject* const* args, Py_ssize_t given) {
  Frame frame;
  if (!has_arguments("frame_value", given, 1, 2) || !frame.open(args[0])) return nullptr;
  if (given == 1 && frame.head.blobs == 0) return codec::unpack_parts(frame.value, frame.value_bytes, nullptr, 0);
  PyObject* const memory = given == 2 ? PySequence_Tuple(args[1]) : PyTuple_New(0);
  if (memory == nullptr) return nullptr;
  PyObject* made = nullptr;
  PyObject* const* const items = reinterpret_cast<PyTupleObject*>(memory)->ob_item;
  if (static_cast<size_t>(PyTuple_GET_SIZE(memory)) != frame.head.blobs)
    PyErr_SetString(PyExc_ValueError, "frame_value takes memory for each blob");
  else if (frame.is_detached())
    made = detached_value(items, frame.head.blobs);
  else
    made = codec::unpack_parts(frame.value, frame.value_bytes, items, frame.head.blobs);
  Py_DECREF(memory);
  return made;
}

PyMethodDef methods[] = {
    {"pack_frame", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pack_frame)), METH_FASTCALL,
     "pack_frame(kind, call, number, name, timeout_s, count, value, path_text=None) -> (frame, blobs)"},
    {"open_frame", open_frame, METH_O, "open_frame(data) -> Frame"},
    {"frame_lengths", frame_lengths, METH_O, "frame_lengths(data) -> the length of each blob"},
    {"frame_memory", frame_memory, METH_O, "frame_memory(data) -> memory for each blob"},
    {"frame_value", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(frame_value)), METH_FASTCALL,
     "frame_value(data, memory=()) -> value"},
    {nullptr, nullptr, 0, nullptr}};

PyStructSequence_Field frame_fields[] = {{"kind", "a number of unisono.rpc.frame"},
                                         {"call", "the caller's number of the call"},
                                         {"number", "the tag of the blobs"},
                                         {"name", "the function"},
                                         {"timeout_s", "None: no deadline"},
                                         {"count", "how many, or the index of an item"},
                                         {"blob_bytes", "the length of all blobs"},
                                         {"data", "the whole frame"},
                                         {nullptr, nullptr}};
PyStructSequence_Desc frame_description = {"unisono._native.Frame", "A frame, without its value.", frame_fields, 8};

}  // namespace

void bind_rpc_frame(nanobind::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw nanobind::python_error();
  frame_type = PyStructSequence_NewType(&frame_description);
  if (frame_type == nullptr) throw nanobind::python_error();
  m.attr("Frame") = nanobind::borrow(reinterpret_cast<PyObject*>(frame_type));
  m.def(
      "forbid_blocking", [](bool is_forbidden) { return std::exchange(is_blocking_forbidden, is_forbidden); },
      "Whether the calling thread may not block from now on; returns whether it might not.");
  m.def("is_blocking_forbidden", [] { return is_blocking_forbidden; });
  m.attr("FRAME_BYTES_MAX") = frame_bytes_max;
  m.attr("FRAME_BLOB_BYTES") = blob_bytes;
  m.attr("CERTAIN_BLOB_BYTES") = engine::certain_bytes_max;
  m.attr("RPC_MESSAGE_BYTES_MAX") = message_bytes_max;
}

}  // namespace unisono
