// An argument of a verb: the memory of a NumPy array, a torch tensor on the CPU, a number or a buffer.
//
// What C++ cannot see (a subclass, a view with gaps, DLPack, bfloat16 of another package) goes to Python's
// buffers.view once, and is memory like any other from then on.

#pragma once

#include <vector>

#include "messaging/message.hpp"
#include "python/bind.hpp"
#include "wire/frame.hpp"

namespace unisono {

namespace nb = nanobind;

// NumPy's array object. Its layout is part of NumPy's binary interface, old and new; check_layout compares.
struct ArrayObject {
  PyObject_HEAD engine::byte* data;
  int nd;
  Py_ssize_t* dimensions;
  Py_ssize_t* strides;
  PyObject* base;
  PyObject* descr;
  int flags;
};
inline constexpr int is_contiguous = 0x1, is_aligned = 0x100, is_writeable = 0x400;

inline const ArrayObject& as_array(PyObject* object) { return *reinterpret_cast<const ArrayObject*>(object); }

// Throws std::runtime_error if arrays that `empty` makes lie otherwise in memory than ArrayObject says.
void check_layout(nb::handle array_type, nb::handle empty);

// A word that the interpreter has once: names of arguments can be compared by address.
PyObject* interned(const char* word);
// Whether a name is this interned word.
inline bool is_word(PyObject* name, PyObject* word) { return name == word || PyUnicode_Compare(name, word) == 0; }

// Thrown before anything is sent: the reference path makes the call.
struct LeftToReference {};

std::int64_t index_of_object(PyObject* given);
// The number of a rank or tag, whatever kind of integer it is. Throws LeftToReference for what is none, and for a bool.
inline std::int64_t index_of(PyObject* given) {
  if (PyLong_CheckExact(given)) [[likely]] {
    int overflow = 0;
    const std::int64_t number = PyLong_AsLongLongAndOverflow(given, &overflow);
    if (overflow == 0) return number;
  }
  return index_of_object(given);
}
// A time that the user gave, in seconds. Negative or NaN if it is no such time: Python refuses it.
double seconds_of(PyObject* given);

// `number` is one of Python's, `scalar` one of NumPy's; both are immutable, so a new one is given back.
enum class Form : uint8_t { none, array, tensor, number, scalar, buffer, viewed, several };

// It is not moved: the memory of a number is its own.
struct Argument {
  Argument() = default;
  // No memory: a NumPy array of this type, of which results are made.
  explicit Argument(uint8_t dtype) : dtype(dtype), form(Form::array) {}
  ~Argument() { clear(); }
  Argument(const Argument&) = delete;
  Argument& operator=(const Argument&) = delete;

  static constexpr int dims_max = 32;  // the limit of NumPy 1; the reference path makes calls with more

  PyObject* given = nullptr;  // the caller's reference, until `keep`
  engine::byte* data = nullptr;
  uint64_t count = 0;  // elements
  uint8_t dtype = engine::untyped;
  Form form = Form::none;
  int nd = 0;
  Py_ssize_t shape[dims_max];

  bool is_given() const { return form != Form::none; }
  bool is_number() const { return form == Form::number || form == Form::scalar || is_viewed_number_; }
  uint64_t nbytes() const;
  // Be this bytes object, made for the call.
  void hold(nb::object bytes) {
    held_ = std::move(bytes);
    given = held_.ptr();
    data = reinterpret_cast<engine::byte*>(PyBytes_AS_STRING(given));
    nd = 1;
    shape[0] = PyBytes_GET_SIZE(given);
    count = static_cast<uint64_t>(shape[0]);
    dtype = engine::plain_bytes;
    form = Form::array;
  }
  // Stand for several arrays of the user, whose memory is elsewhere.
  void stand_for(PyObject* arrays) {
    given = arrays;
    form = Form::several;
  }
  // What keeps its memory beside the object that was given; not valid if nothing does.
  const nb::object& held() const { return held_; }
  // Keep what was given beyond the frame of its caller.
  void keep() { kept_ = nb::borrow(given); }
  void clear() {
    if (form == Form::none) return;
    if (form == Form::buffer) PyBuffer_Release(&buffer_);
    held_.reset();
    kept_.reset();
    form = Form::none;
  }

 private:
  friend class Arguments;
  nb::object held_;  // what buffers.view made, or bytes of the call's own
  nb::object kept_;
  Py_buffer buffer_;
  alignas(16) engine::byte number_[16];
  bool is_viewed_number_ = false;  // buffers.view saw a number of another kind
};

// Memory for a result, in the kind of an argument.
struct Result {
  nb::object object;
  engine::byte* data = nullptr;
};

// How arguments of one kind of array are seen, and how results are made.
class Arguments {
 public:
  // `view` is buffers.view; `dtypes` has NumPy's type of each element type, or None; `leaves_tensors`: tensors that are
  // not in the memory of this process go to the reference path. Throws std::runtime_error if NumPy's arrays are not
  // what this build knows.
  Arguments(nb::object array_type, nb::object empty, nb::object view, nb::list dtypes, bool leaves_tensors);

  bool is_array(PyObject* given) const { return reinterpret_cast<PyObject*>(Py_TYPE(given)) == array_type_.ptr(); }
  // Throws nb::python_error with the UsageError of buffers.view.
  void see(PyObject* given, const char* what, bool is_written, Argument& seen) const {
    seen.given = given;
    if (is_array(given) && see_array(as_array(given), is_written, seen)) [[likely]]
      return;
    see_other(given, what, is_written, seen);
  }

  // A plain NumPy array of its memory, which must outlive it; throws LeftToReference if there is none.
  nb::object array(const Argument& argument) const;
  Result make(const Argument& like, const Py_ssize_t* shape, int nd) const;
  // An array of bytes.
  Result make_bytes(uint64_t nbytes) const;
  // Memory without a kind, of which `part` makes arrays.
  static Result make_memory(uint64_t nbytes);
  // A result in the kind of an argument that C++ can see: a part of such memory, from `offset` on.
  PyObject* part(const Argument& like, const Result& memory, uint64_t offset, const Py_ssize_t* shape, int nd) const;
  // Whether NumPy has the element type.
  bool has_type(uint8_t dtype) const { return !dtypes_[dtype].is_none(); }
  // The result for the user, in the kind of the argument.
  PyObject* give(const Argument& like, Result& result, bool is_scalar) const;
  // What a verb that works in place returns: the object that was passed, or the number that its memory holds now.
  static PyObject* give_back(const Argument& argument);

 private:
  bool see_array(const ArrayObject& array, bool is_written, Argument& seen) const {
    const int needed = is_contiguous | is_aligned | (is_written ? is_writeable : 0);
    if ((array.flags & needed) != needed || array.nd > Argument::dims_max) return false;
    const uint8_t code = code_of(array.descr);
    if (code == engine::untyped) return false;
    seen.dtype = code;
    seen.data = array.data;
    seen.nd = array.nd;
    uint64_t count = 1;
    for (int i = 0; i < array.nd; ++i) count *= static_cast<uint64_t>(seen.shape[i] = array.dimensions[i]);
    seen.count = count;
    seen.form = Form::array;
    return true;
  }
  void see_other(PyObject* given, const char* what, bool is_written, Argument& seen) const;
  bool see_number(PyObject* given, Argument& seen) const;
  bool see_subclass(PyObject* given, bool is_written, Argument& seen) const;
  bool see_tensor(PyObject* given, Argument& seen) const;
  bool is_plain_buffer(PyObject* given) const;
  bool see_buffer(PyObject* given, bool is_written, Argument& seen) const;
  void see_by_python(PyObject* given, const char* what, bool is_written, Argument& seen) const;
  // The number of NumPy's type; `untyped` if it is none of ours. Most arrays have the very object that we know; others,
  // such as those that were unpickled, have an equal one.
  uint8_t code_of(PyObject* descr) const {
    for (size_t code = 0; code < dtypes_.size(); ++code)
      if (dtypes_[code].ptr() == descr) return static_cast<uint8_t>(code);
    return code_of_equal(descr);
  }
  uint8_t code_of_equal(PyObject* descr) const;
  void find_equal_types();
  void find_scalar_types();

  nb::object new_array(uint8_t dtype, const Py_ssize_t* shape, int nd) const;
  nb::object array_in(const nb::object& memory, uint64_t offset, uint8_t dtype, const nb::object& dims) const;

  nb::object array_type_, empty_, view_;
  nb::object generic_type_;  // of NumPy's scalars
  // By element type. That of bfloat16 comes from another package, with the first array of it.
  mutable std::vector<nb::object> dtypes_;
  std::vector<uint8_t> codes_;            // by NumPy's number of a type of its own
  mutable int bfloat16_number_ = -1;      // NumPy's number of the other package's type
  std::vector<nb::object> scalar_types_;  // by element type; none if their objects lie otherwise in memory
  bool leaves_tensors_;
};

}  // namespace unisono
