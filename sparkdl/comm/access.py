"""Access rights on a channel: secrets of attempts and ranks, and what belongs to which rank.

Of the present attempt only, each rank is the process that has called first under its number, and it
alone changes what carries that number; rank 0 also what carries no number, and the driver's own
files nobody. All ranks of a gang get the same bytes from Spark, so no secret in them can belong to
one rank: each process makes a secret of its own, and shows it with every call.
"""

from __future__ import annotations

import hmac
import re
import secrets
import threading
from dataclasses import dataclass, field, replace

from sparkdl.comm.certificates import Certificate
from sparkdl.errors import SparkDLError
from sparkdl.storage.storage import checked

OF_DRIVER = "driver"
"""Folder of the channel's files that only the driver writes."""
SHARED_KEYS = "store/"
"""Start of the keys that every rank writes: torch's, which names them itself."""
READ_KEYS = "checkpoint/"
"""Start of the keys that ranks write for rank 0, which removes them when it has read them."""
_NUMBERED = re.compile(r"(?:rank|value)-(\d+)\.\w+")
"""Files that belong to a rank: ``rank-00003.safetensors`` and ``value-3.pkl``."""


class Unauthenticated(SparkDLError):
    """Nobody of the present attempt has made a call."""


class Unauthorized(SparkDLError):
    """The caller may not do what it asks for."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address of a channel, the certificates of both sides, and the secrets that open it."""

    host: str
    port: int
    server_certificate: str
    """The server's, the only one that a client accepts. Its key never leaves the server."""
    worker: Certificate
    """Certificate that all workers of the run show."""
    secret: str = field(repr=False)
    """That of one attempt."""
    rank: int | None = None
    """Rank of the caller; None: no rank in particular, which may write nothing."""
    rank_secret: str = field(default="", repr=False)

    def of_rank(self, rank: int) -> Address:
        """For the process that is ``rank`` in this attempt; called once in it."""
        return replace(self, rank=rank, rank_secret=secrets.token_hex(16))

    def shown(self) -> str:
        """Return the credentials that every call shows, and `Access.caller` reads."""
        words = [self.secret]
        if self.rank is not None:
            words += [str(self.rank), self.rank_secret]
        return "Bearer " + " ".join(words)


@dataclass(frozen=True)
class Caller:
    """The sender of a call, by its attempt and rank."""

    attempt: int
    rank: int | None


class Access:
    """The secrets of the present attempt. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.begin(0)

    def begin(self, attempt: int) -> None:
        """Begin an attempt: what belonged to earlier ones opens nothing any more."""
        with self._lock:
            self.attempt = attempt
            self.secret = secrets.token_hex(32)
            self._ranks: dict[int, str] = {}

    def caller(self, shown: str) -> Caller:
        """Return the caller who shows this; Unauthenticated if nobody of this attempt does."""
        scheme, secret, number, rank_secret, *_ = [*shown.split(" "), "", "", ""]
        with self._lock:
            if scheme != "Bearer" or not _equal(secret, self.secret):
                raise Unauthenticated("wrong or missing secret, or that of an attempt that is over")
            if not number:
                return Caller(self.attempt, None)
            rank = int(number)
            if not _equal(self._ranks.setdefault(rank, rank_secret), rank_secret):
                raise Unauthenticated(f"another process is rank {rank} of this attempt")
            return Caller(self.attempt, rank)

    def require_present(self, caller: Caller) -> None:
        """Raise Unauthenticated if the attempt of a call that takes long is over."""
        if caller.attempt != self.attempt:
            raise Unauthenticated(f"attempt {caller.attempt} is over")

    def require_report(self, caller: Caller, attempt: int, rank: int) -> None:
        """Allow reports of a rank to itself, and where no process is that rank, to all.

        Tasks of rounds are no ranks: Spark may run several copies of one at the same time. Like all
        checks that follow, this one raises `Unauthorized`.
        """
        with self._lock:
            is_own = caller.rank == rank or (caller.rank is None and rank not in self._ranks)
        if attempt != caller.attempt or not is_own:
            raise Unauthorized(
                f"{_name(caller)} may not report as rank {rank} of attempt {attempt}"
            )


def require_key(caller: Caller, key: str, *, removes: bool = False) -> None:
    """Allow a rank to change a key of its own, or to remove it."""
    is_own = key.startswith(SHARED_KEYS) or key.rpartition("/")[2] == str(caller.rank)
    is_read = removes and key.startswith(READ_KEYS) and caller.rank == 0
    if caller.rank is None or not (is_own or is_read):
        raise Unauthorized(f"{_name(caller)} may not change the key {key!r}")


def require_file(caller: Caller, path: str) -> None:
    """Allow a rank to write or to remove a file or folder of its own, inside the storage."""
    parts = checked(path).split("/")
    numbered = _NUMBERED.fullmatch(parts[-1])
    owner = int(numbered[1]) if numbered else 0
    if parts == [""] or parts[0] == OF_DRIVER or caller.rank != owner:
        raise Unauthorized(f"{_name(caller)} may not change the file {path!r}")


def _name(caller: Caller) -> str:
    return "a task" if caller.rank is None else f"rank {caller.rank}"


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
