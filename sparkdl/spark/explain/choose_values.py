"""Chooses the Params that are ``"auto"`` before a fit, by what `explain` measures.

With a ``checkpointDir`` the choice is kept there, so that an equal fit goes on with it: another
batch size, rate or strategy would be another run.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sparkdl.config import ExplainOptions
from sparkdl.data.plan import steps_per_epoch
from sparkdl.errors import ClusterError, ConfigError, StorageError
from sparkdl.explain import comparison
from sparkdl.explain.choose import Choice, batch_sizes, choose_strategy, choose_workers
from sparkdl.explain.cost_model import Calibration
from sparkdl.explain.explanation import seconds_text
from sparkdl.serialization.json_objects import describe, restore
from sparkdl.spark.cluster.cluster_info import inspect_cluster, require_gang_support
from sparkdl.spark.explain.estimate import Found, estimate
from sparkdl.spark.explain.measure_gang import measure, num_ranks, try_out
from sparkdl.spark.explain.predict_fit import compressions_of, predictor_of
from sparkdl.spark.fit.check_request import CheckedRequest, check_request
from sparkdl.spark.frames.frame_sample import Sample
from sparkdl.spark.frames.shared_spools import Spools
from sparkdl.spark.frames.user_data import UserData
from sparkdl.spark.run.resume import run_key
from sparkdl.spark.run.run import FitRequest
from sparkdl.spark.session.compat import conf
from sparkdl.spark.session.interrupts import Cleanup
from sparkdl.spark.session.settings import read_settings
from sparkdl.storage.hadoop_storage import open_on_driver
from sparkdl.storage.retried import Retried
from sparkdl.storage.storage import Storage
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.strategy import SyncStrategy

logger = logging.getLogger(__name__)

FIT_OPTIONS = ExplainOptions(count_seconds=86_400.0)
"""How much a fit measures; it reads all rows anyway, however long that takes."""
_ALL_NUMBERS = 16
"""Workers up to which every number is looked at, and not only powers of two."""
_FOLDER = "chosen"
"""In the place for checkpoints."""


@dataclass(frozen=True, kw_only=True)
class Looked:
    """A request that was checked, and what is known of its rows."""

    checked: CheckedRequest
    sample: Sample | None
    found: Found


def look(
    rows: UserData,
    request: FitRequest,
    options: ExplainOptions,
    stack: ExitStack,
    earlier: Looked | None = None,
) -> Looked:
    """Check a request as a fit does, look at some rows, and count them.

    Args:
        rows: what is trained on.
        request: what the estimator asks for.
        options: how much is looked at.
        stack: removes the sample's spool.
        earlier: of the same rows with other workers or batches; they are not read again.

    Raises:
        SparkDLError: what a fit raises before it trains.
    """
    checked = check_request(rows, request)
    if earlier is None:
        sample, counted = rows.sample(checked.table_spec, options.count_seconds), None
    else:
        sample, counted = earlier.sample, earlier.found.counted
    # Now that jobs have run, executors are there whose number was not known before.
    checked = replace(checked, slots=checked.slots.asked_again(checked.spark))
    found = estimate(checked, sample, options, stack, counted)
    return Looked(checked=checked, sample=sample, found=found)


def start_of(rows: UserData, request: FitRequest) -> FitRequest:
    """The request with a strategy to begin with where it is to be chosen."""
    if "syncStrategy" not in request.automatic:
        return request
    strategy: SyncStrategy = AllReduce()
    if request.execution_mode == "rounds" or (
        request.execution_mode == "auto" and not _runs_gangs(rows)
    ):
        strategy = ParameterAveraging(averaging_period="auto", target_share=comparison.SMALL_SHARE)
    return replace(request, config=replace(request.config, sync_strategy=strategy))


def _runs_gangs(rows: UserData) -> bool:
    get = partial(conf, rows.spark)
    try:
        require_gang_support(inspect_cluster(rows.spark), get, read_settings(get))
    except ClusterError as error:
        logger.debug("the strategy is chosen for rounds: %s", error)
        return False
    return True


def choose(rows: UserData, request: FitRequest, spools: Spools | None) -> FitRequest:
    """The request of a fit with values in place of every ``"auto"``.

    Args:
        rows: what is trained on.
        request: with Params that are ``"auto"``.
        spools: shared with other fits, which leave this one slots to measure in.

    Raises:
        ConfigError: nothing can be chosen here.
        SparkDLError: what a fit raises before it trains.
        WorkerError: the user's code failed on a worker that measured it.
    """
    began = time.perf_counter()
    with Cleanup() as stack:
        looked = look(rows, start_of(rows, request), FIT_OPTIONS, stack)
        kept = Kept.of(looked)
        choices = None if kept is None else kept.read()
        if choices is None:
            if spools is not None:
                slots = looked.checked.slots
                stack.enter_context(spools.queue.slots(num_ranks(looked.checked), slots.total))
            choices, _ = chosen_values(looked, FIT_OPTIONS, stack)
            if kept is not None:
                kept.write(choices)
    for choice in choices:
        logger.info("%s=%s was chosen: %s", choice.param, shown(choice.value), choice.reason)
    logger.info("choosing took %s", seconds_text(time.perf_counter() - began))
    return with_choices(request, choices)


def chosen_values(
    looked: Looked, options: ExplainOptions, stack: ExitStack
) -> tuple[list[Choice], Calibration | None]:
    """Measure, and choose the Params that are ``"auto"``; the measurements come along, if any.

    Args:
        looked: the request begun with; see `start_of`.
        options: how long one measurement may take.
        stack: removes everything in the end.
    """
    checked, found = looked.checked, looked.found
    wanted, choices = checked.request.automatic, []
    if {"batchSize", "learningRate"} & set(wanted):
        choices += _tried(checked, found, options.measure_seconds, stack)
        request = with_choices(checked.request, choices)
        checked = replace(checked, request=request)
        found = _with_batches(found, request.config.batch_size)
    calibration = None
    if {"numWorkers", "syncStrategy"} & set(wanted):
        calibration = measure(
            checked, found, compressions_of(checked), options.measure_seconds, stack
        )
        choices += _predicted(checked, found, calibration)
    return choices, calibration


def _tried(checked: CheckedRequest, found: Found, seconds: float, stack: ExitStack) -> list[Choice]:
    """The size of a batch and the learning rate, as far as they are wanted."""
    slots, wanted = checked.slots, checked.request.automatic
    try:
        get = partial(conf, checked.spark)
        require_gang_support(slots.cluster, get, checked.settings)
    except ClusterError as error:
        raise ConfigError(
            "batchSize and learningRate cannot be 'auto' on this cluster, since they are tried in "
            f"a gang of one worker: {error}; or set them to values of your own"
        ) from error
    most = slots.num_workers
    if "numWorkers" in wanted:
        most = slots.total or num_ranks(checked)
    at_once = min(most, slots.total or most)
    sizes = None
    if "batchSize" in wanted:
        num_parts = checked.config.gradient_accumulation_steps
        sizes = batch_sizes(found.num_rows // most, num_parts)
    return try_out(
        checked,
        found,
        sizes,
        tries_rates="learningRate" in wanted,
        workers_per_machine=-(-at_once // max(1, slots.cluster.num_executors or 1)),
        seconds=seconds,
        stack=stack,
    )


def _with_batches(found: Found, batch_size: int) -> Found:
    plan = found.plan
    rows = [plan.rows_of(rank) for rank in range(plan.world_size)]
    num_steps = steps_per_epoch(rows, batch_size)
    return replace(found, plan=replace(plan, batch_size=batch_size, steps_per_epoch=num_steps))


def _predicted(checked: CheckedRequest, found: Found, calibration: Calibration) -> list[Choice]:
    """The strategy and the number of workers, as far as they are wanted."""
    slots, request = checked.slots, checked.request
    predictor = predictor_of(checked, found, calibration)
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
    """Where the choice of a request is kept."""

    storage: Storage
    path: str
    most_workers: int | None
    """Workers of a gang that the cluster has room for now; None: as many as are wanted."""

    @classmethod
    def of(cls, looked: Looked) -> Kept | None:
        """The place of this request's choice; None: it has no ``checkpointDir``.

        What counts is what names a run (`resume.run_key`), but of the rows their number only.
        """
        checked, found = looked.checked, looked.found
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
        """What an equal request has chosen before; None: there was none.

        Raises:
            StorageError: it cannot be read.
        """
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
        """Keep a choice for equal requests.

        Raises:
            StorageError: it cannot be written.
        """
        plain = [{**vars(choice), "value": describe(choice.value)} for choice in choices]
        self.storage.write(self.path, json.dumps(plain, indent=2).encode())
