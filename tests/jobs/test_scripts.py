from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent.parent
JOBS = ("prepare", "train", "evaluate", "predict")


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


@pytest.mark.parametrize("name", JOBS)
def test_scripts_stay_small(name: str) -> None:
    lines = (ROOT / "jobs" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 80


def test_the_commands_after_training_name_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    train = load(ROOT / "jobs" / "train.py")
    monkeypatch.setenv("VIRTUAL_ENV", os.sep)
    commands = train.next_commands("models/m")
    assert [command.split()[1] for command in commands] == ["jobs/evaluate.py", "jobs/predict.py"]
    assert all(command.endswith("--set model.path=models/m") for command in commands)


def test_they_begin_with_the_environment_that_make_used(monkeypatch: pytest.MonkeyPatch) -> None:
    train = load(ROOT / "jobs" / "train.py")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    monkeypatch.setattr(sys, "base_prefix", "/usr")
    monkeypatch.chdir(ROOT)
    assert train.next_commands("m")[0].startswith("source .venv/bin/activate")


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


def test_a_report_names_splits_classes_bad_files_and_the_next_command() -> None:
    from sparkdl.prepare.ledger import Report

    report = Report(
        path="/data/o",
        files={"train": 2, "test": 1},
        rows={"train": 1500, "test": 9},
        rows_by_label={"train": {"cat": 1000, "dog": 500}, "test": {"cat": 9, "dog": 0}},
        bad=tuple((f"cat/{number}.png", "is broken") for number in range(7)),
    )
    text = "\n".join(load(ROOT / "jobs" / "prepare.py").lines(report))
    assert "train          1,500 images in 2 files" in text
    assert "test               9 images in 1 file\n" in text
    assert "0 cat                      1,000" in text
    assert "7 bad files skipped, listed in bad_files.jsonl" in text
    assert "cat/4.png: is broken" in text and "cat/5.png" not in text and "and 2 more" in text
    command = text.split("next:")[1]
    assert "--set data.path=/data/o/train" in command
    assert "--set test.path=/data/o/test" in command
    assert "validation" not in command


def test_the_lock_leaves_out_local_versions_and_what_torch_pins() -> None:
    lock = load(ROOT / ".ci" / "lock.py")
    versions = {"torch": "2.13.0+cpu", "nvidia-nccl-cu13": "2", "triton": "3", "numpy": "2.4.6"}
    text = lock.lock_text({**versions, "sparkdl-torch": "0.1"})
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == ["numpy==2.4.6", "torch==2.13.0"]


def test_the_lock_file_pins_every_line() -> None:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert len(pins) > 30
    assert all(line.count("==") == 1 and " " not in line for line in pins)
