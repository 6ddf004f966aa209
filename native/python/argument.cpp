#include "python/argument.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "base/result_memory.hpp"
#include "kernels/kernels.hpp"
#include "python/blob_memory.hpp"
#include "python/tensor.hpp"

namespace unisono {
namespace {

constexpr uint8_t int64_code = static_cast<uint8_t>(DType::int64), float64_code = static_cast<uint8_t>(DType::float64),
                  bfloat16_code = static_cast<uint8_t>(DType::bfloat16),
                  complex128_code = static_cast<uint8_t>(DType::complex128),
                  bool_code = static_cast<uint8_t>(DType::boolean);

// The beginning of NumPy's type object, which is the same in its old and new binary interface.
struct DescrObject {
  PyObject_HEAD PyTypeObject* scalar_type;
  char kind;
  char type;
  char byteorder;
  char flags;
  int type_number;
};
// Types of other packages have numbers from here on, each its own for the life of the process.
constexpr int user_types = 256;
// NumPy's characters for the types that may be equal to one of ours.
constexpr char type_characters[] = "?bBhHiIlLqQefdFD";

const DescrObject& as_descr(PyObject* object) { return *reinterpret_cast<const DescrObject*>(object); }

// Where the value of NumPy's scalar lies: see find_scalar_types.
engine::byte* value_of(PyObject* scalar) { return reinterpret_cast<engine::byte*>(scalar) + sizeof(PyObject); }

template <class T>
T read_as(const engine::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// A new number of Python's, or of the type of NumPy's scalar that was given.
PyObject* number_of(const Argument& like, const engine::byte* from) {
  if (like.form == Form::scalar) {
    PyTypeObject* const type = Py_TYPE(like.given);
    PyObject* const made = type->tp_alloc(type, 0);
    if (made != nullptr) std::memcpy(value_of(made), from, itemsizes[like.dtype]);
    return made;
  }
  switch (like.dtype) {
    case bool_code: return PyBool_FromLong(*from != engine::byte{0});
    case int64_code: return PyLong_FromLongLong(read_as<long long>(from));
    case float64_code: return PyFloat_FromDouble(read_as<double>(from));
    default: return PyComplex_FromCComplex(read_as<Py_complex>(from));
  }
}

// The element type of NumPy's array for a result like this: bfloat16 of a tensor has none.
uint8_t stored_as(const Argument& like) {
  const bool is_bits = like.form == Form::tensor && like.dtype == bfloat16_code;
  return is_bits ? static_cast<uint8_t>(DType::uint16) : like.dtype;
}

// The element type of a buffer's format in the machine's own byte order; `untyped` if it is none of ours.
uint8_t code_of_format(const char* format, Py_ssize_t itemsize) {
  if (format == nullptr) return static_cast<uint8_t>(DType::uint8);
  const bool is_little = std::endian::native == std::endian::little;
  if (*format == '@' || *format == '=' || (*format == '<' && is_little)) ++format;
  const auto is = [&](const char* any_of) { return std::strchr(any_of, *format) != nullptr; };
  const bool is_complex = *format == 'Z' && format[1] != 0 && format[2] == 0;
  if (is_complex)
    return format[1] == 'f'   ? static_cast<uint8_t>(DType::complex64)
           : format[1] == 'd' ? static_cast<uint8_t>(DType::complex128)
                              : engine::untyped;
  if (*format == 0 || format[1] != 0) return engine::untyped;
  if (is("?")) return static_cast<uint8_t>(DType::boolean);
  if (is("e")) return static_cast<uint8_t>(DType::float16);
  if (is("f")) return static_cast<uint8_t>(DType::float32);
  if (is("d")) return float64_code;
  const bool is_signed = is("bhilqn");
  if (!is_signed && !is("BHILQN")) return engine::untyped;
  for (int power = 0; power < 4; ++power)
    if (itemsize == Py_ssize_t{1} << power)
      return static_cast<uint8_t>(static_cast<int>(is_signed ? DType::int8 : DType::uint8) + power);
  return engine::untyped;
}

nb::object tuple_of(const Py_ssize_t* shape, int nd) {
  nb::object dims = nb::steal(PyTuple_New(nd));
  if (!dims.is_valid()) throw nb::python_error();
  for (int i = 0; i < nd; ++i) PyTuple_SET_ITEM(dims.ptr(), i, PyLong_FromSsize_t(shape[i]));
  return dims;
}

}  // namespace

void check_layout(nb::handle array_type, nb::handle empty) {
  const nb::object made = empty(nb::make_tuple(2, 3), "float32");
  const ArrayObject& array = as_array(made.ptr());
  const nb::object data = made.attr("__array_interface__")["data"][0];
  const bool is_known = reinterpret_cast<PyObject*>(Py_TYPE(made.ptr())) == array_type.ptr() && array.nd == 2 &&
                        array.dimensions[0] == 2 && array.dimensions[1] == 3 &&
                        array.descr == nb::object(made.attr("dtype")).ptr() &&
                        reinterpret_cast<uint64_t>(array.data) == nb::cast<uint64_t>(data) &&
                        (array.flags & (is_contiguous | is_writeable)) == (is_contiguous | is_writeable);
  if (!is_known) throw std::runtime_error("NumPy's arrays lie otherwise in memory than this build knows");
}

PyObject* interned(const char* word) {
  PyObject* made = PyUnicode_InternFromString(word);
  if (made == nullptr) throw nb::python_error();
  return made;
}

std::int64_t index_of_object(PyObject* given) {
  if (PyBool_Check(given) || !PyIndex_Check(given)) throw LeftToReference();
  const nb::object number = nb::steal(PyNumber_Index(given));
  if (!number.is_valid()) {
    if (PyErr_ExceptionMatches(PyExc_TypeError) == 0) throw nb::python_error();
    PyErr_Clear();
    throw LeftToReference();
  }
  int overflow = 0;
  const std::int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0) throw LeftToReference();
  return value;
}

double seconds_of(PyObject* given) {
  if (PyFloat_Check(given)) return PyFloat_AS_DOUBLE(given);
  if (PyBool_Check(given)) return -1;
  if (!PyLong_Check(given)) {
    static const nb::handle real = nb::object(nb::module_::import_("numbers").attr("Real")).release();
    const int is_real = PyObject_IsInstance(given, real.ptr());
    if (is_real < 0) throw nb::python_error();
    if (is_real == 0) return -1;
  }
  const double seconds = PyFloat_AsDouble(given);
  if (seconds != -1 || PyErr_Occurred() == nullptr) return seconds;
  if (PyErr_ExceptionMatches(PyExc_OverflowError) == 0) throw nb::python_error();
  PyErr_Clear();
  return -1;
}

uint64_t Argument::nbytes() const { return count * itemsizes[dtype]; }

Arguments::Arguments(nb::object array_type, nb::object empty, nb::object view, nb::list dtypes, bool leaves_tensors)
    : array_type_(std::move(array_type)),
      empty_(std::move(empty)),
      view_(std::move(view)),
      leaves_tensors_(leaves_tensors) {
  check_layout(array_type_, empty_);
  for (const nb::handle dtype : dtypes) dtypes_.push_back(nb::borrow(dtype));
  if (dtypes_.size() != dtype_count)
    throw nb::value_error("allowed: a NumPy type, or None, by the number of the dtype");
  find_equal_types();
  find_scalar_types();
}

// Types of NumPy's own that are equal have equal numbers, but for those of C's integers: two of them are as long.
void Arguments::find_equal_types() {
  for (const char* at = type_characters; *at != 0; ++at) {
    const nb::object made = empty_(nb::make_tuple(), nb::str(at, 1)).attr("dtype");
    const DescrObject& descr = as_descr(made.ptr());
    const int number = nb::cast<int>(made.attr("num"));
    if (descr.type_number != number || nb::cast<std::string>(made.attr("char")) != std::string(1, descr.type) ||
        number < 0 || number >= user_types)
      throw std::runtime_error("NumPy's types lie otherwise in memory than this build knows");
    if (codes_.size() <= static_cast<size_t>(number)) codes_.resize(static_cast<size_t>(number) + 1, engine::untyped);
    for (size_t code = 0; code < dtypes_.size(); ++code)
      if (!dtypes_[code].is_none() && made.equal(dtypes_[code]))
        codes_[static_cast<size_t>(number)] = static_cast<uint8_t>(code);
  }
}

uint8_t Arguments::code_of_equal(PyObject* given) const {
  const DescrObject& descr = as_descr(given);
  if (descr.byteorder != '=' && descr.byteorder != '|') return engine::untyped;
  if (descr.type_number < static_cast<int>(codes_.size())) return codes_[static_cast<size_t>(descr.type_number)];
  if (descr.type_number < user_types) return engine::untyped;
  if (descr.type_number != bfloat16_number_) {
    if (bfloat16_number_ >= 0 || nb::cast<std::string>(nb::handle(given).attr("name")) != "bfloat16")
      return engine::untyped;
    bfloat16_number_ = descr.type_number;
    dtypes_[bfloat16_code] = nb::borrow(given);
  }
  return bfloat16_code;
}

// Those whose value follows the head of the object, which is compared.
void Arguments::find_scalar_types() {
  // The last but `object` of what every scalar derives from.
  const nb::tuple bases = nb::cast<nb::tuple>(dtypes_[int64_code].attr("type").attr("__mro__"));
  generic_type_ = bases[bases.size() - 2];
  scalar_types_.resize(dtypes_.size());
  for (size_t code = 0; code < dtypes_.size(); ++code) {
    if (dtypes_[code].is_none()) continue;
    const nb::object type = dtypes_[code].attr("type");
    const nb::object one = type(1);
    const nb::bytes bytes = nb::cast<nb::bytes>(one.attr("tobytes")());
    const auto size = static_cast<Py_ssize_t>(sizeof(PyObject) + itemsizes[code]);
    if (bytes.size() == itemsizes[code] && reinterpret_cast<PyTypeObject*>(type.ptr())->tp_basicsize >= size &&
        std::memcmp(bytes.c_str(), value_of(one.ptr()), bytes.size()) == 0)
      scalar_types_[code] = type;
  }
}

void Arguments::see_other(PyObject* given, const char* what, bool is_written, Argument& seen) const {
  if (see_number(given, seen) || see_subclass(given, is_written, seen) || see_tensor(given, seen) ||
      see_buffer(given, is_written, seen))
    return;
  if (leaves_tensors_ && is_tensor(given)) throw LeftToReference();
  see_by_python(given, what, is_written, seen);
}

bool Arguments::see_number(PyObject* given, Argument& seen) const {
  const auto write = [&seen](uint8_t dtype, const auto& number) {
    std::memcpy(seen.number_, &number, sizeof number);
    seen.dtype = dtype;
    seen.form = Form::number;
  };
  const bool is_plain = PyFloat_CheckExact(given) || PyLong_CheckExact(given) || PyBool_Check(given);
  const auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(given));
  const auto scalar = is_plain ? scalar_types_.end()
                               : std::find_if(scalar_types_.begin(), scalar_types_.end(),
                                              [type](const nb::object& one) { return one.ptr() == type; });
  if (scalar != scalar_types_.end()) {  // some are of a subclass of Python's numbers
    seen.dtype = static_cast<uint8_t>(scalar - scalar_types_.begin());
    std::memcpy(seen.number_, value_of(given), itemsizes[seen.dtype]);
    seen.form = Form::scalar;
  } else if (PyFloat_Check(given)) {
    write(float64_code, PyFloat_AS_DOUBLE(given));
  } else if (PyBool_Check(given)) {
    write(bool_code, static_cast<uint8_t>(given == Py_True));
  } else if (PyLong_Check(given)) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(given, &overflow);
    if (overflow != 0) return false;
    write(int64_code, number);
  } else if (PyComplex_Check(given)) {
    write(complex128_code, reinterpret_cast<const PyComplexObject*>(given)->cval);
  } else {
    return false;
  }
  seen.data = seen.number_;
  seen.count = 1;
  seen.nd = 0;
  return true;
}

// An array of a subclass, such as memmap. Those with a mask are Python's to refuse.
bool Arguments::see_subclass(PyObject* given, bool is_written, Argument& seen) const {
  if (PyObject_TypeCheck(given, reinterpret_cast<PyTypeObject*>(array_type_.ptr())) == 0) return false;
  static PyObject* const word = interned("numpy.ma.core");
  const nb::object masks = nb::steal(PyImport_GetModule(word));  // a program that has one has imported it
  if (masks.is_valid() && PyObject_IsInstance(given, nb::object(masks.attr("MaskedArray")).ptr()) != 0) {
    PyErr_Clear();
    return false;
  }
  return see_array(as_array(given), is_written, seen);
}

static_assert(TensorView::dims_max <= Argument::dims_max);

bool Arguments::see_tensor(PyObject* given, Argument& seen) const {
  TensorView tensor;
  if (!is_tensor(given) || !view_tensor(given, tensor)) return false;
  seen.dtype = tensor.dtype;
  seen.data = tensor.data;
  seen.nd = tensor.nd;
  seen.count = 1;
  for (int i = 0; i < tensor.nd; ++i) seen.count *= static_cast<uint64_t>(seen.shape[i] = tensor.shape[i]);
  seen.form = Form::tensor;
  return true;
}

// Such as array.array and mmap. Subclasses of arrays, NumPy's scalars and what offers DLPack are Python's to judge.
bool Arguments::is_plain_buffer(PyObject* given) const {
  if (PyObject_CheckBuffer(given) == 0 ||
      PyObject_TypeCheck(given, reinterpret_cast<PyTypeObject*>(array_type_.ptr())) ||
      PyObject_TypeCheck(given, reinterpret_cast<PyTypeObject*>(generic_type_.ptr())))
    return false;
  static PyObject* const dlpack = interned("__dlpack__");
  return PyObject_HasAttr(reinterpret_cast<PyObject*>(Py_TYPE(given)), dlpack) == 0;
}

bool Arguments::see_buffer(PyObject* given, bool is_written, Argument& seen) const {
  const bool is_builtin = PyBytes_CheckExact(given) || PyByteArray_CheckExact(given) || PyMemoryView_Check(given);
  if (!is_builtin && !is_plain_buffer(given)) return false;
  const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (is_written ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(given, &seen.buffer_, flags) != 0) {
    PyErr_Clear();
    return false;
  }
  const Py_buffer& buffer = seen.buffer_;
  const uint8_t code = code_of_format(buffer.format, buffer.itemsize);
  if (code == engine::untyped || buffer.itemsize != static_cast<Py_ssize_t>(itemsizes[code]) ||
      buffer.ndim > Argument::dims_max) {
    PyBuffer_Release(&seen.buffer_);
    return false;
  }
  seen.dtype = code;
  seen.data = static_cast<engine::byte*>(buffer.buf);
  seen.nd = buffer.ndim;
  for (int i = 0; i < buffer.ndim; ++i) seen.shape[i] = buffer.shape[i];
  seen.count = static_cast<uint64_t>(buffer.len / buffer.itemsize);
  seen.form = Form::buffer;
  return true;
}

void Arguments::see_by_python(PyObject* given, const char* what, bool is_written, Argument& seen) const {
  nb::object array = view_(nb::handle(given), what, nb::arg("writable") = is_written);
  const nb::object flat = array.attr("flat");
  const nb::tuple shape = nb::cast<nb::tuple>(array.attr("shape"));
  if (shape.size() > Argument::dims_max) throw LeftToReference();
  seen.data = as_array(flat.ptr()).data;
  seen.dtype = nb::cast<uint8_t>(array.attr("dtype").attr("code"));
  seen.nd = static_cast<int>(shape.size());
  seen.count = 1;
  for (int i = 0; i < seen.nd; ++i) {
    seen.shape[i] = nb::cast<Py_ssize_t>(shape[static_cast<size_t>(i)]);
    seen.count *= static_cast<uint64_t>(seen.shape[i]);
  }
  seen.is_viewed_number_ = nb::cast<bool>(array.attr("is_value"));
  seen.held_ = std::move(array);
  seen.form = Form::viewed;
}

nb::object Arguments::array(const Argument& argument) const {
  if (argument.dtype == bfloat16_code) throw LeftToReference();
  if (argument.form == Form::tensor) return array_of(argument.given);
  if (argument.form == Form::array && is_array(argument.given)) return nb::borrow(argument.given);
  if (argument.count == 0) throw LeftToReference();  // there may be no memory
  const nb::object memory = nb::steal(PyMemoryView_FromMemory(reinterpret_cast<char*>(argument.data),
                                                              static_cast<Py_ssize_t>(argument.nbytes()), PyBUF_WRITE));
  if (!memory.is_valid()) throw nb::python_error();
  return array_in(memory, 0, argument.dtype, tuple_of(argument.shape, argument.nd));
}

Result Arguments::make(const Argument& like, const Py_ssize_t* shape, int nd) const {
  Result made;
  if (like.form == Form::viewed) {
    made.object = like.held_.attr("like")(tuple_of(shape, nd));
    made.data = as_array(nb::object(made.object.attr("flat")).ptr()).data;
    return made;
  }
  made.object = new_array(stored_as(like), shape, nd);
  made.data = as_array(made.object.ptr()).data;
  return made;
}

Result Arguments::make_bytes(uint64_t nbytes) const {
  const auto length = static_cast<Py_ssize_t>(nbytes);
  Result made;
  made.object = new_array(static_cast<uint8_t>(DType::uint8), &length, 1);
  made.data = as_array(made.object.ptr()).data;
  return made;
}

Result Arguments::make_memory(uint64_t nbytes) {
  engine::ResultMemory memory = engine::ResultMemory::take(nbytes);
  Result made;
  made.data = memory.get();
  if (made.data == nullptr) {
    PyErr_NoMemory();
    throw nb::python_error();
  }
  made.object = memory_object(std::move(memory), nbytes);
  return made;
}

PyObject* Arguments::part(const Argument& like, const Result& memory, uint64_t offset, const Py_ssize_t* shape,
                          int nd) const {
  Result made;
  made.object = array_in(memory.object, offset, stored_as(like), tuple_of(shape, nd));
  return give(like, made, false);
}

nb::object Arguments::new_array(uint8_t dtype, const Py_ssize_t* shape, int nd) const {
  const nb::object dims = tuple_of(shape, nd);
  uint64_t nbytes = itemsizes[dtype];
  for (int i = 0; i < nd; ++i) nbytes *= static_cast<uint64_t>(shape[i]);
  if (nbytes < engine::ResultMemory::pooled_bytes_min) return empty_(dims, dtypes_[dtype]);
  return array_in(make_memory(nbytes).object, 0, dtype, dims);
}

nb::object Arguments::array_in(const nb::object& memory, uint64_t offset, uint8_t dtype, const nb::object& dims) const {
  const nb::object from = nb::steal(PyLong_FromUnsignedLongLong(offset));
  PyObject* const args[] = {dims.ptr(), dtypes_[dtype].ptr(), memory.ptr(), from.ptr()};
  PyObject* const made = PyObject_Vectorcall(array_type_.ptr(), args, std::size(args), nullptr);
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

PyObject* Arguments::give(const Argument& like, Result& result, bool is_scalar) const {
  switch (like.form) {
    case Form::viewed: return nb::object(result.object.attr("give")()).release().ptr();
    case Form::tensor: return tensor_of(result.object, like.dtype).release().ptr();
    case Form::number:
    case Form::scalar:
      if (!is_scalar) break;
      return number_of(like, result.data);
    default: break;
  }
  return result.object.release().ptr();
}

PyObject* Arguments::give_back(const Argument& argument) {
  switch (argument.form) {
    case Form::number:
    case Form::scalar: return number_of(argument, argument.data);
    case Form::viewed: return nb::object(argument.held_.attr("give")()).release().ptr();
    default: return Py_NewRef(argument.given);
  }
}

}  // namespace unisono
