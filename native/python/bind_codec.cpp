// The codec as Python functions, without nanobind's wrapping: a small value is packed in less time than that takes.

#include <sys/mman.h>

#include <cstring>
#include <stdexcept>

#include "python/argument.hpp"
#include "python/bind.hpp"
#include "python/codec.hpp"

namespace unisono {
namespace {

using codec::kinds;
using codec::Packer;

// -- memory of another object as a buffer -----------------------------------------------------------------------------

// Text and arrays as bytes to send, and the memory of a new object to receive into.
struct BlobMemory {
  PyObject_HEAD PyObject* owner;
  void* data;
  Py_ssize_t bytes;
  bool is_writable;
};

int get_buffer(PyObject* self, Py_buffer* view, int flags) {
  const auto& blob = *reinterpret_cast<BlobMemory*>(self);
  return PyBuffer_FillInfo(view, self, blob.data, blob.bytes, blob.is_writable ? 0 : 1, flags);
}

void free_blob(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  Py_DECREF(reinterpret_cast<BlobMemory*>(self)->owner);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyObject* owner_of(PyObject* self, void*) { return Py_NewRef(reinterpret_cast<BlobMemory*>(self)->owner); }

PyTypeObject* blob_type() {
  static PyGetSetDef attributes[] = {{"owner", owner_of, nullptr, "The object whose memory it is.", nullptr}, {}};
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(free_blob)},
                                {Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)},
                                {Py_tp_getset, attributes},
                                {0, nullptr}};
  static PyType_Spec spec = {"unisono._native.BlobMemory", sizeof(BlobMemory), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  static auto* const type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type == nullptr) throw nanobind::python_error();
  return type;
}

// Takes the reference to `owner`.
PyObject* make_blob(PyObject* owner, void* data, Py_ssize_t bytes, bool is_writable) {
  auto* const made = PyObject_New(BlobMemory, blob_type());
  if (made == nullptr) {
    Py_DECREF(owner);
    return nullptr;
  }
  made->owner = owner;
  made->data = data;
  made->bytes = bytes;
  made->is_writable = is_writable;
  return reinterpret_cast<PyObject*>(made);
}

// -- functions --------------------------------------------------------------------------------------------------------

bool has_arguments(const char* name, Py_ssize_t given, Py_ssize_t least, Py_ssize_t most) {
  if (given >= least && given <= most) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd to %zd arguments, not %zd", name, least, most, given);
  return false;
}

PyObject* place_in(PyObject* const* args, Py_ssize_t count) {
  return count < 2 || args[1] == Py_None ? nullptr : args[1];
}

PyObject* pack(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!has_arguments("pack", count, 1, 2)) return nullptr;
  Packer packer;
  return packer.pack(args[0], place_in(args, count)) ? packer.to_bytes() : nullptr;
}

// The same as memory that may be written to, as a buffer of a collective must be.
PyObject* pack_writable(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  PyObject* const made = pack(self, args, count);
  return made != nullptr ? make_blob(made, PyBytes_AS_STRING(made), PyBytes_GET_SIZE(made), true) : nullptr;
}

PyObject* part_of(const Packer::Blob& blob) {
  if (PyMemoryView_Check(blob.owner)) {
    const Py_buffer& view = *PyMemoryView_GET_BUFFER(blob.owner);
    const bool is_plain = view.ndim == 1 && (view.format == nullptr || std::strcmp(view.format, "B") == 0);
    if (is_plain && PyByteArray_CheckExact(view.obj)) return Py_NewRef(blob.owner);
  }
  if (PyBytes_CheckExact(blob.owner)) return PyMemoryView_FromObject(blob.owner);
  PyObject* const memory =
      make_blob(Py_NewRef(blob.owner), const_cast<codec::byte*>(blob.data), static_cast<Py_ssize_t>(blob.bytes), false);
  PyObject* const made = memory != nullptr ? PyMemoryView_FromObject(memory) : nullptr;
  Py_XDECREF(memory);
  return made;
}

PyObject* pack_parts(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!has_arguments("pack_parts", count, 1, 3)) return nullptr;
  size_t blob_bytes = codec::blob_bytes_min;
  if (count == 3) blob_bytes = PyLong_AsSize_t(args[2]);
  if (PyErr_Occurred()) return nullptr;
  Packer packer(blob_bytes);
  if (!packer.pack(args[0], place_in(args, count))) return nullptr;
  PyObject* const parts = PyList_New(static_cast<Py_ssize_t>(packer.blobs().size()));
  if (parts == nullptr) return nullptr;
  Py_ssize_t at = 0;
  for (const Packer::Blob& blob : packer.blobs()) {
    PyObject* const part = part_of(blob);
    if (part == nullptr) {
      Py_DECREF(parts);
      return nullptr;
    }
    PyList_SET_ITEM(parts, at++, part);
  }
  PyObject* const head = packer.head_to_bytes();
  PyObject* const made = head != nullptr ? PyTuple_Pack(2, head, parts) : nullptr;
  Py_XDECREF(head);
  Py_DECREF(parts);
  return made;
}

PyObject* unpack(PyObject*, PyObject* data) {
  if (PyBytes_CheckExact(data))
    return codec::unpack(reinterpret_cast<const codec::byte*>(PyBytes_AS_STRING(data)),
                         static_cast<size_t>(PyBytes_GET_SIZE(data)));
  Py_buffer view;
  if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) != 0) return nullptr;
  PyObject* const made = codec::unpack(static_cast<const codec::byte*>(view.buf), static_cast<size_t>(view.len),
                                       view.readonly ? nullptr : data);
  PyBuffer_Release(&view);
  return made;
}

PyObject* unpack_parts(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!has_arguments("unpack_parts", count, 2, 2)) return nullptr;
  PyObject* const blobs = PySequence_Tuple(args[1]);
  if (blobs == nullptr) return nullptr;
  PyObject* made = nullptr;
  Py_buffer head;
  if (PyObject_GetBuffer(args[0], &head, PyBUF_SIMPLE) == 0) {
    made = codec::unpack_parts(static_cast<const codec::byte*>(head.buf), static_cast<size_t>(head.len),
                               reinterpret_cast<PyTupleObject*>(blobs)->ob_item,
                               static_cast<size_t>(PyTuple_GET_SIZE(blobs)));
    PyBuffer_Release(&head);
  }
  Py_DECREF(blobs);
  return made;
}

// Fresh memory is slow: the system provides it page by page, and another rank reads it page by page. As NumPy does, ask
// for huge pages where there is room for some.
void ask_for_huge_pages(void* data, size_t bytes) {
  constexpr size_t huge_page = 2 << 20, bytes_min = 4 << 20;
  if (bytes < bytes_min) return;
  const auto start = reinterpret_cast<uintptr_t>(data), first = (start + huge_page - 1) / huge_page * huge_page;
  madvise(reinterpret_cast<void*>(first), start + bytes - first, MADV_HUGEPAGE);  // a wish: it may be refused
}

// Memory of a bytes object or a bytearray that nobody has seen yet.
PyObject* new_memory(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!has_arguments("new_memory", count, 2, 2)) return nullptr;
  const Py_ssize_t bytes = PyLong_AsSsize_t(args[1]);
  if (bytes == -1 && PyErr_Occurred()) return nullptr;
  if (bytes < 2) {  // shorter bytes are shared by the whole process
    PyErr_SetString(PyExc_ValueError, "new_memory takes a length of at least 2");
    return nullptr;
  }
  const bool is_bytes = args[0] == reinterpret_cast<PyObject*>(&PyBytes_Type);
  PyObject* const made =
      is_bytes ? PyBytes_FromStringAndSize(nullptr, bytes) : PyByteArray_FromStringAndSize(nullptr, bytes);
  if (made == nullptr) return nullptr;
  char* const data = is_bytes ? PyBytes_AS_STRING(made) : PyByteArray_AS_STRING(made);
  ask_for_huge_pages(data, static_cast<size_t>(bytes));
  return make_blob(made, data, bytes, true);
}

void set_kinds(nanobind::dict given) {
  codec::Kinds& known = kinds();
  auto take = [&given](const char* name) { return nanobind::object(given[name]).release().ptr(); };
  known.reduce = take("reduce");
  known.rebuild = take("rebuild");
  known.too_deep = take("too_deep");
  known.refusal = take("refusal");
  known.malformed = take("malformed");
  known.protocol_error = take("protocol_error");
  known.status_type = take("status_type");
  known.array_type = take("array_type");
  known.empty = take("empty");
  check_layout(known.array_type, known.empty);
  const nanobind::list dtypes(given["dtypes"]);
  if (dtypes.size() != dtype_count) throw std::invalid_argument("as many dtypes as there are codes");
  for (size_t code = 0; code < dtype_count; ++code) {
    nanobind::object dtype = dtypes[code];
    known.dtypes[code] = dtype.is_none() ? nullptr : dtype.release().ptr();
  }
}

PyMethodDef methods[] = {
    {"pack", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pack)), METH_FASTCALL,
     "pack(value, place=None) -> bytes"},
    {"pack_writable", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pack_writable)), METH_FASTCALL,
     "pack_writable(value, place=None) -> the same as memory that may be written to"},
    {"pack_parts", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pack_parts)), METH_FASTCALL,
     "pack_parts(value, place=None, blob_bytes=4096) -> (head, blobs)"},
    {"unpack", unpack, METH_O, "unpack(packed) -> value"},
    {"unpack_parts", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(unpack_parts)), METH_FASTCALL,
     "unpack_parts(head, blobs) -> value"},
    {"new_memory", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(new_memory)), METH_FASTCALL,
     "new_memory(kind, length) -> memory of a new bytes object or bytearray, its `owner`"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_codec(nanobind::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw nanobind::python_error();
  m.def("set_kinds", &set_kinds, "Tell the codec what it knows of Python; done once, by unisono.core.codec.");
  m.attr("BlobMemory") = nanobind::borrow(reinterpret_cast<PyObject*>(blob_type()));
  m.attr("BLOB_BYTES_MIN") = codec::blob_bytes_min;
  m.attr("DEPTH_MAX") = codec::depth_max;
}

}  // namespace unisono
