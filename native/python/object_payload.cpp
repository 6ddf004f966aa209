#include "python/object_payload.hpp"

#include <cstring>
#include <optional>

#include "base/huge_pages.hpp"
#include "python/blob_memory.hpp"

namespace unisono {

using engine::byte;
using engine::ResultMemory;

namespace {

nb::object checked(PyObject* made) {
  if (made == nullptr) throw nb::python_error();
  return nb::steal(made);
}

}  // namespace

PackedObject pack_object(nb::handle value, uint64_t bytes_max) {
  codec::Packer packer;
  if (!packer.pack(value.ptr())) throw nb::python_error();
  const uint64_t size = packer.size();
  if (size > bytes_max) throw LeftToReference();
  if (packer.blobs().empty()) return {checked(packer.to_bytes())};
  PackedObject packed{new_bytes(size)};
  std::optional<GilReleased> released;
  if (size >= gil_release_bytes) released.emplace();
  packer.copy_to(packed.data());
  return packed;
}

nb::object unpack_object(ResultMemory memory, uint64_t nbytes) {
  const byte* const data = memory.get();
  // Nothing in it is long enough to be a view.
  if (nbytes < codec::blob_bytes_min) return checked(codec::unpack(data, nbytes));
  const nb::object owner = memory_object(std::move(memory), nbytes);
  return checked(codec::unpack(data, nbytes, owner.ptr()));
}

nb::object bytes_object(const byte* data, uint64_t nbytes) {
  nb::object made = new_bytes(nbytes);
  std::optional<GilReleased> released;
  if (nbytes >= gil_release_bytes) released.emplace();
  if (nbytes != 0) std::memcpy(PyBytes_AS_STRING(made.ptr()), data, nbytes);
  return made;
}

nb::object new_bytes(uint64_t nbytes) {
  nb::object made = checked(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes)));
  engine::ask_for_huge_pages(PyBytes_AS_STRING(made.ptr()), nbytes);
  return made;
}

}  // namespace unisono
