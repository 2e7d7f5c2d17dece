"""What is recommended for machines of all kinds."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.explain.comparison import Places, Predictor, world_sizes
from sparkdl.explain.cost_model import Calibration, Compute, Fixed, Level, Link, Network, Stages
from sparkdl.explain.explanation import Explanation, PlanFacts
from sparkdl.explain.predict_times import Workload
from sparkdl.explain.recommend import Recommendation, recommend, seconds_text
from sparkdl.sync.exchange_pattern import ModelSize
from sparkdl.sync.gradients.allreduce import AllReduce

GIGABIT, SLOW = 1 / 110e6, 1 / 11e6
"""Seconds per byte of networks of 1 Gbit/s and of 100 Mbit/s."""


def predictor(
    *, byte_seconds: float = GIGABIT, latency_seconds: float = 1e-4, parameters: int = 1_000_000,
    row_seconds: float = 1e-3, rows: int = 1_000_000, nodes: int = 8, can_gang: bool = True,
    start_seconds: float = 5.0,
) -> Predictor:  # fmt: skip
    """A cluster of machines with one worker each; a step on 64 rows takes 64 ms by default."""
    compute = Compute(fixed_seconds=0.0, row_seconds=row_seconds, step_spread=0.05)
    level = Level(ranks_per_node=1, threads=8, compute=compute)
    return Predictor(
        calibration=Calibration(
            levels=(level,) if can_gang else (),
            stage_levels=(level,),
            network=Network(
                messages=Link(latency_seconds=latency_seconds, byte_seconds=byte_seconds)
            ),
            codec_seconds={"BF16Compression": 1e-4},
            stages={nodes: Stages(fixed_seconds=0.3, byte_seconds=2e-9)},
            fixed=Fixed(start_seconds=start_seconds, stage_start_seconds=start_seconds),
        ),
        workload=Workload(
            num_rows=rows,
            num_validation_rows=0,
            batch_size=64,
            epochs=3,
            max_steps=-1,
            largest_rows=lambda world_size: math.ceil(rows / world_size),
            checkpoint_interval=-1,
            checkpoint_bytes=0,
        ),
        size=ModelSize(
            shapes=((parameters,),), element_size=4, replica_bytes=4 * parameters,
            buffer_bytes=0, optimizer_bytes=0,
        ),
        places=Places(num_nodes=nodes, slots=nodes),
        config=TrainConfig(checkpoint=CheckpointConfig(interval=-1)),
        can_gang=can_gang,
        has_dataframe=True,
    )  # fmt: skip


def recommended(found: Predictor) -> Recommendation:
    sizes = world_sizes(found.places.slots, 8, 8, ())
    planned = found.option(AllReduce(), sizes, in_rounds=False)
    return recommend(found.ladder(sizes), planned, 8)


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
    ladder = found.ladder([8])
    assert ladder[2].best.step.exchange_share == pytest.approx(0.05, abs=0.005)


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
    scaling = found.scaling(AllReduce(), (1, 2, 8, 64, 1000), in_rounds=False, planned=8)
    assert [row.workers for row in scaling] == [1, 2, 8, 64, 1000]
    assert [row.nodes for row in scaling] == [1, 2, 8, 64, 1000]
    assert scaling[0].speedup == 1
    assert all(row.same_global_batch_seconds is not None for row in scaling[:4])
    assert scaling[4].same_global_batch_seconds is None  # 512 samples for 1,000 workers
    rows = found.strategies(AllReduce(), 8, in_rounds=False)
    assert rows[0].strategy == "AllReduce()"
    assert len({(row.strategy, row.mode) for row in rows}) == len(rows)
    refused = [row for row in predictor(can_gang=False).strategies(AllReduce(), 8, in_rounds=False)
               if row.why_not is not None]  # fmt: skip
    assert refused[0].step_seconds is None
    assert "gang" in str(refused[0].why_not)


def test_sync_batch_norm_wants_strategies_in_step() -> None:
    slow = predictor(byte_seconds=SLOW, parameters=5_000_000)
    found = dataclasses.replace(slow, config=dataclasses.replace(slow.config, sync_batch_norm=True))
    best = recommended(found)
    assert best.strategy.startswith("AllReduce(")
    rows = {row.strategy: row.why_not for row in found.strategies(AllReduce(), 8, in_rounds=False)}
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
        scaling=found.scaling(AllReduce(), (1, 8), in_rounds=False, planned=8),
        strategies=found.strategies(AllReduce(), 8, in_rounds=False),
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
        assert max(len(line) for line in shown.lines()) < 200


def test_the_columns_of_a_table_stand_below_each_other() -> None:
    lines = explanation(predictor()).lines()
    at = lines.index("AllReduce(), by number of workers")
    assert len({len(line) for line in lines[at + 1 : at + 4]}) == 1
