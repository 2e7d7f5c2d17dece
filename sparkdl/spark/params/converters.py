"""The values that Params accept, and the form in which they are kept.

These are type converters as pyspark knows them: they return the value to keep, also of their own
results, or raise TypeError or ConfigError. A `Rule` is checked after them.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Integral
from operator import attrgetter
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from sparkdl.config import EarlyStopping
from sparkdl.errors import ConfigError
from sparkdl.inputs import Specification, Tensor
from sparkdl.runtime.arguments import takes
from sparkdl.serialization.initial_state import InitialState
from sparkdl.serialization.initial_weights import InitialWeights

if TYPE_CHECKING:
    from sparkdl.inference.outputs import Output

Metric = str | Callable[..., Any]
"""The name of a metric, a torchmetrics.Metric, or what makes one."""
Metrics = Mapping[str, Metric | Mapping[str, Metric] | Sequence[Metric]] | Sequence[Metric]
"""Metrics by name in the history, or by label; or a list, named by their classes and names."""


NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
"""Types in a user's words."""


def to_type(hint: Any, doc: str, value: Any) -> Any:
    """Accept the values of a type; ``doc`` says what they are where another is refused."""
    try:
        return _converted(value, hint)
    except TypeError:
        shown = shorten(repr(value), 100, placeholder=" ...")  # an optimizer's has many lines
        remedy = _as_object(value)
        doc = doc.rstrip(".") if remedy else doc
        raise TypeError(f"received {shown}; expected: {doc}{remedy}") from None


def _as_object(value: Any) -> str:
    """Return how to write the value, if classes are given where objects are meant."""
    items = value if isinstance(value, list | tuple) else [value]
    names = [f"{item.__name__}()" for item in items if isinstance(item, type)]
    return f"; pass an object of the class: {', '.join(names)}" if names else ""


def to_callbacks(doc: str, value: Any) -> list[Any]:
    """Accept a list of callbacks."""
    if hasattr(value, "on_step_end") and not isinstance(value, type):
        raise TypeError(f"received {value!r}; write callbacks=[{type(value).__name__}(...)]")
    callbacks = to_type(list[Any], doc, value)
    for one in callbacks:
        if isinstance(one, type) or not hasattr(one, "on_step_end"):
            remedy = _as_object(one) or "; derive a class from sparkdl.Callback, and pass an object"
            if isinstance(one, EarlyStopping):
                remedy = "; write earlyStopping=EarlyStopping(...) instead"
            raise TypeError(f"received {one!r}, which is no callback{remedy}")
    return list(callbacks)


def to_optimizer(doc: str, value: Any) -> Any:
    """Accept a name, or what makes an optimizer of parameters."""
    if _is_of_torch(value, "Optimizer"):
        kind, rate = type(value).__name__, value.param_groups[0].get("lr")
        raise TypeError(
            "received an optimizer, which belongs to the parameters of one module, and each worker "
            f"makes its own: write optimizer={kind.lower()!r}, learningRate={rate} (and "
            "optimizerParams={...} for other options)"
        )
    value = to_type(str | Callable[..., Any], doc, value)
    if not isinstance(value, type):
        _require_arguments(value, "parameters")
    return value


def to_step(doc: str, value: Any) -> Any:
    """Accept a training step."""
    value = to_type(Callable[..., Any] | None, doc, value)
    _require_arguments(value, "module", "inputs", "target")
    return value


def to_augmentation(doc: str, value: Any) -> Any:
    """Accept a function of a batch's inputs."""
    value = to_type(Callable[..., Any] | None, doc, value)
    _require_arguments(value, "inputs")
    return value


def to_loss(doc: str, value: Any) -> Any:
    """Accept the name of a loss, or what compares outputs with labels; or these by label."""
    one = str | Callable[..., Any]
    value = to_type(one | Mapping[str, one], doc, value)
    for each in value.values() if isinstance(value, Mapping) else [value]:
        if not isinstance(each, type):  # these are told to be made
            _require_arguments(each, "output", "target")
    return value


def _require_arguments(function: Any, *names: str) -> None:
    """Refuse a function that cannot be called with so many arguments; raises TypeError."""
    if callable(function) and not takes(function, names):
        name = getattr(function, "__name__", type(function).__name__)
        taken = ", ".join(inspect.signature(function, follow_wrapped=False).parameters)
        raise TypeError(f"{name}({taken}) cannot be called with ({', '.join(names)}), as it is")


def to_scheduler(doc: str, value: Any) -> Any:
    """Accept what makes a schedule of an optimizer alone."""
    if _is_of_torch(value, "lr_scheduler.LRScheduler", "lr_scheduler.ReduceLROnPlateau"):
        raise TypeError(
            "received a schedule, which belongs to one optimizer, and each worker makes its own: "
            f"write scheduler={_partial_of(type(value))}"
        )
    if isinstance(value, str):
        raise TypeError(
            f"received {value!r}, but schedules have no names here: write what makes one of the "
            "optimizer, such as functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)"
        )
    if value is not None:
        value = to_type(Callable[..., Any], doc, value)
        if needed := _needed(value)[1:]:
            raise TypeError(
                f"received {getattr(value, '__name__', value)!r}, which needs {', '.join(needed)} "
                f"besides the optimizer: write scheduler={_partial_of(value)}"
            )
    return value


def to_early_stopping(doc: str, value: Any) -> Any:
    """Accept an object of the class; numbers and yes are told how to write one."""
    if isinstance(value, bool | int):
        given = "" if isinstance(value, bool) else f"patience={value}"
        raise TypeError(f"received {value!r}; write earlyStopping=EarlyStopping({given})")
    return to_type(EarlyStopping | None, doc, value)


def _is_of_torch(value: Any, *names: str) -> bool:
    """True for an object of a class of torch.optim, which is not imported for that."""
    optim = getattr(sys.modules.get("torch"), "optim", None)
    return optim is not None and any(isinstance(value, attrgetter(name)(optim)) for name in names)


def _needed(function: Callable[..., Any]) -> list[str]:
    """The arguments without which a function cannot be called; none where Python does not know."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in kinds]


def _partial_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", "make_schedule")
    arguments = "".join(f", {one}=..." for one in _needed(function)[1:])
    return f"functools.partial({name}{arguments})"


def _converted(value: Any, hint: Any) -> Any:
    """A value of a type, with dicts and lists of its own; what is no such value is refused."""
    if len(parts := parts_of(hint)) > 1:
        for part in parts:
            with contextlib.suppress(TypeError):
                return _converted(value, part)
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Mapping and isinstance(value, Mapping):
        return {_converted(k, inner[0]): _converted(v, inner[1]) for k, v in value.items()}
    if kind is list and isinstance(value, list | tuple):
        return [_converted(item, inner[0]) for item in value]
    if kind is float and type(value) is int:
        return float(value)
    if kind is Any or (isinstance(kind, type) and isinstance(value, kind)):
        return value
    raise TypeError


def parts_of(hint: Any) -> tuple[Any, ...]:
    """The types of a union; a type that is none is its only one."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def to_device(doc: str, value: Any) -> str:
    """Accept a name, or a device of torch's."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.device):
        return str(value)
    if isinstance(value, str):
        return value
    raise TypeError(f"received {value!r}; expected: {doc}")


def to_run_name(value: Any) -> str | None:
    """Accept a text of one line."""
    if value is None or (isinstance(value, str) and value.strip() and value.isprintable()):
        return value
    raise TypeError(f"expected a text of one line, such as 'digits, wide'; received {value!r}")


def to_inputs(value: Any) -> Any:
    """Accept a mapping from arguments to specifications or column names, or a list of these."""
    if isinstance(value, Mapping):
        return {name: _specification(entry) for name, entry in to_options(value).items()}
    if isinstance(value, (list, tuple)):
        return [_specification(entry) for entry in value]
    raise TypeError(
        "expected a dict from the names of forward's arguments to columns or specifications such "
        f"as sparkdl.Image(...), or a list of these; received {value!r}"
    )


def to_labels(value: Any) -> dict[str, Specification]:
    """Accept a mapping from names to specifications or column names."""
    return {name: _specification(entry) for name, entry in to_options(value).items()}


def _specification(value: Any) -> Specification:
    if isinstance(value, str):
        return Tensor(value)
    if not isinstance(value, Specification) or type(value) is Specification:
        raise TypeError(
            "expected a column's name or a specification, such as sparkdl.Tensor; received "
            f"{value!r}"
        )
    return value


to_patterns = partial(to_type, list[str], "a list of patterns such as ['encoder.*']")
to_options = partial(to_type, Mapping[str, Any], "a dict with names as keys")


def to_groups(value: Any) -> dict[str, dict[str, Any]]:
    """Accept a mapping from patterns of parameter names to options of the optimizer."""
    groups = {pattern: to_options(options) for pattern, options in to_options(value).items()}
    for pattern, options in groups.items():
        if "params" in options:
            raise TypeError(f"{pattern!r} stands for the parameters; leave out 'params'")
    return groups


def to_initial_weights(value: Any) -> InitialWeights:
    """Accept an `InitialWeights`, or what it takes as its source."""
    return value if isinstance(value, InitialWeights) else InitialWeights(source=value)


def to_initial_state(value: Any) -> InitialState | None:
    """Accept a fitted model, or the place of a saved one."""
    return None if value is None else InitialState.of(value)


def to_metrics(value: Any) -> dict[str, Any]:
    """Accept a dict of metrics, or a list of them, which then have their class or name as key.

    A name alone is a list of one.
    """
    value = [value] if isinstance(value, str) else value
    if isinstance(value, Mapping):
        metrics: dict[str, Any] = to_options(value)
    elif isinstance(value, Sequence):
        metrics = {
            m.lower() if isinstance(m, str) else getattr(m, "__name__", type(m).__name__): m
            for m in value
        }
        if len(metrics) < len(value):
            raise TypeError("two metrics have the same name; pass a dict from name to metric")
    else:
        raise TypeError(
            f"expected names of metrics or torchmetrics in a list or dict, received {value!r}"
        )
    for name, metric in metrics.items():
        if isinstance(metric, (Mapping, list, tuple)):
            metrics[name] = to_metrics(metric)  # of one label
        elif not callable(metric) and not isinstance(metric, str):
            raise TypeError(
                f"metric {name!r} is neither a name nor a torchmetrics.Metric: {metric!r}"
            )
    return metrics


def to_output(value: Any) -> Output:
    """Accept an `Output`, or what its key may be: a name, an index, or a tuple of these."""
    from sparkdl.inference.outputs import Output

    return value if isinstance(value, Output) else Output(key=value)


def to_outputs(value: Any) -> dict[str, Output]:
    """Accept a mapping from names of columns to what `to_output` accepts."""
    return {name: to_output(output) for name, output in to_options(value).items()}


def to_shapes(value: Any) -> list[Any]:
    """Accept a shape, which is kept as a list, or a list with a shape or None per input column."""
    if _is_shape(value):
        return list(map(int, value))
    if isinstance(value, list | tuple) and all(one is None or _is_shape(one) for one in value):
        return [None if one is None else list(map(int, one)) for one in value]
    raise TypeError(
        "expected the shape of one row, without the batch, such as (1, 28, 28), or a list with a "
        f"shape or None per input column; received {value!r}"
    )


def shapes_by_input(shapes: list[Any] | None, num_inputs: int) -> tuple[Any, ...]:
    """The shape of each input column, from what `to_shapes` returned; raises ConfigError."""
    if shapes is None:
        return (None,) * num_inputs
    by_input = [shapes] if _is_shape(shapes) else shapes
    if len(by_input) != num_inputs:
        raise ConfigError(
            f"inputShape has {len(by_input)} shape(s) for {num_inputs} input column(s)"
        )
    return tuple(None if shape is None else tuple(shape) for shape in by_input)


def _is_shape(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        not isinstance(size, bool) and isinstance(size, Integral) and int(size) > 0
        for size in value
    )
