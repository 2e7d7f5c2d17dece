"""Does a saved model load where Spark is not installed, from wherever it lies?"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
import torch
from torch import nn

import sparkdl
from sparkdl.data.plan import Column
from sparkdl.errors import StorageError
from sparkdl.inputs import Sequence
from sparkdl.serialization.load import column_as_json, load_module, load_signature
from sparkdl.storage.storage import LocalStorage, open_storage
from tests.describable import NeedsWidth, make_net, tokenize
from tests.serialization.saving import save_module

ROOT = Path(__file__).parents[2]
X = torch.linspace(-1, 1, 6).reshape(2, 3)
COLUMNS = [{"name": "x", "role": "feature", "dtype": "float32", "shape": (3,)}]


def make() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()


def save(root: str | Path, folder: str = "model", **extra: Any) -> nn.Module:
    module = make()
    extra = extra or {"columns": COLUMNS, "num_classes": 2, "factory": None}
    storage = open_storage(root)
    save_module(module, None, storage, folder, example_inputs=None, extra=extra)
    return module


@pytest.mark.parametrize("prefix", ["", "file://", "file:"])
def test_the_folder_that_was_saved_to_is_enough(tmp_path: Path, prefix: str) -> None:
    module = save(tmp_path / "m")
    back = load_module(f"{prefix}{tmp_path}/m")
    assert torch.equal(back(X), module(X)) and not back.training
    signature = load_signature(f"{prefix}{tmp_path}/m")
    assert signature.num_classes == 2
    assert [(c.name, c.dtype, c.shape) for c in signature.inputs] == [("x", "float32", (3,))]
    assert back(*signature.example_inputs(4)).shape == (4, 2)


def test_any_url_of_fsspec_will_do() -> None:
    try:
        module = save("memory://saved/m")
        assert torch.equal(load_module("memory://saved/m")(X), module(X))
        assert torch.equal(load_module("memory:/saved/m/model")(X), module(X))
    finally:
        fsspec.filesystem("memory").rm("/saved", recursive=True)


@pytest.mark.parametrize(
    "inside", ["", "model", "stages/2_abc/model", "bestModel/model", "bestModel/stages/0_a/model"]
)
def test_modules_are_found_inside_what_holds_them(tmp_path: Path, inside: str) -> None:
    module = save(tmp_path / "p", inside or ".")
    (tmp_path / "p" / "stages" / "0_other" / "metadata").mkdir(parents=True)
    assert torch.equal(load_module(tmp_path / "p")(X), module(X))


def test_several_stages_are_told_apart_by_name(tmp_path: Path) -> None:
    for name in ("stages/0_a/model", "stages/1_b/model"):
        save(tmp_path, name)
    with pytest.raises(StorageError, match=r"2 saved modules; name one.*stages/0_a, stages/1_b"):
        load_module(tmp_path)
    load_module(tmp_path / "stages" / "1_b")


def test_an_estimators_module_loads_but_has_no_signature(tmp_path: Path) -> None:
    save_module(make(), None, LocalStorage(tmp_path), "module", example_inputs=None, extra={})
    load_module(tmp_path)
    with pytest.raises(StorageError, match="holds an estimator"):
        load_signature(tmp_path)


def test_a_folder_without_a_module_is_named(tmp_path: Path) -> None:
    for load in (load_module, load_signature):
        with pytest.raises(StorageError, match=f"{tmp_path} holds no saved module; pass the fold"):
            load(tmp_path)


@pytest.mark.slow
def test_signatures_need_no_weights_and_no_code_and_modules_name_what_they_lack(
    tmp_path: Path,
) -> None:
    """In one process, in which importing torch takes most of the time."""
    plain, texts, wide = (tmp_path / name for name in ("plain", "texts", "wide"))
    save(plain, columns=COLUMNS, num_classes=None, factory=make_net)
    index = plain / "model" / "module.json"
    assert "tests.describable:make_net" in index.read_text()
    (plain / "model" / "weights.safetensors").unlink()
    words = Sequence("text", transform=tokenize, max_length=7, mask="mask")
    column = Column(
        name="text", role="feature", dtype="int64", shape=(), argument="words", specification=words
    )
    save(texts, columns=[column_as_json(column)], num_classes=None, factory=None)
    factory = functools.partial(NeedsWidth, 5)
    storage = LocalStorage(wide)
    save_module(factory(), factory, storage, "model", example_inputs=None, extra={})
    code = (
        "import sys, sparkdl\n"
        f"print(sparkdl.load_signature({str(plain)!r}).inputs[0].shape)\n"
        f"(words,) = sparkdl.load_signature({str(texts)!r}).inputs\n"
        "print(words.kind.max_length, words.kind.mask, words.kind.transform.text)\n"
        f"sparkdl.load_signature({str(texts)!r}).example_arguments()\n"
        "assert not any('describable' in name for name in sys.modules)\n"
        "sys.modules['tests'] = None\n"
        "try:\n"
        f"    sparkdl.load_module({str(wide)!r})\n"
        "except sparkdl.ConfigError as error:\n    print(error)\n"
    )
    shape, sequence, error = run(code).splitlines()
    assert shape == "(3,)"
    assert sequence == '7 mask {"import": "tests.describable:tokenize"}'
    assert "cannot import 'tests.describable:" in error
    kind = load_signature(texts).inputs[0].kind
    batch = pa.record_batch({"text": ["two words", None]})
    assert kind.transform is not None and kind.transform(batch) == [[3, 5], []]


def run(code: str) -> str:
    """Run ``code`` in a Python in which pyspark, py4j and pandas cannot be imported."""
    barred = (
        "import sys\n"
        "for name in ('pyspark', 'py4j', 'pandas', 'sklearn', 'matplotlib', 'torchmetrics'):\n"
        "    sys.modules[name] = None\n"
    )
    command = [sys.executable, "-W", "error", "-c", barred + code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_it_works_where_pyspark_cannot_be_imported(tmp_path: Path) -> None:
    module = save(tmp_path / "m")
    code = (
        "import torch, sparkdl\n"
        "try:\n    import pyspark\n    raise SystemExit('pyspark is there')\n"
        "except ImportError:\n    pass\n"
        f"module = sparkdl.load_module('file://{tmp_path}/m')\n"
        "print(module(torch.linspace(-1, 1, 6).reshape(2, 3)).tolist())\n"
        f"print(sparkdl.load_signature({str(tmp_path / 'm')!r}).num_classes)\n"
    )
    shown, classes = run(code).splitlines()
    torch.testing.assert_close(torch.tensor(json.loads(shown)), module(X).detach())
    assert classes == "2"


@pytest.mark.parametrize("name", ["load_module", "load_signature", "ModelSignature"])
def test_the_names_are_public(name: str) -> None:
    assert name in sparkdl.__all__ and callable(getattr(sparkdl, name))


def test_damage_is_our_error(tmp_path: Path) -> None:
    save(tmp_path)
    weights = tmp_path / "model" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(StorageError, match=r"weights\.safetensors is damaged"):
        load_module(tmp_path)
