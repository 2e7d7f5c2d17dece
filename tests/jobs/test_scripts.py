from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
JOBS = ("prepare", "train", "evaluate", "predict", "tune")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", JOBS)
def test_help_has_an_example_that_names_a_file_of_conf(name: str) -> None:
    script = ROOT / "jobs" / f"{name}.py"
    result = subprocess.run(
        [sys.executable, str(script), "--help"], check=True, capture_output=True, text=True
    )
    example = result.stdout.split("example:\n")[1]
    assert f"spark-submit jobs/{name}.py --config conf/" in example
    assert (ROOT / example.split("--config ")[1].split()[0]).is_file()


def test_the_doctor_is_a_script_too() -> None:
    script = ROOT / "jobs" / "doctor.py"
    command = [sys.executable, str(script), "--no-cluster"]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    assert result.stdout.startswith("this machine\n  ok       Python")


@pytest.mark.parametrize("name", [*JOBS, "doctor"])
def test_scripts_only_call_the_package(name: str) -> None:
    lines = (ROOT / "jobs" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 15


def test_digits_are_split_and_written_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import pyarrow.parquet as pq

    monkeypatch.setattr(sys, "argv", ["digits.py", "--output", str(tmp_path / "digits")])
    digits = load(ROOT / "jobs" / "digits.py")
    for _ in range(2):
        digits.main()
    train, test = (pq.read_table(tmp_path / "digits" / split) for split in ("train", "test"))
    assert (train.num_rows, test.num_rows) == (1437, 360)
    assert {len(image) for image in test["image"].to_pylist()} == {64}
    assert set(test["label"].to_pylist()) == set(range(10))
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]
    assert "1437 training and 360 test digits" in capsys.readouterr().out


def test_digits_become_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from PIL import Image

    arguments = ["digits.py", "--files", "--output", str(tmp_path / "digits")]
    monkeypatch.setattr(sys, "argv", arguments)
    load(ROOT / "jobs" / "digits.py").main()
    assert sorted(path.name for path in (tmp_path / "digits").iterdir()) == list("0123456789")
    files = list((tmp_path / "digits").rglob("*.png"))
    assert len(files) == 1797
    with Image.open(files[0]) as image:
        assert (image.mode, image.size) == ("L", (8, 8))
    assert "wrote 1797 digits as PNG files" in capsys.readouterr().out
