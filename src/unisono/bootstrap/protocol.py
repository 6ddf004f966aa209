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

Half of a worker's nonce is random, the other half a tag that only holders of the token can make. It admits
nobody, but a crowd of strangers cannot make one: who shows it first is not pushed out by them. With TLS it
stands in the client hello, too, as the name of the server.
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


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A launcher's news: the process of a rank has ended, and will not join any more.

    `age_s` is the time since that process was started, measured after the seed has proven the token.
    """

    rank: int
    how: str
    age_s: float


# Why the seed says no: the request does not fit this world; another process has the rank, in a world that
# forms or in a complete one; this very process has it in a complete one; the world cannot form any more.
Refusal: TypeAlias = Literal["misfit", "taken", "taken late", "own late", "over"]


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The seed says no."""

    reason: str
    kind: Refusal = "misfit"
    formed_s: float = 0.0
    """For how long the world has been complete, if it is."""


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
_ends: Final = msgspec.msgpack.Decoder(Ended)
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


class JoinServer:
    """The seed's view of one connection: first a stranger, then the holder of a token."""

    def __init__(self, token: bytes, binding: bytes, nonce: bytes) -> None:
        self._token = token
        self._binding = binding
        self._nonce = nonce
        self._nonces = b""
        self._buffer = bytearray()
        self.frames: Frames | None = None

    @property
    def nonce_heard(self) -> bytes:
        """The worker's nonce, once it has come."""
        return self._nonces[:NONCE_BYTES]

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


class JoinClient:
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


def encode(message: Request | Ended | Reply) -> bytes:
    """The body of a frame."""
    return msgspec.msgpack.encode(message)


def parse_request(body: bytes) -> Request | Ended:
    """Read a worker's request, or a launcher's news.

    Raises:
        ProtocolError: it is neither.
    """
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        return _ends.decode(body)
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
    """A worker's nonce: random bytes, and the tag that shows who may have made them."""
    return random + hmac.digest(token, b"unisono join 1 tag " + random, "sha256")[:_HALF]


def is_tagged(token: bytes, nonce: bytes) -> bool:
    """Whether a nonce was made by a holder of the token."""
    return len(nonce) == NONCE_BYTES and hmac.compare_digest(tagged_nonce(token, nonce[:_HALF]), nonce)


def nonce_as_name(nonce: bytes) -> str:
    """A nonce as the name of a server in a client hello: a label has 63 characters at most."""
    return f"{nonce[:_HALF].hex()}.{nonce[_HALF:].hex()}"


def nonce_from_name(name: str) -> bytes:
    """The nonce again; empty if the name is none."""
    try:
        return bytes.fromhex(name.replace(".", "", 1))
    except ValueError:
        return b""


def links_secret(token: bytes) -> bytes:
    """What ranks prove to each other on links without TLS: from the token, but not the token."""
    return hmac.digest(token, b"unisono links 1", "sha256")


def _proof(token: bytes, what: bytes, nonces: bytes, binding: bytes) -> bytes:
    return hmac.digest(token, b"unisono join 1 " + what + b" " + nonces + binding, "sha256")
