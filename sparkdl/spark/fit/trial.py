"""A trial of the module on the driver, before anything is launched.

A copy of the module runs on some real rows, or on zeros of their shapes, so that the module itself
stays as it is. What fails there would fail on every worker.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
import re
import traceback
import warnings
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError, meant
from sparkdl.inputs import Sequence
from sparkdl.report.record.module_graph import traced
from sparkdl.runtime.process import borrowed_generator, seeded
from sparkdl.runtime.tracebacks import arose_in
from sparkdl.serialization.program.program_state import program_kept
from sparkdl.spark.fit.check_request import CheckedValues
from sparkdl.spark.fit.check_saving import warn_if_not_saved
from sparkdl.spark.fit.example import ROWS, Example, is_compiled, lent_weights, own_copy
from sparkdl.spark.fit.parts_of_batches import check_parts, is_close
from sparkdl.spark.run.run import FitRequest

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.serialization.recorded.recipe import RecordedWeights
    from sparkdl.train.objective.loss import LossFunction, ModuleLoss

logger = logging.getLogger(__name__)

_NO_VALUES = ("meta", "storage")
"""Words of torch's errors about tensors without memory."""
_OF_ROWS = re.compile(rf"(\((?=\d+x)|input(?: of size:? ?)?\[|size: \[){ROWS}(?=x|, |\])")
"""Pattern of the places in torch's messages that have the number of rows."""
_TORCHS = (RuntimeError, IndexError, NotImplementedError, TypeError)
"""Errors that torch raises if it cannot use a tensor; other errors are the module's own."""
_LABEL_NAMES = frozenset(
    ("y_true", "true", "target", "targets", "label", "labels", "truth", "ground_truth")
)
_OUTPUT_NAMES = frozenset(
    ("y_pred", "y_hat", "pred", "preds", "prediction", "predictions", "output", "outputs", "logits")
)
"""Names of parameters of a loss function that take labels, and of those for modules' outputs."""
_RESHAPING = ("Squeeze", "Unsqueeze", "View", "UnsafeView", "Reshape", "Transpose", "TBackward",
              "Permute", "Select", "Slice", "Flatten")  # fmt: skip
"""Beginnings of the names that torch gives to operations which change no value."""
_BOUNDS = {"sigmoid": (0, 1), "softmax": (0, 1), "tanh": (-1, 1), "relu": (0, math.inf)}
"""Functions, as torch names their backward passes in lower case, and what they give."""
_ROUNDING = 1e-3
"""By so much the probabilities of a row may differ from one in all."""
Sink = Callable[[Mapping[str, Any]], None]
"""Gets the graph of what a module did, see `report.module_graph`."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The results of a trial."""

    num_classes: int | None
    """Number of classes of a classifier."""
    prediction_key: str | None
    """Key of the output's tensor that loss and prediction mean; None: the output is one tensor."""
    metrics: Mapping[str, Any] | None
    """Metrics of the request, with a metric in place of each name, see `named_metrics`."""
    output: Any = None
    """The part of the module's output for some rows that the loss takes."""


def try_module(checked: CheckedValues, example: Example, sink: Sink | None = None) -> Trial:
    """Run a copy of the module on two rows: it must take the features, and the loss its output.

    This also gives the module the weights of its lazy layers. ``sink`` gets the graph of what it
    did, unless it fails because it is looked at; None: nobody does.

    Raises:
        ConfigError: the module does not take the features, its output is not a classifier's, or
            the loss cannot compare it with the label.
    """
    module, weights = checked.module, checked.weights
    with program_kept(module, vars(checked.config), checked.objective):
        try:
            output = _output(module, example, checked.request, weights, sink)
        except ConfigError as error:
            if weights is None or not any(one in str(error.__cause__) for one in _NO_VALUES):
                raise
            # Code beside torch's operations has met a parameter that is not there.
            logger.info("the driver makes the whole module to run it: %s", error.__cause__)
            weights.fill(module)
            output = _output(module, example, checked.request, weights, None)
        trial = _judged(checked, output, example)
        check_parts(checked, example)
        _warn_of_last_function(checked, example)
        warn_if_not_saved(checked, example)
        _try_along_mesh(checked, example)
    return trial


def _output(
    module: nn.Module,
    example: Example,
    request: FitRequest,
    weights: RecordedWeights | None,
    sink: Sink | None,
) -> Any:
    """Return what a copy of the module gives for the example's rows; raises ConfigError."""
    tried = own_copy(module, weights)
    if sink is not None and is_compiled(tried):
        sink = None
    try:
        found = _run(tried, example, request, weights, sink)
    except ConfigError:
        raise
    except Exception as error:
        failed = failed_layer(error, tried)
        if sink is None or (failed is not None and failed.is_torchs):
            raise ConfigError(refusal(error, tried, example.columns)) from error
        # It may have failed only because somebody looks.
        return _output(module, example, request, weights, None)
    _make_layers(module, tried)
    return found


def _run(
    tried: nn.Module,
    example: Example,
    request: FitRequest,
    weights: RecordedWeights | None,
    sink: Sink | None,
) -> Any:
    """Run a module in evaluation mode, return its output; lazy layers get their weights now."""
    import torch

    from sparkdl.sync.frozen_layers import evaluating

    mesh, uses = request.config.parallelism, None
    if mesh is not None:
        from sparkdl.sync.divided.outside_uses import OutsideUses

        uses = OutsideUses(tried, mesh)
    with (
        torch.no_grad(),
        borrowed_generator(request.config.seed),
        lent_weights(weights),
        uses or nullcontext(),
        # After the layout was found: that passes by layers with hooks.
        nullcontext() if sink is None else traced(tried, sink),
    ):
        output = example.of("feature", example.num_rows).call(evaluating(tried))
    if uses is not None:
        uses.check()
    with torch.no_grad(), borrowed_generator(request.config.seed), lent_weights(weights):
        _check_one_row(tried, example, output)
    return output


def _check_one_row(module: nn.Module, example: Example, output: Any) -> None:
    """Refuse a module whose output loses its dimension of rows if there is one row only."""
    import torch

    if not isinstance(output, torch.Tensor) or output.shape[:1] != (ROWS,):
        return
    one: Any = None
    with contextlib.suppress(Exception):  # a module may want several rows, or as many as before
        one = example.of("feature", 1).call(module)
    if isinstance(one, torch.Tensor) and one.shape == output.shape[1:]:
        raise ConfigError(
            f"for two rows the module returns {tuple(output.shape)}, but for one row "
            f"{tuple(one.shape)}: the dimension of the rows is gone, and the last batch may have "
            "one row; use squeeze(-1) in place of squeeze()"
        )


def _make_layers(module: nn.Module, tried: nn.Module) -> None:
    """Give lazy layers of a module what its copy has made of them."""
    from torch import nn

    made = dict(tried.named_modules())
    for name, layer in list(module.named_modules()):
        own = [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]
        if any(nn.parameter.is_lazy(tensor) for tensor in own) and name in made:
            layer.__class__, layer.__dict__ = made[name].__class__, made[name].__dict__


def _judged(checked: CheckedValues, output: Any, example: Example) -> Trial:
    """Derive the results from the module's output; raises ConfigError."""
    from sparkdl.train.objective.loss import CallableLoss
    from sparkdl.train.objective.named_metrics import NamedMetric, flat, resolved
    from sparkdl.train.objective.training_step import StepLoss, taken

    request, objective, config = checked.request, checked.objective, checked.request.config
    meant = taken(objective.shown if isinstance(objective, StepLoss) else objective, output)
    num_classes = config.task.num_classes(meant) or None
    if isinstance(objective, CallableLoss):
        _check_order(config.loss, meant, example)
        if num_classes is not None:
            _warn_of_probabilities(checked.module, meant)
    if not isinstance(objective, StepLoss) and (config.task.has_one_label or request.labels):
        _try_loss(objective, meant, example)
    labels = [str(one.argument) for one in example.columns if one.role == "label"]
    metrics = resolved(config.metrics, objective, meant, labels)
    unweighted = [n for n, _, m in flat(metrics or {}) if not isinstance(m, NamedMetric)]
    if request.weight_col and unweighted:
        logger.warning(
            "weightCol does not count in the metrics %s, since torchmetrics take no weights; "
            "metrics by name, such as 'f1', count by it",
            unweighted,
        )
    return Trial(
        num_classes=num_classes,
        prediction_key=None if meant is output else "logits",
        metrics=metrics,
        output=meant,
    )


def try_metrics(checked: CheckedValues, example: Example, trial: Trial) -> None:
    """Compute the user's own metrics once, for real rows whose labels are known to be good.

    Raises:
        ConfigError: a metric does not take the module's output, or computes several numbers.
    """
    import torch

    from sparkdl.comm.communicator import LocalCommunicator
    from sparkdl.train.objective.metrics import Metrics
    from sparkdl.train.objective.named_metrics import NamedMetric, flat
    from sparkdl.train.objective.training_step import StepLoss

    own = [m for _, _, m in flat(trial.metrics or {}) if not isinstance(m, NamedMetric)]
    labels = [column for column in example.columns if column.role == "label"]
    is_plain = len(labels) == 1 and labels[0].argument is None
    is_hidden = isinstance(checked.objective, StepLoss)
    if not own or not is_plain or is_hidden or example.rows is None or example.num_rows < ROWS:
        return
    metrics = Metrics.of(
        replace(checked.config, metrics=trial.metrics), checked.objective, torch.device("cpu")
    )
    (target,) = example.of("label", ROWS).values
    try:
        with torch.no_grad(), warnings.catch_warnings(), program_kept(own):
            warnings.simplefilter("ignore")  # of how few rows there are
            metrics.update(trial.output, target)
            metrics.compute(LocalCommunicator())
    except ConfigError:
        raise
    except Exception as error:  # whatever a metric raises
        raise ConfigError(
            f"a metric of {sorted(trial.metrics or {})} cannot be computed of the module's output: "
            f"{type(error).__name__}: {error}; choose one for this kind of output and label"
        ) from error


def _try_loss(loss: LossFunction, output: Any, example: Example) -> None:
    """Compare the output with labels; a loss of class numbers with class 0.

    A function of the user's is not tried: in evaluation mode it may get another kind of output.
    """
    from sparkdl.train.objective.label_losses import LossSum
    from sparkdl.train.objective.loss import ModuleLoss

    labels = [column for column in example.columns if column.role == "label"]
    if not labels:
        return
    targets = example.of("label", example.num_rows).values
    if isinstance(loss, ModuleLoss):
        _try_one(loss, output, targets[0], labels[0])
    elif isinstance(loss, LossSum):
        by_label = {name: (part, value) for name, part, value in loss.pairs(output)}
        for label, target in zip(labels, targets, strict=True):
            part, value = by_label[str(label.argument)]
            if isinstance(part, ModuleLoss):
                _try_one(part, value, target, label)


def _check_order(function: Any, output: Any, example: Example) -> None:
    """Refuse a loss function that takes the label first, as those of Keras do.

    Its parameters say so by their names, and only in that order, or with another value, it can be
    computed. One that gives the same both ways is taken. Raises ConfigError.
    """
    import torch
    from torch import nn

    labels = [column for column in example.columns if column.role == "label"]
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        names = list(inspect.signature(called).parameters)[:2]
    except (TypeError, ValueError):  # of one written in C, or compiled
        return
    is_swapped = len(names) == 2 and names[0] in _LABEL_NAMES and names[1] in _OUTPUT_NAMES
    if not is_swapped or len(labels) != 1 or not isinstance(output, torch.Tensor):
        return
    (target,) = example.of("label", example.num_rows).values
    values = []
    for pair in ((target, output), (output, target)):
        with contextlib.suppress(Exception), torch.no_grad():  # which tells of the order, too
            values.append(torch.as_tensor(called(*pair)).double().mean())
        if not values or (len(values) == 2 and is_close(*values)):
            return
    raise ConfigError(
        f"the loss function takes ({', '.join(names)}), and is called with the module's output "
        "first, then the label; change the order of its parameters, or pass "
        "lambda output, label: function(label, output)"
    )


def _try_one(loss: ModuleLoss, output: Any, target: torch.Tensor, label: Column) -> None:
    import torch
    from torch import nn

    from sparkdl.train.objective.loss import ClassLoss, shape_text

    if isinstance(loss, ClassLoss):
        target = torch.zeros_like(target)
    shape = tuple(output.shape[1:]) if isinstance(output, torch.Tensor) else None
    if isinstance(loss, ClassLoss) and shape in ((), (1,)):
        raise ConfigError(
            f"the module has one output, {shape_text(('batch', *shape))}, but the loss compares "
            "one for each class; give the module two, or use loss='bce_with_logits'"
        )
    try:
        with torch.no_grad():
            _compare(loss, output, target)
        ones = output.float().sum(dim=1) - 1 if isinstance(loss, ClassLoss) else None
        if ones is not None and (output >= 0).all() and (ones.abs() < _ROUNDING).all():
            _warn_of_end("softmax")
        if ones is not None and isinstance(loss.own, nn.NLLLoss):
            sums = output.double().exp().sum(dim=1)
            if not ((sums - 1).abs() < _ROUNDING).all():
                logger.warning(
                    "the loss nll takes logarithms of probabilities, which the module does not "
                    "seem to give: it would grow them without end; use loss='cross_entropy', or "
                    "let the module end in a log_softmax"
                )
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f'the loss cannot compare the module\'s output with "{label.name}" {label.dtype} '
            f"{shape_text(('batch', *label.shape))}: {type(error).__name__}: {error}; "
            f"{_remedy_of_weights(loss, output) or 'adapt module or loss'}"
        ) from error


def _compare(loss: ModuleLoss, output: Any, target: torch.Tensor) -> None:
    """Compute the loss, of as many rows as it has weights if it takes no others; raises errors."""
    import torch

    try:
        loss(output, target, None)
    except Exception:
        for weights in loss.own.buffers():
            with contextlib.suppress(Exception):
                places = torch.arange(len(weights)) % len(target)
                loss(output[places], target[places], None)
                return
        raise


def _remedy_of_weights(loss: ModuleLoss, output: Any) -> str:
    """Say which weights of a loss are of another dtype than the output; empty: none are."""
    for name, weights in loss.own.named_buffers():
        if weights.dtype != output.dtype:
            found = f"the loss's {name} is {weights.dtype}, and outputs are {output.dtype}"
            return f"{found}: pass it as {name}.to({output.dtype})"
    return ""


def _warn_of_end(name: str) -> None:
    logger.warning(
        "the module seems to end in a %s, but the loss takes what comes before it (logits), and "
        "learns slowly otherwise; leave the %s out: transform of a classifier applies it",
        *(name, name),
    )


def _warn_of_last_function(checked: CheckedValues, example: Example) -> None:
    """Say so if a module ends in a sigmoid that its loss applies once more, or cannot reach labels.

    It can give no label beyond the bounds of its last function.
    """
    import torch
    from torch import nn

    from sparkdl.sync.frozen_layers import evaluating
    from sparkdl.train.objective.loss import ModuleLoss

    loss = checked.objective
    own = loss.own if isinstance(loss, ModuleLoss) else None
    takes_logits = isinstance(own, nn.BCEWithLogitsLoss)
    compares = isinstance(own, nn.MSELoss | nn.L1Loss | nn.SmoothL1Loss | nn.HuberLoss)
    labels = [column for column in example.columns if column.role == "label"]
    if checked.weights is not None or not (takes_logits or (compares and len(labels) == 1)):
        return
    node = None
    # A trial of its own, since others take no gradients; what fails here is told by them.
    with contextlib.suppress(Exception), borrowed_generator(checked.config.seed):
        module = evaluating(own_copy(checked.module, None))
        with torch.enable_grad():
            node = example.of("feature", example.num_rows).call(module).grad_fn
    while node is not None and node.name().startswith(_RESHAPING):
        node = node.next_functions[0][0]
    name = "" if node is None else node.name().partition("Backward")[0].lower().removeprefix("_")
    if takes_logits and name == "sigmoid":
        _warn_of_end("sigmoid")
    elif compares and name in _BOUNDS:
        (target,) = example.of("label", example.num_rows).values
        low, high = _BOUNDS[name]
        beyond = target[(target < low) | (target > high)].flatten()
        if beyond.numel():
            logger.warning(
                'the module seems to end in a %s, which gives %g to %g, and "%s" is %g in one of '
                "the first rows: leave the %s out, or scale the label",
                *(name, low, high, labels[0].name, beyond[0].item(), name),
            )


def _try_along_mesh(checked: CheckedValues, example: Example) -> None:
    """Run what workers do in a step, up to the loss, and see that divided layers can do it.

    Raises:
        ConfigError: they cannot, or would do something else.
    """
    config = checked.request.config
    mesh = config.parallelism
    if mesh is None or mesh.num_shards * mesh.tensor == 1:
        return
    import torch

    from sparkdl.data.batches import Batch
    from sparkdl.sync.divided.outside_uses import OutsideUses
    from sparkdl.sync.divided.part_check import check_parts
    from sparkdl.sync.frozen_layers import training_mode
    from sparkdl.train.objective.training_step import StepLoss, run

    tried = own_copy(checked.module, checked.weights)
    training_mode(tried, config.frozen_layers)
    steps = isinstance(checked.objective, StepLoss)
    rows, has_label = example.num_rows, any(column.role == "label" for column in example.columns)

    def step(watch: AbstractContextManager[object] = nullcontext()) -> None:  # noqa: B008
        features = example.of("feature", rows)
        target = (example.of("label", rows) if has_label else features).packed()
        batch = Batch(features.values, target, None, rows, features.names, has_label)
        with torch.no_grad(), seeded(config.seed), lent_weights(checked.weights), watch:
            if steps:
                run(copy.deepcopy(checked.objective), tried, batch)
            else:
                features.call(tried)

    uses = OutsideUses(tried, mesh)
    try:
        step(uses)
    except Exception as error:  # it was run in evaluation mode; workers have other rows
        logger.debug("a training step cannot be tried on the driver: %s", error)
        uses.check()
        return
    uses.check()
    check_parts(tried, mesh, step)


def _warn_of_probabilities(module: nn.Module, output: torch.Tensor) -> None:
    """Say so if a classifier seems to give probabilities, which are taken for logits."""
    from torch import nn

    *_, last = module.modules()
    if isinstance(last, nn.Sigmoid | nn.Softmax) and bool(((output >= 0) & (output <= 1)).all()):
        logger.warning(
            "the module seems to end in a %s, but transform, evaluate and metrics take its output "
            "for logits: every row may get the same class; leave it out, and let the loss apply it",
            type(last).__name__,
        )


@dataclass(frozen=True)
class FailedLayer:
    """The innermost layer that was running when a module failed."""

    name: str
    """Its path in the module, empty for the module itself."""
    layer: nn.Module
    given: str
    """The tensors that it got."""

    @property
    def is_torchs(self) -> bool:
        """True if it is a layer of torch's own."""
        return type(self.layer).__module__.startswith("torch.nn.")


def failed_layer(error: BaseException, module: nn.Module) -> FailedLayer | None:
    """The layer in whose ``forward`` an error was raised, by the error's traceback."""
    from torch import nn

    names, found = {part: name for name, part in module.named_modules()}, None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, values = frame.f_code, frame.f_locals
        layer = values.get("self")
        if code.co_name == "forward" and isinstance(layer, nn.Module) and layer in names:
            arguments = [values.get(name) for name in code.co_varnames[1 : code.co_argcount]]
            given = ", ".join(shown for value in arguments if (shown := _shown_tensor(value)))
            found = FailedLayer(names[layer], layer, given)
    return found


def _shown_tensor(value: object) -> str:
    import torch

    from sparkdl.train.objective.loss import shape_text

    if not isinstance(value, torch.Tensor):
        return ""
    shape: list[object] = list(value.shape)
    if shape and value.shape[0] == ROWS:
        shape[0] = "batch"
    return f"{str(value.dtype).removeprefix('torch.')} {shape_text(shape)}"


def refusal(error: Exception, module: nn.Module, features: Items[Column]) -> str:
    """One sentence: what the module got, what failed in which layer, and what to do."""
    from torch import nn

    from sparkdl.train.objective.loss import shape_text

    features = [column for column in features if column.role == "feature"]
    shown = ", ".join(_shown_input(column) for column in features)
    failed = failed_layer(error, module)
    message = _OF_ROWS.sub(r"\1batch", str(error))
    what = f"{type(error).__name__}: {message}"
    if failed is not None and failed.is_torchs and failed.given:
        place = f"layer {failed.name}, " * bool(failed.name)
        what = f"{place}{failed.layer}, got {failed.given}: {message}"
    if arose_in(error, "torch.cuda"):
        return (
            f"the module's forward asks for a GPU, which the driver has not: {what}; leave that "
            "out: module and inputs are on the worker's own device, x.device of an input x"
        )
    if "does not require grad" in str(error):
        return (
            f"the module's forward asks for gradients on the features ({shown}): {what}; "
            "evaluation and transform compute without them: put what needs them into "
            "'with torch.enable_grad():'"
        )
    layer = None if failed is None else failed.layer
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and isinstance(error, IndexError):
        return (
            f"the module cannot take the features ({shown}): {what}; it has embeddings of 0 to "
            f"{layer.num_embeddings - 1}: raise num_embeddings above the largest number, or make "
            "numbers from 0 on of the values, as StringIndexer does"
        )
    if not isinstance(error, _TORCHS):
        return f"the module's forward failed on the features ({shown}): {what}; correct forward"
    whole = [f'"{c.name}" ({c.dtype})' for c in features if not c.dtype.startswith("float")]
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        name, alike = type(module).__name__, meant("forward", vars(type(module)))
        remedy = "write one" if alike is None else f"rename {alike!r}, if that is it"
        return f"the module {name} has no method forward, which gets the features; {remedy}"
    if isinstance(error, TypeError) and (called := _as_called(module, features)):
        return f"the module cannot take the features ({shown}): {error}; {called}"
    is_float = failed is not None and failed.given.startswith(("float", "bfloat"))
    remedies = [f"call .float() on {', '.join(whole)} in forward"] * (bool(whole) and not is_float)
    remedies += [
        f'decode files of images, inputs=[sparkdl.Image("{c.name}")]'
        for c in features
        if c.dtype == "uint8" and len(c.shape) == 1
    ]
    shape = None if failed is None else _wanted_shape(failed, features)
    if shape is not None:
        remedies.append(f"set inputShape={shape}")
    remedies.append("adapt the module")
    if failed is not None and isinstance(failed.layer, nn.Linear):  # whose width no shape changes
        one = features[0] if len(features) == 1 and features[0].shape else None
        is_first = one and failed.given == f"{one.dtype} {shape_text(('batch', *one.shape))}"
        if one and is_first and one.shape[-1] != failed.layer.in_features:
            remedies.insert(-1, f"let {failed.name or 'it'} have in_features={one.shape[-1]}")
    elif shape is None and not isinstance(error, TypeError):
        remedies.append("set inputShape")
    return f"the module cannot take the features ({shown}): {what}; {', or '.join(remedies)}"


def _wanted_shape(failed: FailedLayer, features: Items[Column]) -> list[int] | None:
    """The shape of a row in which the layer would take the only input; None: nothing is known."""
    from torch import nn

    layer = failed.layer
    if len(features) != 1 or isinstance(features[0].kind, Sequence):
        return None
    shape = list(features[0].shape)
    if isinstance(layer, nn.Linear):
        return [1] if not shape and layer.in_features == 1 else None
    dims: dict[type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
    if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.in_channels == 1:
        return [1, *shape] if len(shape) == dims.get(type(layer)) else None
    return None


def _as_called(module: nn.Module, features: Items[Column]) -> str:
    """Say what to do where forward has other arguments than there are inputs; empty: it has not."""
    named = [column.argument for column in features if column.argument is not None]
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):  # of one written in C, or compiled
        return ""
    try:
        signature.bind(*[None] * (len(features) - len(named)), **dict.fromkeys(named))
    except TypeError:
        taken = ", ".join(str(one) for one in signature.parameters.values())
        remedy = f"forward takes ({taken})"
        if len(features) > 1 and not named:
            return (
                f"{remedy}, and each input column is an argument of forward; to have one vector, "
                "put the columns together with VectorAssembler, or F.array"
            )
        return f"{remedy}: name a column for each argument, inputs={{argument: column}}"
    return ""


def _shown_input(column: Column) -> str:
    from sparkdl.train.objective.loss import shape_text

    is_sequence = isinstance(column.kind, Sequence)
    shape = ("batch", *(("length",) * is_sequence), *column.shape)
    name = "" if column.argument is None else f"{column.argument}="
    return f'{name}"{column.name}" {column.dtype} {shape_text(shape)}'
