"""Files that somebody has changed at will: each loads, or ends in an error of sparkdl's, in time.

`make fuzz` tries many, and others each time; `make test-all` the same few.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import resource
import struct
import threading
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from sparkdl.cli.job_files.job_file import TrainJob, load_job
from sparkdl.errors import SparkDLError
from sparkdl.report.record.run_folder import RunFolder, RunReader, folder_name
from sparkdl.report.run_server import RunServer
from sparkdl.serialization.exported_program import read_program, write_program
from sparkdl.serialization.json_objects import describe
from sparkdl.serialization.load import load_module, load_signature
from sparkdl.serialization.saved_module import prepare_module
from sparkdl.storage import checkpoint_format as checkpoints
from sparkdl.storage.atomic_folder import write_folder
from sparkdl.storage.checkpoint_format import CheckpointInfo, decode, encode, views
from sparkdl.storage.storage import LocalStorage
from sparkdl.storage.tensor_file import TensorFile
from sparkdl.storage.tensor_tree import snapshot
from tests.describable import make_net
from tests.report.runs import events, record

IS_LONG = "FUZZ" in os.environ
NUM_FILES = int(os.environ.get("FUZZ", "60"))
"""Of each kind."""
MOST_BYTES = 6 << 30
"""Of memory that may be asked for besides what is in use."""
FUZZ = settings(
    max_examples=NUM_FILES,
    deadline=timedelta(seconds=20),
    database=None,
    derandomize=not IS_LONG,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
    print_blob=IS_LONG,
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 if not IS_LONG else 36_000)]

NAMES = [
    "os:system", "torch:os.system", "torch.nn.modules.linear:Linear", "sparkdl:AllReduce",
    "torch.nn.modules.container:ModuleDict", "tests.describable:make_net", "a:b:c", ":", "",
    'x",0) or print(1', "../x", "a.b", "\0", "\ud800", "float32", "qint8", "bits8", "99" * 50,
    "torch.ops.aten.as_strided.default", "2*s0", "print(1)", "NaN", "1e999", "=" * 100,
]  # fmt: skip
DEEP = json.loads("[" * 700 + "]" * 700)
SCALARS = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(2**63), 2**70, 0.5, -1e308, float("inf"),
    float("nan"), *NAMES,
]  # fmt: skip
SHAPES = [
    [], {}, [[]], [None], {"x": 1}, {"": {}}, [0] * 50, [2**40, 2**40], DEEP, {"tuple": []},
    {"import": "os:system"}, {"float": "x"}, {"dict": [[1]]}, {"partial": 1}, {"dtype": 3},
    {"tensor": "", "dtype": "float32", "shape": [4096]},
    {"tensor": "AAAA", "dtype": "qint8", "shape": [4]},
    {"module": "torch.nn.modules.linear:Linear", "args": {"in_features": -1}, "frozen": []},
    {"dataclass": "sparkdl:EarlyStopping", "fields": {"patience": "x"}},
]  # fmt: skip
VALUES = st.sampled_from([*SCALARS, *SHAPES])
DEEPEST = 50
"""Depth at which a value is changed: one `DEEP` in another could not be written down here."""


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each part of a JSON value, and to itself."""
    yield at
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(item, (*at, key))


def changed(data: st.DataObject, value: Any) -> Any:
    """A JSON value with one to three of its parts replaced, removed, renamed or taken twice."""
    value = json.loads(json.dumps(value))
    for _ in range(data.draw(st.integers(1, 3))):
        way = data.draw(st.sampled_from(list(places(value))))[:DEEPEST]
        if not way:
            continue
        owner = value
        for key in way[:-1]:
            owner = owner[key]
        kind = data.draw(st.sampled_from(["replace", "remove", "rename", "twice", "swap"]))
        if kind == "remove":
            del owner[way[-1]]
        elif kind == "rename" and isinstance(owner, dict):
            owner[data.draw(st.sampled_from(NAMES))] = owner.pop(way[-1])
        elif kind == "twice" and isinstance(owner, list):
            owner.append(owner[way[-1]])
        elif kind == "swap":
            other = data.draw(st.sampled_from(list(places(value))))[:DEEPEST]
            found = value
            for key in other:
                found = found[key]
            owner[way[-1]] = json.loads(json.dumps(found))
        else:
            owner[way[-1]] = json.loads(json.dumps(data.draw(VALUES)))
    return value


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """Bytes with some of them changed, left out or put in."""
    found = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(found) - 1)))
        until = at + data.draw(st.integers(0, 8))
        found[at:until] = data.draw(st.binary(max_size=8))
    return bytes(found)


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    """What asks for more memory gets an error in place of the machine's last."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    (used,) = [
        int(line.split()[1]) << 10
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        if line.startswith("VmSize:")
    ]
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def ours(call: Callable[..., Any], *args: Any) -> Any:
    """What a call gives, or None if it ended in an error of sparkdl's; others fail the test."""
    try:
        return call(*args)
    except SparkDLError as error:
        assert str(error)
    return None


def saved(module: nn.Module, factory: Any = None) -> dict[str, Any]:
    column = {"name": "x", "role": "feature", "dtype": "float32", "shape": [3]}
    extra = {"columns": [column], "num_classes": 2}
    made = prepare_module(module, factory, example_inputs=None, extra=extra)
    return dict(made.index)


PARTS = {"a": nn.Sequential(nn.Linear(3, 4), nn.ReLU()), "0": nn.LayerNorm(4)}
MODULES = [saved(nn.ModuleDict(PARTS)), saved(make_net(), make_net)]
STATES = [
    dict(nn.ModuleDict(PARTS).state_dict()),
    {"a": torch.ones(3, dtype=torch.bfloat16), "b": [1, (2.0, None)], "c": torch.ones(0, 3)},
]


@FUZZ
@given(st.data())
def test_a_module_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("m")
    index = changed(data, data.draw(st.sampled_from(MODULES)))
    if not isinstance(index, dict):
        return
    content = b"".join(encode(snapshot(STATES[0])))
    if data.draw(st.booleans()):
        content = in_header(data, content)
    write_folder(
        LocalStorage(folder), "model", "module.json", index, {"weights.safetensors": content}
    )
    if data.draw(st.integers(0, 9)) == 0:
        file = folder / "model/module.json"
        file.write_bytes(damaged(data, file.read_bytes()))
    ours(load_module, folder)
    ours(load_signature, folder)


def in_header(data: st.DataObject, content: bytes) -> bytes:
    """A safetensors file with another header, or other bytes."""
    if data.draw(st.booleans()):
        return damaged(data, content)
    (size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"]["tree"] = json.loads(header["__metadata__"]["tree"])
    header = changed(data, header)
    if isinstance(header, dict) and isinstance(header.get("__metadata__"), dict):
        tree = header["__metadata__"].get("tree")
        header["__metadata__"]["tree"] = json.dumps(tree)
    text = json.dumps(header).encode()
    size = data.draw(st.sampled_from([len(text)] * 5 + [0, 2**63, len(text) + 9]))
    return struct.pack("<Q", size) + text + content[8 + len(text) :]


@FUZZ
@given(st.data())
def test_a_safetensors_file(data: st.DataObject) -> None:
    content = in_header(data, b"".join(encode(snapshot(data.draw(st.sampled_from(STATES))))))
    for read in (decode, views):
        ours(read, content, "here")


@FUZZ
@given(st.data())
def test_tensors_that_are_read_one_by_one_are_of_the_file(data: st.DataObject) -> None:
    content = b"".join(encode(snapshot(STATES[0])))
    (size,) = struct.unpack_from("<Q", content)
    file = TensorFile.of(content[8 : 8 + size])
    name = data.draw(st.sampled_from(sorted(file.entries)))
    begin, end = file.entries[name]["data_offsets"]
    other = sorted(data.draw(st.tuples(*[st.integers(0, len(content))] * 2)))
    lying = {**file.entries[name], "data_offsets": other}
    hostile = TensorFile(file.tree, {**file.entries, name: lying}, file.begin)
    if (found := ours(hostile.read, io.BytesIO(content), name, "here")) is not None:
        assert found.nbytes == other[1] - other[0] == end - begin


@pytest.fixture(scope="module")
def programs() -> list[bytes]:
    recurrent = nn.LSTM(3, 2, batch_first=True)
    return [
        write_program(nn.Sequential(nn.Linear(3, 4), nn.ReLU()), (torch.ones(2, 3),)),
        write_program(recurrent, (torch.ones(2, 5, 3),)),
    ]


@FUZZ
@given(st.data())
def test_an_exported_program(programs: list[bytes], data: st.DataObject) -> None:
    archive = data.draw(st.sampled_from(programs))
    if data.draw(st.integers(0, 4)) == 0:
        ours(read_program, damaged(data, archive))
        return
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(buffer, "w") as target:
        names = source.namelist()
        chosen = data.draw(st.sampled_from([n for n in names if n.endswith(".json")]))
        for name in names:
            content = source.read(name)
            if name == chosen:
                content = json.dumps(changed(data, json.loads(content))).encode()
            target.writestr(name, content)
    ours(read_program, buffer.getvalue())


@FUZZ
@given(st.data())
def test_a_checkpoint(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    storage, path = LocalStorage(tmp_path_factory.mktemp("c")), "run/id-0/step-00000007"
    contents = {
        checkpoints.SHARED: {"step": 7, "w": torch.ones(3)},
        checkpoints.rank_file(0): {"rng": torch.ones(2)},
    }
    files = {
        name: checkpoints.write_file(storage, f"{path}/{name}", encode(snapshot(state)))
        for name, state in contents.items()
    }
    info = CheckpointInfo(
        storage=storage, path=path, step=7, world_size=1, run_key="run", complete=False,
        environment={"torch": "x"}, files=files,
    )  # fmt: skip
    checkpoints.write_manifest(info)
    manifest = f"{path}/{checkpoints.MANIFEST}"
    if data.draw(st.booleans()):
        storage.write(manifest, damaged(data, storage.read(manifest)))
    else:
        changed_one = changed(data, json.loads(storage.read(manifest)))
        storage.write(manifest, json.dumps(changed_one).encode())
    ours(checkpoints.latest, storage, "run")


JOB = Path(__file__).parents[2] / "conf/digits.toml"


@FUZZ
@given(st.data())
def test_a_job_file(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Which is code, once it runs; to read it runs nothing."""
    file = tmp_path_factory.mktemp("j") / "job.toml"
    if data.draw(st.booleans()):
        file.write_bytes(damaged(data, JOB.read_bytes()))
    else:
        tables = changed(data, tomllib.loads(JOB.read_text(encoding="utf-8")))
        lines = [
            f"{json.dumps(str(section))} = {as_toml(table)}" for section, table in tables.items()
        ]
        file.write_text("\n".join(lines), encoding="utf-8", errors="replace")
    ours(load_job, TrainJob, file)


def as_toml(value: Any) -> str:
    """A JSON value in one line of TOML, which has no null."""
    if isinstance(value, dict):
        inside = (f"{json.dumps(str(key))} = {as_toml(item)}" for key, item in value.items())
        return "{" + ", ".join(inside) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    return (
        json.dumps("" if value is None else value).replace("NaN", "nan").replace("Infinity", "inf")
    )


NAME = folder_name("Odd", "0123456789ab", 1.7e9)


@FUZZ
@given(st.data())
def test_the_record_of_a_run(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """`sparkdl ui` shows each, as what it is or as unreadable."""
    storage = LocalStorage(tmp_path_factory.mktemp("r"))
    if data.draw(st.booleans()):
        found = changed(data, json.loads(json.dumps(record().to_dict())))
        storage.write(f"{NAME}/run.json", json.dumps(found).encode())
    else:
        told = changed(data, events(ended=False))
        if not all(isinstance(event, dict) for event in told):
            return
        RunFolder(storage, NAME).append(told)
    with RunServer(("127.0.0.1", 0), RunReader(storage)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            answers = [status(server, path) for path in ("/", *PAGES)]
        finally:
            server.shutdown()
            thread.join(10)
    assert answers[0] == 200 and set(answers[1:]) <= {200, 404, 500}


PAGES = (f"/runs/{NAME}/", f"/runs/{NAME}/run.json")


def status(server: RunServer, path: str) -> int:
    """What the server answers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    with contextlib.closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        return answer.status


def test_what_is_changed_is_what_loads(tmp_path: Path) -> None:
    """Otherwise all of the above could fail for another reason."""
    content = b"".join(encode(snapshot(STATES[0])))
    files = {"weights.safetensors": content}
    write_folder(LocalStorage(tmp_path), "model", "module.json", MODULES[0], files)
    assert isinstance(load_module(tmp_path), nn.ModuleDict)
    assert load_signature(tmp_path).num_classes == 2
    assert describe({"a": 1}) == {"dict": [["a", 1]]}
    assert load_job(TrainJob, JOB).estimator.num_workers == 2
