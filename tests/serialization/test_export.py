"""Do the files that a saved model becomes compute what it does, without its code?"""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import sparkdl
from sparkdl.cli.main import main
from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError, SparkDLError, StorageError
from sparkdl.models.demo import DigitsNet
from sparkdl.serialization.export import export_saved
from sparkdl.serialization.load import column_as_json
from sparkdl.storage.storage import LocalStorage
from tests.serialization.saving import save_module

IMAGE = Column(name="image", role="feature", dtype="uint8", shape=(1, 8, 8))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved model as the half without Spark sees it."""
    torch.manual_seed(0)
    extra = {"columns": [column_as_json(IMAGE)], "num_classes": 10, "factory": DigitsNet}
    storage = LocalStorage(tmp_path / "digits")
    save_module(DigitsNet(), DigitsNet, storage, "model", example_inputs=None, extra=extra)
    return tmp_path / "digits"


def images(rows: int) -> torch.Tensor:
    return torch.arange(rows * 64, dtype=torch.uint8).remainder(17).reshape(rows, 1, 8, 8)


def test_a_program_runs_without_the_code(saved: Path, tmp_path: Path) -> None:
    exported = export_saved(saved, tmp_path / "digits.pt2")
    assert exported.inputs == ("input image: uint8, (batch, 1, 8, 8)",)
    program = torch.export.load(str(tmp_path / "digits.pt2")).module()
    for rows in (1, 7):
        expected = sparkdl.load_module(saved)(images(rows))
        torch.testing.assert_close(program(images(rows)), expected)


def test_a_folder_needs_no_code_either(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = sparkdl.load_module(saved)(images(3))
    export_saved(saved, tmp_path / "exported")
    monkeypatch.delattr("sparkdl.models.demo.DigitsNet")
    with pytest.raises(SparkDLError):
        sparkdl.load_module(saved)
    again = sparkdl.load_module(tmp_path / "exported")
    torch.testing.assert_close(again(images(3)), expected)
    signature = sparkdl.load_signature(tmp_path / "exported")
    assert (signature.inputs, signature.num_classes) == ((IMAGE,), 10)
    text = (tmp_path / "exported" / "module.json").read_text(encoding="utf-8")
    assert "DigitsNet" not in text


def test_weights_alone_are_those_of_the_model(saved: Path, tmp_path: Path) -> None:
    exported = export_saved(saved, tmp_path / "digits.safetensors")
    found = safetensors.torch.load_file(tmp_path / "digits.safetensors")
    expected = sparkdl.load_module(saved).state_dict()
    assert exported.what == f"{len(expected)} tensors"
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_onnx_by_its_ending(saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    exported = export_saved(saved, tmp_path / "digits.onnx")
    assert (tmp_path / "digits.onnx").is_file()
    assert exported.difference is not None
    assert exported.difference < 1e-4


def test_what_is_there_is_replaced_only_if_asked(saved: Path, tmp_path: Path) -> None:
    for name in ("digits.safetensors", "exported"):
        export_saved(saved, tmp_path / name)
        with pytest.raises(ConfigError, match="already; choose another target, or replace it"):
            export_saved(saved, tmp_path / name)
        export_saved(saved, tmp_path / name, overwrite=True)


def test_a_folder_of_something_else_is_never_replaced(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").touch()
    with pytest.raises(ConfigError, match="holds something else than an exported model"):
        export_saved(saved, tmp_path / "photos", overwrite=True)
    assert (tmp_path / "photos" / "me.jpg").exists()


def test_an_estimators_module_has_weights_only(tmp_path: Path) -> None:
    module = nn.Linear(2, 1)
    storage = LocalStorage(tmp_path / "estimator")
    save_module(module, None, storage, "module", example_inputs=None, extra={})
    export_saved(tmp_path / "estimator", tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match="export the model that its fit gives"):
        export_saved(tmp_path / "estimator", tmp_path / "p.pt2")


def test_an_unknown_ending_is_refused(saved: Path, tmp_path: Path) -> None:
    """It became a folder of that name."""
    known = r"known: .onnx, .pt2, .safetensors; or none for a folder"
    with pytest.raises(
        ConfigError, match=r"unknown ending '.onx'; did you mean '.onnx'\? " + known
    ):
        export_saved(saved, tmp_path / "digits.onx")
    assert list(tmp_path.glob("*.onx")) == []
    export_saved(saved, tmp_path / "digits-v1.2")
    assert (tmp_path / "digits-v1.2" / "module.json").is_file()


def test_no_model_and_no_name(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="holds no saved module"):
        export_saved(tmp_path / "none", tmp_path / "m.pt2")
    with pytest.raises(ConfigError, match="name a file or folder to write"):
        export_saved(saved, "/")


def test_the_command_says_what_it_wrote(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = str(tmp_path / "digits.pt2")
    assert main(["export", str(saved), target]) == 0
    text = capsys.readouterr().out
    assert text == f"wrote an exported program: {target}\n  input image: uint8, (batch, 1, 8, 8)\n"
    assert main(["export", str(saved), target]) == 1
    assert "or replace it with --overwrite" in capsys.readouterr().err
    assert main(["export", str(saved), target, "--overwrite"]) == 0
