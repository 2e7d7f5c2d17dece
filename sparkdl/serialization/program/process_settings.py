"""Settings of torch and numpy that hold for a whole process, as a program has changed them."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_USUAL_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}


def changed_settings() -> dict[str, Any]:
    """Settings of this process that are not what they are when it begins, by name."""
    return {name: now for name, (now, usual, _) in _settings().items() if now != usual}


def set_settings(changed: Mapping[str, Any]) -> dict[str, Any]:
    """Let this process have other settings; return what they were."""
    for package in {"numpy" if name == "numpy errors" else "torch" for name in changed}:
        importlib.import_module(package)  # which has its settings only then
    before = {}
    for name, value in changed.items():
        before[name], _, give = _settings()[name]
        give(value)
    return before


_before: list[dict[str, Any]] = []
"""Settings that `take_settings` has changed in this process, as they were: none, or one."""


def take_settings(changed: Mapping[str, Any]) -> None:
    """Let this process have those of a program until `give_settings_back`."""
    give_settings_back()
    _before.append(set_settings(changed))


def give_settings_back() -> None:
    """Let this process have the settings that it had before a program."""
    while _before:
        set_settings(_before.pop())


def present_settings() -> dict[str, Any]:
    """All settings of this process as they are."""
    return {name: now for name, (now, _, _) in _settings().items()}


@contextlib.contextmanager
def kept_settings() -> Iterator[None]:
    """Let this process have its own settings after the block, whatever changes them there."""
    before = present_settings()
    try:
        yield
    finally:
        for name, (now, usual, give) in _settings().items():
            if now != (was := before.get(name, usual)):
                give(was)
        give_settings_back()  # the program's may have come before the block


def _settings() -> dict[str, tuple[Any, Any, Callable[[Any], Any]]]:
    """Name -> what it is now, what it is at first, what sets it; of packages that are imported."""
    found: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {}
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        enabled = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        found["deterministic algorithms"] = (
            (enabled, warns), (False, False),
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        )  # fmt: skip
        found["float32 matmul precision"] = (
            torch.get_float32_matmul_precision(), "highest", torch.set_float32_matmul_precision
        )  # fmt: skip
        cudnn = torch.backends.cudnn
        for name, usual in (("benchmark", False), ("deterministic", False), ("enabled", True)):
            found[f"cudnn.{name}"] = (
                getattr(cudnn, name), usual, functools.partial(setattr, cudnn, name)
            )  # fmt: skip
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy errors"] = (
            numpy.geterr(), _USUAL_ERRORS, lambda value: numpy.seterr(**value)
        )  # fmt: skip
    return found
