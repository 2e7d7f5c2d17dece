"""The reference of job files has every key with its meaning, and fits a terminal."""

from __future__ import annotations

import dataclasses

import pytest

from sparkdl.cli.job_files.job_file import PARAMS, EvaluateJob, PredictJob, TrainJob
from sparkdl.cli.job_files.key_reference import as_text, sections_of
from sparkdl.cli.job_files.prepare_file import PrepareJob
from sparkdl.cli.job_files.study_file import TuneJob
from sparkdl.cli.main import main


@pytest.mark.parametrize("kind", [TrainJob, EvaluateJob, PredictJob, TuneJob, PrepareJob])
def test_every_section_is_there(kind: type) -> None:
    names = {section.name for section in sections_of(kind)}
    assert {item.name for item in dataclasses.fields(kind)} <= names
    assert max(map(len, as_text(kind, 80))) <= 80


def test_params_have_type_default_and_meaning() -> None:
    (estimator,) = (s for s in sections_of(TrainJob) if s.name == "estimator")
    keys = {key.name: key for key in estimator.keys}
    assert set(keys) == {"kind", *PARAMS}
    assert (keys["epochs"].value, keys["epochs"].default) == ("an integer", "1")
    assert keys["checkpoint_interval"].default == "500"
    assert keys["sync_strategy"].default == "'allreduce'"
    assert "num_shards times as many" in keys["batch_size"].doc  # not numShards
    assert all(key.doc for key in estimator.keys if key.name != "kind")


def test_a_terminal_shows_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["train", "--keys"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("[data] (required)")
    assert "\n  learning_rate: a number or 'auto'\n      learning rate (> 0)" in text
    assert "\n  path: a string, required\n" in text
