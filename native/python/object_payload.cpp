#include "python/object_payload.hpp"

#include <cstring>
#include <optional>

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

std::optional<ObjectHead> head_of(const Announcement& row, size_t number) {
  std::span<const byte> rest = row.rest();
  for (size_t i = 0; rest.size() > 1; ++i) {
    const auto kind = std::to_integer<uint8_t>(rest[0]);
    rest = rest.subspan(1);
    const size_t length = codec::head_bytes_at(rest.data(), rest.size());
    if (length == 0 || kind > static_cast<uint8_t>(BlobKind::detached)) break;
    if (i == number) return ObjectHead{static_cast<BlobKind>(kind), rest.first(length)};
    rest = rest.subspan(length);
  }
  return {};
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

nb::object new_bytes(uint64_t nbytes) { return checked(new_bytes_to_fill(nbytes)); }

}  // namespace unisono
