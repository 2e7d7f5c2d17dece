"""A round task's work for a population: it trains one member on a shard, or measures several.

A member's state comes in parts, which the driver passes on without looking into them: ``model``,
and ``rest``, which is optimizer, schedule and scaler.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdl.data.plan import RoundPart, Shard
from sparkdl.errors import TrainingDiverged
from sparkdl.worker.lifecycle import Results
from sparkdl.worker.round_task import Warm

if TYPE_CHECKING:
    from sparkdl.worker.reporter import Reporter

MODEL, REST = "model", "rest"
RIVAL_MODEL, RIVAL_REST = "rival model", "rival rest"
"""Parts of another member, where the two compete; without its ``rest`` a loser keeps its own."""
OPTIONS = "options"
"""JSON: ``hyperparameters`` to train with, those of the ``rival``, and whether the member
``may_diverge``."""


def pack_parts(parts: Mapping[str, bytes]) -> bytes:
    """Several byte strings as one."""
    sizes = {name: len(part) for name, part in parts.items()}
    return b"".join([json.dumps(sizes).encode() + b"\n", *parts.values()])


def unpack_parts(data: bytes) -> dict[str, bytes]:
    """Inverse of `pack_parts`."""
    at = data.index(b"\n") + 1
    parts = {}
    for name, size in json.loads(data[:at]).items():
        parts[name] = data[at : at + size]
        at += size
    return parts


def encoded(tree: Any) -> bytes:
    """A tree of tensors as one part."""
    from sparkdl.storage.checkpoint_format import encode
    from sparkdl.storage.tensor_tree import snapshot

    return b"".join(encode(snapshot(tree)))


def decoded(part: bytes) -> dict[str, Any]:
    """Inverse of `encoded`; nothing gives an empty dict."""
    from sparkdl.storage.checkpoint_format import decode

    tree: dict[str, Any] = decode(part, "a member's state") if part else {}
    return tree


def work(
    warm: Warm, shard: Shard, part: RoundPart | None, state: bytes, reporter: Reporter
) -> Results:
    """Do one shard's part of a job, a `RoundWork` with a ``state`` as `pack_parts` gave it.

    With a ``part``, train the member whose parts ``state`` holds; without, measure the models in
    ``state``, each of which is a part under its member's number.

    Returns:
        ``("result", JSON)`` with, after training, ``model`` and ``rest``, unless the member has
        diverged; after measuring, with ``metrics <member>`` for each.
    """
    parts = unpack_parts(state)
    if part is None:
        return _measure(warm, shard, parts, reporter)
    return _train(warm, shard, part, parts, reporter)


def _measure(warm: Warm, shard: Shard, parts: Mapping[str, bytes], reporter: Reporter) -> Results:
    reporter.phase("evaluate")
    report, results = {}, []
    for member, model in parts.items():
        report[member], metrics = warm.measure(shard, decoded(model))
        results.append((f"metrics {member}", metrics))
    return [("result", json.dumps(report).encode()), *results]


def _train(
    warm: Warm, shard: Shard, part: RoundPart, parts: Mapping[str, bytes], reporter: Reporter
) -> Results:
    options = json.loads(parts[OPTIONS])
    state = {**decoded(parts[MODEL]), **decoded(parts[REST])}
    contest = None
    if RIVAL_MODEL in parts:
        reporter.phase("evaluate")
        rival = {**state, **decoded(parts[RIVAL_MODEL]), **decoded(parts.get(RIVAL_REST, b""))}
        contest = _contest(warm, shard, state, rival)
        state = rival if contest["is_lost"] else state
    values = options["rival" if contest is not None and contest["is_lost"] else "hyperparameters"]
    reporter.phase("train")
    try:
        outcome, report = warm.train(shard, state, part, reporter, values)
    except TrainingDiverged as error:
        if not options["may_diverge"]:
            raise
        none = {"loss_sum": 0.0, "weight": 0.0, "rows": 0, "seconds": 0.0, "spent": {}}
        none |= {"label_sums": []}
        return [("result", json.dumps({**none, "diverged": str(error)}).encode())]
    report["learning_rate"] = outcome.state["optimizer"]["param_groups"][0].get("lr")
    if contest is not None:
        report["contest"] = contest
    model = {name: outcome.state.pop(name) for name in ("model", "attributes")}
    return [
        ("result", json.dumps(report).encode()),
        (MODEL, encoded(model)),
        (REST, encoded(outcome.state)),
    ]


def _contest(warm: Warm, shard: Shard, own: Any, rival: Any) -> dict[str, Any]:
    """Measure both on this shard's tournament set."""
    from sparkdl.sync.population.tournament import Tournament, has_won

    strategy = warm.replica.config.sync_strategy
    assert isinstance(strategy, Tournament)
    if not warm.open(shard, "validation").num_rows:
        return {"value": float("nan"), "rival_value": float("nan"), "is_lost": False}
    mine, other = warm.record(shard, own), warm.record(shard, rival)
    is_lost = has_won(strategy.cost(other), strategy.cost(mine))
    name = strategy.monitor
    return {"value": mine[name], "rival_value": other[name], "is_lost": is_lost}
