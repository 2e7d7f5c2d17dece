"""Sees whether parts of a batch give what the whole batch gives, on a few real rows.

Workers, micro-batches and the stages of a pipeline see parts of a batch. So a loss must be a mean
over rows, and a module must compute what it gives for a row from that row alone.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from sparkdl.errors import ConfigError
from sparkdl.runtime.process import borrowed_generator, seeded
from sparkdl.spark.fit.check_request import CheckedValues
from sparkdl.spark.fit.example import ROWS, Example, is_compiled, lent_weights, own_copy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.data.batches import Batch
    from sparkdl.train.objective.loss import LossFunction

logger = logging.getLogger(__name__)

_MOST_ROWS = 4
"""Rows on which modules and training steps are tried; losses take all that are at hand."""
_MOST_BYTES = 1 << 24
"""Largest batch on which a module is tried for what it does with many rows."""
_MOST_SECONDS = 0.5
"""Most time of the CPU that this may take, by what a few rows do."""
_MOST_NUMBERS = 1 << 26
"""Modules with more parameters than this are tried only where a pipeline cuts batches."""


def check_parts(checked: CheckedValues, example: Example) -> None:
    """See that a loss and a module of the user's own mean the same for rows and parts of them.

    What gives another value for the halves is warned of.

    Raises:
        ConfigError: losses of single rows do not add up to what a loss module gives, or a pipeline
            would compute something else.
    """
    mesh = checked.config.parallelism
    is_staged = mesh is not None and mesh.pipeline > 1
    rows = 0
    if example.rows is not None:
        rows = min(len(values) for values in example.rows.values()) // 2 * 2
    if is_staged:
        _check_staged(checked, example)
    if rows < 2 * ROWS or (checked.weights is not None and not is_staged):
        return
    few = min(rows, _MOST_ROWS)
    _check_loss(checked, example, rows)
    if not _check_step(checked, example, few):  # it may need more rows, as the hardest of them
        _check_step(checked, example, rows)
    numbers = sum(parameter.numel() for parameter in checked.module.parameters())
    if is_compiled(checked.module) or (numbers > _MOST_NUMBERS and not is_staged):
        return
    if is_staged and _depends_on(checked, example, few, trains=True) == "calls":
        raise ConfigError(
            f"parallelism=Mesh({mesh}): forward gives the same rows something else from call to "
            "call, and along a pipeline it is called for each part of a batch; let it depend on "
            "nothing but its input, or leave pipeline at 1"
        )
    many = None
    if not _mixes_rows(checked, example, few):
        many = _counted_rows(checked, example, few)
        if many is None:
            return
    elif is_staged:
        raise ConfigError(
            f"parallelism=Mesh({mesh}): what forward gives for a row depends on the other rows of "
            "its batch, of which each part goes through a pipeline by itself; compute each row by "
            "itself, or leave pipeline at 1"
        )
    _warn_of_parts(checked, few, many)


def _warn_of_parts(checked: CheckedValues, few: int, many: int | None) -> None:
    """Warn of a module that mixes rows or, if ``many`` are given, does something else for these."""
    is_whole = (checked.request.num_workers, checked.config.gradient_accumulation_steps) == (1, 1)
    if many is None:
        what = "what forward gives for a row depends on the other rows of its batch"
        remedy = "compute each row by itself"
    else:
        what = f"forward gives a row other values in a batch of {many} rows than in one of {few}"
        remedy = "do the same for every number of rows"
    if is_whole:
        logger.warning("%s: transform gives it other values in other company; %s", what, remedy)
        return
    logger.warning(
        "%s, and workers see parts of a batch: with several workers, or gradientAccumulationSteps, "
        "training is not that of one, and transform gives a row other values in other company; "
        "%s, or set numWorkers=1",
        *(what, remedy),
    )


@contextmanager
def _quietly(seed: int) -> Iterator[None]:
    """Let what the user's code warns of be: workers warn too."""
    with warnings.catch_warnings(), borrowed_generator(seed):
        warnings.simplefilter("ignore")
        yield


def _check_loss(checked: CheckedValues, example: Example, rows: int) -> None:
    """Compare a loss of the user's own, or those of several labels, with what halves give."""
    import torch

    from sparkdl.sync.frozen_layers import evaluating
    from sparkdl.train.objective.label_losses import LossSum
    from sparkdl.train.objective.loss import CallableLoss, ModuleLoss
    from sparkdl.train.objective.training_step import StepLoss, taken

    given = checked.objective
    parts = list(given.parts.values()) if isinstance(given, LossSum) else [given]
    if checked.weights is not None or isinstance(given, StepLoss):
        return
    if not any(isinstance(part, CallableLoss | ModuleLoss) for part in parts):
        return
    found: list[tuple[LossFunction, Any, Any]] = []
    with contextlib.suppress(Exception), _quietly(checked.config.seed), torch.no_grad():
        loss, batch = copy.deepcopy(given), example.batch(rows)
        output = taken(loss, batch.arguments.call(evaluating(own_copy(checked.module, None))))
        target: Any = batch.target
        found = [(loss, output, target)]
        if isinstance(loss, LossSum):
            found = [(part, seen, target[name]) for name, part, seen in loss.pairs(output)]
    for part, output, target in found:
        _compare_halves(checked, part, output, target, rows)


def _compare_halves(
    checked: CheckedValues, loss: LossFunction, output: Any, target: Any, rows: int
) -> None:
    import torch

    from sparkdl.train.objective.loss import CallableLoss, ModuleLoss

    found, own, squeezed, spread = None, None, None, None
    # The loss may count its calls, and in training it may see another kind of output.
    with contextlib.suppress(Exception), _quietly(checked.config.seed), torch.no_grad():

        def halves(output: Any) -> list[torch.Tensor]:
            return _of_halves(
                lambda some: loss(_some(output, some, rows), _some(target, some, rows), None), rows
            )

        found = halves(output)
        if not is_close(found[0][0], halves(output)[0][0]):
            return  # it draws random numbers, or counts its calls
        own = loss.own_value(output, target) if isinstance(loss, ModuleLoss) else None
        if _are_unlike(output, target):
            squeezed = halves(output.squeeze(1))
        spread = halves(_spread(output))
    if found is None:
        return
    whole = found[0][0] / found[0][1]
    if own is not None and not is_close(own.to(whole.dtype), whole):
        name = type(checked.config.loss).__name__
        raise ConfigError(
            f"the loss {name} gives {own:g} for {rows} rows, but its losses of single rows "
            f"(reduction='none') have the mean {whole:g}, and workers see parts of a batch; pass "
            "a function of (output, target) that returns the loss of each row, or a pair (sum of "
            "losses, sum of weights)"
        )
    if isinstance(loss, CallableLoss):
        if squeezed is None or _is_mean(found) or not _is_mean(squeezed):
            if _is_mean(found) and spread is not None and torch.isfinite(torch.stack(spread)).all():
                found = spread
            _judge_halves("loss function", found, rows)
            return
        logger.warning(
            "the loss function gets outputs of the shape (batch, 1) and labels of the shape "
            "(batch,), and torch's arithmetic sets each of these against each of those: it gives "
            "%g for %d rows, and %g for output.squeeze(1), which is what it should take",
            *(whole, rows, squeezed[0][0] / squeezed[0][1]),
        )


def _are_unlike(output: Any, target: Any) -> bool:
    """True of one output and one label per row, of which torch's arithmetic makes a table."""
    import torch

    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return False
    return output.dim() == 2 and output.shape[1] == 1 and target.dim() == 1


def _check_step(checked: CheckedValues, example: Example, rows: int) -> bool:
    """Compare the value of a training step, unless it draws random numbers; False: it has none."""
    import torch

    from sparkdl.sync.frozen_layers import evaluating
    from sparkdl.train.objective.lightning import TrainerStandIn
    from sparkdl.train.objective.training_step import StepLoss, run

    given = checked.objective
    is_own = isinstance(given, StepLoss) and not isinstance(given.step, TrainerStandIn)
    if not is_own or checked.weights is not None or is_compiled(checked.module):
        return True
    found = again = None
    # With gradients, which the step may ask for.
    with contextlib.suppress(Exception), _quietly(checked.config.seed):
        loss, batch = copy.deepcopy(given), example.batch(rows)
        module = evaluating(own_copy(checked.module, None))

        def sums(some: slice) -> Any:
            part = batch.rows(some.start, some.stop).map(torch.clone)
            return loss(run(loss, module, part), part.target, None)

        found, again = _of_halves(sums, rows), _of_halves(sums, rows)
    if found is None or again is None:
        return False
    if is_close(found[0][0], again[0][0]):
        _judge_halves("training step", found, rows)
    return True


def _of_halves(sums: Callable[[slice], Any], rows: int) -> list[torch.Tensor]:
    """Sum of losses and of weights of so many rows, of their first half, and of the second."""
    import torch

    parts = [slice(0, rows), slice(0, rows // 2), slice(rows // 2, rows)]
    found = ([float(torch.as_tensor(v).detach()) for v in sums(part)] for part in parts)
    return [torch.tensor(one, dtype=torch.float64) for one in found]


def _judge_halves(what: str, found: Items[torch.Tensor], rows: int) -> None:
    """Warn if halves mean something else; ConfigError if weights are no sum over rows."""
    together = found[1] + found[2]
    if found[0][1] != 0 and is_close(found[0][1], together[1] / 2):
        raise ConfigError(
            f"the {what} returned a pair, which means (sum of losses, sum of weights), and its "
            f"second value is {found[0][1]:g} for {rows} rows, and about as much for half of them; "
            "return the loss alone"
        )
    if _is_mean(found):
        return
    logger.warning(
        "the %s is no mean over rows: it gives %g for %d rows, and %g for their "
        "halves together; with several workers, or gradientAccumulationSteps, training sees "
        "the latter; return the loss of each row, or a pair (sum of losses, sum of weights)",
        *(what, found[0][0] / found[0][1], rows, together[0] / together[1]),
    )


def _is_mean(found: Items[torch.Tensor]) -> bool:
    """True if both halves together mean what the whole does; see `_of_halves`."""
    whole, together = found[0], found[1] + found[2]
    return is_close(whole[0] / whole[1], together[0] / together[1])


def _spread(output: Any) -> Any:
    """An output whose rows differ more: those of a module that has not trained are much alike."""
    import torch
    from torch.utils import _pytree as pytree

    def differ(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 3 * torch.randn_like(tensor) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(torch.Tensor, differ, output)


def _check_staged(checked: CheckedValues, example: Example) -> None:
    """Refuse what a pipeline, which fills parts of a batch up, would see too often.

    Raises:
        ConfigError: the module returns something that has no row for each of its input's, or the
            loss keeps something from call to call.
    """
    import torch
    from torch.utils import _pytree as pytree

    from sparkdl.storage.tensor_tree import pack
    from sparkdl.sync.module_tensors import fingerprint
    from sparkdl.train.objective.label_losses import sums_of
    from sparkdl.train.objective.own_states import Kept
    from sparkdl.train.objective.training_step import taken

    mesh, rows = checked.config.parallelism, example.num_rows
    outputs: list[torch.Tensor] = []
    is_kept = False
    with _tried(checked) as module, contextlib.suppress(Exception):
        batch, loss = example.batch(rows), copy.deepcopy(checked.objective)
        output = batch.arguments.call(module)
        outputs = [v for v in pytree.tree_leaves(output) if isinstance(v, torch.Tensor)]
        kept = Kept(checked.config, loss)

        def call() -> Any:
            with torch.enable_grad(), seeded(checked.config.seed):
                sums = sums_of(loss, taken(loss, output), batch.target, None)
            text, tensors = pack(kept.state_dict())
            # As text, so that NaN is NaN.
            return (
                [repr(float(one)) for one in sums[:2]],
                text,
                list(map(fingerprint, tensors.values())),
            )

        is_kept = call() != call()
    for value in outputs:
        if value.dim() == 0 or len(value) != rows:
            raise ConfigError(
                f"parallelism=Mesh({mesh}): of {rows} rows the module returns a tensor of the "
                f"shape {tuple(value.shape)}, and a pipeline fills parts of a batch up with rows "
                "that do not count; return tensors with a row for each of the input's"
            )
    if is_kept:
        raise ConfigError(
            f"parallelism=Mesh({mesh}): the loss keeps something from call to call, and along a "
            "pipeline it is called for each part of a batch; let it depend on nothing but output "
            "and target, or leave pipeline at 1"
        )


def _mixes_rows(checked: CheckedValues, example: Example, rows: int) -> bool:
    """True if a module gives a row something else when other rows stand beside it.

    BatchNorm, of which everybody knows, is left as in evaluation, and dropout. What is drawn at
    random, or changes from call to call, is tried in evaluation mode.
    """
    for trains in (True, False):
        found = _depends_on(checked, example, rows, trains=trains)
        if found in ("rows", "nothing"):
            return found == "rows"
    return False


def _depends_on(
    checked: CheckedValues, example: Example, rows: int, *, trains: bool
) -> Literal["nothing", "rows", "calls", "draws"] | None:
    """What the module's output for a row depends on besides that row; None: a call has failed.

    Other rows of the batch, earlier calls, or numbers that are drawn.
    """
    seed = checked.config.seed
    with _tried(checked, trains=trains) as module, contextlib.suppress(Exception):
        batch = example.batch(rows)

        def call(part: Batch, seed: int) -> list[torch.Tensor | None]:
            with seeded(seed):
                return _called(module, part)

        half = batch.rows(0, rows // 2)
        # In this order something differs also for a module that does every second call otherwise.
        whole, part, part_again, again = (call(one, seed) for one in (batch, half, half, batch))
        if not (_are_close(whole, again, rows) and _are_close(part, part_again, rows // 2)):
            return "calls"
        if _are_close(whole, part, rows // 2):
            return "nothing"
        return "rows" if _are_close(again, call(batch, seed + 1), rows) else "draws"
    return None


def _counted_rows(checked: CheckedValues, example: Example, rows: int) -> int | None:
    """The rows of a large batch, if forward does something else for so many.

    None: it does not, or takes too long for that many.
    """
    import torch

    from sparkdl.serialization.example_inputs import InputExample

    many = checked.config.batch_size * (checked.request.num_workers or 2)
    with _tried(checked) as module, contextlib.suppress(Exception), torch.no_grad():
        batch = example.batch(rows)
        row_bytes = sum(value.nbytes for value in batch.inputs) // rows
        if many <= rows or many * row_bytes > _MOST_BYTES:
            return None
        given = InputExample(batch.arguments, (False,) * len(batch.inputs))
        large = replace(batch, inputs=given.rows(many).values, num_rows=many)
        found, seconds = [], math.inf
        for number, part in enumerate((batch, batch, large)):
            if part is large and seconds * many > _MOST_SECONDS * rows:
                return None
            began = time.thread_time()
            with seeded(checked.config.seed + number):  # of what draws nothing is known
                found.append(_called(module, part))
            seconds = min(seconds, time.thread_time() - began)
        few, again, told = found
        return many if _are_close(few, again, rows) and not _are_close(told, few, rows) else None
    return None


@contextmanager
def _tried(checked: CheckedValues, *, trains: bool = False) -> Iterator[nn.Module]:
    """A copy of the module, and all that it needs to compute."""
    import torch
    from torch.nn.modules.batchnorm import _NormBase
    from torch.nn.modules.dropout import _DropoutNd

    from sparkdl.sync.frozen_layers import evaluating, training_mode

    tried = own_copy(checked.module, checked.weights)
    if trains:
        training_mode(tried, checked.config.frozen_layers)
        for layer in tried.modules():
            if isinstance(layer, _NormBase | _DropoutNd):
                layer.training = False
    else:
        evaluating(tried)
    with (
        torch.set_grad_enabled(trains),  # forward may ask for gradients where it trains
        borrowed_generator(checked.config.seed),
        lent_weights(checked.weights),
    ):
        yield tried


def _called(module: nn.Module, batch: Batch) -> list[torch.Tensor | None]:
    """What the module returns, None in place of what has no row for each of the batch's."""
    import torch
    from torch.utils import _pytree as pytree

    own = batch.map(torch.clone)
    values = pytree.tree_leaves(own.arguments.call(module))
    own_rows = (own.num_rows,)
    return [v if isinstance(v, torch.Tensor) and v.shape[:1] == own_rows else None for v in values]


def _are_close(
    whole: list[torch.Tensor | None], part: list[torch.Tensor | None], rows: int
) -> bool:
    """True if the first rows are equal but for rounding, or have other shapes."""
    import torch

    for one, other in zip(whole, part, strict=False):
        if one is None or other is None:
            continue
        a, b = one[:rows].double().nan_to_num(), other[:rows].double().nan_to_num()
        if a.shape != b.shape or not a.numel():
            continue
        rounding = 4 * torch.finfo(one.dtype).eps if one.is_floating_point() else 0.0
        if (a - b).abs().max() > max(1e-3, rounding) * a.abs().max() + 1e-6:
            return False
    return True


def _some(value: Any, some: slice, rows: int) -> Any:
    """Some of the rows of all tensors of a value that have so many."""
    import torch
    from torch.utils import _pytree as pytree

    from sparkdl.data.collate import narrow

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        # Clones, since a loss may change what it gets in place.
        if tensor.shape[:1] == (rows,):
            tensor = narrow(tensor, some.start, some.stop)
        return tensor.clone()

    return pytree.tree_map_only(torch.Tensor, cut, value)


def is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two numbers are equal but for rounding."""
    return bool(one.isclose(other, rtol=1e-3, atol=1e-6, equal_nan=True))
