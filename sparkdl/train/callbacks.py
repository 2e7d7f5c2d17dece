"""Callbacks and observers of training: what callbacks may ask for, and how ranks agree on it.

Callbacks are the user's, on every rank; the `Observer` is the worker's way to the driver.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import nn

from sparkdl.comm.communicator import Communicator
from sparkdl.errors import ConfigError, meant
from sparkdl.runtime.arguments import takes

Phase = Literal["setup", "train", "evaluate", "checkpoint", "finish"]


class Observer(Protocol):
    """Receives what a rank reports; must be quick, as `step` is called at every step."""

    def step(self, *, epoch: int, step: int, loss: float, rows: int) -> None:
        """A step was completed.

        Args:
            epoch: number of the epoch, from 1.
            step: completed steps of the run.
            loss: newest known loss of the global batch.
            rows: samples of this rank in the step.
        """

    def phase(self, name: Phase) -> None:
        """Another phase begins."""

    def clock(self, seconds: Mapping[str, float]) -> None:
        """Training begins; ``seconds`` grow with it, and say what its time is spent on."""

    def epoch(self, record: Mapping[str, float]) -> None:
        """An evaluation, such as that of an epoch's end; ``record`` is its entry in the history."""

    def confusion(self, epoch: float, counts: Sequence[Sequence[float]]) -> None:
        """Report what a classifier takes for what after ``epoch``: rows by label and prediction."""

    def layers(self, step: int, found: Mapping[str, Any]) -> None:
        """Report what was found in the layers after ``step``; see `RunListener.layers`."""


class NullObserver:
    """An observer that does nothing."""

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    step = phase = clock = epoch = confusion = layers = _nothing


@dataclass(frozen=True)
class CallbackRequest:
    """The request of a rank's callbacks."""

    stop: bool = False
    save: bool = False
    learning_rate: float | None = None

    def __str__(self) -> str:
        parts = ["to stop"] * self.stop + ["to save"] * self.save
        if self.learning_rate is not None:
            parts.append(f"for the learning rate {self.learning_rate:g}")
        return " and ".join(parts) or "for nothing"


class Requests:
    """Collects what the callbacks of one rank ask for, until it is carried out.

    Attributes:
        refusal: why nothing can be asked for now; None: it can.
        no_save: why no checkpoint can be asked for; None: it can.
        taken_at: completed steps of the run when `take` was last called.
    """

    def __init__(self, *, refusal: str | None = None, no_save: str | None = None) -> None:
        self.refusal, self.no_save = refusal, no_save
        self.taken_at = 0
        self._asked = CallbackRequest()

    def ask(self, **wanted: Any) -> None:
        """Take note of what a callback wants, by the names of `CallbackRequest`.

        Raises:
            ConfigError: it cannot be had.
        """
        refusal = self.refusal or (self.no_save if "save" in wanted else None)
        if refusal is not None:
            raise ConfigError(refusal)
        self._asked = replace(self._asked, **wanted)

    def take(self, step: int) -> CallbackRequest:
        """Return what was asked for since the last call; of several learning rates the last."""
        self.taken_at = step
        taken, self._asked = self._asked, CallbackRequest()
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint must hold."""
        return {"asked": asdict(self._asked), "taken_at": self.taken_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._asked = CallbackRequest(**state["asked"])
        self.taken_at = state["taken_at"]


OUTSIDE = "callbacks may act in on_step_end, on_evaluation_end and on_epoch_end only"
IN_TASKS = (
    "with executionMode='rounds' on_step_end runs in tasks, which cannot act on the run; act in "
    "on_epoch_end or on_evaluation_end, which run on the driver, or use executionMode='gang'"
)
NO_PLACE = "state.save() needs a place for checkpoints; set checkpointDir"


def agreed(
    own: CallbackRequest, comm: Communicator, device: torch.device, step: int
) -> CallbackRequest:
    """Return the request of all ranks' callbacks, given this rank's ``own``; collective.

    Raises:
        ConfigError: not all have asked for the same; names a rank.
    """
    if comm.world_size == 1:
        return own
    rate = math.nan if own.learning_rate is None else own.learning_rate
    sent = torch.tensor([own.stop, own.save, rate], dtype=torch.float64, device=device)
    asked = [
        CallbackRequest(bool(stop), bool(save), None if math.isnan(rate) else rate)
        for stop, save, rate in comm.all_gather(sent).tolist()
    ]
    usual = Counter(asked).most_common(1)[0][0]
    for rank, other in enumerate(asked):
        if other != usual:
            raise ConfigError(
                f"callbacks must ask for the same on all ranks, but after step {step} rank {rank} "
                f"asked {other}, and rank {asked.index(usual)} {usual}; decide by what is equal on "
                "all ranks, such as the loss or an epoch's record"
            )
    return own


@dataclass(frozen=True, kw_only=True)
class CallbackState:
    """The state of training that a callback sees, and the requests that it may make.

    All ranks must ask for the same. What `on_evaluation_end` and `on_epoch_end` ask for is done at
    once. What `on_step_end` asks for is done when a round is closed, every ``Callback.acts_every``
    steps, and at evaluations.
    """

    rank: int
    """This worker's number, from 0; in rounds that of the shard."""
    world_size: int
    """Workers; in rounds shards."""
    epoch: int
    """Completed epochs."""
    step: int
    """Completed steps of the run."""
    loss: float
    """Newest known loss of the global batch; NaN before the first step."""
    model: nn.Module
    """This rank's replica, to look at."""
    learning_rate: float = math.nan
    """Present one of the first parameter group; NaN if it has none, or where it is not known."""
    requests: Requests = field(default_factory=lambda: Requests(refusal=OUTSIDE), repr=False)
    """Notes of `stop`, `set_learning_rate` and `save` of what was asked for."""

    def stop(self) -> None:
        """End training. The epoch gets its record, with what its steps so far have brought.

        Raises:
            ConfigError: callbacks may not act here.
        """
        self.requests.ask(stop=True)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Give the first parameter group this learning rate.

        The other groups keep their proportion to it. A schedule keeps its shape, and its place in
        it: all rates that it sets later are multiplied by the same factor.

        Args:
            learning_rate: at least 0.

        Raises:
            ConfigError: it is negative or not finite, or callbacks may not act here.
        """
        if not (math.isfinite(learning_rate) and learning_rate >= 0):
            raise ConfigError(
                f"set_learning_rate takes a finite number of at least 0; received {learning_rate}"
            )
        self.requests.ask(learning_rate=float(learning_rate))

    def save(self) -> None:
        """Write a checkpoint, whatever ``checkpointInterval`` says.

        Raises:
            ConfigError: there is no place for checkpoints, or callbacks may not act here.
        """
        self.requests.ask(save=True)


class Callback:
    """Watches training on every rank, and may act on it; override what you need.

    Through the state that they get, `on_step_end`, `on_evaluation_end` and `on_epoch_end` may stop
    training, change the learning rate and save a checkpoint. All ranks must ask for the same.

    Example::

        class Halve(Callback):
            def on_epoch_end(self, state, record):
                if record["epoch"] % 10 == 0:
                    state.set_learning_rate(state.learning_rate / 2)
                if record["loss"] < 0.01:
                    state.stop()
    """

    acts_every: ClassVar[int] = 16
    """Steps after which the ranks agree on what `on_step_end` has asked for, by a small message."""

    def on_train_begin(self, state: CallbackState) -> None:
        """Training begins, or goes on after a restart."""

    def on_step_end(self, state: CallbackState) -> None:
        """A step was completed."""

    def on_evaluation_end(self, state: CallbackState, record: Mapping[str, float]) -> None:
        """The model was evaluated, within an epoch or at its end; ``record`` is the history's."""

    def on_epoch_end(self, state: CallbackState, record: Mapping[str, float]) -> None:
        """An epoch was completed, or the run has ended within it; follows `on_evaluation_end`.

        ``record`` is the epoch's entry in the history.
        """

    def on_train_end(self, state: CallbackState) -> None:
        """Training is over; the model has its final weights."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints, as plain values and tensors; that of rank 0 is kept."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave, before `on_train_begin`, after a restart."""


def called_at_steps(callbacks: Iterable[Any]) -> list[Any]:
    """Those that have an `on_step_end` of their own."""
    ours = Callback.on_step_end
    return [one for one in callbacks if getattr(one.on_step_end, "__func__", None) is not ours]


def steps_between(callbacks: Iterable[Any]) -> int | None:
    """Steps between two agreements on what callbacks ask for; None: none is called at steps.

    Raises:
        ConfigError: it is less than one step, or a method would not be called, or not like that.
    """
    callbacks = list(callbacks)
    for callback in callbacks:
        _check_methods(callback)
    acts_every = (callback.acts_every for callback in called_at_steps(callbacks))
    every: int | None = min(acts_every, default=None)
    if every is not None and every < 1:
        raise ConfigError(f"acts_every of a callback must be at least 1; received {every}")
    return every


def _called(kind: type) -> set[str]:
    """Return the names that the methods of a class use, which may be those of its own methods."""
    functions = (value for base in kind.__mro__ for value in vars(base).values())
    codes = (getattr(function, "__code__", None) for function in functions)
    return {name for code in codes if code is not None for name in code.co_names}


def _check_methods(callback: Any) -> None:
    """Refuse methods that nobody would call, or with other arguments; raises ConfigError."""
    kind = type(callback)
    ours = {name: value for name, value in vars(Callback).items() if name.startswith("on_")}
    for name in dir(kind):
        if not name.startswith("on_"):
            continue
        if name not in ours:
            if name not in _called(kind) and (alike := meant(name, ours)):
                raise ConfigError(
                    f"nobody calls {name} of the callback {kind.__name__}; did you mean {alike!r}? "
                    f"known: {', '.join(ours)}"
                )
            continue
        given = list(inspect.signature(ours[name]).parameters)[1:]
        if not takes(getattr(callback, name), tuple(given)):
            taken = ", ".join(map(str, inspect.signature(getattr(callback, name)).parameters))
            raise ConfigError(
                f"{name} of the callback {kind.__name__} takes (self, {taken}), and is called "
                f"with (self, {', '.join(given)})"
            )


def call_evaluated(
    callbacks: Iterable[Any],
    state: Callable[[], CallbackState],
    record: Mapping[str, float],
    act: Callable[[], None],
    is_over: Callable[[], bool],
) -> None:
    """Call `Callback.on_evaluation_end`, and if the epoch or the run is over then, `on_epoch_end`.

    Args:
        callbacks: the user's.
        state: gives what they see now.
        record: the entry in the history.
        act: does what they have asked for.
        is_over: tells if the epoch or the run is over.
    """
    for callback in callbacks:
        callback.on_evaluation_end(state(), record)
    act()
    if is_over():
        for callback in callbacks:
            callback.on_epoch_end(state(), record)
        act()


def states_of(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Return the states of callbacks for checkpoints, by their classes and places among these."""
    return {name: callback.state_dict() for name, callback in _named(callbacks)}


def give_states(callbacks: Iterable[Any], states: Mapping[str, Any]) -> None:
    """Restore what `states_of` gave; callbacks that were not there begin anew."""
    for name, callback in _named(callbacks):
        if name in states:
            callback.load_state_dict(states[name])


def _named(callbacks: Iterable[Any]) -> list[tuple[str, Any]]:
    seen: Counter[str] = Counter()
    named = []
    for callback in callbacks:
        kind = type(callback).__qualname__
        named.append((f"{kind} {seen[kind]}", callback))
        seen[kind] += 1
    return named
