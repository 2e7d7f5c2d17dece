"""States in pieces: whole again, with the mean of whole states, and smaller where compressed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparkdl.comm.compression import resolve
from sparkdl.sync.averaging.mean import CHANGES, merge
from sparkdl.sync.averaging.state_pieces import FRAME, Pieces


def state(seed: int, *, has_stepped: bool = True) -> dict[str, Any]:
    torch.manual_seed(seed)
    weight = torch.randn(50, 30)
    model = {"0.weight": weight, "1.tied": weight, "0.bias": torch.randn(50)}
    model["count"] = torch.full((600,), seed)
    moments = {"step": torch.tensor(float(seed)), "exp_avg": torch.randn(50, 30).double()}
    optimizer = {"state": {0: moments} if has_stepped else {}, "param_groups": [{"lr": seed / 7}]}
    return {"model": model, "optimizer": optimizer, "scheduler": None, "pair": (1, [weight * 2])}


def united(pieces: Pieces, states: list[Any], weights: list[float]) -> Any:
    """As the tasks of a round and the driver do it."""
    found: dict[str, list[bytes]] = {}
    for one, weight in zip(states, weights, strict=True):
        for name, data in pieces.cut(one, weight):
            found.setdefault(name, []).append(data)
    return pieces.put_together((name, pieces.mean(name, parts)) for name, parts in found.items())


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("piece_bytes", [500, 1 << 20])
def test_the_mean_of_pieces_has_the_bits_of_the_mean_of_states(piece_bytes: int) -> None:
    pieces = Pieces(piece_bytes=piece_bytes)
    one = state(3)
    whole = united(pieces, [one], [2.0])
    assert_equal(whole, one)
    assert whole["model"]["0.weight"] is whole["model"]["1.tied"]
    states, weights = [state(1), state(2, has_stepped=False), state(3)], [3.0, 1.0, 0.5]
    assert_equal(united(pieces, states, weights), merge(states, weights))
    for sizes in ([900, 300, 3], [3, 300, 900], [300, 900, 300]):  # of buffers of their own
        for one, size in zip(states, sizes, strict=True):
            one["model"]["cache"] = torch.randn(size)
        assert_equal(united(pieces, states, weights), merge(states, weights))


def test_equal_tensors_are_cut_alike_and_small_ones_stay_in_the_frame() -> None:
    pieces = Pieces(piece_bytes=2000)
    names = [name for name, _ in pieces.cut(state(1), 1.0)]
    assert names == [name for name, _ in pieces.cut(state(2), 5.0)]
    assert names[0] == FRAME
    assert f"{FRAME}/model/0.weight[50, 30]#0" in names
    assert not any("bias" in name or "tied" in name for name in names)
    assert Pieces.of(2).piece_bytes == 4 << 20
    assert Pieces.of(100_000).piece_bytes == 1 << 16


@pytest.mark.parametrize(("name", "ratio"), [("fp16", 2.0), ("bf16", 2.0), ("int8", 3.5)])
def test_changes_are_made_smaller(name: str, ratio: float) -> None:
    pieces = Pieces(piece_bytes=40_000, compression=resolve(name))
    torch.manual_seed(1)
    changes = [torch.randn(300, 101) * scale for scale in (0.01, 3.0)]
    states = [{"model": {}, CHANGES: {"w": change}, "rest": change.clone()} for change in changes]
    cut = list(pieces.cut(states[0], 1.0))
    whole, small = (
        sum(len(data) for name, data in cut if name.startswith(f"{FRAME}/{start}"))
        for start in ("rest[", f"{CHANGES}/w[")
    )
    assert whole / small == pytest.approx(ratio, rel=0.15)
    found = united(pieces, states, [1.0, 3.0])[CHANGES]["w"]
    exact = (changes[0] + 3 * changes[1]) / 4
    assert found.dtype == torch.float32
    assert not torch.equal(found, exact)
    bound = exact.abs().amax(1, keepdim=True) / 80  # a column's largest value over 127, and more
    assert ((found - exact).abs() <= bound).all()


def test_extra_states_of_layers_are_those_of_the_first_replica() -> None:
    """As plain attributes are, since nobody knows their mean; they need not be alike."""

    def having(batches: int) -> dict[str, Any]:
        kept = {"sums": torch.ones(300 * batches), "seen": [1.0] * batches}
        return {"model": {"norm._extra_state": kept, "weight": torch.full((400,), batches)}}

    states, weights = [having(1), having(2), having(3)], [0.0, 1.0, 2.0]
    pieces = Pieces(piece_bytes=500)
    counting = united(pieces, states[1:], weights[1:])
    assert_equal(counting, merge(states, weights))
    assert_equal(counting["model"]["norm._extra_state"], having(2)["model"]["norm._extra_state"])
