"""The errors that sparkdl raises.

All are `SparkDLError`; those about what the user has given are also a ValueError. A `GangError`
stays inside the gang, and users see it only if it exhausts the restarts.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Sequence

from sparkdl.familiar_names import plain, same


class SparkDLError(Exception):
    """Base of every error that sparkdl raises on purpose."""

    def __str__(self) -> str:
        """The message; a terminal might obey what is not printable, which a file may hold."""
        return "".join(
            sign if sign.isprintable() or sign in "\n\t" else sign.encode("unicode_escape").decode()
            for sign in super().__str__()
        )


class ConfigError(SparkDLError, ValueError):
    """A parameter is wrong, or two of them contradict each other."""


class ConfigErrors(ConfigError):
    """Several parameters are wrong; the message has a line for each.

    Attributes:
        errors: each by itself.
    """

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__(all_of(map(str, errors)))
        self.errors = tuple(errors)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.errors,)


class ParamError(ConfigError, TypeError):
    """No Param has this name, or the value is of another type; Spark ML's own is a TypeError."""


class DataError(SparkDLError, ValueError):
    """The DataFrame cannot be trained on as it is; names column, count and an example row."""


class ClusterError(SparkDLError):
    """The cluster cannot run the gang as asked; the message names the remedy."""


class StorageError(SparkDLError):
    """A directory for checkpoints or models cannot be read or written."""


class CheckpointError(StorageError):
    """A checkpoint is incomplete, damaged, or belongs to another run."""


class WorkerError(SparkDLError):
    """The user's code failed on a worker.

    Attributes:
        rank: the rank that failed first.
        error_type: name of the original exception's class.
        worker_traceback: the traceback as that worker formatted it.
        host: name of the host on which it ran; empty if nobody has told.
    """

    def __init__(
        self, rank: int, error_type: str, message: str, worker_traceback: str, host: str = ""
    ) -> None:
        who = f"rank {rank}" + f" on host {host}" * bool(host)
        said = f"{error_type} on rank {rank}"
        if message:
            said = f"{error_type} on rank {rank}: {message}"
        super().__init__(f"{said}\n\nTraceback of {who}:\n{worker_traceback.rstrip()}")
        self._arguments = (rank, error_type, message, worker_traceback, host)
        self.rank = rank
        self.host = host
        self.error_type = error_type
        self.worker_traceback = worker_traceback

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._arguments


class TrainingDiverged(SparkDLError):
    """The loss became infinite or NaN; the message names the step and what to try."""


class TrainingFailed(SparkDLError):
    """Workers were lost more often than ``maxRestarts`` allows, or the Spark job was cancelled."""


class GangError(SparkDLError):
    """A failure that restarting the gang from the last checkpoint may heal."""


class CommunicationError(GangError):
    """A collective failed: a peer died, closed the connection, or did not answer in time."""


class CollectiveError(CommunicationError):
    """A collective that the user's own function called has failed."""


class CheckpointLost(GangError):
    """A checkpoint that the driver has read cannot be read here; there may be an older one."""


class ShardLost(GangError):
    """A spool file that the shard table promised is not on this host."""


@contextlib.contextmanager
def import_or(error: SparkDLError) -> Iterator[None]:
    """Raise ``error`` if the block imports a package that is not installed, or is broken."""
    try:
        yield
    except ModuleNotFoundError as cause:
        raise error from cause
    except ImportError as cause:
        raise type(error)(f"{error}; what is installed is broken: {cause}") from cause


def unknown(what: str, name: object, known: Iterable[str], more: str = "") -> ConfigError:
    """The error about a name that is none of those known, with the one that may be meant."""
    names = sorted(known)
    hint = did_you_mean(name, names) or ";"
    return ConfigError(f"unknown {what} {name!r}{hint} known: {', '.join(names)}{more}")


def unknown_names(start: str, names: Iterable[str], known: Iterable[str]) -> str:
    """One sentence about all names that are unknown, each with the one that may be meant.

    ``start`` is its beginning, such as ``Mesh has no argument``: the sentence goes on
    ``'shards'; did you mean 'shard'?``
    """
    wrong, known = list(names), list(known)
    hints = [did_you_mean(name, known) for name in wrong]
    all_known = "" if all(hints) else f"; known: {', '.join(known) or 'none'}"
    if len(wrong) == 1:
        return f"{start} {wrong[0]!r}{hints[0]}{all_known}"
    each = (f"{n!r}{f' ({h[2:]})' if h else ''}" for n, h in zip(wrong, hints, strict=True))
    return f"{start}s {', '.join(each)}{all_known}"


class Problems:
    """Collects what is wrong, so that users learn of all of it at once."""

    def __init__(self) -> None:
        self.errors: list[ConfigError] = []

    def add(self, message: str) -> None:
        """Take note of a problem."""
        self.errors.append(ConfigError(message))

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Take note of the ConfigError that ends the block, if one does."""
        try:
            yield
        except ConfigErrors as several:
            self.errors += several.errors
        except ConfigError as error:
            self.errors.append(error)

    def raise_all(self) -> None:
        """Raise the only error, or several as one; nothing if there are none."""
        found = list({str(error): error for error in self.errors}.values())
        if found:
            raise found[0] if len(found) == 1 else ConfigErrors(found)


def all_of(problems: Iterable[str]) -> str:
    """Several problems as one message, each in a line of its own."""
    return "\n".join(problems)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``; did you mean 'x'?``, or nothing where `meant` finds no name."""
    found = meant(name, known)
    return "" if found is None else f"; did you mean {found!r}?"


def meant(name: object, known: Iterable[str]) -> str | None:
    """The known name that is like another, or has it as its initials; None: there is none.

    First comes one that is the same but for case and underscores, or that other packages call so;
    see `familiar_names`.
    """
    by_plain: dict[str, str] = {}
    for one in known:
        by_plain.setdefault(plain(one), one)
    found = same(name, by_plain)
    if found is not None:
        return found
    close = difflib.get_close_matches(plain(name), list(by_plain), n=1, cutoff=0.65)
    names = [by_plain[one] for one in close]
    names += [one for one in by_plain.values() if len(one) > 1 and _initials(one) == name]
    return names[0] if names else None


def _initials(name: str) -> str:
    """Such as ``lr`` of ``learningRate`` or ``learning_rate``."""
    pairs = zip(f"_{name}", name, strict=False)
    return "".join(c for before, c in pairs if before == "_" or c.isupper()).lower()
