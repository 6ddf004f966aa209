"""The quic backend: the native engine with QUIC links between all ranks, on one host, too."""

from __future__ import annotations

from typing import Final

from unisono import _native
from unisono.backends.registry import BackendInfo
from unisono.config import Config
from unisono.errors import UsageError
from unisono.messaging.backend import Capabilities

__all__ = ["DESCRIPTION", "MISSING", "PACKAGES"]

# What a build from source needs to have QUIC links.
PACKAGES: Final = (
    "apt install libngtcp2-dev libngtcp2-crypto-gnutls-dev libgnutls28-dev pkg-config (Debian, Ubuntu) or "
    "dnf install ngtcp2-devel ngtcp2-crypto-gnutls-devel gnutls-devel pkgconf (Fedora), "
    "then install unisono again"
)
MISSING: Final = (
    "this build of unisono has no QUIC links: ngtcp2 or GnuTLS was not there when it was compiled"
)


def _adapted(config: Config) -> Config:
    """QUIC between all ranks.

    Raises:
        UsageError: the settings choose other links.
    """
    if config.links == "tcp":
        raise UsageError(
            'backend="quic" and links="tcp" contradict each other',
            next_step='remove links="tcp", or choose backend="native"',
        )
    return config.changed(links="quic", shm=False)


DESCRIPTION = BackendInfo(
    name="quic",
    summary="ranks as processes, over QUIC: one UDP port per rank, always encrypted",
    check=lambda: None if _native.has_quic() else MISSING,
    install="part of unisono" if _native.has_quic() else PACKAGES,
    capabilities=Capabilities("quic", run_plan=True),
    wrap=lambda native: native,
    adapt=_adapted,
)
