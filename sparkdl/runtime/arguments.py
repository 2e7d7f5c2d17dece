"""The arguments of public functions: plain values, and a sentence about those refused."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, TypeVar, cast

from sparkdl.errors import ParamError, all_of, unknown_names
from sparkdl.familiar_names import plain, same

F = TypeVar("F", bound=Callable[..., Any])


def plain_value(value: Any) -> Any:
    """A number of numpy as Python's, and a `pathlib` path as a text, also within lists and dicts.

    All else is returned as it is.
    """
    kind = type(value)
    if kind in (list, tuple):
        items = [plain_value(item) for item in value]
        is_same = all(a is b for a, b in zip(items, value, strict=True))
        return value if is_same else kind(items)
    if kind is dict:
        found = {plain_value(key): plain_value(item) for key, item in value.items()}
        is_same = all(a is b for pair in zip(found.items(), value.items(), strict=True)
                      for a, b in zip(*pair, strict=True))  # fmt: skip
        return value if is_same else found
    if isinstance(value, PurePath):
        return str(value)
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic):
        return value
    for theirs, ours in ((numpy.bool_, bool), (numpy.integer, int), (numpy.floating, float)):
        if isinstance(value, theirs):
            return ours(value)
    return str(value) if isinstance(value, str) else value


def plain_arguments(function: F) -> F:
    """Give a function the `plain_value` of each argument."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = {name: plain_value(value) for name, value in kwargs.items()}
        return function(*map(plain_value, args), **given)

    return cast(F, call)


def takes(function: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = {}) -> bool:  # noqa: B006
    """True if a function or class can be called with the arguments, as far as Python knows."""
    try:
        # Of a function that wraps another one, its own.
        inspect.signature(function, follow_wrapped=False).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # of one written in C, which has no signature
        pass
    return True


def refusal(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> ParamError | None:
    """The error about arguments that a function does not take, or lacks; None: it takes them."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    name, me = getattr(function, "__qualname__", repr(function)), None
    if parameters and parameters[0].name == "self" and args:
        me, args, parameters = args[0], args[1:], parameters[1:]
        name = f"{type(me).__name__}.{function.__name__}".removesuffix(".__init__")
    problems = []
    names = [one.name for one in parameters if one.kind not in _VARIADIC]
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        wrong = [one for one in kwargs if one not in names]
        if wrong:
            problems.append(
                unknown_names(f"{name} has no argument", wrong, names)
                + _as_params(me, wrong)
                + _OVERWRITES * (function.__name__ == "save")
            )
    positional = [one.name for one in parameters if one.kind in _POSITIONAL]
    takes_any_number = any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters)
    if len(args) > len(positional) and not takes_any_number:
        others = names[len(positional) :]
        form = ", ".join([*(f"{one}=..." for one in others[:3]), *["..."] * (len(others) > 3)])
        number = len(positional)
        problems.append(
            f"{name} takes {number or 'no'} argument{'s' * (number != 1)} without a name, and "
            f"{len(args)} {'is' if len(args) == 1 else 'are'} given; "
            + (f"name them: {name}({form})" if form else f"known: {', '.join(names) or 'none'}")
        )
    given = {*positional[: len(args)], *kwargs}
    needed = [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind not in _VARIADIC and one.name not in given
    ]
    if needed and not problems:
        problems.append(f"{name} needs the argument {needed[0]!r}: {name}({needed[0]}=...)")
    twice = [one for one in positional[: len(args)] if one in kwargs]
    if twice:
        problems.append(f"{name} got the argument {twice[0]!r} twice; leave one out")
    return ParamError(all_of(problems)) if problems else None


_OVERWRITES = "; write().overwrite().save(path) replaces what is there"
_VARIADIC = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _as_params(me: Any, names: list[str]) -> str:
    """Say how to set those of the names that are Params of the object whose method was called."""
    params = {plain(name): name for name in getattr(type(me), "_options", ())}
    found = [one for one in (same(name, params) for name in names) if one is not None]
    setters = ", ".join(f"set{one[0].upper()}{one[1:]}(...)" for one in found)
    return f"; set Params of {type(me).__name__} by {setters}" if found else ""
