"""What is recommended for machines of all kinds."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.data.plan import Shard, make_plan
from sparkdl.errors import ConfigError
from sparkdl.explain.comparison import (
    ComparedStrategy,
    choose_strategy,
    choose_workers,
    ladder,
    option,
    recommend,
    scaling,
    strategies,
    world_sizes,
)
from sparkdl.explain.cost_model import Calibration, Compute, Gang, Network, NetworkLink, StageCosts
from sparkdl.explain.explanation import Explanation, PlanFacts, Recommendation, seconds_text
from sparkdl.explain.predict_times import Predictor
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.exchange_pattern import ModelSize
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.strategy import SyncStrategy
from sparkdl.train.modules import sync_batch_norm

GIGABIT, SLOW = 1 / 110e6, 1 / 11e6
"""Seconds per byte of networks of 1 Gbit/s and of 100 Mbit/s."""


def predictor(
    *, byte_seconds: float = GIGABIT, latency_seconds: float = 1e-4, parameters: int = 1_000_000,
    row_seconds: float = 1e-3, rows: int = 1_000_000, nodes: int = 8, can_gang: bool = True,
    start_seconds: float = 5.0,
) -> Predictor:  # fmt: skip
    """A cluster of machines with one worker each; a step on 64 rows takes 64 ms by default."""
    compute = Compute(threads=8, fixed_seconds=0.0, row_seconds=row_seconds, step_spread=0.05)
    messages = NetworkLink(latency_seconds=latency_seconds, byte_seconds=byte_seconds)
    gang = Gang(
        levels={},
        network=Network(messages=messages),
        codec_seconds={"BF16Compression": 1e-4},
        launch_seconds=start_seconds,
    )
    shards = [
        Shard(shard_id=i, num_rows=math.ceil(rows / nodes), num_validation_rows=0, fingerprint="")
        for i in range(nodes)
    ]
    return Predictor(
        calibration=Calibration(
            gang=gang if can_gang else None,
            levels={1: compute},
            task_levels={1: compute},
            stages=StageCosts(fixed_seconds=0.3, byte_seconds=2e-9, first_seconds=start_seconds),
        ),
        plan=make_plan(columns=(), shards=shards, world_size=nodes, batch_size=64, epochs=3),
        size=ModelSize(
            shapes=((parameters,),), element_size=4, replica_bytes=4 * parameters,
            buffer_bytes=0, optimizer_bytes=0,
        ),
        num_nodes=nodes,
        slots=nodes,
        config=TrainConfig(checkpoint=CheckpointConfig(interval=-1)),
        largest_rows=lambda world_size: math.ceil(rows / world_size),
        check=lambda strategy, world_size: None,
    )  # fmt: skip


def recommended(found: Predictor) -> Recommendation:
    sizes = world_sizes(found.slots, 8, 8, ())
    planned = option(found, AllReduce(), sizes, in_rounds=False)
    return recommend(ladder(found, sizes), planned, 8)


def test_a_good_network_wants_all_reduce_on_all_machines() -> None:
    best = recommended(predictor(byte_seconds=GIGABIT / 10))
    assert (best.num_workers, best.strategy) == (8, "AllReduce()")
    assert not best.is_one_machine_faster
    assert best.averaging_period is None
    assert "that is what the estimator asks for" in best.reasons


def test_half_the_bytes_where_that_is_enough() -> None:
    best = recommended(predictor(parameters=1_000_000))
    assert best.strategy == "AllReduce(compression='bf16')"
    assert any("AllReduce() would spend" in reason for reason in best.reasons)


def test_a_slow_network_wants_rounds_of_five_per_cent() -> None:
    found = predictor(byte_seconds=SLOW, parameters=5_000_000)
    best = recommended(found)
    assert best.strategy.startswith("LocalSGD(averaging_period=")
    assert best.averaging_period is not None
    assert best.averaging_period > 20
    assert ladder(found, [8])[2].best.exchange_share == pytest.approx(0.05, abs=0.005)


def test_many_workers_with_little_to_sum_want_a_tree() -> None:
    """A ring has 2 (W - 1) messages one after the other, a tree 2 log2 W."""
    found = predictor(parameters=20_000, nodes=1000, rows=64_000_000)
    ring, tree = (
        option(found, AllReduce(topology=topology), [1000], in_rounds=False).best.step_seconds
        for topology in ("ring", "tree")
    )
    assert ring > 2 * tree
    best = recommend(
        ladder(found, [1, 1000]), option(found, AllReduce(), [1000], in_rounds=False), 1000
    )
    assert (best.num_workers, best.strategy) == (1000, "AllReduce(topology='tree')")
    few = choose_strategy(ladder(found, [1, 2]))[0].value
    assert few == AllReduce()  # as quick as along a tree

    def only_as_usual(strategy: SyncStrategy, world_size: int) -> None:
        if strategy == AllReduce(topology="tree"):
            raise ConfigError("topology must be 'auto'")

    refused = dataclasses.replace(found, check=only_as_usual)
    assert ladder(refused, [1000])[0].strategy == AllReduce()


def test_a_strategy_that_is_quicker_and_changes_training_is_named() -> None:
    best = recommended(predictor(byte_seconds=GIGABIT / 4))
    assert best.strategy == "AllReduce()"
    assert any(
        reason.startswith("LocalSGD(") and reason.endswith("changes what is learned")
        for reason in best.reasons
    )
    quick = recommended(predictor(byte_seconds=GIGABIT / 100))
    assert not any("changes what is learned" in reason for reason in quick.reasons)


def test_little_data_wants_one_machine() -> None:
    best = recommended(
        predictor(rows=64, parameters=50_000_000, row_seconds=1e-4, byte_seconds=SLOW)
    )
    assert best.num_workers == 1
    assert best.is_one_machine_faster
    assert "one machine is faster" in best.reasons[0]


def test_a_start_that_takes_longer_than_the_epochs_is_not_worth_the_slots() -> None:
    best = recommended(predictor(rows=1000, byte_seconds=GIGABIT / 100, start_seconds=100.0))
    assert best.num_workers == 1


def test_where_no_gang_can_run_there_are_rounds() -> None:
    best = recommended(predictor(can_gang=False))
    assert best.strategy.startswith("ParameterAveraging(averaging_period='auto'")
    assert best.num_workers == 8
    assert best.averaging_period is not None


def test_tables_have_a_row_for_each() -> None:
    found = predictor()
    sizes = scaling(found, AllReduce(), (1, 2, 8, 64, 1000), in_rounds=False)
    assert [row.workers for row in sizes] == [1, 2, 8, 64, 1000]
    assert [row.nodes for row in sizes] == [1, 2, 8, 64, 1000]
    assert sizes[0].speedup == 1
    assert all(row.same_global_batch_seconds is not None for row in sizes[:4])
    assert sizes[4].same_global_batch_seconds is None  # 512 samples for 1,000 workers
    rows = strategies(found, AllReduce(), 8, in_rounds=False)
    assert rows[0].strategy == "AllReduce()"
    assert len({(row.strategy, row.mode) for row in rows}) == len(rows)
    found = predictor(can_gang=False)
    refused = [row for row in strategies(found, AllReduce(), 8, in_rounds=False) if row.why_not]
    assert refused[0].step_seconds is None
    assert "gang" in str(refused[0].why_not)


def test_sync_batch_norm_wants_strategies_in_step() -> None:
    def check(strategy: SyncStrategy, world_size: int) -> None:
        sync_batch_norm.check_strategy(strategy, world_size)

    slow = predictor(byte_seconds=SLOW, parameters=5_000_000)
    found = dataclasses.replace(slow, check=check)
    best = recommended(found)
    assert best.strategy.startswith("AllReduce(")
    rows = {row.strategy: row.why_not for row in strategies(found, AllReduce(), 8, in_rounds=False)}
    assert rows["AllReduce()"] is None
    assert "syncBatchNorm" in str(rows["LocalSGD(averaging_period=16)"])
    assert "syncBatchNorm" in str(rows["ParameterAveraging(averaging_period='auto')"])


def test_numbers_of_workers() -> None:
    assert world_sizes(12, 8, 3, (100,)) == [1, 2, 3, 4, 8, 12, 100]
    assert world_sizes(None, 2, 2, ()) == [1, 2]
    assert world_sizes(1, 1, 1, ()) == [1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0000125, "0.0125 ms"), (0.25, "250 ms"), (3.14159, "3.14 s"), (600, "10 min"),
     (7200, "2 h")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def explanation(found: Predictor) -> Explanation:
    plan = PlanFacts(
        master="local[2]", slots=8, num_workers=8, threads=1, mode="gang", device="cpu",
        strategy="AllReduce()", rows=1000, validation_rows=0, rows_by_shard=(125,) * 8,
        batch_size=64, epochs=3, steps_per_epoch=2, total_steps=6, parameters=10,
        replica_bytes=40, optimizer_bytes=0, worker_bytes=160, process_bytes=1 << 20,
        peak_bytes=None, spool_bytes=1 << 20, sent_bytes_per_step=None, checkpoint_bytes=40,
        checkpoint_interval=500,
    )  # fmt: skip
    return Explanation(
        plan=plan,
        scaling=scaling(found, AllReduce(), (1, 8), in_rounds=False),
        strategies=strategies(found, AllReduce(), 8, in_rounds=False),
        recommendation=recommended(found),
        notes=("a <note>",),
        measured=(("step", "1 ms"),),
    )


def test_text_html_and_json_say_the_same() -> None:
    for found in (predictor(), predictor(can_gang=False)):
        shown = explanation(found)
        text, page = str(shown), shown._repr_html_()
        for word in ("AllReduce()", "Tournament", "recommended", "numWorkers", "1.00 of the mean"):
            assert word in text
            assert word in page
        assert "a &lt;note&gt;" in page
        values = json.loads(json.dumps(shown.to_dict(), allow_nan=False))
        assert values["plan"]["rows"] == 1000
        assert values["recommendation"]["num_workers"] == 8


def test_the_columns_of_a_table_stand_below_each_other_in_a_terminal() -> None:
    shown = explanation(predictor())
    lines = shown.lines()
    at = lines.index("AllReduce(), by number of workers")
    head = next(n for n in range(at, len(lines)) if lines[n].startswith("  workers"))
    assert len({len(line) for line in lines[head : head + 3]}) == 1
    long = dataclasses.replace(
        shown,
        plan=dataclasses.replace(shown.plan, master="spark://" + "very-long-name" * 3),
        chosen={"numWorkers": {"value": 8, "reason": "a reason of many words " * 9}},
        scaling=tuple(
            dataclasses.replace(row, steps_per_epoch=12_345_678, total_seconds=5999.0)
            for row in shown.scaling
        ),
        notes=("a note of many words " * 9,),
    )
    without_gang = explanation(predictor(can_gang=False))
    for one in (*lines, *long.lines(), *without_gang.lines()):
        assert len(one) <= 80
    assert any(line.startswith("  - a note of many") for line in long.lines())


def workers(totals: dict[int, float]) -> ComparedStrategy:
    """Fits of all-reduce with so many workers that take so many seconds."""
    found = option(predictor(), AllReduce(), list(totals), in_rounds=False)
    predictions = [
        dataclasses.replace(one, total_seconds=total)
        for one, total in zip(found.predictions, totals.values(), strict=True)
    ]
    return dataclasses.replace(found, predictions=tuple(predictions))


def test_the_number_of_workers_with_its_neighbours() -> None:
    choice = choose_workers(workers({1: 30.0, 2: 17.0, 3: 12.0, 4: 14.0}))
    assert (choice.param, choice.value) == ("numWorkers", 3)
    assert choice.reason == "the fit takes about 12 s with 3 workers, 17 s with 2, 14 s with 4"


def test_more_workers_must_help_by_more_than_five_per_cent() -> None:
    choice = choose_workers(workers({1: 30.0, 2: 12.5, 3: 12.4, 4: 12.0}))
    assert choice.value == 2
    assert "12.5 s with 2 workers, 30 s with 1, 12 s with 4" in choice.reason  # with the shortest
    assert choose_workers(workers({1: 30.0, 2: 12.7, 4: 12.0})).value == 4


def test_one_number_is_taken() -> None:
    assert choose_workers(workers({1: 30.0})).reason.endswith("30 s with 1 worker")


def test_all_reduce_unless_agreeing_takes_too_long() -> None:
    quick, slow = (
        predictor(byte_seconds=GIGABIT / 10),
        predictor(byte_seconds=SLOW, parameters=5_000_000),
    )
    choice, chosen = choose_strategy(ladder(quick, [8]))
    assert choice.value == AllReduce()
    assert choice.reason.startswith("AllReduce() spends ")
    assert chosen.best.workers == 8
    choice, chosen = choose_strategy(ladder(slow, [1, 2, 4, 8]))
    assert isinstance(choice.value, LocalSGD)
    assert "AllReduce() would spend" in choice.reason
    assert choose_workers(chosen).value == 8
    alone = choose_strategy(ladder(slow, [1]))[0]
    assert (alone.value, alone.reason) == (
        AllReduce(),
        "1 worker has nobody to agree with",
    )
    assert isinstance(
        choose_strategy(ladder(predictor(can_gang=False), [8]))[0].value, ParameterAveraging
    )


def test_nothing_to_choose_from() -> None:
    none = option(predictor(can_gang=False), AllReduce(), [1, 2], in_rounds=False)
    with pytest.raises(ConfigError, match=r"AllReduce\(\) cannot be used with any number"):
        choose_workers(none)
    with pytest.raises(ConfigError, match="set numWorkers and syncStrategy"):
        choose_strategy([none])
