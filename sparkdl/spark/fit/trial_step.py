"""A first step of training on the driver, before anything is launched.

A copy of all that takes part goes through forward, loss, backward, optimizer and schedule, as a
worker would do it, on the first rows. What fails there would fail on every worker.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from sparkdl.config import TrainConfig
from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.errors import ConfigError, DataError, TrainingDiverged
from sparkdl.runtime.process import borrowed_generator, lent, seeded
from sparkdl.runtime.tracebacks import is_of_users, passed_through, users_line
from sparkdl.serialization.program.process_settings import present_settings
from sparkdl.serialization.program.program_state import ProgramState, program_kept
from sparkdl.serialization.travel.pickling import dumps, lent_globals, loads
from sparkdl.spark.fit.check_request import CheckedValues
from sparkdl.spark.fit.example import Example, is_compiled, own_copy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sparkdl.data.batches import Batch
    from sparkdl.data.collate import Rows
    from sparkdl.serialization.travel.attributes import Attributes
    from sparkdl.serialization.travel.shared_values import SharedValue
    from sparkdl.train.objective.own_states import Kept
    from sparkdl.train.replica import Replica

logger = logging.getLogger(__name__)

Changes = Mapping[tuple[str, str], Any]
"""Kind and name of what a step has changed besides what the optimizer does -> what tells its values
apart. Kinds: a parameter, a buffer or an attribute of the module, or what the loss keeps;
``output`` and ``value``, what module and loss give with these attributes and all else as before;
and what else the ``program`` keeps, such as a global, if outputs, losses or gradients follow from
it."""
_MOST_NUMBERS = 1 << 26
"""Modules with more parameters than this are not tried: the driver would need their gradients and
moments besides."""
_FEW_ROWS = 8
_LONGEST_TEXT = 400
_OF_CODE = (AttributeError, ImportError, NameError, NotImplementedError, TypeError)
_NO_GRADIENT = "does not require grad"
_NO_NUMPY = "Can't call numpy() on Tensor that requires grad"
_NO_CLASSES = "expected target dtype to be Long"
_OTHER_DTYPE = "expected scalar type"
_CERTAIN = (
    "modified by an inplace operation", _NO_GRADIENT, _NO_NUMPY, "view size is not compatible",
    _NO_CLASSES, _OTHER_DTYPE,
)  # fmt: skip
"""What torch says of a backward pass that cannot be, and of memory in another order."""
_SIZES = re.compile(r"tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
_UNLIKE, _LOSS = "must match the size of tensor", "sparkdl.train.objective.loss"
_FORWARD = re.compile(r'File "([^"]+)", line (\d+), in (.+)\n\s+(?!File "|\(Triggered)(.+)')
"""A frame in what torch tells of the forward pass that a failed backward pass belongs to."""


def try_step(
    checked: CheckedValues,
    example: Example,
    metrics: Mapping[str, Any] | None,
    read_rows: Callable[[], Mapping[str, Rows] | None],
    *,
    adds_up: bool = True,
    several: bool = True,
) -> None:
    """Take a training step on a copy of module, loss, optimizer and schedule.

    A few rows are tried first. If they fail it decides what a whole batch does, since a loss may
    want as many. Few different rows are at hand, maybe of one class, so nothing is refused for what
    depends on them: only mistakes of the code, of backward passes and of the optimizer, which other
    values must meet at the same place.

    Args:
        checked: what shall be trained, and how. A module that is compiled, that is not whole,
            that trains on GPUs, or that a callback may prepare is not tried.
        example: rows, or zeros where no rows are at hand.
        metrics: those of the request, with a metric in place of each name.
        read_rows: reads some rows where none are at hand, or gives None.
        adds_up: whether workers add gradients up.
        several: whether there is more than one.

    Raises:
        ConfigError: what fails, with the line of the user's own where it fails; or a checkpoint
            cannot hold a state of the optimizer or the schedule; or forward changes weights by the
            rows that it gets, which are others on each worker that adds gradients up.
        DataError: the loss is not finite, nor are some values of the features.
    """
    from sparkdl.train.callbacks import Callback

    config, module = checked.config, checked.module
    numbers = sum(parameter.numel() for parameter in module.parameters())
    is_here = config.device != "cuda" and config.precision != "fp16" and checked.weights is None
    begun = any(type(one).on_train_begin is not Callback.on_train_begin for one in config.callbacks)
    if not is_here or begun or numbers > _MOST_NUMBERS or is_compiled(module):
        return
    config = replace(config, compile=False, metrics=metrics, divergence_factor=None)
    seen: list[Changes] = []
    failing = partial(
        _error, module, config, seen, adds_up=adds_up, shared=checked.shared,
        in_rounds=checked.mode == "rounds", has_others=checked.request.validation is not None,
    )  # fmt: skip
    error = failing(example, _FEW_ROWS, is_first=True)
    _check_program(*seen, mode=checked.mode)
    if isinstance(error, DataError):
        raise error
    if error is None and not (several and any(seen)):
        return
    if example.rows is None:
        rows = read_rows()
        if rows is None:
            return
        example = replace(example, rows=rows)
    if error is None:
        failing(_varied(example), _FEW_ROWS, is_first=True)
        _check_changes(*seen, adds_up=adds_up)
        return
    error = failing(example, config.batch_size)
    if isinstance(error, ConfigError):
        raise error
    if error is not None and _is_certain(error):
        elsewhere = failing(_varied(example), config.batch_size)
        if _where(elsewhere) != _where(error):
            return
        if any(failing(example, number) is None for number in _wanted_rows(error)):
            return
        place = users_line(error) or _forward_line(module, config, example)
        text = str(error).partition("\n")[0]  # torch lists all of its backends
        text = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
        remedy = "correct it in a loop of your own, on a batch"
        if passed_through(error, _LOSS):
            remedy = "a loss is called with the module's output first, then the label; correct it"
        if _UNLIKE in text and (shapes := _shapes_of_loss(error)):
            remedy = f"the loss gets {shapes}; make one of the two like the other"
        if _NO_GRADIENT in text:
            remedy = (
                "the loss hangs together with no parameter that trains; look in forward and loss "
                "for detach, no_grad, argmax, item, or a new tensor made of values"
            )
        if _NO_CLASSES in text:
            remedy = "the loss compares classes by their numbers: give it target.long()"
        if _OTHER_DTYPE in text and _NO_CLASSES not in text:
            remedy = (
                "two tensors are of different dtypes, such as a loss's weights: use .to(x.dtype)"
            )
        if _NO_NUMPY in text:
            remedy = "numpy and scikit-learn compute no gradients; write it with functions of torch"
        raise ConfigError(
            f"the first step of training fails{place}: {type(error).__name__}: {text}; the same "
            f"would happen on every worker: {remedy}"
        ) from error


def _check_changes(first: Changes, *others: Changes, adds_up: bool) -> None:
    """Refuse weights, and warn of all else, that a step changes by the rows that it gets.

    Of replicas that train apart weights and buffers are averaged.

    Args:
        first: what a step has changed, given some rows.
        others: the same, given other rows; none: these have failed.
        adds_up: whether workers add gradients up.

    Raises:
        ConfigError: some are parameters.
    """
    changed: dict[str, str] = {}
    for (kind, name), now in first.items():
        if any(other.get((kind, name), now) != now for other in others):
            changed.setdefault(kind, name)
    if adds_up and "parameter" in changed:
        raise ConfigError(
            f"forward changes the parameter {changed['parameter']!r} by the rows that it gets, and "
            "each worker gets others, so replicas would come apart; run the module on some rows "
            "before fit if it does so once, or set numWorkers=1, or a strategy that averages "
            "replicas"
        )
    if adds_up and "buffer" in changed:
        logger.warning(
            "forward changes the buffer %r by the rows that it gets, and each worker gets others: "
            "at the end of an epoch all go on with the mean of the workers' values, and of whole "
            "numbers with those of the first; set numWorkers=1 if they shall be of all rows",
            changed["buffer"],
        )
    if {"attribute", "output"} <= changed.keys():
        logger.warning(
            "forward changes the attribute %r by the rows that it gets, and each worker gets "
            "others: each goes on with its own, and the fitted module has that of the first; make "
            "it a buffer (register_buffer), of which they take the mean, or set numWorkers=1",
            changed["attribute"],
        )
    if {"loss", "value"} <= changed.keys():
        logger.warning(
            "the %s keeps something that follows from the rows that it gets, and each worker gets "
            "others and goes on with its own; let it depend on nothing but its arguments, or set "
            "numWorkers=1",
            changed["loss"],
        )


_TOLD_IN_ROUNDS = {
    "setting": (
        "a step changes what holds for its whole process (%s), and tasks of a round run in "
        "several, in each of which it is so only after a step there; set it before fit, or set "
        "executionMode='gang'"
    ),
    "callbacks": (
        "a step changes %r, which a callback reads, and in rounds steps run in tasks: the callback "
        "runs on the driver, and finds what it was at first; keep it in a buffer or an attribute "
        "of a layer, which a callback finds at state.model, or set executionMode='gang'"
    ),
    "evaluated": (
        "evaluation changes %r, too, and in rounds it has a copy of its own: training does not go "
        "on with what it has counted on validation rows; count in training alone (self.training "
        "of a layer, torch.is_grad_enabled() in a loss), or set executionMode='gang'"
    ),
    "counted": (
        "a step changes %r, which is none of the module's attributes and buffers: each task of a "
        "round begins with it anew, and the program's own stays as it is; keep it in a buffer or "
        "an attribute of a layer if anything shall follow from it, or set executionMode='gang'"
    ),
}
_TOLD_IN_GANGS = {
    "counted": (
        "a step changes %r, which is none of the module's attributes and buffers: each worker "
        "changes its own, the program's own stays as it is, and no checkpoint has it; keep it in a "
        "buffer or an attribute of a layer if anything shall follow from it"
    ),
}
"""By the kind of change: what is told, since nothing that is known follows from it."""


def _check_program(*seen: Changes, mode: Literal["gang", "rounds"]) -> None:
    """Tell of results that follow from what a step changes, and that no checkpoint has.

    Raises:
        ConfigError: tasks of rounds train, which begin with it anew each time.
    """
    named = {kind: name for changes in seen for kind, name in changes}
    told = _TOLD_IN_ROUNDS if mode == "rounds" else _TOLD_IN_GANGS
    for kind, text in told.items():
        if kind in named:
            logger.warning(text, named[kind])
    name = named.get("program")
    if name is None:
        return
    what = (
        f"a step changes {name!r}, which is none of the module's attributes and buffers, and "
        "computes with it"
    )
    remedy = "keep it in a buffer or an attribute of a layer, or of a loss that is an nn.Module"
    if mode == "rounds":
        raise ConfigError(
            f"{what}: each task of a round would begin with it anew; {remedy}, or set "
            "executionMode='gang'"
        )
    logger.warning(
        "%s: no checkpoint has it, so that after a lost worker training goes on with another "
        "value; %s",
        *(what, remedy),
    )


def _is_certain(error: Exception) -> bool:
    """Return True if the error comes whichever rows a batch has, and however many differ."""
    if isinstance(error, _OF_CODE) or any(text in str(error) for text in _CERTAIN):
        return True
    if _UNLIKE in str(error) and passed_through(error, _LOSS):
        return True
    return passed_through(error, "torch.optim") and not passed_through(error, "torch.nn")


def _wanted_rows(error: Exception) -> list[int]:
    """Sizes that do not fit, and are none of those that the loss has got: rows it may be made for.

    A worker's batches may have fewer rows than ``batch_size``.
    """
    sizes = {size for tensor in _given_to_loss(error) for size in tensor.shape}
    named = _SIZES.search(str(error))
    return [] if named is None else [n for n in map(int, named.groups()) if n and n not in sizes]


def _shapes_of_loss(error: Exception) -> str:
    """Say which shapes the loss that failed has got; empty: not those of two tensors."""
    from sparkdl.train.objective.loss import shape_text

    shapes = [shape_text(("batch", *one.shape[1:])) for one in _given_to_loss(error)]
    return "outputs of the shape {} and labels of the shape {}".format(*shapes) if shapes else ""


def _given_to_loss(error: Exception) -> list[torch.Tensor]:
    """The output and the label with which the loss has failed; empty: not two tensors."""
    import torch

    for frame, _ in traceback.walk_tb(error.__traceback__):
        given = [frame.f_locals.get(name) for name in ("output", "target")]
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        if frame.f_globals.get("__name__") == _LOSS and len(tensors) == len(given):
            return tensors
    return []


def _where(error: Exception | None) -> tuple[object, str] | None:
    return None if error is None else (type(error), users_line(error))


def _varied(example: Example) -> Example:
    """The example with values of the same kind that hang together with nothing."""
    import torch

    assert example.rows is not None
    generator = torch.Generator().manual_seed(0)

    def vary(values: torch.Tensor) -> torch.Tensor:
        if not len(values):
            return values
        drawn = torch.rand(values.shape, generator=generator, dtype=torch.float64)
        if not values.is_floating_point():
            num_values = 1 + max(1, int(values.max()))  # two classes at least
            return (drawn * num_values).long().to(values.dtype)
        least, most = values.min(), values.max()
        if bool(((values == 0) | (values == 1)).all()):
            return drawn.round().to(values.dtype)
        return (least + drawn * (most - least)).to(values.dtype)

    rows = {
        key: vary(value) if isinstance(value, torch.Tensor) else value
        for key, value in example.rows.items()
    }
    return replace(example, rows=rows)


def _error(
    module: nn.Module,
    config: TrainConfig,
    seen: list[Changes],
    example: Example,
    num_rows: int,
    *,
    adds_up: bool,
    shared: tuple[SharedValue, ...],
    in_rounds: bool,
    has_others: bool,
    is_first: bool = False,
) -> Exception | None:
    """Return what a step on so many rows raises; None: nothing that says anything of training.

    ``has_others`` is True if some of the rows may be for validation.
    """
    if example.rows is not None and min(map(len, example.rows.values())) < 2:
        return None  # a module may want several, and there may be more elsewhere
    with borrowed_generator(config.seed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # workers warn too
        try:
            with _copies(module, config, example, num_rows, shared) as copies:
                evaluates = in_rounds and has_others
                tried = replace(copies, in_rounds=in_rounds, evaluates=evaluates)
                seen.append(_step(tried, adds_up=adds_up, is_first=is_first))
        except MemoryError:
            return None
        except TrainingDiverged as error:
            refused = None if has_others else _of_bad_rows(error, example)
            if refused is None:
                return None
            # Another cause stays when these values are others.
            again: list[Changes] = []
            _error(
                module, config, again, _finite(example), num_rows, adds_up=adds_up, shared=shared,
                in_rounds=in_rounds, has_others=True,
            )  # fmt: skip
            return refused if again else None
        except Exception as error:  # whatever the user's code raises
            return None if passed_through(error, "torch.distributed") else error
    return None


@dataclass(frozen=True)
class _Tried:
    """Copies of what takes part in a step, and the rows of it."""

    given: nn.Module
    """The module itself, which stays as it is."""
    module: nn.Module
    config: TrainConfig
    shared: tuple[SharedValue, ...]
    """The objects that module and configuration have in common, as this configuration has them."""
    plan: TrainPlan
    batch: Batch
    in_rounds: bool = False
    """True if tasks of rounds train."""
    evaluates: bool = False
    """True if these evaluate validation rows."""


@contextlib.contextmanager
def _copies(
    module: nn.Module,
    config: TrainConfig,
    example: Example,
    num_rows: int,
    shared: tuple[SharedValue, ...] = (),
) -> Iterator[_Tried]:
    """Copies for a step on so many rows, with globals in common, as on a worker."""
    shard = Shard(shard_id=0, num_rows=num_rows, num_validation_rows=0, fingerprint="first rows")
    plan = make_plan(
        columns=example.columns,
        shards=[shard],
        world_size=1,
        batch_size=num_rows,
        epochs=config.epochs,
        max_steps=-1,
    )
    batch = _batch(example, num_rows)
    with lent, lent_globals():
        own, shared = loads(dumps((config, shared)))
        yield _Tried(module, own_copy(module, None), own, shared, plan, batch)


def _step(tried: _Tried, *, adds_up: bool = False, is_first: bool = False) -> Changes:
    """Take the step; raises what it raises.

    Returns what it has changed, and what buffers are then. The first time torch's own optimizers
    step on sparse gradients only. Dense ones they take, and a step imports torch's compiler, which
    takes seconds.
    """
    between = _between_steps(tried.config.callbacks)
    before = present_settings(travelling=False)
    with program_kept(tried.module, vars(tried.config)) as program:
        seen = ProgramState(between) if between else None
        found = dict(_changes(tried, program, adds_up=adds_up, is_first=is_first))
        for name in [] if seen is None else seen.changed():
            found["callbacks", name] = None
        now = present_settings(travelling=False)
        others = {name for name in now if now[name] != before.get(name)} - {"environment"}
        if others:  # libraries set variables, too
            found["setting", ", ".join(sorted(others))] = None
    return found


def _between_steps(callbacks: Items[Any]) -> list[Any]:
    """Return the methods of callbacks that rounds do not call in tasks."""
    from sparkdl.train.callbacks import Callback

    ours = {name: value for name, value in vars(Callback).items() if name.startswith("on_")}
    own = ((name, getattr(type(one), name, None)) for one in callbacks for name in ours)
    return [one for name, one in own if name != "on_step_end" and one is not ours[name]]


def _changes(tried: _Tried, program: ProgramState, *, adds_up: bool, is_first: bool) -> Changes:
    """Take the step in a ``program`` as it was before."""
    from sparkdl.comm.communicator import LocalCommunicator
    from sparkdl.serialization.travel.attributes import Attributes
    from sparkdl.sync.module_tensors import give_tensors, tensors_of
    from sparkdl.train.modules.memory_format import in_memory_format
    from sparkdl.train.optimizers import check_optimizer, stepping
    from sparkdl.train.optimizers.nested_states import is_known
    from sparkdl.train.optimizers.without_compiler import without_compiler
    from sparkdl.train.round_replica import check_held
    from sparkdl.train.step import TrainStep
    from sparkdl.train.time_spent import Clock

    module, config, batch = tried.module, tried.config, tried.batch
    replica = _replica(tried)
    optimizer = replica.synchronizer.optimizer
    step = TrainStep(replica, clock=Clock(LocalCommunicator()))
    for part in step.parts:
        part.place(0, 1)
        part.begin_fit()
        part.move_to(0, 0, 0)
        part.begin_epoch()
    stepping.set_mode(optimizer, trains=True)
    if is_first and is_known(optimizer):
        _leave_out_plain_steps(optimizer)
    held = Attributes(module, shared=tried.shared)
    before, kept = _fingerprints(module), _besides(held, replica.kept)
    with in_memory_format(module, config.memory_format):
        try:
            step(batch, batch.num_rows, 0)
        finally:  # if it failed, then maybe since it did not find what forward had left there
            held.check_shared()
    now, seen = _besides(held, replica.kept), step.after_forward
    changes = {place: mark for place, mark in now.items() if kept.get(place) != mark}
    changes |= {("buffer", name): mark for name, mark in _fingerprints(module).items()}
    for number, (name, _) in enumerate(module.named_parameters()):
        changes.pop(("buffer", name), None)
        if seen is not None and before.get(name) != seen[number]:
            changes["parameter", name] = seen[number]
    _check_sparse(config, module, adds_up=adds_up)
    if tried.in_rounds:
        check_held(held.state_dict())
    if adds_up:
        step.check_shared_gradients()
    stepping.set_mode(optimizer, trains=False)
    with without_compiler():
        for what, owner in (("optimizer", optimizer), ("scheduler", replica.scheduler)):
            check_optimizer.check_kept(what, owner)
    keeps = any(kind in ("attribute", "loss") for kind, _ in changes)
    if keeps:
        give_tensors(module, tensors_of(tried.given))
        changes |= _given(replica, batch)
    counted = program.changed()
    if counted:
        if _gives_other(tried, held, replica, program):
            changes["program", counted[0]] = None
        elif moved := program.counted():
            changes["counted", moved[0]] = None
    if tried.evaluates:
        changes |= {
            ("evaluated", name): None for name in _changed_in_evaluation(held, tried, replica)
        }
    return changes


def _replica(tried: _Tried) -> Replica:
    """What a worker would have made of the copies, in training mode."""
    import torch

    from sparkdl.comm.communicator import LocalCommunicator
    from sparkdl.sync.frozen_layers import training_mode
    from sparkdl.sync.gradients.allreduce import AllReduce
    from sparkdl.train.optimizers.without_compiler import without_compiler
    from sparkdl.train.replica import make_replica

    with without_compiler():
        replica = make_replica(
            tried.module, tried.config, tried.plan, torch.device("cpu"),
            lambda model, make: AllReduce().setup(model, make, LocalCommunicator()),
        )  # fmt: skip
    training_mode(tried.module, tried.config.frozen_layers)
    return replica


def counted_in_steps(checked: CheckedValues, columns: tuple[Column, ...]) -> str:
    """Name a value that each step changes alike, whichever rows it gets; empty: none is known.

    Such as a count of steps, or a teacher that follows the weights. What the module, or its loss,
    does not let see, or fails to do on rows that are drawn, is not known.
    """
    example = Example(columns=columns)
    numbers = sum(parameter.numel() for parameter in checked.module.parameters())
    if checked.weights is not None or numbers > _MOST_NUMBERS or is_compiled(checked.module):
        return ""
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        once = _left_by_steps(checked, example, 1)
        if once:
            again = _left_by_steps(checked, example, 2)
            others = _left_by_steps(checked, example, 1, has_others=True)
            for (kind, name), mark in once.items():
                if others.get((kind, name)) == mark != again.get((kind, name)):
                    return name if kind == "loss" else f"{kind} {name!r}"
    return ""


def _left_by_steps(
    checked: CheckedValues, example: Example, num_steps: int, *, has_others: bool = False
) -> Changes:
    """What forward and backward passes change, given rows that are drawn, or others and fewer.

    Weights that train are others than those that the module begins with, as after some steps.
    """
    import torch

    from sparkdl.serialization.travel.attributes import Attributes
    from sparkdl.train.objective.label_losses import sums_of
    from sparkdl.train.objective.training_step import run

    config = replace(checked.config, compile=False, metrics=None)
    with (
        borrowed_generator(config.seed + has_others),
        _copies(checked.module, config, example, _FEW_ROWS - has_others, checked.shared) as tried,
        program_kept(tried.module, vars(tried.config)),
    ):
        replica = _replica(tried)
        with torch.no_grad():
            for parameter in tried.module.parameters():
                if parameter.requires_grad and parameter.is_floating_point():
                    factors = torch.linspace(0.5, 1.0, parameter.numel())
                    parameter.mul_(factors.view(parameter.shape))
        held = Attributes(tried.module, shared=tried.shared)
        batch = tried.batch.map(_drawn)
        before = _marks(held, replica)
        for _ in range(num_steps):
            seen = run(replica.loss, replica.module, batch)
            torch.autograd.backward(sums_of(replica.loss, seen, batch.target, None)[0])
        after = _marks(held, replica)
        return {place: mark for place, mark in after.items() if before.get(place) != mark}


def _drawn(values: torch.Tensor) -> torch.Tensor:
    """Values of the same shape and dtype, from 0 to 1, of which no two rows are alike."""
    import torch

    drawn = torch.rand(values.shape, dtype=torch.float64)
    return (drawn if values.is_floating_point() else drawn.round()).to(values.dtype)


def _gives_other(tried: _Tried, held: Attributes, replica: Replica, program: ProgramState) -> bool:
    """Return True if outputs, losses or gradients are others once the program is put back.

    False also for modules that hold what nobody could put back for that.
    """
    from sparkdl.storage import tensor_tree
    from sparkdl.sync.module_tensors import give_tensors, tensors_of

    attributes, kept = held.state_dict(), replica.kept.state_dict()
    if attributes["lacks"] or attributes["layers"]:
        return False
    state = tensor_tree.snapshot([attributes, kept])

    def given(asked: Callable[[Replica, Batch], Any]) -> Any:
        attributes, kept = tensor_tree.unpack(state.value, copy.deepcopy(state.tensors))
        held.load_state_dict(attributes)
        replica.kept.load_state_dict(kept)
        give_tensors(tried.module, tensors_of(tried.given))
        return asked(replica, tried.batch)

    asked: list[Callable[[Replica, Batch], Any]] = [_gradients_given]
    asked += [partial(one, is_training=mode) for one in _GIVEN for mode in (True, False)]
    with program_kept(tried.module, vars(tried.config)) as counted:
        for one in asked:  # what one of them leaves another one may read
            found = given(one)
            counted.put_back()
            program.put_back()
            is_same = given(one) == found
            counted.put_back()
            if not is_same:
                return True
    return False


def _changed_in_evaluation(held: Attributes, tried: _Tried, replica: Replica) -> list[str]:
    """Names of what module and loss change of their own where validation rows are evaluated."""
    replica.module.eval()
    before = _marks(held, replica)
    _values_given(replica, tried.batch, is_training=False)
    return [place[1] for place, mark in _marks(held, replica).items() if before.get(place) != mark]


def _gradients_given(replica: Replica, batch: Batch) -> list[int]:
    """What tells apart the gradients for rows of ones; nothing, where a backward pass fails."""
    import torch

    from sparkdl.sync.module_tensors import fingerprint
    from sparkdl.train.objective.label_losses import sums_of
    from sparkdl.train.objective.training_step import run

    gradients = list[int]()
    replica.synchronizer.zero_gradients()
    with contextlib.suppress(Exception), seeded(replica.config.seed):
        replica.module.train()
        ones = batch.map(torch.ones_like)
        seen = run(replica.loss, replica.module, ones)
        torch.autograd.backward(sums_of(replica.loss, seen, ones.target, None)[0])
        parameters = replica.module.parameters()
        gradients += [fingerprint(p.grad) for p in parameters if p.grad is not None]
    replica.synchronizer.zero_gradients()
    return gradients


def _outputs_given(replica: Replica, batch: Batch, *, is_training: bool) -> list[int]:
    """What tells apart the outputs for rows of ones; nothing, where forward fails."""
    import torch
    from torch.utils import _pytree as pytree

    from sparkdl.sync.module_tensors import fingerprint

    with contextlib.suppress(Exception), torch.no_grad(), seeded(replica.config.seed):
        replica.module.train(is_training)
        output = batch.map(torch.ones_like).arguments.call(replica.module)
        leaves = [v for v in pytree.tree_leaves(output) if isinstance(v, torch.Tensor)]
        return [fingerprint(value) for value in leaves]
    return []


def _values_given(replica: Replica, batch: Batch, *, is_training: bool) -> list[str]:
    """The loss of rows of ones, and its weight; nothing, where it fails."""
    import torch

    from sparkdl.train.objective.label_losses import sums_of
    from sparkdl.train.objective.training_step import run

    with contextlib.suppress(Exception), torch.no_grad(), seeded(replica.config.seed):
        replica.module.train(is_training)
        ones = batch.map(torch.ones_like)
        seen = run(replica.loss, replica.module, ones)
        return [str(float(one)) for one in sums_of(replica.loss, seen, ones.target, None)[:2]]
    return []


_GIVEN: Items[Callable[..., list[Any]]] = (_outputs_given, _values_given)


def _given(replica: Replica, batch: Batch) -> Changes:
    """What tells apart the outputs for rows of ones, in both modes, and the loss of these."""
    both = ([one(replica, batch, is_training=mode) for mode in (True, False)] for one in _GIVEN)
    return dict(zip((("output", ""), ("value", "")), both, strict=True))


def _marks(held: Attributes, replica: Replica) -> dict[tuple[str, str], Any]:
    """What tells the values apart of all that module and loss hold."""
    buffers = _fingerprints(replica.module).items()
    return {**_besides(held, replica.kept), **{("buffer", name): one for name, one in buffers}}


def _besides(held: Attributes, kept: Kept) -> dict[tuple[str, str], Any]:
    """What tells the values of attributes apart, and of what loss and augmentation keep.

    Metrics of torchmetrics count the rows of all workers.
    """
    from sparkdl.storage.tensor_tree import pack
    from sparkdl.sync.module_tensors import fingerprint

    found: dict[tuple[str, str], Any] = {}
    for layer, key, mark in held.marks():
        kinds = {one.__module__.partition(".")[0] for one in type(layer).__mro__}
        if "torchmetrics" not in kinds:
            found["attribute", key] = mark
    for name, state in kept.state_dict().items():
        tree, tensors = pack(state)
        found["loss", name] = tree, list(map(fingerprint, tensors.values()))
    return found


def _fingerprints(module: nn.Module) -> Mapping[str, int]:
    """Fingerprints of parameters and buffers, but of the statistics of torch's norms: means."""
    from torch.nn.modules.batchnorm import _NormBase

    from sparkdl.sync.module_tensors import fingerprint, places_of

    norms = [layer for layer in module.modules() if isinstance(layer, _NormBase)]
    means = {id(buffer) for norm in norms for buffer in norm.buffers()}
    return {
        place.name: fingerprint(place.value)
        for place in places_of(module, aliases=False)
        if id(place.owner[place.key]) not in means
    }


def _leave_out_plain_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step only if some gradient is sparse."""
    taken = optimizer.step

    def step(closure: Any = None) -> Any:
        if any(gradient.is_sparse for gradient in _gradients(optimizer)):
            return taken(closure)
        return None if closure is None else closure()

    optimizer.step = step  # type: ignore[method-assign]


def _gradients(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return (p.grad for p in parameters if p.grad is not None)


def _check_sparse(config: TrainConfig, module: nn.Module, *, adds_up: bool) -> None:
    """Refuse sparse gradients where nobody expects them; raises ConfigError."""
    from sparkdl.sync.sparse_gradients import sparse_parameters

    found = {
        name: parameter
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and parameter.grad.is_sparse
    }
    if found and config.gradient_clip_norm is not None:
        raise ConfigError(
            f"gradientClipNorm: the gradient of {next(iter(found))} is sparse, and torch has no "
            "norm of it; leave it unset, or make the layer with sparse=False"
        )
    known = {id(parameter) for parameter in sparse_parameters(module).values()}
    strange = [name for name, parameter in found.items() if id(parameter) not in known]
    if strange and adds_up:
        raise ConfigError(
            f"the gradient of {strange[0]} is sparse, and workers add gradients up that are known "
            "to be so before: use nn.Embedding(..., sparse=True), or let the layer that has it "
            "call it weight and have an attribute sparse = True"
        )


def _batch(example: Example, num_rows: int) -> Batch:
    """The rows that are at hand as a batch, again and again if it wants more."""
    import torch

    at_hand = num_rows if example.rows is None else min(map(len, example.rows.values()))
    fewer = min(at_hand, num_rows)
    places = torch.arange(num_rows) % fewer
    repeated = example.batch(fewer).map(lambda value: value.index_select(0, places))
    return replace(repeated, num_rows=num_rows)


def _forward_line(module: nn.Module, config: TrainConfig, example: Example) -> str:
    """Return the line of the user's forward pass whose backward pass fails, as torch names it."""
    import torch

    with (
        borrowed_generator(config.seed),
        warnings.catch_warnings(record=True) as told,
        torch.autograd.set_detect_anomaly(True, check_nan=False),
    ):
        warnings.simplefilter("always")
        try:
            with _copies(module, config, example, config.batch_size) as tried:
                _step(tried)
        except Exception:  # the same as before
            texts = [str(warning.message) for warning in told]
            frames = [frame for text in texts for frame in _FORWARD.findall(text)]
            for path, _, function, line in reversed(frames):
                if is_of_users(path):
                    return f" in the backward pass of {line.strip()!r} ({function})"
    return ""


def _finite(example: Example) -> Example:
    """The example with zeros in the place of what is not finite."""
    import torch

    assert example.rows is not None
    rows = {
        key: torch.nan_to_num(value, 0.0, 0.0, 0.0)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for key, value in example.rows.items()
    }
    return replace(example, rows=rows)


def _of_bad_rows(error: TrainingDiverged, example: Example) -> DataError | None:
    """Return the error that names values which are not finite; None: all are."""
    from sparkdl.train.objective.divergence import without_remedies
    from sparkdl.train.objective.not_finite import bad_rows, named

    found = {} if example.rows is None else bad_rows(example.rows, example.columns)
    if example.rows is None or not found:
        return None
    of = f"the first {min(map(len, example.rows.values()))} rows"
    refused = DataError(f"{without_remedies(error)}. Among {of} {named(found)}")
    refused.__cause__ = error
    return refused
