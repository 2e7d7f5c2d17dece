"""Settings that hold for a whole process, as a program has changed them."""

from __future__ import annotations

import contextlib
import importlib
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Setting:
    package: str
    """It has it; where nothing has imported it, nothing has changed the setting."""
    usual: Any
    """What it is when a process begins."""
    read: Callable[[Any], Any]
    write: Callable[[Any, Any], object]
    """Both get the package."""
    travels: bool = True
    """True if workers get it as the program has it."""

    @classmethod
    def of_attribute(cls, usual: Any, path: str) -> _Setting:
        """That of torch's below ``torch.backends``."""
        owner, _, name = f"backends.{path}".rpartition(".")

        def write(torch: Any, value: Any) -> None:
            setattr(operator.attrgetter(owner)(torch), name, value)

        return cls("torch", usual, operator.attrgetter(f"{owner}.{name}"), write)


def _set_environment(module: Any, values: dict[str, str]) -> None:
    for name in module.environ.keys() - values.keys():
        del module.environ[name]
    module.environ.update(values)


def _set_decimals(decimal: Any, value: tuple[int, str]) -> None:
    context = decimal.getcontext()
    context.prec, context.rounding = value


_TINY = 2.0**-1060
"""A number whose half is zero where the processor flushes such."""
_ABSENT = object()
_USUAL_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
_SETTINGS = {
    "deterministic algorithms": _Setting(
        "torch", (False, False),
        lambda torch: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "filled memory": _Setting(
        "torch", True,
        lambda torch: torch.utils.deterministic.fill_uninitialized_memory,
        lambda torch, value: setattr(
            torch.utils.deterministic, "fill_uninitialized_memory", value
        ),
    ),
    "anomaly detection": _Setting(
        "torch", (False, True),
        lambda torch: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda torch, value: torch.autograd.set_detect_anomaly(*value),
    ),
    "flushed denormals": _Setting(
        "torch", False,
        lambda torch: _TINY * 0.5 == 0,
        lambda torch, value: torch.set_flush_denormal(value),
    ),
    # The older names of precisions first: they set some of the others.
    "float32 matmul precision": _Setting(
        "torch", "highest",
        lambda torch: torch.get_float32_matmul_precision(),
        lambda torch, value: torch.set_float32_matmul_precision(value),
    ),
    **{
        path: _Setting.of_attribute(usual, path)
        for usual, paths in (
            (True, ("cudnn.allow_tf32", "cudnn.enabled", "mkldnn.enabled")),
            (False, ("cudnn.benchmark", "cudnn.deterministic", "mkldnn.deterministic")),
            ("none", ("fp32_precision", "cuda.matmul.fp32_precision", "cudnn.fp32_precision")),
            ("tf32", ("cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision")),
            ("none", ("mkldnn.fp32_precision", "mkldnn.matmul.fp32_precision")),
            ("none", ("mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision")),
        )
        for path in paths
    },
    "numpy errors": _Setting(
        "numpy", _USUAL_ERRORS,
        lambda numpy: numpy.geterr(), lambda numpy, value: numpy.seterr(**value),
    ),
    "default dtype": _Setting(
        "torch", None, lambda torch: torch.get_default_dtype(),
        lambda torch, value: torch.set_default_dtype(value), travels=False,
    ),
    "gradients": _Setting(
        "torch", None, lambda torch: torch.is_grad_enabled(),
        lambda torch, value: torch.set_grad_enabled(value), travels=False,
    ),
    "numpy print options": _Setting(
        "numpy", None, lambda numpy: numpy.get_printoptions(),
        lambda numpy, value: numpy.set_printoptions(**value), travels=False,
    ),
    "decimal numbers": _Setting(
        "decimal", None, lambda decimal: (decimal.getcontext().prec, decimal.getcontext().rounding),
        _set_decimals, travels=False,
    ),
    "recursion limit": _Setting(
        "sys", None, lambda sys: sys.getrecursionlimit(),
        lambda sys, value: sys.setrecursionlimit(value), travels=False,
    ),
    "environment": _Setting(
        "os", None, lambda os: dict(os.environ), _set_environment, travels=False
    ),
}  # fmt: skip
"""By name, in the order in which they are set."""


def present_settings(*, travelling: bool = True) -> dict[str, Any]:
    """All settings of this process as they are, or those that workers get, by name."""
    names = [name for name, one in _SETTINGS.items() if one.travels or not travelling]
    found = {name: _read(name) for name in names}
    return {name: value for name, value in found.items() if value is not _ABSENT}


def changed_settings() -> dict[str, Any]:
    """Settings that workers get and that are not what they are when a process begins, by name."""
    present = present_settings()
    return {name: now for name, now in present.items() if now != _SETTINGS[name].usual}


def set_settings(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Let this process have other settings; return all that workers get, as they were."""
    for package in {_SETTINGS[name].package for name in wanted}:
        importlib.import_module(package)  # which has them only then
    before = present_settings() if wanted else {}
    for name, setting in _SETTINGS.items():  # one may be set by another
        if name in wanted and _read(name) != wanted[name]:
            setting.write(sys.modules[setting.package], wanted[name])
    return before


def _read(name: str) -> Any:
    """What a setting is; `_ABSENT` if it cannot be read."""
    package = sys.modules.get(_SETTINGS[name].package)
    # Torch refuses to give precisions by their older names where these do not fit the newer ones.
    with contextlib.suppress(AttributeError, RuntimeError):
        return _ABSENT if package is None else _SETTINGS[name].read(package)
    return _ABSENT


_before: list[dict[str, Any]] = []
"""Settings that `take_settings` has changed in this process, as they were: none, or one."""


def take_settings(changed: Mapping[str, Any]) -> None:
    """Let this process have those of a program until `give_settings_back`.

    ``changed`` are those that are not what they usually are; all others are.
    """
    give_settings_back()
    if changed:
        others = {name: one.usual for name, one in _SETTINGS.items() if one.travels}
        is_there = {name for name in others if _SETTINGS[name].package in sys.modules}
        _before.append(set_settings({name: others[name] for name in is_there} | {**changed}))


def give_settings_back() -> None:
    """Let this process have the settings that it had before a program."""
    while _before:
        set_settings(_before.pop())


@contextlib.contextmanager
def kept_settings() -> Iterator[None]:
    """Let this process have its own settings after the block, whatever changes them there."""
    before = present_settings(travelling=False)
    try:
        yield
    finally:
        now = present_settings(travelling=False)
        if now != before:  # which lacks those of packages that were not imported yet
            usual = {name: _SETTINGS[name].usual for name in now if _SETTINGS[name].travels}
            set_settings(usual | before)


@contextlib.contextmanager
def settings_of_task() -> Iterator[None]:
    """Let this process have its own settings after the block: Spark has it do other tasks next.

    Those of a program may have come before the block, with what the task is.
    """
    try:
        with warnings.catch_warnings(), kept_settings():
            yield
    finally:
        give_settings_back()
