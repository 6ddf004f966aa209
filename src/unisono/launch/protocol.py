"""The words of a join: proving the token without sending it, and frames that nobody can alter.

Knows bytes and both sides' states. Does not know sockets, TLS or who may join. Any bytes give a message or
ProtocolError; lengths are checked before memory is taken.

    worker -> seed    "UNISONO1" | nonce (32)
    seed -> worker    "UNISONO1" | nonce (32)
    worker -> seed    HMAC(token, "worker" | both nonces | binding)
    seed -> worker    0 | HMAC(token, "seed" | both nonces | binding)   or   1 | zeros, and the end
    both              length u32 | HMAC(key, side | number | body) | body

The binding is the hash of the seed's certificate as each side sees it, so that a proof is worth nothing on
another connection; without TLS it is zero. The key of the frames comes from the token, nonces and binding.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final, Literal, TypeAlias

import msgspec

from unisono.errors import ProtocolError
from unisono.launch.limits import REPLY_BYTES_MAX, REQUEST_BYTES_MAX, UNPROVEN_BYTES_MAX

__all__ = [
    "ALPN",
    "Admitted",
    "Frames",
    "Guest",
    "Member",
    "Members",
    "Refused",
    "Reply",
    "Request",
    "Status",
    "Visitor",
    "WrongToken",
    "encode",
    "links_secret",
    "parse_reply",
    "parse_request",
]

ALPN: Final = "unisono-join/1"
NONCE_BYTES: Final = 32
NO_BINDING: Final = bytes(32)

_MAGIC: Final = b"UNISONO1"
_PROOF_BYTES: Final = 32
_FRAME: Final = struct.Struct(">I32s")

Side: TypeAlias = Literal[b"worker", b"seed"]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's wish to be a rank."""

    rank: int
    size: int
    version: str
    config_digest: str
    settings: dict[str, str]
    card: bytes
    csr: bytes
    host: str
    pid: int
    instance: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The seed says no. `is_late`: the world had been formed, so the ticket may be an old one."""

    reason: str
    is_late: bool = False


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Where the formation stands."""

    text: str


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The seed says yes, and everybody has come: `members` follow in the next frame."""

    job: str
    incarnation: int
    ca_pem: bytes
    certificate_pem: bytes


class Member(msgspec.Struct, frozen=True, array_like=True):
    """One rank of the world."""

    rank: int
    incarnation: int
    card: bytes
    host: str
    pid: int
    address: str


class Members(msgspec.Struct, frozen=True, tag="members"):
    """The world: the same bytes for every rank."""

    members: list[Member]


Reply: TypeAlias = Refused | Status | Admitted | Members

_requests: Final = msgspec.msgpack.Decoder(Request)
_replies: Final = msgspec.msgpack.Decoder(Reply)


class WrongToken(Exception):
    """The other side does not know the token."""


class Frames:
    """Frames after the proof: each has a number and a code that only holders of the token can make."""

    def __init__(self, key: bytes, own: Side, other: Side, body_bytes_max: int) -> None:
        self._key = key
        self._own, self._other = own, other
        self._body_bytes_max = body_bytes_max
        self._sent = 0
        self._received = 0
        self._buffer = bytearray()

    def seal(self, body: bytes) -> bytes:
        """What precedes a body on the wire; the body itself is not copied."""
        code = self._code(self._own, self._sent, body)
        self._sent += 1
        return _FRAME.pack(len(body), code)

    def receive(self, data: bytes) -> list[bytes]:
        """The bodies that are complete now.

        Raises:
            ProtocolError: a frame is too long, or was not made by the other side.
        """
        self._buffer += data
        bodies: list[bytes] = []
        while len(self._buffer) >= _FRAME.size:
            length, code = _FRAME.unpack_from(self._buffer)
            if length > self._body_bytes_max:
                raise ProtocolError(f"a frame of {length} bytes; allowed: {self._body_bytes_max}")
            end = _FRAME.size + length
            if len(self._buffer) < end:
                break
            body = bytes(memoryview(self._buffer)[_FRAME.size : end])
            if not hmac.compare_digest(code, self._code(self._other, self._received, body)):
                raise ProtocolError("a frame was altered on its way")
            self._received += 1
            bodies.append(body)
            del self._buffer[:end]
        return bodies

    def _code(self, side: bytes, number: int, body: bytes) -> bytes:
        maker = hmac.new(self._key, b"%s %d " % (side, number), hashlib.sha256)
        maker.update(body)
        return maker.digest()


class Guest:
    """The seed's view of one connection: first a stranger, then the holder of a token."""

    def __init__(self, token: bytes, binding: bytes, nonce: bytes) -> None:
        self._token = token
        self._binding = binding
        self._nonce = nonce
        self._nonces = b""
        self._buffer = bytearray()
        self.frames: Frames | None = None

    @property
    def is_proven(self) -> bool:
        """Whether it has shown that it knows the token."""
        return self.frames is not None

    def receive(self, data: bytes) -> tuple[bytes, list[bytes]]:
        """Take bytes: what to send back, and the bodies of frames that are complete.

        Raises:
            ProtocolError: it does not speak our words.
            WrongToken: it speaks them, but does not know the token.
        """
        if self.frames is not None:
            return b"", self.frames.receive(data)
        self._buffer += data
        if len(self._buffer) > UNPROVEN_BYTES_MAX:
            raise ProtocolError(f"more than {UNPROVEN_BYTES_MAX} bytes before the token was proven")
        answer = b""
        if not self._nonces:
            if not _MAGIC.startswith(bytes(self._buffer[: len(_MAGIC)])):
                raise ProtocolError("it does not speak the join protocol")
            if len(self._buffer) < len(_MAGIC) + NONCE_BYTES:
                return b"", []
            self._nonces = bytes(self._buffer[len(_MAGIC) : len(_MAGIC) + NONCE_BYTES]) + self._nonce
            del self._buffer[: len(_MAGIC) + NONCE_BYTES]
            answer = _MAGIC + self._nonce
        if len(self._buffer) < _PROOF_BYTES:
            return answer, []
        claimed = bytes(self._buffer[:_PROOF_BYTES])
        if not hmac.compare_digest(claimed, _proof(self._token, b"worker", self._nonces, self._binding)):
            raise WrongToken
        key = _proof(self._token, b"frames", self._nonces, self._binding)
        self.frames = Frames(key, b"seed", b"worker", REQUEST_BYTES_MAX)
        answer += b"\0" + _proof(self._token, b"seed", self._nonces, self._binding)
        return answer, self.frames.receive(bytes(self._buffer[_PROOF_BYTES:]))


# What a stranger hears whose proof is wrong: as long as the right answer, and always the same.
NO_ENTRY: Final = b"\1" + bytes(_PROOF_BYTES)


class Visitor:
    """A worker's side of the proof. It gives nothing away to a seed that does not know the token."""

    greeting_bytes: Final = len(_MAGIC) + NONCE_BYTES
    verdict_bytes: Final = 1 + _PROOF_BYTES

    def __init__(self, token: bytes, binding: bytes, nonce: bytes) -> None:
        self._token = token
        self._binding = binding
        self._nonce = nonce
        self._nonces = b""

    def hello(self) -> bytes:
        """The first words."""
        return _MAGIC + self._nonce

    def proof(self, greeting: bytes) -> bytes:
        """Answer the seed's greeting.

        Raises:
            ProtocolError: whoever is there does not speak our words.
        """
        if len(greeting) != self.greeting_bytes or not greeting.startswith(_MAGIC):
            raise ProtocolError("what answers there is no seed of unisono")
        self._nonces = self._nonce + greeting[len(_MAGIC) :]
        return _proof(self._token, b"worker", self._nonces, self._binding)

    def frames(self, verdict: bytes) -> Frames:
        """Check that the seed knows the token too.

        Raises:
            WrongToken: the seed refused ours.
            ProtocolError: the seed does not know it.
        """
        if verdict == NO_ENTRY:
            raise WrongToken
        right = b"\0" + _proof(self._token, b"seed", self._nonces, self._binding)
        if not hmac.compare_digest(verdict, right):
            raise ProtocolError("what answers there does not know the token")
        key = _proof(self._token, b"frames", self._nonces, self._binding)
        return Frames(key, b"worker", b"seed", REPLY_BYTES_MAX)


def encode(message: Request | Reply) -> bytes:
    """The body of a frame."""
    return msgspec.msgpack.encode(message)


def parse_request(body: bytes) -> Request:
    """Read a worker's request.

    Raises:
        ProtocolError: it is not one.
    """
    try:
        return _requests.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ProtocolError("a malformed request", cause=type(error).__name__) from None


def parse_reply(body: bytes) -> Reply:
    """Read a seed's reply.

    Raises:
        ProtocolError: it is not one.
    """
    try:
        reply: Reply = _replies.decode(body)
        return reply
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ProtocolError("a malformed reply", cause=type(error).__name__) from None


def links_secret(token: bytes) -> bytes:
    """What ranks prove to each other on links without TLS: from the token, but not the token."""
    return hmac.digest(token, b"unisono links 1", "sha256")


def _proof(token: bytes, what: bytes, nonces: bytes, binding: bytes) -> bytes:
    return hmac.digest(token, b"unisono join 1 " + what + b" " + nonces + binding, "sha256")
