"""Does a packed tree come back bit for bit, and is everything else refused by name?"""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkdl.errors import CheckpointError
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.storage.tensor_tree import Snapshot, num_bytes, pack, snapshot, unpack


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and raw(a) == raw(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist())


def through_file(tree: Any) -> Any:
    return decode(b"".join(encode(snapshot(tree))), "a test")


NAN_WITH_PAYLOAD = struct.unpack("<d", bytes.fromhex("010203000000f87f"))[0]

LEAVES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**63,
    -(2**5000),
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    NAN_WITH_PAYLOAD,
    "",
    "é\n\0",
    b"",
    b"\0\xff",
    (),
    [],
    {},
    {1: "int", "1": "str", "__metadata__": [()]},
    {"tensor": "not one", "dict": 1},
    Counter({3: 2}),
    torch.tensor(1.5),
    torch.empty(0, 3),
    torch.tensor([True, False]),
    torch.tensor([math.nan, -0.0], dtype=torch.bfloat16),
    torch.arange(6).reshape(2, 3).t(),
    torch.tensor([1 + 2j], dtype=torch.complex128).conj(),
    torch.tensor([200], dtype=torch.uint8),
    torch.arange(4, dtype=torch.float16)[1:3],
    np.float32(0.1),
    np.int64(-3),
    np.datetime64("2024-01-01"),
    np.arange(6, dtype=">i2").reshape(2, 3),
    np.empty((0, 2)),
    np.array(["a", "bc"]),
    np.asfortranarray(np.eye(3)),
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: f"{type(leaf).__name__}")
def test_every_kind_comes_back_bit_for_bit(leaf: Any) -> None:
    tree = {"a": [leaf, (leaf,)], 7: leaf}
    assert same(through_file(tree), tree)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:.*[Qq]uantiz")
def test_sparse_and_quantized_tensors_come_back() -> None:
    rows = torch.eye(3).roll(1, 0)
    quantized = torch.quantize_per_tensor(torch.tensor([[0.5], [1.0]]).t(), 0.5, 3, torch.qint8)
    channels = torch.quantize_per_channel(
        torch.ones(2, 3), torch.tensor([0.5, 0.2]), torch.tensor([1, 0]), 0, torch.quint8
    )
    for value in (
        rows.to_sparse(),
        rows.to_sparse_csr(),
        rows.to_sparse_csc(),
        quantized,
        channels,
    ):
        back = through_file([value])[0]
        assert (back.layout, back.dtype, back.shape) == (value.layout, value.dtype, value.shape)
        kinds = [v.dequantize() if v.is_quantized else v.to_dense() for v in (back, value)]
        assert torch.equal(*kinds)
    assert num_bytes([rows, rows.to_sparse()]) == 9 * 4 + 2 * 3 * 8 + 3 * 4


def test_the_json_half_is_json() -> None:
    value, tensors = pack({"all": LEAVES})
    assert same(unpack(json.loads(json.dumps(value)), tensors), {"all": LEAVES})


def test_state_dicts_keep_order_versions_and_values() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = model.state_dict()
    back = through_file(state)
    assert type(back) is OrderedDict and same(back, state)
    assert back._metadata == state._metadata  # type: ignore[attr-defined]


def test_generator_states_go_on_with_the_same_numbers() -> None:
    python, numpy = random.Random(3), np.random.RandomState(3)
    states = through_file([python.getstate(), numpy.get_state()])
    expected = python.random(), numpy.rand()
    python.setstate(states[0])
    numpy.set_state(states[1])
    assert (python.random(), numpy.rand()) == expected


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"a": [0, range(1)]}, "at a.1 has type builtins.range"),
        ({"a": {(1,): 2}}, "a key at a has type builtins.tuple"),
        ({True: 1}, "a key at the top has type builtins.bool"),
        (object(), "at the top has type builtins.object"),
        ([np.array([object()])], "at 0 has type numpy.ndarray"),
        ([torch.empty(2, device="meta")], "only dense tensors"),
        ([lambda: None], "builtins.function"),
    ],
)
def test_other_kinds_are_refused_with_path_and_type(tree: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        pack(tree)


@pytest.mark.parametrize(
    "value",
    [
        {"tensor": "absent"},
        {"nothing": 1},
        {},
        {"tuple": 3},
        {"float": "zz"},
        {"scalar": "", "dtype": "<f8"},
        1j,
    ],
)
def test_malformed_json_is_a_checkpoint_error(value: Any) -> None:
    with pytest.raises(CheckpointError, match="malformed"):
        unpack(value, {})


def test_an_object_array_cannot_be_smuggled_in() -> None:
    value = {"numpy": "x", "dtype": "|O", "shape": [1]}
    with pytest.raises(CheckpointError, match="malformed"):
        unpack(value, {"x": torch.zeros(8, dtype=torch.uint8)})


def test_tied_tensors_are_stored_once_and_stay_tied() -> None:
    weight = torch.randn(4, 4)
    value, tensors = pack({"a": weight, "b": weight, "row": weight[0], "copy": weight.clone()})
    assert sorted(tensors) == ["a", "copy", "row"]
    back = unpack(value, tensors)
    assert back["a"] is back["b"]


def test_names_that_collide_are_kept_apart() -> None:
    tree = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), "__metadata__": torch.tensor(3)}
    assert same(through_file(tree), tree)


def test_a_snapshot_does_not_change_with_the_original() -> None:
    tree = {"w": torch.ones(3), "n": np.ones(2)}
    taken = snapshot(tree)
    tree["w"].zero_()
    tree["n"][:] = 0
    back = unpack(taken.value, taken.tensors)
    assert back["w"].tolist() == [1, 1, 1] and back["n"].tolist() == [1, 1]


def test_a_snapshot_reuses_fitting_buffers_only() -> None:
    first = snapshot({"a": torch.ones(3), "b": torch.ones(2)})
    second = snapshot({"a": torch.zeros(3), "b": torch.zeros(5)}, first)
    assert second.tensors["a"] is first.tensors["a"]
    assert second.tensors["b"] is not first.tensors["b"]
    assert second.tensors["a"].tolist() == [0, 0, 0]


def test_tensors_that_were_tied_before_do_not_share_a_buffer_after() -> None:
    weight = torch.ones(2)
    first = snapshot({"a": weight, "b": weight})
    second = snapshot({"a": torch.tensor([1.0, 2]), "b": torch.tensor([3.0, 4])}, first)
    back = unpack(second.value, second.tensors)
    assert back["a"].tolist() == [1, 2] and back["b"].tolist() == [3, 4]


def test_a_view_is_copied_alone() -> None:
    taken: Snapshot = snapshot({"row": torch.arange(10**6)[:2]})
    assert taken.tensors["row"].untyped_storage().nbytes() == 16
