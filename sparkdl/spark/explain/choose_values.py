"""Chooses the Params that are ``"auto"`` before a fit, by what `explain` measures.

An equal fit goes on with a choice that ``checkpointDir`` keeps: another would be another run.
"""

from __future__ import annotations

import ast
import json
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from sparkdl.config import ExplainOptions
from sparkdl.data.plan import steps_per_epoch
from sparkdl.errors import ConfigError, StorageError
from sparkdl.explain import comparison
from sparkdl.explain.comparison import Choice, choose_strategy, choose_workers
from sparkdl.explain.cost_model import Calibration
from sparkdl.explain.explanation import seconds_text
from sparkdl.explain.trials import batch_sizes
from sparkdl.runtime.public_names import import_object
from sparkdl.serialization.json_objects import describe, restore
from sparkdl.spark.cluster.cluster_info import inspect_cluster
from sparkdl.spark.explain.estimate import Found, look
from sparkdl.spark.explain.measure_gang import (
    measure,
    num_ranks,
    obstacle_to_gangs,
    predictor_of,
    try_out,
)
from sparkdl.spark.frames.shared_spools import Spools
from sparkdl.spark.frames.user_data import UserData
from sparkdl.spark.run.resume import run_key
from sparkdl.spark.run.run import FitRequest
from sparkdl.spark.session.interrupts import Cleanup
from sparkdl.storage.hadoop_storage import open_on_driver
from sparkdl.storage.retried import Retried
from sparkdl.storage.storage import Storage
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.strategy import SyncStrategy

logger = logging.getLogger(__name__)

FIT_OPTIONS = ExplainOptions(count_seconds=86_400.0)
"""Options for what a fit measures; it reads all rows anyway, however long that takes."""
_ALL_NUMBERS = 16
"""Workers up to which every number is looked at, and not only powers of two."""
_FOLDER = "chosen"
"""In the place for checkpoints."""


def start_of(rows: UserData, request: FitRequest) -> FitRequest:
    """The request with the strategy that choosing begins with, if it is ``"auto"``.

    A fit that goes on from another has the strategy of that: it is chosen already. Raises
    ConfigError if that is none of the package's own, StorageError if it cannot be read.
    """
    if "syncStrategy" not in request.automatic:
        return request
    if request.initial_state is not None:
        method = request.initial_state.read()[1].method
        reason = "the fit that initialState goes on from has it, and so has its state"
        if request.execution_mode == "auto":
            request = replace(request, execution_mode=method.mode)
        choice = Choice(param="syncStrategy", value=strategy_of(method.strategy), reason=reason)
        return with_choices(request, [choice])
    strategy: SyncStrategy = AllReduce()
    mode, spark = request.execution_mode, rows.spark
    if mode == "rounds" or (mode == "auto" and obstacle_to_gangs(spark, inspect_cluster(spark))):
        strategy = ParameterAveraging(averaging_period="auto", target_share=comparison.SMALL_SHARE)
    return replace(request, config=replace(request.config, sync_strategy=strategy))


def strategy_of(text: str) -> SyncStrategy:
    """The strategy whose ``repr`` a training state has; raises ConfigError if it is not ours."""
    try:
        made = _made(ast.parse(text, mode="eval").body)
    except (ConfigError, SyntaxError, ValueError, TypeError):
        made = None
    if not isinstance(made, SyncStrategy) or repr(made) != text:
        raise ConfigError(
            f"syncStrategy cannot be 'auto' with this initialState, whose strategy {text} is none "
            "of the package's own; set syncStrategy to the strategy of the earlier fit"
        )
    return made


def _made(node: ast.expr) -> Any:
    """Return what an expression says: plain values, and public classes with keyword arguments."""
    if not isinstance(node, ast.Call):
        return ast.literal_eval(node)
    options = {str(option.arg): _made(option.value) for option in node.keywords}
    return import_object(f"sparkdl:{ast.unparse(node.func)}")(**options)


def choose(rows: UserData, request: FitRequest, spools: Spools | None) -> FitRequest:
    """The request of a fit with values in place of every ``"auto"``; ``spools`` as for `fit`.

    Raises ConfigError if nothing can be chosen here, and what a fit or a measuring worker raises.
    """
    began = time.perf_counter()
    started = start_of(rows, request)
    if started.automatic:
        with Cleanup() as stack:
            found = look(rows, started, FIT_OPTIONS, stack)
            kept = Kept.of(found)
            choices = None if kept is None else kept.read()
            if choices is None:
                if spools is not None:
                    slots = found.checked.slots
                    stack.enter_context(spools.queue.slots(num_ranks(found.checked), slots.total))
                choices, _ = chosen_values(found, FIT_OPTIONS, stack, only_choices=True)
                if kept is not None:
                    kept.write(choices)
        started = with_choices(started, choices)
    for name, choice in started.chosen.items():
        logger.info("%s=%s was chosen: %s", name, choice["value"], choice["reason"])
    logger.info("choosing took %s", seconds_text(time.perf_counter() - began))
    return started


def chosen_values(
    found: Found, options: ExplainOptions, stack: ExitStack, *, only_choices: bool = False
) -> tuple[list[Choice], Calibration | None]:
    """Measure, and choose the Params that are ``"auto"``; the measurements come along, if any."""
    wanted, choices = found.checked.request.automatic, []
    if {"batchSize", "learningRate"} & set(wanted):
        choices += _tried(found, options.measure_seconds, stack)
        request = with_choices(found.checked.request, choices)
        found = _with_batches(replace(found, checked=replace(found.checked, request=request)))
    calibration = None
    if {"numWorkers", "syncStrategy"} & set(wanted):
        calibration = measure(found, options.measure_seconds, stack, only_choices=only_choices)
        choices += _predicted(found, calibration)
    return choices, calibration


def _tried(found: Found, seconds: float, stack: ExitStack) -> list[Choice]:
    checked = found.checked
    slots, wanted = checked.slots, checked.request.automatic
    obstacle = obstacle_to_gangs(checked.spark, slots.cluster)
    if obstacle is not None:
        raise ConfigError(
            "batchSize and learningRate cannot be 'auto' on this cluster, since they are tried in "
            f"a gang of one worker: {obstacle}; or set them to values of your own"
        )
    most = slots.num_workers
    if "numWorkers" in wanted:
        most = slots.total or num_ranks(checked)
    at_once = min(most, slots.total or most)
    sizes = None
    if "batchSize" in wanted:
        num_parts = checked.config.gradient_accumulation_steps
        sizes = batch_sizes(found.num_rows // most, num_parts)
    return try_out(
        found,
        sizes,
        seconds,
        stack,
        tries_rates="learningRate" in wanted,
        workers_per_machine=-(-at_once // max(1, slots.cluster.num_executors or 1)),
    )


def _with_batches(found: Found) -> Found:
    """The same with the plan of batches of the size that was chosen."""
    plan, batch_size = found.plan, found.checked.config.batch_size
    rows = [shard.num_rows for shard in plan.shards]
    num_steps = steps_per_epoch(rows, batch_size)
    return replace(found, plan=replace(plan, batch_size=batch_size, steps_per_epoch=num_steps))


def _predicted(found: Found, calibration: Calibration) -> list[Choice]:
    checked = found.checked
    slots, request = checked.slots, checked.request
    predictor = predictor_of(found, calibration)
    sizes = [slots.num_workers]
    if "numWorkers" in request.automatic:
        most = slots.total or num_ranks(checked)
        sizes = comparison.world_sizes(most, most, 1, range(1, min(most, _ALL_NUMBERS) + 1))
    choices = []
    if "syncStrategy" in request.automatic:
        modes = {"gang": (False,), "rounds": (True,)}.get(request.execution_mode, (False, True))
        ladder = comparison.ladder(predictor, sizes)
        ladder = [one for one in ladder if one.strategy.prefers_rounds in modes]
        choice, option = choose_strategy(ladder)
        choices.append(choice)
    else:
        option = comparison.option(predictor, checked.strategy, sizes, in_rounds=checked.in_rounds)
    if "numWorkers" in request.automatic:
        choices.insert(0, choose_workers(option))
    return choices


def with_choices(request: FitRequest, choices: Sequence[Choice]) -> FitRequest:
    """The request with these values, which are ``"auto"`` no more."""
    values = {choice.param: choice.value for choice in choices}
    config = request.config
    told = {
        choice.param: {"value": shown(choice.value), "reason": choice.reason} for choice in choices
    }
    return replace(
        request,
        config=replace(
            config,
            batch_size=values.get("batchSize", config.batch_size),
            learning_rate=values.get("learningRate", config.learning_rate),
            sync_strategy=values.get("syncStrategy", config.sync_strategy),
        ),
        num_workers=values.get("numWorkers", request.num_workers),
        automatic=tuple(name for name in request.automatic if name not in values),
        chosen={**request.chosen, **told},
    )


def shown(value: Any) -> Any:
    """A chosen value as plain value: that of a strategy is its text."""
    return comparison.strategy_text(value) if isinstance(value, SyncStrategy) else value


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The place where the choice of a request is kept."""

    storage: Storage
    path: str
    most_workers: int | None
    """Workers of a gang that the cluster has room for now; None: as many as are wanted."""

    @classmethod
    def of(cls, found: Found) -> Kept | None:
        """The place of this request's choice, named like a run; None: no ``checkpointDir``."""
        checked = found.checked
        request, directory = checked.request, checked.config.checkpoint.directory
        if directory is None:
            return None
        asked = [
            request.automatic, request.num_workers, request.execution_mode,
            request.cpus_per_worker, request.gpus_per_worker, found.counted[0],
        ]  # fmt: skip
        key = run_key(checked.module, found.columns, checked.config, json.dumps(asked))
        return cls(
            storage=Retried(open_on_driver(checked.spark, directory)),
            path=f"{_FOLDER}/{key}.json",
            most_workers=None if checked.in_rounds else checked.slots.total,
        )

    def read(self) -> list[Choice] | None:
        """Read what an equal request chose before; None: there was none. Raises StorageError."""
        if not self.storage.exists(self.path):
            return None
        try:
            found = json.loads(self.storage.read(self.path))
            choices = [Choice(**{**one, "value": restore(one["value"])}) for one in found]
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(
                f"{self.path} in {self.storage} is damaged: {error}; remove it, so that the "
                "Params that are 'auto' are chosen again"
            ) from error
        return [self._that_fits(choice) for choice in choices]

    def _that_fits(self, choice: Choice) -> Choice:
        most = self.most_workers
        if choice.param != "numWorkers" or most is None or choice.value <= most:
            reason = f"{choice.reason}; kept in checkpointDir by an earlier fit"
            return replace(choice, reason=reason)
        reason = f"an earlier fit had {choice.value}, but the cluster has room for {most}"
        return replace(choice, value=most, reason=reason)

    def write(self, choices: Sequence[Choice]) -> None:
        """Keep a choice for equal requests; raises StorageError."""
        plain = [{**vars(choice), "value": describe(choice.value)} for choice in choices]
        self.storage.write(self.path, json.dumps(plain, indent=2).encode())
