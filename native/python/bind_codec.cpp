// The codec as Python functions, without nanobind's wrapping: a small value is packed in less time than that takes.

#include <stdexcept>

#include "python/argument.hpp"
#include "python/bind.hpp"
#include "python/blob_memory.hpp"
#include "python/codec.hpp"

namespace unisono {
namespace {

using codec::kinds;
using codec::Packer;

// -- functions --------------------------------------------------------------------------------------------------------

bool has_arguments(const char* name, Py_ssize_t given, Py_ssize_t least, Py_ssize_t most) {
  if (given >= least && given <= most) return true;
  PyErr_Format(PyExc_TypeError, "%s takes %zd to %zd arguments, not %zd", name, least, most, given);
  return false;
}

PyObject* path_text_in(PyObject* const* args, Py_ssize_t count) {
  return count < 2 || args[1] == Py_None ? nullptr : args[1];
}

PyObject* pack(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!has_arguments("pack", count, 1, 2)) return nullptr;
  Packer packer;
  return packer.pack(args[0], path_text_in(args, count)) ? packer.to_bytes() : nullptr;
}

// The same as memory that may be written to, as a buffer of a collective must be.
PyObject* pack_writable(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  PyObject* const made = pack(self, args, count);
  return made != nullptr ? make_blob(made, PyBytes_AS_STRING(made), PyBytes_GET_SIZE(made), true) : nullptr;
}

PyObject* pack_parts(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!has_arguments("pack_parts", count, 1, 3)) return nullptr;
  size_t blob_bytes = codec::blob_bytes_min;
  if (count == 3) blob_bytes = PyLong_AsSize_t(args[2]);
  if (PyErr_Occurred()) return nullptr;
  Packer packer(blob_bytes);
  if (!packer.pack(args[0], path_text_in(args, count))) return nullptr;
  PyObject* const parts = PyList_New(static_cast<Py_ssize_t>(packer.blobs().size()));
  if (parts == nullptr) return nullptr;
  Py_ssize_t at = 0;
  for (const Packer::Blob& blob : packer.blobs()) {
    PyObject* const part = codec::view_of(blob);
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

PyObject* unpack_beside(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (!has_arguments("unpack_beside", count, 2, 2)) return nullptr;
  Py_buffer head, blobs;
  if (PyObject_GetBuffer(args[0], &head, PyBUF_SIMPLE) != 0) return nullptr;
  PyObject* made = nullptr;
  if (PyObject_GetBuffer(args[1], &blobs, PyBUF_SIMPLE) == 0) {
    made = codec::unpack_beside(static_cast<const codec::byte*>(head.buf), static_cast<size_t>(head.len),
                                static_cast<const codec::byte*>(blobs.buf), static_cast<size_t>(blobs.len),
                                blobs.readonly ? nullptr : args[1]);
    PyBuffer_Release(&blobs);
  }
  PyBuffer_Release(&head);
  return made;
}

PyObject* head_bytes_at(PyObject*, PyObject* data) {
  Py_buffer view;
  if (PyObject_GetBuffer(data, &view, PyBUF_SIMPLE) != 0) return nullptr;
  const size_t length = codec::head_bytes_at(static_cast<const codec::byte*>(view.buf), static_cast<size_t>(view.len));
  PyBuffer_Release(&view);
  return PyLong_FromSize_t(length);
}

// Memory for a result, which is reused once no reference is left.
PyObject* result_memory(PyObject*, PyObject* length) {
  const Py_ssize_t bytes = PyLong_AsSsize_t(length);
  if (bytes < 0) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "result_memory takes a length from 0 on");
    return nullptr;
  }
  engine::ResultMemory memory = engine::ResultMemory::take(static_cast<size_t>(bytes));
  if (memory.get() == nullptr) return PyErr_NoMemory();
  try {
    return memory_object(std::move(memory), static_cast<uint64_t>(bytes)).release().ptr();
  } catch (nanobind::python_error& error) {
    error.restore();
    return nullptr;
  }
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
  known.object_new = take("object_new");
  known.records = take("records");
  known.makers = take("makers");
  known.scalars = take("scalars");
  known.scalar_extension = nanobind::cast<uint8_t>(given["scalar_extension"]);
  check_layout(known.array_type, known.empty);
  const nanobind::list dtypes(given["dtypes"]);
  const nanobind::list arrays(given["one_element"]);
  if (dtypes.size() != dtype_count || arrays.size() != dtype_count)
    throw std::invalid_argument("as many dtypes as there are codes");
  for (size_t code = 0; code < dtype_count; ++code) {
    nanobind::object dtype = dtypes[code], array = arrays[code];
    known.dtypes[code] = dtype.is_none() ? nullptr : dtype.release().ptr();
    known.one_element[code] = array.is_none() ? nullptr : array.release().ptr();
  }
}

PyMethodDef methods[] = {
    {"pack", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pack)), METH_FASTCALL,
     "pack(value, path_text=None) -> bytes"},
    {"pack_writable", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pack_writable)), METH_FASTCALL,
     "pack_writable(value, path_text=None) -> the same as memory that may be written to"},
    {"pack_parts", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(pack_parts)), METH_FASTCALL,
     "pack_parts(value, path_text=None, blob_bytes=4096) -> (head, blobs)"},
    {"unpack", unpack, METH_O, "unpack(packed) -> value"},
    {"unpack_parts", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(unpack_parts)), METH_FASTCALL,
     "unpack_parts(head, blobs) -> value"},
    {"unpack_beside", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(unpack_beside)), METH_FASTCALL,
     "unpack_beside(head, blobs) -> value"},
    {"head_bytes_at", head_bytes_at, METH_O, "head_bytes_at(data) -> the length of the head that begins there"},
    {"result_memory", result_memory, METH_O, "result_memory(length) -> memory for a result"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void bind_codec(nanobind::module_& m) {
  if (PyModule_AddFunctions(m.ptr(), methods) != 0) throw nanobind::python_error();
  m.def("set_kinds", &set_kinds, "Tell the codec what it knows of Python; done once, by unisono.core.codec.");
  m.attr("BlobMemory") = nanobind::borrow(reinterpret_cast<PyObject*>(blob_type()));
  m.attr("POOLED_BYTES_MIN") = engine::ResultMemory::pooled_bytes_min;
  m.attr("BLOB_BYTES_MIN") = codec::blob_bytes_min;
  m.attr("DEPTH_MAX") = codec::depth_max;
}

}  // namespace unisono
