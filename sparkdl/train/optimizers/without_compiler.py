"""Torch's optimizers without torch's compiler, whose import takes two seconds of a new process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType
from typing import Any

import torch

_MARK = "__dynamo_disable"
"""Attribute of a function that has what is called in its place."""
_COMPILER = "torch._dynamo"

_lock = threading.Lock()
_users = 0
"""How many are within `without_compiler`, in all threads."""
_undo: list[Callable[[], object]] = []


@contextmanager
def without_compiler(*, in_steps: bool = False) -> Iterator[None]:
    """Let torch make optimizers and tell their states without importing its compiler.

    An optimizer imports it to tell it that it shall not look into some functions
    (torch/_compile.py), and to have it cut a graph before and after each step (``_use_grad`` in
    torch/optim/optimizer.py). Neither does anything where no optimizer is compiled. A version of
    torch that does it otherwise imports its compiler as before.

    Args:
        in_steps: True if they step without it, too. For processes that look at no code meanwhile:
            torch's steps have another then.
    """
    global _users
    with _lock:
        _users += 1
        if _COMPILER not in sys.modules:
            _undo.extend(_marked())
            if in_steps:
                _undo.extend(_plain_steps())
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            while not _users and _undo:
                _undo.pop()()


def _marked() -> Iterator[Callable[[], object]]:
    """Mark functions as known to the compiler; yield what takes the mark away."""
    optimizer: Any = torch.optim.Optimizer
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        function = getattr(getattr(optimizer, name), "__wrapped__", None)
        if function is not None and not hasattr(function, _MARK):
            setattr(function, _MARK, function)
            yield partial(function.__dict__.pop, _MARK, None)


def _plain_steps() -> Iterator[Callable[[], object]]:
    """Give torch's steps the code below; yield what gives them their own again."""
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) else None
        while step is not None:
            code = getattr(step, "__code__", None)
            if isinstance(step, FunctionType) and code is not None and _cuts_graphs(code):
                step.__code__ = _PLAIN
                yield partial(setattr, step, "__code__", code)
                break
            step = getattr(step, "__wrapped__", None)


def _cuts_graphs(code: CodeType) -> bool:
    """True for torch's ``_use_grad``, in the form that is known."""
    names = {"_dynamo", "graph_break", "set_grad_enabled", "is_grad_enabled", "defaults"}
    return code.co_freevars == ("func",) and names <= set(code.co_names)


def _like_use_grad(func: Callable[..., Any]) -> FunctionType:
    """Torch's ``_use_grad_for_differentiable`` but for the compiler."""

    def _use_grad(*args: Any, **kwargs: Any) -> Any:
        before = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(args[0].defaults["differentiable"])
            return func(*args, **kwargs)
        finally:
            torch.set_grad_enabled(before)

    assert isinstance(_use_grad, FunctionType)
    return _use_grad


_PLAIN = _like_use_grad(print).__code__
