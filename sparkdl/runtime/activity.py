"""The activity of the present thread, in words, for whoever shows it.

Code that waits says so with `doing`. It does not know who shows that, if anybody does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Show = Callable[[str, str | None], None]
"""Is given what is done, and a detail of it; see `doing`."""

STOPPING = "stopping"
"""Activity while work is ended before its end, which views show also in training."""
FOR_SLOTS = "for slots"
"""In what is done, or its detail, where nothing goes on until slots are free."""

_show: ContextVar[Show | None] = ContextVar("sparkdl_activity", default=None)


def doing(what: str, detail: str | None = None) -> None:
    """Say what this thread does or waits for now, such as ``waiting for slots``; empty: nothing.

    ``detail`` is what may change while it lasts, such as ``2 of 4 are there``; None: how many of
    Spark's tasks are done.
    """
    show = _show.get()
    if show is not None:
        show(what, detail)


def is_shown() -> bool:
    """True if somebody shows what this thread does."""
    return _show.get() is not None


@contextlib.contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """In the block, have ``show`` called with what this thread does."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)
