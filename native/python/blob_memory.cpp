#include "python/blob_memory.hpp"

#include <memory>
#include <vector>

#include "base/huge_pages.hpp"

namespace unisono {
namespace {

// Long bytes objects that were made here, also those that the program still has: of an object without other references
// only the memory matters. The GIL is held.
class BytesPool {
 public:
  // Bounds on what is kept, as of result_memory.cpp: below the first the allocator keeps memory itself.
  static constexpr size_t bytes_min = 32 * 1024, kept_bytes_max = 64 * 1024 * 1024, kept_max = 16;

  // The shortest free one that is long enough, and not so long that much of it would be wasted; null if there is none.
  PyObject* take(size_t bytes) {
    Kept* best = nullptr;
    for (Kept& one : kept_)
      if (Py_REFCNT(one.object) == 1 && one.capacity >= bytes && one.capacity <= bytes + bytes / 4 &&
          (best == nullptr || one.capacity < best->capacity))
        best = &one;
    if (best == nullptr) return nullptr;
    auto* const object = reinterpret_cast<PyBytesObject*>(best->object);
    Py_SET_SIZE(object, static_cast<Py_ssize_t>(bytes));
    object->ob_sval[bytes] = 0;
    forget_hash(object);
    return Py_NewRef(best->object);
  }
  // Keep one of this length; those that were kept first make room.
  void keep(PyObject* object, size_t bytes) {
    if (bytes > kept_bytes_max) return;
    size_t dropped = 0;
    while (kept_.size() - dropped >= kept_max || kept_bytes_ + bytes > kept_bytes_max) {
      kept_bytes_ -= kept_[dropped].capacity;
      Py_DECREF(kept_[dropped++].object);
    }
    kept_.erase(kept_.begin(), kept_.begin() + static_cast<std::ptrdiff_t>(dropped));
    kept_.push_back({Py_NewRef(object), bytes});
    kept_bytes_ += bytes;
  }

  // Never destroyed: the interpreter may be gone by then.
  static BytesPool& instance() {
    static BytesPool& pool = *new BytesPool();
    return pool;
  }

 private:
  struct Kept {
    PyObject* object;
    size_t capacity;
  };
  static void forget_hash(PyBytesObject* object) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
    object->ob_shash = -1;
#pragma GCC diagnostic pop
  }

  std::vector<Kept> kept_;
  size_t kept_bytes_ = 0;
};

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

engine::byte* data_of_blob(PyObject* blob) {
  return static_cast<engine::byte*>(reinterpret_cast<BlobMemory*>(blob)->data);
}

BlobKind kind_of_blob(PyObject* owner) {
  if (PyBytes_CheckExact(owner)) return BlobKind::bytes;
  if (PyMemoryView_Check(owner)) return BlobKind::bytearray;
  return PyUnicode_CheckExact(owner) && PyUnicode_IS_COMPACT_ASCII(owner) ? BlobKind::ascii : BlobKind::array;
}

PyObject* new_bytes_to_fill(size_t bytes) {
  const bool is_kept = bytes >= BytesPool::bytes_min;
  if (PyObject* const kept = is_kept ? BytesPool::instance().take(bytes) : nullptr; kept != nullptr) return kept;
  PyObject* const made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes));
  if (made == nullptr || !is_kept) return made;
  engine::ask_for_huge_pages(PyBytes_AS_STRING(made), bytes);
  BytesPool::instance().keep(made, bytes);
  return made;
}

PyObject* memory_for(BlobKind kind, size_t bytes) {
  const auto length = static_cast<Py_ssize_t>(bytes);
  PyObject* made = nullptr;
  void* data = nullptr;
  switch (kind) {
    case BlobKind::bytes:
      if ((made = new_bytes_to_fill(bytes)) == nullptr) return nullptr;
      return make_blob(made, PyBytes_AS_STRING(made), length, true);
    case BlobKind::bytearray:
      if ((made = PyByteArray_FromStringAndSize(nullptr, length)) != nullptr) data = PyByteArray_AS_STRING(made);
      break;
    case BlobKind::ascii:
      if ((made = PyUnicode_New(length, 127)) != nullptr) data = PyUnicode_DATA(made);
      break;
    default: {
      engine::ResultMemory memory = engine::ResultMemory::take(bytes);
      if (memory.get() == nullptr) return PyErr_NoMemory();
      try {
        return memory_object(std::move(memory), bytes).release().ptr();
      } catch (nanobind::python_error& error) {
        error.restore();
        return nullptr;
      }
    }
  }
  if (made == nullptr) return nullptr;
  engine::ask_for_huge_pages(data, bytes);
  return make_blob(made, data, length, true);
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
