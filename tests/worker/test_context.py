"""What a training function knows of its place, without a gang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sparkdl
from sparkdl.errors import CommunicationError, ConfigError
from sparkdl.worker.context import Context, context, entered


def place(rank: int = 0, **changes: Any) -> Context:
    values: dict[str, Any] = {
        "rank": rank, "nodes": (0, 0, 1, 1), "device": torch.device("cpu"), "num_restarts": 0,
        "sets": {}, "resumed": None, "save": None, "show": lambda record: None,
    }  # fmt: skip
    return Context(**{**values, **changes})


def test_ranks_are_numbered_within_their_host() -> None:
    found = [
        (p.local_rank, p.local_world_size, p.node_rank, p.world_size) for p in map(place, range(4))
    ]
    assert found == [(0, 2, 0, 4), (1, 2, 0, 4), (0, 2, 1, 4), (1, 2, 1, 4)]


def test_the_context_is_there_inside_only() -> None:
    with pytest.raises(ConfigError, match=r"TorchRunner\(num_workers=0\)"):
        sparkdl.context()
    outer, inner = place(0), place(1)
    with entered(outer):
        with entered(inner):
            assert sparkdl.context() is inner
        assert context() is outer
    with pytest.raises(ConfigError):
        context()


def test_what_rank_0_reports_is_shown_kept_and_saved() -> None:
    shown: list[dict[str, float]] = []
    saved: list[tuple[int, dict[str, Any]]] = []
    first = place(show=shown.append, save=lambda number, state, _: saved.append((number, state)))
    first.report({"loss": torch.tensor(0.5), "rows": 3})
    first.report({"loss": 0.25}, checkpoint={"epoch": 2})
    first.report(checkpoint={"epoch": 3})
    records = [{"report": 1, "loss": 0.5, "rows": 3}, {"report": 2, "loss": 0.25}]
    assert shown == first.history == records
    assert [(number, state["checkpoint"]) for number, state in saved] == [
        (1, {"epoch": 2}),
        (2, {"epoch": 3}),
    ]
    again = place(
        resumed=saved[-1][1], show=shown.append, save=lambda n, s, _: saved.append((n, s))
    )
    assert again.checkpoint == {"epoch": 3}
    again.report({"loss": 0.125}, checkpoint={"epoch": 4})
    assert again.history == [*records, {"report": 3, "loss": 0.125}]
    assert saved[-1][0] == 3


def test_every_rank_keeps_its_history_but_rank_0_speaks() -> None:
    def never(*_: Any) -> None:
        raise AssertionError("rank 1 must not speak")

    other = place(1, show=never, save=never)
    other.report({"loss": 1.0}, checkpoint={"epoch": 1})
    assert other.history == [{"report": 1, "loss": 1.0}]


def test_the_counter_of_reports_is_no_metric() -> None:
    with pytest.raises(ConfigError, match="another name"):
        place().report({"report": float("nan")})


@pytest.mark.parametrize("value", ["high", None, torch.ones(2)])
def test_metrics_are_numbers(value: Any) -> None:
    with pytest.raises(ConfigError, match="'loss'"):
        place().report({"loss": value})


def test_an_unknown_data_set_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no data set 'test'.*TorchRunner\(data=...\)"):
        place().loader("test", batch_size=2)


def test_a_run_without_a_mesh_or_a_checkpoint_says_so() -> None:
    with pytest.raises(ConfigError, match=r"parallelism=Mesh"):
        place().mesh  # noqa: B018
    with pytest.raises(ConfigError, match="no checkpoint to load"):
        place().load_checkpoint({})


def test_who_waits_in_report_for_checkpoints_of_others_says_so() -> None:
    def gather(_: bytes) -> list[bytes]:
        raise CommunicationError("all_reduce failed: connection reset")

    along: Any = SimpleNamespace(get_local_rank=lambda axis: 0)
    found = place(mesh=along, gather=gather, save=lambda *_: None)
    with pytest.raises(CommunicationError, match=r"all ranks of a mesh must pass one: all_reduce"):
        found.report({"loss": 1.0}, checkpoint={"weight": torch.ones(2)})
