"""A seal: text that only processes with a secret can read or make, kept where others read and write."""

from __future__ import annotations

import hmac
import secrets
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["seal", "unseal"]

_NONCE_BYTES: Final = 12


def seal(text: str, secret: bytes) -> str:
    """Encrypt and authenticate a text."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return (nonce + _cipher(secret).encrypt(nonce, text.encode(), None)).hex()


def unseal(text: str, secret: bytes) -> str:
    """The text again.

    Raises:
        ValueError: it was altered, or sealed with another secret.
    """
    sealed = bytes.fromhex(text)
    try:
        return _cipher(secret).decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None).decode()
    except InvalidTag:
        raise ValueError("sealed with another secret, or altered") from None


def _cipher(secret: bytes) -> AESGCM:
    return AESGCM(hmac.digest(secret, b"unisono seal 1", "sha256"))
