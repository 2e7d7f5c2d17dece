"""The space of a search: names of Params and their values, and the estimators made of these."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from torch import nn

from sparkdl.config import require
from sparkdl.errors import ConfigError, did_you_mean
from sparkdl.spark.run.run_facts import shown
from sparkdl.sync.population.ranges import Around, Range

if TYPE_CHECKING:
    import optuna

    from sparkdl.estimator import _TorchEstimator

Domain: TypeAlias = Range | Around | Sequence[Any]
Values: TypeAlias = Mapping[str, Any]
"""Param, or a part of one such as ``optimizerParams.momentum`` -> its value."""
Space: TypeAlias = Mapping[str, Domain] | Callable[["optuna.Trial"], Values]
"""The values of each Param; or a function that chooses them by the methods of a trial."""

E = TypeVar("E", bound="_TorchEstimator")

_STORED = (bool, int, float, str)
"""Types that Optuna stores as they are, besides None."""


def with_values(estimator: E, values: Values) -> E:
    """A copy of the estimator that has these values; raises ConfigError where it cannot."""
    changed: dict[str, Any] = {}
    for key in sorted(values, key=lambda key: key.count(".")):  # a Param before its parts
        name, *parts = key.split(".")
        if not estimator.hasParam(name):
            names = [param.name for param in estimator.params]
            raise ConfigError(
                f"{type(estimator).__name__} has no Param {name!r}{_hint(name, names)}"
            )
        value = values[key]
        if parts:
            value = _put(changed.get(name, estimator.value(name)), parts, value, within=name)
        changed[name] = value
    try:
        return estimator.copy()._set(**changed)
    except TypeError as error:
        raise ConfigError(str(error)) from error


def own_value(estimator: _TorchEstimator, key: str) -> Any:
    """Return the estimator's value for a Param, or a part of one; None: nothing."""
    name, *parts = key.split(".")
    value = estimator.value(name)
    for part in parts:
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value


def _put(owner: Any, path: Sequence[str], value: Any, *, within: str) -> Any:
    """``owner`` with another value at the path: an entry, a field or an argument."""
    head, *rest = path
    inner = f"{within}.{head}"
    if isinstance(owner, Mapping):
        known = owner.get(head, {})
        return {**owner, head: _put(known, rest, value, within=inner) if rest else value}
    if dataclasses.is_dataclass(owner) and not isinstance(owner, type):
        names = [item.name for item in dataclasses.fields(owner)]
        _require_known(head, names, f"{within} is {owner!r}, which has no field")
        new = _put(getattr(owner, head), rest, value, within=inner) if rest else value
        return dataclasses.replace(owner, **{head: new})
    if within == "module" and callable(owner) and not isinstance(owner, nn.Module) and not rest:
        return _with_argument(owner, head, value)
    remedy = "give values for the whole Param"
    if within == "module":
        remedy = "pass the function or class that makes it, whose arguments can be varied"
    raise ConfigError(f"{inner} cannot be varied, since {within} is {shown(owner)}; {remedy}")


def _with_argument(factory: Callable[..., Any], name: str, value: Any) -> Any:
    """The function or class with one of its arguments."""
    arguments = inspect.signature(factory).parameters
    if not any(item.kind is item.VAR_KEYWORD for item in arguments.values()):
        _require_known(name, arguments, f"module is {shown(factory)}, which has no argument")
    return functools.partial(factory, **{name: value})


def _require_known(name: str, known: Iterable[str], what: str) -> None:
    if name not in (names := list(known)):
        raise ConfigError(f"{what} {name!r}{_hint(name, names)}")


def _hint(name: str, known: Sequence[str]) -> str:
    return did_you_mean(name, known) or f"; known: {', '.join(known)}"


class Chooser:
    """Draws the values of a trial from a space."""

    def __init__(self, space: Space, estimator: _TorchEstimator | None = None) -> None:
        """``estimator`` has the values that an `Around` goes by; raises ConfigError."""
        rule = "space must be a dict from Params to their values, or a function that gets a trial"
        require(isinstance(space, Mapping) or callable(space), rule, space)
        if not space:
            raise ConfigError("the space is empty; name at least one Param and its values")
        self._domains: dict[str, Range | Sequence[Any]] = {}
        self._function: Callable[[Any], Values] | None = None
        if isinstance(space, Mapping):
            self._domains = {k: _checked(k, domain, estimator) for k, domain in space.items()}
        else:
            self._function = space

    def __call__(self, trial: optuna.trial.BaseTrial) -> Values:
        """The values of a trial; of a finished one the same as before."""
        if self._function is None:
            return {key: _suggested(trial, key, domain) for key, domain in self._domains.items()}
        values = self._function(trial)
        if not isinstance(values, Mapping):
            raise ConfigError(
                "the function that is the space must return a dict from Params to values; it "
                f"returned {values!r}"
            )
        return dict(values)

    def described(self) -> Any:
        """Return what must stay the same for trials to be comparable, as JSON holds it."""
        if self._function is not None:
            return "a function"
        return {
            key: dataclasses.asdict(domain) if isinstance(domain, Range) else _labels(domain)
            for key, domain in self._domains.items()
        }


def _checked(key: str, domain: Any, estimator: _TorchEstimator | None) -> Range | Sequence[Any]:
    if isinstance(domain, Around):
        return domain.range_of(None if estimator is None else own_value(estimator, key), key)
    if isinstance(domain, Range):
        return domain
    is_list = isinstance(domain, Sequence) and not isinstance(domain, str) and len(domain) > 0
    rule = "must be a sparkdl.Range, a sparkdl.Around or a list of values"
    require(is_list, f"the values of {key!r} {rule}", domain)
    differ = len(set(_labels(domain))) == len(domain)
    require(differ, f"the values of {key!r} must differ, also as text", domain)
    values: Sequence[Any] = domain
    return values


def _suggested(trial: optuna.trial.BaseTrial, key: str, domain: Any) -> Any:
    if not isinstance(domain, Range):
        labels = _labels(domain)
        return domain[labels.index(trial.suggest_categorical(key, labels))]
    low, high, step, log = domain.low, domain.high, domain.step, domain.log
    if domain.is_whole:
        whole = 1 if step is None else int(step)
        return trial.suggest_int(key, int(low), int(high), step=whole, log=log)
    return trial.suggest_float(key, low, high, step=step, log=log)


def _labels(choices: Sequence[Any]) -> list[Any]:
    """The choices as Optuna can store them."""
    return [v if v is None or type(v) in _STORED else shown(v) for v in choices]
