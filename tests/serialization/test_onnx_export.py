"""Does an ONNX file compute what the module does, and is a file that does not never written?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError
from sparkdl.serialization import onnx_export
from sparkdl.serialization.onnx_export import export_onnx
from sparkdl.storage.storage import LocalStorage
from tests.serialization.saving import save_module

# onnxruntime is asked for first: the others do without it only half of the work.
onnxruntime = pytest.importorskip("onnxruntime", reason="needs pip install onnxruntime")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

X = torch.linspace(-1, 1, 12).reshape(4, 3)


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Dropout(),
            nn.LazyLinear(4),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)

    def forward(self, x: torch.Tensor, place: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"b": x + self.embed(place), "a": place + 1}


class Fitted:
    """Looks like a fitted model, without Spark."""

    def __init__(self, module: nn.Module, *columns: Column) -> None:
        self.module, self.columns = module.eval(), columns


class NoCounterpart(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.svdvals(x)


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


def column(name: str, dtype: str, *shape: int) -> Column:
    return Column(name=name, role="feature", dtype=dtype, shape=shape)


def run(path: Path, *inputs: torch.Tensor) -> list[torch.Tensor]:
    onnx.checker.check_model(onnx.load(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]
    given = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return [torch.from_numpy(array) for array in session.run(None, given)]


@pytest.mark.slow
def test_a_module_with_batch_norm_takes_batches_of_any_size(tmp_path: Path) -> None:
    module = Convolutional()
    module(torch.randn(8, 1, 6, 6))
    assert module.training
    path = tmp_path / "net.onnx"
    difference = export_onnx(module, path, example_inputs=(torch.randn(3, 1, 6, 6),))
    assert 0 <= difference < 1e-5
    assert module.training and module.layers[1].training
    for rows in (1, 2, 9):
        x = torch.randn(rows, 1, 6, 6)
        (found,) = run(path, x)
        torch.testing.assert_close(found, module.eval()(x), rtol=1e-4, atol=1e-5)


def test_a_fitted_model_names_its_inputs_after_its_columns(tmp_path: Path) -> None:
    model = Fitted(TwoInputs(), column("a column", "float32", 3), column("place", "int64"))
    export_onnx(model, str(tmp_path / "two.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "two.onnx"))
    assert [node.name for node in session.get_inputs()] == ["a column", "place"]
    place = torch.tensor([4, 0, 1, 2])
    found = run(tmp_path / "two.onnx", X, place)
    expected = model.module(X, place)
    torch.testing.assert_close(found, list(expected.values()))


def test_a_saved_model_is_exported_by_its_path(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)).eval()
    extra = {"columns": [{"name": "x", "role": "feature", "dtype": "float32", "shape": (3,)}]}
    save_module(module, None, LocalStorage(tmp_path), "m", example_inputs=None, extra=extra)
    export_onnx(tmp_path / "m", tmp_path / "m.onnx")
    torch.testing.assert_close(run(tmp_path / "m.onnx", X), [module(X)])


@pytest.mark.slow
def test_an_exported_program_can_become_onnx(tmp_path: Path) -> None:
    from sparkdl.serialization.exported_program import read_program, write_program

    module = nn.Linear(3, 2)
    program = read_program(write_program(module, (X,)))
    export_onnx(program, tmp_path / "p.onnx", example_inputs=(X,))
    torch.testing.assert_close(run(tmp_path / "p.onnx", X), [module(X)])


@pytest.mark.slow
def test_files_go_to_urls_and_replace_others(tmp_path: Path) -> None:
    for width in (2, 5):
        export_onnx(nn.Linear(3, width), f"file://{tmp_path}/m.onnx", example_inputs=(X,))
    assert [name.name for name in tmp_path.iterdir()] == ["m.onnx"]
    assert run(tmp_path / "m.onnx", X)[0].shape == (4, 5)


def test_an_operator_that_onnx_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no counterpart of the operator aten\._linalg_svd.*lo"):
        export_onnx(NoCounterpart(), tmp_path / "m.onnx", example_inputs=(torch.randn(3, 2, 2),))
    assert not list(tmp_path.iterdir())


def test_what_torch_cannot_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch\.export cannot export it"):
        export_onnx(Branches(), tmp_path / "m.onnx", example_inputs=(X,))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_file_that_computes_something_else_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_export = onnx_export.export_program
    monkeypatch.setattr(
        onnx_export, "export_program", lambda module, x: true_export(nn.Linear(3, 2), x)
    )
    with pytest.raises(ConfigError, match=r"does not compute what the module does, on 1 rows"):
        export_onnx(nn.Linear(3, 2), tmp_path / "m.onnx", example_inputs=(X,))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "path", "message"),
    [
        (nn.Linear(3, 2), "m.onnx", "pass example_inputs="),
        (42, "m.onnx", "received int"),
        (Fitted(nn.Linear(3, 2), column("x", "float32", 3)), "folder/", "name the file"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, model: Any, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        export_onnx(model, f"{tmp_path}/{path}")


def test_a_module_that_is_not_on_the_cpu_is_refused(tmp_path: Path) -> None:
    module = nn.Linear(3, 2).to("meta")
    with pytest.raises(ConfigError, match=r"parts of it are on \['meta'\]; pass module\.cpu\(\)"):
        export_onnx(module, tmp_path / "m.onnx", example_inputs=(torch.zeros(2, 3),))


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    true_import = onnx_export.import_module

    def absent(name: str) -> Any:
        if name.startswith("onnx"):
            raise ImportError(name)
        return true_import(name)

    monkeypatch.setattr(onnx_export, "import_module", absent)
    with pytest.raises(ConfigError, match=r"needs onnx, .*; pip install onnx "):
        export_onnx(nn.Linear(3, 2), tmp_path / "m.onnx", example_inputs=(X,))
