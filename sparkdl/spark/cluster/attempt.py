"""What follows from what is known of a gang's end: is it good, shall it start again, or give up?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdl import errors
from sparkdl.errors import CollectiveError, CommunicationError, SparkDLError, WorkerError
from sparkdl.spark.session.failures import LOST, raise_unless_loss, told_by

if TYPE_CHECKING:
    from sparkdl.spark.cluster.supervisor import Attempt

_CONSEQUENCES = (CommunicationError.__name__, CollectiveError.__name__)
"""What the peers of a rank report that fell away."""


def verdict(attempt: Attempt) -> str | None:
    """None if the gang succeeded, else why it must start again.

    Raises:
        WorkerError, SparkDLError: when starting again would not help.
    """
    if attempt.spark_error is not None and not attempt.cancelled:
        # Workers never raise into Spark, so one was lost. What its peers reported, whatever
        # its type, is a consequence; a mistake of the user's would come again.
        raise_unless_loss(attempt.spark_error)
        return f"{LOST} ({told_by(attempt.spark_error)})"
    for failure in attempt.failures:
        if failure["kind"] == "user":
            raise WorkerError(
                failure["rank"], failure["type"], failure["message"], failure["traceback"]
            )
        if failure["kind"] == "sparkdl":
            raise _own_error(failure)
    if attempt.failures:
        _raise_if_calls_differ(attempt)
        # Peers of a lost rank are often heard before the one that tells why.
        causes = [f for f in attempt.failures if f["type"] not in _CONSEQUENCES]
        first = (causes or attempt.failures)[0]
        return f"rank {first['rank']} failed with {first['type']}: {first['message']}"
    return None


def _raise_if_calls_differ(attempt: Attempt) -> None:
    """Tell a rank that nobody answers any more from one whose peers were lost.

    Raises:
        WorkerError: the function called a collective on some ranks while others had come to their
            end well, which it would do again.
    """
    ended = sorted(attempt.ended_well())
    is_all = len(ended) + len({f["rank"] for f in attempt.failures}) == attempt.world_size
    if not ended or not is_all:
        return
    if all(failure["type"] == CollectiveError.__name__ for failure in attempt.failures):
        first = attempt.failures[0]
        raise WorkerError(
            first["rank"],
            first["type"],
            f"rank {', '.join(map(str, ended))} had come to its end while this one was in a "
            "collective; every rank must make the same calls of torch.distributed in the same "
            f"order ({first['message']})",
            first["traceback"],
        )


def _own_error(failure: Mapping[str, Any]) -> SparkDLError:
    kind = getattr(errors, failure["type"], None)
    if not (isinstance(kind, type) and issubclass(kind, SparkDLError)) or kind is WorkerError:
        return WorkerError(
            failure["rank"], failure["type"], failure["message"], failure["traceback"]
        )
    error: SparkDLError = kind(failure["message"])
    return error
