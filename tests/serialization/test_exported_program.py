"""Is an exported program refused if reading it could run code?"""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export.pt2_archive._package import load_pt2

from sparkdl.errors import ConfigError, StorageError
from sparkdl.serialization.exported_program import read_program, write_program
from sparkdl.serialization.trust import trusting

MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
SAMPLES = "data/sample_inputs/model.pt"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 3)
        self.rnn = nn.LSTM(3, 2, batch_first=True)
        self.scale = torch.tensor(2.0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        out, _ = self.rnn(self.embed(x))
        flat = out.reshape(x.shape[0], -1)
        return {"sum": flat.sum(1) * self.scale + y, "twice": torch.cat([flat, flat])}


@pytest.fixture(scope="module")
def archive() -> bytes:
    return write_program(Net(), (torch.randint(0, 9, (1, 4)), torch.ones(1)))


def changed(archive: bytes, entries: dict[str, Callable[[bytes], bytes]]) -> bytes:
    """The archive with some entries changed or added."""
    buffer = io.BytesIO()
    left = dict(entries)
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(buffer, "w") as target:
        root = source.namelist()[0].split("/")[0]
        for name in source.namelist():
            change = left.pop(name.removeprefix(f"{root}/"), lambda data: data)
            target.writestr(name, change(source.read(name)))
        for name, change in left.items():
            target.writestr(f"{root}/{name}", change(b""))
    return buffer.getvalue()


def in_model(edit: Callable[[Any], None]) -> dict[str, Callable[[bytes], bytes]]:
    def change(data: bytes) -> bytes:
        model = json.loads(data)
        edit(model)
        return json.dumps(model).encode()

    return {MODEL: change}


def test_nested_outputs_and_several_inputs_come_back(archive: bytes) -> None:
    program = read_program(archive)
    for rows in (1, 5):
        out = program(torch.ones(rows, 4, dtype=torch.int64), torch.ones(rows))
        assert out["sum"].shape == (rows,) and out["twice"].shape == (2 * rows, 8)


def test_an_archive_copied_entry_by_entry_is_read(archive: bytes) -> None:
    read_program(changed(archive, {}))  # so that the refusals below are due to the changes


class Touch:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def pickled(path: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save((Touch(path),), buffer)
    return buffer.getvalue()


def source(path: Path) -> str:
    return f"__import__('pathlib').Path({str(path)!r}).touch() or 1"


def set_size(model: Any, text: str) -> None:
    values = model["graph_module"]["graph"]["tensor_values"]
    sizes = next(v["sizes"] for v in values.values() if "as_expr" in str(v["sizes"][:1]))
    sizes[0]["as_expr"]["expr_str"] = text


def set_operator(name: str, model: Any) -> None:
    model["graph_module"]["graph"]["nodes"][0].update(target=name)


def rename_input(model: Any, text: str) -> None:
    graph = json.dumps(model["graph_module"])
    model["graph_module"] = json.loads(graph.replace('"y"', json.dumps(text)))


ATTACKS: dict[str, Callable[[Path], dict[str, Callable[[bytes], bytes]]]] = {
    "samples": lambda path: {SAMPLES: lambda _: pickled(path)},
    "size": lambda path: in_model(lambda model: set_size(model, source(path))),
    "guard": lambda path: in_model(lambda model: model.update(guards_code=[source(path)])),
    "legacy": lambda path: {"data/weights/model.pt": lambda _: pickled(path)},
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_torch_would_run_is_refused(archive: bytes, attack: str, tmp_path: Path) -> None:
    bad = changed(archive, ATTACKS[attack](tmp_path / "touched"))
    with pytest.raises(StorageError, match="could run code"):
        read_program(bad)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    "size",
    [
        "9**9**9**9", "Pow(9, Pow(9, Pow(9, 9)))", "((9**64)**64)**64", "1 << 10**9",
        "PowByNatural(Integer(2), Integer(999999999))", "s0 + 2**(64*64)",
        "(" * 300 + "2" + ")" * 300,
    ],
)  # fmt: skip
def test_sizes_that_take_any_time_to_compute_are_refused(archive: bytes, size: str) -> None:
    bad = changed(archive, in_model(lambda model: set_size(model, size)))
    with pytest.raises(StorageError, match=r"could take any time|could run code"):
        read_program(bad)


class Squared(nn.Module):
    """Has sizes with powers of the number of rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        return x.new_ones(rows**2 + 2**3 * rows, 2).sum() + x


def test_sizes_with_small_powers_are_read() -> None:
    archive = write_program(Squared(), (torch.ones(3, 2),))
    assert b"Pow(" in archive or b"**" in archive
    module = read_program(archive)
    assert torch.equal(module(torch.ones(5, 2)), Squared()(torch.ones(5, 2)))


class Scaled(nn.Module):
    """Has a scale that follows from the number of rows."""

    def __init__(self, scale: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale(x)


@pytest.mark.parametrize(
    "scale", [len, lambda x: float(len(x)), lambda x: int(x.shape[0]), lambda x: 1 / x.size(0)]
)
def test_a_number_of_rows_that_a_module_reads(scale: Callable[[torch.Tensor], float]) -> None:
    module = read_program(write_program(Scaled(scale), (torch.ones(2, 3),)))
    for num_rows in (1, 2, 7):
        x = torch.ones(num_rows, 3)
        torch.testing.assert_close(module(x), x * scale(x))


def test_a_module_that_is_another_for_a_single_row() -> None:
    with pytest.raises(ConfigError, match=r"torch\.export cannot export it"):
        write_program(Scaled(lambda x: 1.0 if x.shape[0] > 1 else 2.0), (torch.ones(2, 3),))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attack", ["samples", "size"])
def test_torch_does_run_it_so_the_guard_is_needed(
    archive: bytes, attack: str, tmp_path: Path
) -> None:
    bad = changed(archive, ATTACKS[attack](tmp_path / "touched"))
    try:
        load_pt2(io.BytesIO(bad))
    except Exception as error:  # torch may fail after it ran the code; that is not the point
        print(f"torch failed afterwards: {error!r}")
    assert (tmp_path / "touched").exists()


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (lambda m: rename_input(m, "y=print(1)"), "the name"),
        (lambda m: set_operator("torch.os.system", m), "the operator"),
        (lambda m: set_operator("torch.ops.aten.from_file.default", m), "the operator"),
        *(
            (partial(set_operator, f"torch.ops.{name}"), "the operator")
            for name in (
                "aten.as_strided.default",
                "aten.set_.source_Tensor_storage_offset",
                "aten._unsafe_index_put.default",
                "aten._index_put_impl_.default",
                "aten.resize_.default",
                "aten.empty.memory_format",
                "aten.add.out",
                "aten._native_batch_norm_legit_no_training.default",
                "aten.remainder.int",
                "aten.gcd.int",
                "aten.floordiv.int",
                "aten.lstm.data",
                "aten.gru.data",
                "aten.rnn_tanh.data",
                "aten.rnn_relu.data",
                "prims.as_strided.default",
                "mylib.anything.default",
                "higher_order.call_torchbind",
                "higher_order.aoti_call_delegate",
            )
        ),
        *(
            (partial(set_operator, name), "the operator")
            for name in ("_operator.call", "_operator.attrgetter", "_operator.methodcaller")
        ),
        (lambda m: set_size(m, "print(1)"), "the size"),
        (lambda m: set_size(m, "Symbol('s1').__class__"), "the size"),
        (lambda m: m["graph_module"]["graph"]["nodes"][0].update(metadata={"a": "b"}), "metadata"),
        (
            lambda m: m["graph_module"]["signature"].update(
                in_spec='[1, {"type": "collections.defaultdict", "context": "", '
                '"children_spec": []}]'
            ),
            "the container",
        ),
    ],
)
def test_a_graph_with_anything_unusual_is_refused(archive: bytes, edit: Any, what: str) -> None:
    with pytest.raises(StorageError, match=f"holds {what}"):
        read_program(changed(archive, in_model(edit)))


@pytest.mark.parametrize(("name", "kind"), [("dtype", "as_int"), ("memory_format", "as_ints")])
def test_numbers_in_the_place_of_torchs_constants_are_refused(
    archive: bytes, name: str, kind: str
) -> None:
    """Torch looks them up in a table, at whatever place a number says."""

    def edit(model: Any) -> None:
        node = model["graph_module"]["graph"]["nodes"][0]
        node["target"] = "torch.ops.aten.zeros_like.default"
        value = {kind: -100 if kind == "as_int" else [4]}
        node["inputs"] = [
            {"name": "self", "arg": node["inputs"][0]["arg"], "kind": 1},
            {"name": name, "arg": value, "kind": 2},
        ]

    with pytest.raises(StorageError, match=f"another {name} than torch has|cannot be read"):
        read_program(changed(archive, in_model(edit)))


def test_control_flow_calls_no_operator_without_its_checks() -> None:
    """torch.cond calls whatever it is given; attention reads as many values as there are keys."""

    class Branches(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            tensors = (x, y, z)
            found: torch.Tensor = torch.cond(
                x.sum() > 0, lambda x, y, z: x + y + z, lambda x, y, z: x - y - z, tensors
            )
            return found

    def call_operator(model: Any) -> None:
        for node in model["graph_module"]["graph"]["nodes"]:
            for given in node["inputs"]:
                if "as_graph" in given["arg"]:
                    name = "torch.ops.aten.scaled_dot_product_attention.default"
                    given["arg"] = {"as_operator": name}

    archive = write_program(Branches(), tuple(torch.rand(2, 1, 3, 4) for _ in range(3)))
    ones = torch.ones(1, 1, 3, 4)
    assert torch.equal(read_program(archive)(ones, ones, ones), 3 * ones)
    with pytest.raises(StorageError, match="an operator"):
        read_program(changed(archive, in_model(call_operator)))


def test_sizes_are_looked_at_in_little_time(archive: bytes) -> None:
    """With second tries each letter would double the time: here to some hours."""
    began = time.monotonic()
    with pytest.raises(StorageError, match="the size"):
        read_program(changed(archive, in_model(lambda m: set_size(m, "a" * 40 + ";"))))
    assert time.monotonic() - began < 5


def test_operators_that_are_not_in_the_list_can_be_trusted_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Strided(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_strided(x, (x.shape[0], 1), (1, 1)) + x

    archive = write_program(Strided(), (torch.ones(4, 1),))
    assert "trusted=['torch.ops.aten.as_strided'] only" in caplog.text
    with pytest.raises(StorageError, match=r"trusted=\['torch.ops.aten.as_strided'\]"):
        read_program(archive)
    for trusted in ("torch.ops.aten.as_strided", "torch.ops.aten"):
        program = read_program(archive, trusting(trusted))
        assert torch.equal(copy.deepcopy(program)(torch.ones(3, 1)), torch.full((3, 1), 2.0))
    with pytest.raises(StorageError, match="the operator"):
        read_program(archive, trusting("torch.ops.aten.as_stride"))


def test_all_operators_that_must_be_trusted_are_named_at_once() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.as_strided(x, (x.shape[0], 1), (1, 1)) + torch.linalg.matrix_exp(x).sum()

    archive = write_program(Odd(), (torch.ones(2, 2, 2),))
    named = "trusted=['torch.ops.aten.as_strided', 'torch.ops.aten.linalg_matrix_exp']"
    with pytest.raises(StorageError, match=re.escape(named)):
        read_program(archive)


@pytest.mark.parametrize("name", ["data/aotinductor/model/x.so", "data/constants/opaque_obj_0"])
def test_other_entries_are_refused(archive: bytes, name: str) -> None:
    with pytest.raises(StorageError, match="holds the entry"):
        read_program(changed(archive, {name: lambda _: b"x"}))


def test_pickled_weights_are_refused(archive: bytes) -> None:
    bad = {WEIGHTS: lambda data: data.replace(b'"use_pickle": false', b'"use_pickle": true')}
    with pytest.raises(StorageError, match="pickled tensor"):
        read_program(changed(archive, bad))


@pytest.mark.parametrize("data", [b"", b"PK", pickle.dumps(1)])
def test_other_files_are_a_storage_error(data: bytes) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        read_program(data)


@pytest.mark.parametrize("inputs", [(), (torch.tensor(1.0),), (torch.empty(0, 3),)])
def test_example_inputs_need_samples(inputs: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(ConfigError, match="with a sample each"):
        write_program(nn.Linear(3, 2), inputs)
