#include "python/tensor.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kernels/kernels.hpp"
#include "messaging/message.hpp"

namespace unisono {
namespace {

// DLPack 1.x's types, as its specification lays them out.
struct DLTensor {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  uint8_t type_code;
  uint8_t type_bits;
  uint16_t type_lanes;
  const int64_t* shape;
  const int64_t* strides;  // in elements
  uint64_t byte_offset;
};
struct ExchangeFunctions {
  uint32_t major, minor;
  void* previous;
  void *allocate, *from_object, *to_object;
  int (*look_at)(void* object, DLTensor* seen);  // borrows everything from the object
  void* current_stream;
};
constexpr int32_t cpu_device = 1;
enum TypeCode : uint8_t { signed_integer, unsigned_integer, real, bfloat = 4, complex, boolean };

// torch's attribute, if torch is imported; else nothing.
nb::object torch_attribute(const char* name) {
  PyObject* const modules = PyImport_GetModuleDict();
  PyObject* const torch = modules != nullptr ? PyDict_GetItemString(modules, "torch") : nullptr;
  PyObject* const found = torch != nullptr ? PyObject_GetAttrString(torch, name) : nullptr;
  if (found == nullptr) PyErr_Clear();
  return nb::steal(found);
}

// The name is compared first, which costs nothing. A type that is found is kept for good, as torch is.
bool is_type(PyTypeObject* type, const char* name, PyTypeObject*& known) {
  if (type == known) return true;
  if (known != nullptr || std::strcmp(type->tp_name, name) != 0) return false;
  const nb::object nn = torch_attribute("nn");
  nb::object found = torch_attribute(name);
  if (!found.is_valid() && nn.is_valid()) found = nb::getattr(nn, name, nb::none());
  if (found.ptr() != reinterpret_cast<PyObject*>(type)) return false;
  known = reinterpret_cast<PyTypeObject*>(found.release().ptr());
  return true;
}

const ExchangeFunctions* exchange_functions(PyObject* tensor) {
  const nb::object capsule = nb::getattr(nb::handle(Py_TYPE(tensor)), "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nullptr;
  const auto* functions =
      static_cast<const ExchangeFunctions*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  return functions->major == 1 && functions->look_at != nullptr ? functions : nullptr;
}

uint8_t code_of(const DLTensor& tensor) {
  if (tensor.type_lanes != 1) return engine::untyped;
  const auto either = [&](int bits, DType type) { return tensor.type_bits == bits ? static_cast<int>(type) : -1; };
  const auto whole = [&](DType first) {
    for (int power = 0; power < 4; ++power)
      if (tensor.type_bits == 8 << power) return static_cast<int>(first) + power;
    return -1;
  };
  int code = -1;
  switch (tensor.type_code) {
    case signed_integer: code = whole(DType::int8); break;
    case unsigned_integer: code = whole(DType::uint8); break;
    case real:
      code = std::max({either(16, DType::float16), either(32, DType::float32), either(64, DType::float64)});
      break;
    case bfloat: code = either(16, DType::bfloat16); break;
    case complex: code = std::max(either(64, DType::complex64), either(128, DType::complex128)); break;
    case boolean: code = either(8, DType::boolean); break;
    default: break;
  }
  return code < 0 ? engine::untyped : static_cast<uint8_t>(code);
}

bool is_in_a_row(const DLTensor& tensor) {
  if (tensor.strides == nullptr) return true;
  int64_t expected = 1;
  bool has_gaps = false;
  for (int i = tensor.ndim - 1; i >= 0; --i) {
    if (tensor.shape[i] == 0) return true;
    has_gaps |= tensor.shape[i] != 1 && tensor.strides[i] != expected;
    expected *= tensor.shape[i];
  }
  return !has_gaps;
}

// Whether torch still has to conjugate or negate what lies in the memory.
bool is_lazy(PyObject* tensor, bool is_complex) {
  static PyObject* const is_conj = PyUnicode_InternFromString("is_conj");
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  const auto is_set = [tensor](PyObject* asked) {
    const nb::object answer = nb::steal(PyObject_CallMethodNoArgs(tensor, asked));
    if (!answer.is_valid()) PyErr_Clear();
    return answer.ptr() != Py_False;
  };
  return is_set(is_neg) || (is_complex && is_set(is_conj));
}

}  // namespace

bool is_tensor(PyObject* object) {
  static PyTypeObject *tensor = nullptr, *parameter = nullptr;
  PyTypeObject* const type = Py_TYPE(object);
  return is_type(type, "Tensor", tensor) || is_type(type, "Parameter", parameter);
}

bool view_tensor(PyObject* tensor, TensorView& seen) {
  static const ExchangeFunctions* const functions = exchange_functions(tensor);
  if (functions == nullptr) return false;
  DLTensor given;
  if (functions->look_at(tensor, &given) != 0) {
    PyErr_Clear();
    return false;
  }
  if (given.device_type != cpu_device || given.ndim > TensorView::dims_max || !is_in_a_row(given)) return false;
  seen.dtype = code_of(given);
  if (seen.dtype == engine::untyped || is_lazy(tensor, given.type_code == complex)) return false;
  seen.data = static_cast<std::byte*>(given.data) + given.byte_offset;
  const size_t alignment = std::min(itemsizes[seen.dtype], alignof(double));
  if (reinterpret_cast<uintptr_t>(seen.data) % alignment != 0) return false;
  seen.nd = given.ndim;
  std::copy_n(given.shape, given.ndim, seen.shape);
  return true;
}

nb::object tensor_of(nb::handle array, uint8_t dtype) {
  const nb::object from_numpy = torch_attribute("from_numpy");
  if (!from_numpy.is_valid()) throw std::runtime_error("a tensor without torch");
  nb::object made = nb::steal(PyObject_CallOneArg(from_numpy.ptr(), array.ptr()));
  if (!made.is_valid()) throw nb::python_error();
  return dtype == static_cast<uint8_t>(DType::bfloat16) ? made.attr("view")(torch_attribute("bfloat16")) : made;
}

nb::object array_of(nb::handle tensor) { return tensor.attr("detach")().attr("numpy")(); }

}  // namespace unisono
