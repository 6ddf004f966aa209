"""The join protocol: both sides prove the token without sending it, then exchange authenticated frames.

Pure: bytes in, bytes out. Any bytes give a message or ProtocolError; lengths are checked before memory is
allocated.

    worker -> seed    "UNISONO1" | nonce (32)
    seed -> worker    "UNISONO1" | nonce (32)
    worker -> seed    HMAC(token, "worker" | both nonces | binding)
    seed -> worker    0 | HMAC(token, "seed" | both nonces | binding)   or   1 | zeros, then it closes
    both              length u32 | HMAC(key, side | number | body) | body

The binding is the hash of the seed's certificate as each side sees it, so that a proof is worth nothing on
another connection; without TLS it is zero. The key of the frames comes from the token, nonces and binding.

Half of a worker's nonce is random, the other half a tag: an HMAC that only holders of the token can make. A
tag does not admit a worker, but the first connection that shows it is no longer evicted for newcomers when
strangers crowd the port. With TLS the nonce is in the client hello, too, as the server name.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import struct
from typing import Final, Literal, TypeAlias

import msgspec

from unisono.bootstrap.limits import REPLY_BYTES_MAX, REQUEST_BYTES_MAX, UNPROVEN_BYTES_MAX
from unisono.errors import ProtocolError

__all__ = [
    "ALPN",
    "Admitted",
    "Ended",
    "Frames",
    "JoinClient",
    "JoinServer",
    "Member",
    "Members",
    "Refusal",
    "Refused",
    "Reply",
    "Request",
    "Status",
    "WrongToken",
    "encode",
    "is_tagged",
    "links_secret",
    "nonce_as_name",
    "nonce_from_name",
    "parse_reply",
    "parse_request",
    "tagged_nonce",
]

ALPN: Final = "unisono-join/1"
NONCE_BYTES: Final = 32
NO_BINDING: Final = bytes(32)

_MAGIC: Final = b"UNISONO1"
_PROOF_BYTES: Final = 32
_HALF: Final = NONCE_BYTES // 2
_FRAME: Final = struct.Struct(">I32s")

Side: TypeAlias = Literal[b"worker", b"seed"]


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker asks to be a rank. `csr` is its certificate signing request, empty without TLS."""

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


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A launcher reports that the process of a rank has ended and will not join any more.

    `age_s` is the time since that process was started, measured after the seed has proven the token.
    """

    rank: int
    how: str
    age_s: float


class Arrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The launcher of another node has come. No two launchers have the same `instance`."""

    node: int
    instance: str


# Why the seed refuses a request. misfit: it does not fit this world. taken: another process has the rank in a
# world that is forming; taken late: in a complete world. own late: this very process has it in a complete
# world. over: the world cannot form any more.
Refusal: TypeAlias = Literal["misfit", "taken", "taken late", "own late", "over"]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The seed refuses a request."""

    reason: str
    kind: Refusal = "misfit"
    formed_s: float = 0.0
    """Seconds for which the world has been complete; 0 if it is not."""


class Status(msgspec.Struct, frozen=True, tag="status"):
    """The state of the formation, as one sentence."""

    text: str


class Admitted(msgspec.Struct, frozen=True, tag="admitted"):
    """The world is formed: a rank's own part of the view. `Members` follows in the next frame."""

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


class Store(msgspec.Struct, frozen=True, tag="store"):
    """The answer to an arrival: the port on node 0 that is kept for the store of torch programs."""

    port: int


Reply: TypeAlias = Refused | Status | Admitted | Members | Store

_requests: Final = msgspec.msgpack.Decoder(Request)
_ends: Final = msgspec.msgpack.Decoder(Ended)
_arrivals: Final = msgspec.msgpack.Decoder(Arrival)
_replies: Final = msgspec.msgpack.Decoder(Reply)


class WrongToken(Exception):
    """The other side does not know the token."""


class Frames:
    """Frames after the proof: each has a number and an HMAC that only holders of the token can make."""

    def __init__(self, key: bytes, own: Side, other: Side, body_bytes_max: int) -> None:
        self._key = key
        self._own, self._other = own, other
        self._body_bytes_max = body_bytes_max
        self._sent = 0
        self._received = 0
        self._buffer = bytearray()

    def seal(self, body: bytes) -> bytes:
        """The header of a body on the wire; the body itself is not copied."""
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


class JoinServer:
    """The seed's side of the handshake, and the frames that follow."""

    def __init__(self, token: bytes, binding: bytes, nonce: bytes) -> None:
        self._token = token
        self._binding = binding
        self._nonce = nonce
        self._nonces = b""
        self._buffer = bytearray()
        self.frames: Frames | None = None

    @property
    def worker_nonce(self) -> bytes:
        """The worker's nonce; empty before it has come."""
        return self._nonces[:NONCE_BYTES]

    @property
    def is_proven(self) -> bool:
        """Whether the worker has proven the token."""
        return self.frames is not None

    def receive(self, data: bytes) -> tuple[bytes, list[bytes]]:
        """Take bytes: what to send back, and the bodies of complete frames.

        Raises:
            ProtocolError: it does not speak this protocol.
            WrongToken: it does, but does not know the token.
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


# The answer to a wrong proof: as long as the right answer, and always the same.
NO_ENTRY: Final = b"\1" + bytes(_PROOF_BYTES)


class JoinClient:
    """A worker's side of the handshake. It reveals nothing to a seed that does not know the token."""

    greeting_bytes: Final = len(_MAGIC) + NONCE_BYTES
    answer_bytes: Final = 1 + _PROOF_BYTES

    def __init__(self, token: bytes, binding: bytes, nonce: bytes) -> None:
        self._token = token
        self._binding = binding
        self._nonce = nonce
        self._nonces = b""

    def hello(self) -> bytes:
        """The first message."""
        return _MAGIC + self._nonce

    def proof(self, greeting: bytes) -> bytes:
        """The answer to the seed's greeting.

        Raises:
            ProtocolError: the other side does not speak this protocol.
        """
        if len(greeting) != self.greeting_bytes or not greeting.startswith(_MAGIC):
            raise ProtocolError("the server at this address is no unisono seed")
        self._nonces = self._nonce + greeting[len(_MAGIC) :]
        return _proof(self._token, b"worker", self._nonces, self._binding)

    def frames(self, answer: bytes) -> Frames:
        """Check that the seed knows the token too.

        Raises:
            WrongToken: the seed refused ours.
            ProtocolError: the seed does not know it.
        """
        if answer == NO_ENTRY:
            raise WrongToken
        right = b"\0" + _proof(self._token, b"seed", self._nonces, self._binding)
        if not hmac.compare_digest(answer, right):
            raise ProtocolError("the server at this address does not know the token")
        key = _proof(self._token, b"frames", self._nonces, self._binding)
        return Frames(key, b"worker", b"seed", REPLY_BYTES_MAX)


def encode(message: Request | Ended | Arrival | Reply) -> bytes:
    """The body of a frame."""
    return msgspec.msgpack.encode(message)


def parse_request(body: bytes) -> Request | Ended | Arrival:
    """Read a worker's request, or what a launcher tells.

    Raises:
        ProtocolError: it is none of them.
    """
    for decoder in (_ends, _arrivals):
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
            return decoder.decode(body)
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


def tagged_nonce(token: bytes, random: bytes) -> bytes:
    """A worker's nonce: random bytes and their tag."""
    return random + hmac.digest(token, b"unisono join 1 tag " + random, "sha256")[:_HALF]


def is_tagged(token: bytes, nonce: bytes) -> bool:
    """Whether a nonce was made by a holder of the token."""
    return len(nonce) == NONCE_BYTES and hmac.compare_digest(tagged_nonce(token, nonce[:_HALF]), nonce)


def nonce_as_name(nonce: bytes) -> str:
    """A nonce as a server name in a client hello; two labels, since a label has at most 63 characters."""
    return f"{nonce[:_HALF].hex()}.{nonce[_HALF:].hex()}"


def nonce_from_name(name: str) -> bytes:
    """The nonce again; empty if the name is not one."""
    try:
        return bytes.fromhex(name.replace(".", "", 1))
    except ValueError:
        return b""


def links_secret(token: bytes) -> bytes:
    """The secret that ranks prove to each other on links without TLS; derived from the token."""
    return hmac.digest(token, b"unisono links 1", "sha256")


def _proof(token: bytes, what: bytes, nonces: bytes, binding: bytes) -> bytes:
    return hmac.digest(token, b"unisono join 1 " + what + b" " + nonces + binding, "sha256")
