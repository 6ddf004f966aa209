"""The identity of a rank: the seed's authority, a worker's key, certificates with job, rank and incarnation.

A private key is made where it is used and never leaves the process. This module is imported only where TLS is
used: `cryptography` takes 60 ms.

The subject alternative name of a rank's certificate is one URI. The peer's engine compares it with the rank
that a connection claims to be:

    unisono://<job>/<rank>/<incarnation>
"""

from __future__ import annotations

import datetime
import hashlib
import re
from dataclasses import dataclass, field
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from unisono.errors import ProtocolError

__all__ = ["Authority", "Identity", "Name", "WorkerKey", "fingerprint", "verified_name"]

# Clocks of hosts may differ by an hour or two; certificates are checked only when a link opens.
_SKEW: Final = datetime.timedelta(hours=2)
_LIFE: Final = datetime.timedelta(days=90)
_URI: Final = re.compile(r"unisono://([0-9a-f]{32})/([0-9]{1,9})/([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class Name:
    """What a certificate says about its owner."""

    job: str
    rank: int
    incarnation: int

    @property
    def uri(self) -> str:
        """The form inside the certificate."""
        return f"unisono://{self.job}/{self.rank}/{self.incarnation}"

    @classmethod
    def parse(cls, uri: str) -> Name:
        """Read the form inside the certificate.

        Raises:
            ProtocolError: it is not in this form.
        """
        found = _URI.fullmatch(uri)
        if found is None:
            raise ProtocolError("a certificate names no rank")
        return cls(found[1], int(found[2]), int(found[3]))


@dataclass(frozen=True, slots=True)
class Identity:
    """What a rank needs for mutual TLS, as PEM. The key is never shown."""

    name: Name
    key_pem: bytes = field(repr=False)
    certificate_pem: bytes = field(repr=False)
    ca_pem: bytes = field(repr=False)


class Authority:
    """The seed's key and certificate. The same certificate is the TLS server's, so its hash can be pinned."""

    def __init__(self, job: str, now: datetime.datetime) -> None:
        self.job = job
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"unisono seed {job[:8]}")])
        self._certificate = (
            _builder(name, name, self._key.public_key(), now)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def certificate_pem(self) -> bytes:
        """The only certificate that ranks trust."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def fingerprint(self) -> bytes:
        """The SHA-256 that a ticket pins."""
        return fingerprint(self._certificate.public_bytes(serialization.Encoding.DER))

    def key_pem(self) -> bytes:
        """The private key, for the TLS server of the same process only."""
        return _key_pem(self._key)

    def certify(self, request_der: bytes, rank: int, incarnation: int, now: datetime.datetime) -> bytes:
        """Sign a worker's request: only its public key is used; the seed chooses the name.

        Raises:
            ProtocolError: the request is malformed, not signed by its own key, or of another kind of key.
        """
        key = _requested_key(request_der)
        name = Name(self.job, rank, incarnation)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"unisono rank {rank}")])
        return (
            _builder(self._certificate.subject, subject, key, now)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(name.uri)]), critical=True
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
        )


class WorkerKey:
    """A worker's private key; it never leaves this object except for the TLS engine."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())

    def request(self) -> bytes:
        """A certificate signing request (DER) without a name: the seed chooses it."""
        builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)

    def identity(self, certificate_pem: bytes, ca_pem: bytes, now: datetime.datetime) -> Identity:
        """The identity from our key and the seed's certificate for it.

        Raises:
            ProtocolError: the certificate is for another key, or not from this authority.
        """
        name = verified_name(certificate_pem, ca_pem, now)
        if x509.load_pem_x509_certificate(certificate_pem).public_key() != self._key.public_key():
            raise ProtocolError("the seed certified another key than ours")
        return Identity(name, _key_pem(self._key), certificate_pem, ca_pem)


def verified_name(certificate_pem: bytes, ca_pem: bytes, now: datetime.datetime) -> Name:
    """The name in a certificate, if this authority signed it and it is valid now.

    Raises:
        ProtocolError: it is malformed, of another authority, expired, or names no rank.
    """
    try:
        leaf = x509.load_pem_x509_certificate(certificate_pem)
        leaf.verify_directly_issued_by(x509.load_pem_x509_certificate(ca_pem))
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as error:
        raise ProtocolError("a certificate is not from this job's seed", cause=type(error).__name__) from None
    if not leaf.not_valid_before_utc - _SKEW <= now <= leaf.not_valid_after_utc + _SKEW:
        raise ProtocolError("a certificate is not valid now", cause=f"until {leaf.not_valid_after_utc}")
    if len(uris) != 1:
        raise ProtocolError("a certificate names no rank")
    return Name.parse(uris[0])


def fingerprint(certificate_der: bytes) -> bytes:
    """The SHA-256 of a certificate."""
    return hashlib.sha256(certificate_der).digest()


def _builder(
    issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime.datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _LIFE)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _requested_key(request_der: bytes) -> ec.EllipticCurvePublicKey:
    try:
        request = x509.load_der_x509_csr(request_der)
        key = request.public_key()
        is_signed = request.is_signature_valid
    except Exception as error:  # malformed bytes make cryptography raise a dozen types
        raise ProtocolError("the certificate request is malformed", cause=type(error).__name__) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ProtocolError("the certificate request has another kind of key than P-256")
    if not is_signed:
        raise ProtocolError("the certificate request is not signed by its key")
    return key


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
