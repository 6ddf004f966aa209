#include "python/blob_memory.hpp"

#include <memory>

namespace unisono {
namespace {

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

}  // namespace

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

PyObject* owner_of_blob(PyObject* object) {
  return Py_TYPE(object) == blob_type() ? reinterpret_cast<BlobMemory*>(object)->owner : nullptr;
}

nanobind::object memory_object(engine::ResultMemory memory, uint64_t nbytes) {
  using engine::ResultMemory;
  auto held = std::make_unique<ResultMemory>(std::move(memory));
  PyObject* const owner = PyCapsule_New(held.get(), nullptr, [](PyObject* self) {
    delete static_cast<ResultMemory*>(PyCapsule_GetPointer(self, nullptr));
  });
  if (owner == nullptr) throw nanobind::python_error();
  const ResultMemory* const kept = held.release();  // the capsule has it
  PyObject* const made = make_blob(owner, kept->get(), static_cast<Py_ssize_t>(nbytes), true);
  if (made == nullptr) throw nanobind::python_error();
  return nanobind::steal(made);
}

}  // namespace unisono
