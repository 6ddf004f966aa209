"""The credentials that a seed would give to the ranks of a world, for tests of links with TLS."""

from __future__ import annotations

import datetime
import functools

from unisono.backends.native.card import Credentials
from unisono.bootstrap.identity import Authority, Name, WorkerKey

JOB = "0123456789abcdef" * 2
INCARNATION = 3


class Issuer:
    """A certificate authority, and the certificates of its ranks, which all have the same incarnation."""

    def __init__(self, size: int, job: str = JOB) -> None:
        self.job = job
        self.now = datetime.datetime.now(datetime.UTC)
        self.authority = Authority(job, self.now)
        self.names = [Name(job, rank, INCARNATION).uri for rank in range(size)]

    def credentials(
        self, rank: int, *, incarnation: int = INCARNATION, age: datetime.timedelta = datetime.timedelta()
    ) -> Credentials:
        """A new key and a certificate for a rank."""
        key = WorkerKey()
        when = self.now - age
        certificate = self.authority.certify(key.request(), rank, incarnation, when)
        mine = key.identity(certificate, self.authority.certificate_pem, when)
        return Credentials(self.names, mine.key_pem, mine.certificate_pem, mine.ca_pem)


def unfit_credentials(issuer: Issuer) -> list[Credentials]:
    """What rank 0 must not accept as its own: of another rank, mixed, for too few ranks, without a key."""
    mine, theirs = issuer.credentials(0), issuer.credentials(1)
    return [
        theirs,
        Credentials(issuer.names, mine.key_pem, theirs.certificate_pem, mine.authority_pem),
        Credentials(issuer.names[:1], mine.key_pem, mine.certificate_pem, mine.authority_pem),
        Credentials(issuer.names, b"no key", mine.certificate_pem, mine.authority_pem),
    ]


@functools.cache
def credentials(size: int) -> list[Credentials]:
    """Credentials for every rank of a world; all worlds of one size share them."""
    issuer = Issuer(size)
    return [issuer.credentials(rank) for rank in range(size)]
