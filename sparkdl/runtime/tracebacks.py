"""Errors for users: their own lines and our sentence, without what lies in between.

A mistake in a module's ``forward`` passes through torch, this package, py4j and Spark before the
user sees it. The frames of these are left out, and causes that only repeat it in other words.
``SPARKDL_FULL_TRACEBACKS=1`` shows everything.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, TypeVar

from sparkdl.errors import SparkDLError
from sparkdl.runtime.arguments import refusal

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=BaseException)

_VARIABLE = "SPARKDL_FULL_TRACEBACKS"
_HIDDEN = (
    "sparkdl", "pyspark", "py4j", "grpc", "torch", "torchmetrics", "cloudpickle", "fsspec",
    "pyarrow",
)  # fmt: skip
"""Packages whose frames say nothing to users, besides Python's own."""
_MOST_LINES = 100
"""Most lines of a traceback at its beginning, and as many at its end."""
_STANDARD = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120


def plainly(function: Callable[P, R]) -> Callable[P, R]:
    """Let Ctrl-C, and what a public function raises on purpose, end in a short traceback.

    So do errors that Spark tells of the user's own functions on DataFrames. Arguments that the
    function does not take are a ParamError, which names those that may be meant.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            refused = None
            # Python refuses arguments before the function has a frame.
            if isinstance(error, TypeError) and error.__traceback__.tb_next is None:  # type: ignore[union-attr]
                refused = refusal(call, args, kwargs)
            if _shows_all() or not (refused or _explains_itself(error)):
                raise
            raised = refused or shortened(error)
        raise raised from raised.__cause__

    return call


def shortened(error: E) -> E:
    """An error of ours without a traceback; its cause is the user's own exception, if one is."""
    cause = error.__cause__
    if isinstance(error, KeyboardInterrupt) and isinstance(cause, SparkDLError):
        error.__cause__ = shortened(cause)  # what was told when it came
    else:
        error.__cause__ = _users_cause(error)
    error.__suppress_context__ = True
    return error.with_traceback(None)


def formatted(error: BaseException) -> str:
    """An exception with the frames of the user's code, or with all of them if there are none.

    Where a module is missing, it does not matter who has asked for it. Of hundreds of lines, such
    as those of a recursion, the middle is left out.
    """
    own = None if _shows_all() else _users_frames(error.__traceback__)
    if own is None and isinstance(error, ModuleNotFoundError) and not _shows_all():
        return "".join(traceback.format_exception_only(error))
    if own is None:
        found = traceback.format_exception(error)
    else:
        found = traceback.format_exception(type(error), error, own, chain=False)
    lines = "".join(found).splitlines(keepends=True)
    left_out = 0 if _shows_all() else len(lines) - 2 * _MOST_LINES
    if left_out > 0:
        lines[_MOST_LINES:-_MOST_LINES] = [
            f"  [{left_out} lines left out; {_VARIABLE}=1 shows all]\n"
        ]
    return "".join(lines)


def is_of_packages(error: BaseException) -> bool:
    """True if an exception passed through no code of the user's: packages alone raised it."""
    return error.__traceback__ is not None and _users_frames(error.__traceback__) is None


def passed_through(error: BaseException, package: str) -> bool:
    """True if an exception passed through code of a package, such as ``torch.distributed``."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    names = (f"{frame.f_globals.get('__name__')}." for frame in frames)
    return any(name.startswith(f"{package}.") for name in names)


def arose_in(error: BaseException, module: str) -> bool:
    """True if an exception arose in the code of a module, such as ``torch.cuda``."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == module


def users_line(error: BaseException) -> str:
    """Say where in the user's code an exception arose, if anywhere: its code and function."""
    own = _users_frames(error.__traceback__)
    if own is None:
        return ""
    *_, last = traceback.extract_tb(own)
    return f" in {last.line!r} ({last.name})" if last.line else f" in {last.name}"


def is_of_users(path: str) -> bool:
    """True if a file of code is neither Python's nor of a package that says nothing to users."""
    return not _is_hidden(path)


def _explains_itself(error: BaseException) -> bool:
    if isinstance(error, SparkDLError | KeyboardInterrupt):
        return True
    kind = type(error)  # of pyspark, which is not imported here
    return kind.__name__ == "PythonException" and kind.__module__.startswith("pyspark.errors")


def _shows_all() -> bool:
    return os.environ.get(_VARIABLE, "0") not in ("", "0")


def _users_cause(error: BaseException) -> BaseException | None:
    """The first exception below ``error`` that passed through the user's code, with that alone."""
    below, seen = _below(error), {id(error)}
    while below is not None and id(below) not in seen:  # chains may end in a circle
        seen.add(id(below))
        own = _users_frames(below.__traceback__)
        if own is not None and not isinstance(below, SparkDLError):
            below.__cause__, below.__suppress_context__ = None, True
            return below.with_traceback(own)
        below = _below(below)
    return None


def _below(error: BaseException) -> BaseException | None:
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _users_frames(found: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of packages, from the first frame that is the user's."""
    own: TracebackType | None = None
    links = []
    while found is not None:
        links.append(found)
        found = found.tb_next
    for each in reversed(links):
        if not _is_hidden(each.tb_frame.f_code.co_filename):
            own = TracebackType(own, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return own


def _is_hidden(path: str) -> bool:
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _HIDDEN]
    folders = tuple(f"{Path(file).parent}{os.sep}" for file in files if file is not None)
    is_standard = path.startswith(_STANDARD) and "-packages" not in path
    return is_standard or path.startswith(("<frozen", *folders))
