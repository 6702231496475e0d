"""A certificate request that may already have been answered, with its key, on disk.

The answer to a join or a renewal can be lost on its way. The control plane then answers the same
request again, but not another one; and an ECDSA signature differs each time it is made. So key *and*
request are written before anything is sent, used for every attempt, and removed with success.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.files import make_private_directory, read_private, write_atomic
from shared.identity import decode_private_key, encode_private_key, make_csr, make_key, parse_csr_pem

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric import ec

    from shared.identity import CertificateRequest


def load_or_make_request(path: Path) -> tuple[ec.EllipticCurvePrivateKey, CertificateRequest]:
    """Return the key and the request in `path`, made and stored first if there are none.

    Raises UnsafeFile, BadKeyFile, BadCsr, OSError.
    """
    try:
        pem = read_private(path)
    except FileNotFoundError:
        make_private_directory(path.parent)
        key = make_key()
        csr = make_csr(key)
        write_atomic(path, encode_private_key(key) + csr.pem.encode())
        return key, csr
    return decode_private_key(pem), parse_csr_pem(pem.decode())


def forget_request(path: Path) -> None:
    """Its answer is stored; the next request is another one. Raises OSError."""
    path.unlink(missing_ok=True)
