"""The choice of windows in which rows are mixed that do not fit into memory.

Decided once, on the driver, from what the executors have measured while spooling. The plan and
every checkpoint hold the decision: a run that goes on elsewhere reads its rows in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sparkdl.errors import CheckpointError

MEMORY_SHARE = 0.5
"""Part of a host's free memory that spools may take to be mixed as a whole: page cache."""
GROUP_BYTES = 8 << 20
"""Largest row group: disks read pieces of this size at their full speed."""
_GROUPS_TOGETHER = 32
"""Row groups of a window, if these are not of the largest size."""
_LEAST_WINDOW, _LARGEST_WINDOW = 16 << 20, 256 << 20
_WINDOW_SHARE = 8
"""A window takes this part of the memory for a shard, within these limits, unless the user says."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows for mixing rows that do not fit into memory together; see `data.shuffle`."""

    group_rows: int
    """Neighbouring rows that are read in one piece."""
    groups_together: int
    """Row groups whose rows are mixed."""

    @property
    def num_rows(self) -> int:
        """Rows of a window."""
        return self.group_rows * self.groups_together


@dataclass(frozen=True, kw_only=True)
class HostLoad:
    """The spools that a host has to hold, and the memory for them."""

    num_shards: int
    num_bytes: int
    """Bytes of all its spools."""
    memory_bytes: int
    """Memory that is left for them and the workers."""


def choose_windows(
    hosts: Sequence[HostLoad],
    *,
    bytes_by_shard: Sequence[int],
    row_bytes: int,
    window_bytes: int | None,
) -> Windows | None:
    """Choose whether and in which windows to mix rows.

    Args:
        hosts: where the shards lie.
        bytes_by_shard: size of each shard's rows.
        row_bytes: mean size of a row, at least 1.
        window_bytes: the user's wish for the size of a window; None: windows only if the rows of
            a host take more than `MEMORY_SHARE` of its memory, an eighth of a shard's part of it
            each, but 16 to 256 MiB.

    Returns:
        The windows; None: the rows of a shard are mixed as a whole.
    """
    if window_bytes is None:
        if all(host.num_bytes <= MEMORY_SHARE * host.memory_bytes for host in hosts):
            return None
        each = min(host.memory_bytes // host.num_shards for host in hosts) // _WINDOW_SHARE
        return make_windows(min(max(each, _LEAST_WINDOW), _LARGEST_WINDOW), row_bytes)
    if max(bytes_by_shard) <= window_bytes:
        return None
    return make_windows(window_bytes, row_bytes)


def make_windows(window_bytes: int, row_bytes: int) -> Windows:
    """Windows of about ``window_bytes``, of at least `_GROUPS_TOGETHER` row groups if they can."""
    window_rows = max(1, window_bytes // row_bytes)
    group_bytes = min(GROUP_BYTES, window_bytes // _GROUPS_TOGETHER)
    group_rows = max(1, group_bytes // row_bytes)
    return Windows(group_rows=group_rows, groups_together=max(1, window_rows // group_rows))


WINDOWS = "windows"
"""Key in a checkpoint's manifest under which it says how rows were mixed."""


def as_text(windows: Windows | None) -> str:
    """For the manifest of a checkpoint."""
    return "whole" if windows is None else f"{windows.group_rows}x{windows.groups_together}"


def from_text(text: str) -> Windows | None:
    """Inverse of `as_text`.

    Raises:
        CheckpointError: the text is nothing that `as_text` gives.
    """
    if text == "whole":
        return None
    match = re.fullmatch(r"([1-9]\d{0,17})x([1-9]\d{0,17})", text)
    if match is None:
        raise CheckpointError(f"a checkpoint's manifest says {text!r} of the order of rows")
    return Windows(group_rows=int(match[1]), groups_together=int(match[2]))
