"""The certificates by which the two ends of a run's own connections know each other.

They are made for one run, sign themselves, and are trusted by nobody else. Whoever connects knows
beforehand which certificate the other end must show. No clock is looked at: those of hosts differ,
and nothing outlives the run.
"""

from __future__ import annotations

import os
import ssl
import tempfile
from dataclasses import dataclass, field
from datetime import datetime

from sparkdl.errors import ClusterError

NAME = "sparkdl"
"""The host's name in all certificates. Hosts have several names; what counts is the key."""


@dataclass(frozen=True)
class Certificate:
    """A certificate and its private key, in PEM."""

    public: str
    key: str = field(repr=False)


def make_certificate() -> Certificate:
    """A new key of the curve P-256 and a certificate; ClusterError if the package is missing."""
    try:  # here, since only the process that opens a channel needs it
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        raise ClusterError(
            f"the package cryptography is missing ({error}); it makes the certificates of the "
            "channel between driver and workers: install it on the driver, and on the executors "
            "where the workers host the channel (spark.sparkdl.channel)"
        ) from error
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(2000, 1, 1))
        .not_valid_after(datetime(9999, 12, 31, 23, 59, 59))  # RFC 5280's "no end"
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = certificate.public_bytes(serialization.Encoding.PEM)
    return Certificate(public.decode(), private.decode())


def mutual_tls(shared: Certificate, *, is_server: bool) -> ssl.SSLContext:
    """TLS 1.3 between processes that have the same certificate and key, and nobody else."""
    return tls(shared, shared.public, is_server=is_server)


def tls(own: Certificate, other: str, *, is_server: bool) -> ssl.SSLContext:
    """TLS 1.3 of who shows ``own`` with those who show the certificate ``other``, and no others."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=other)
    if is_server:
        context.num_tickets = 0  # connections are kept, and nobody would read the tickets
    # Python reads a key from files only. This one is in memory, or where there are no such files
    # readable by its owner alone, and goes at once.
    if hasattr(os, "memfd_create"):
        with open(os.memfd_create("sparkdl-key"), "w") as file:  # noqa: PTH123
            file.write(own.public + own.key)
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        return context
    with tempfile.NamedTemporaryFile("w", prefix="sparkdl-", suffix=".pem") as file:
        file.write(own.public + own.key)
        file.flush()
        context.load_cert_chain(file.name)
    return context
