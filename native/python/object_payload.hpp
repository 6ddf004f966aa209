// The payload of an object: a Python object as the bytes that travel, and back.
//
// Every function needs the GIL, and may run any Python code: registered classes have a part in it.

#pragma once

#include <optional>
#include <span>

#include "base/result_memory.hpp"
#include "python/announcement.hpp"
#include "python/argument.hpp"
#include "python/blob_memory.hpp"
#include "python/codec.hpp"
#include "python/gil_released.hpp"

namespace unisono {

// An object in one piece, as a bytes object without other references.
struct PackedObject {
  nb::object bytes;

  engine::byte* data() const { return reinterpret_cast<engine::byte*>(PyBytes_AS_STRING(bytes.ptr())); }
  uint64_t size() const { return static_cast<uint64_t>(PyBytes_GET_SIZE(bytes.ptr())); }
};

// Throws LeftToReference if it has more than `bytes_max` bytes: the reference path refuses it. Throws nb::python_error
// if it cannot be sent.
PackedObject pack_object(nb::handle value, uint64_t bytes_max);

// The head of a part in a row that has heads, and what its blob becomes: `detached` if there are several, in one piece.
// In the row a byte of the kind precedes each head.
struct ObjectHead {
  BlobKind kind;
  std::span<const engine::byte> bytes;
};
// Nothing if the row does not have it.
std::optional<ObjectHead> head_of(const Announcement& row, size_t number);

// The object in a message; long arrays in it are views of the memory. Throws nb::python_error with a ProtocolError.
nb::object unpack_object(engine::ResultMemory memory, uint64_t nbytes);

// The bytes of a message, copied.
nb::object bytes_object(const engine::byte* data, uint64_t nbytes);

// A bytes object of this length, to be filled by the caller.
nb::object new_bytes(uint64_t nbytes);

}  // namespace unisono
