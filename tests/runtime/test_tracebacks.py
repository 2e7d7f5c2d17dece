"""What users see of an error: our sentence and their own lines."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import pytest
import torch
from pyspark.errors import PythonException
from torch import nn

from sparkdl import TorchClassifier
from sparkdl.errors import ConfigError, SparkDLError
from sparkdl.runtime.tracebacks import formatted, plainly
from sparkdl.storage.storage import open_storage


class Net(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weigh(x)

    def weigh(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(3, 3)


def run_module() -> None:
    try:
        Net()(torch.ones(2, 2))
    except RuntimeError as error:
        raise ConfigError("the module cannot run") from error


def write_file() -> None:
    """The cause is raised and caught within the package."""
    open_storage("/proc/nowhere").write("file", b"")


def interrupt() -> None:
    raise KeyboardInterrupt("interrupted; nothing is left")


def interrupt_search() -> None:
    """Its main thread waits for those of trials."""
    raise KeyboardInterrupt


def shown(function: Callable[[], None], kind: type[BaseException] = SparkDLError) -> list[str]:
    with pytest.raises(kind) as caught:
        plainly(function)()
    return "".join(traceback.format_exception(caught.value)).splitlines()


def test_of_the_cause_the_users_own_frames_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(run_module)
    assert lines[-1].endswith("ConfigError: the module cannot run")
    for name in ("forward", "weigh"):
        assert any(line.endswith(f"in {name}") for line in lines)
    assert not any("torch/nn" in line for line in lines)
    assert sum(line.startswith("Traceback") for line in lines) == 2
    monkeypatch.setenv("SPARKDL_FULL_TRACEBACKS", "1")
    assert any("torch/nn" in line for line in shown(run_module))


def test_an_interrupted_fit_is_a_sentence_without_frames_of_the_package() -> None:
    lines = shown(interrupt, KeyboardInterrupt)
    assert lines[-1] == "KeyboardInterrupt: interrupted; nothing is left"
    assert not any(line.endswith("in interrupt") for line in lines)
    assert len(shown(interrupt_search, KeyboardInterrupt)) == len(lines)


def test_a_cause_without_a_frame_of_the_users_is_left_out() -> None:
    lines = shown(write_file)
    assert sum(line.startswith("Traceback") for line in lines) == 1
    assert "/proc/nowhere" in lines[-1]


def test_what_nobody_raised_on_purpose_is_whole() -> None:
    def fails() -> None:
        Net()(torch.ones(2, 2))

    with pytest.raises(RuntimeError) as caught:
        plainly(fails)()
    assert any("torch/nn" in line for line in traceback.format_exception(caught.value))
    text = formatted(caught.value)
    assert "in weigh" in text and "torch/nn" not in text
    assert text.splitlines()[-1].startswith("RuntimeError: ")


def test_an_error_without_frames_of_the_users_keeps_all() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2, 2) @ torch.ones(3, 3)
    error = caught.value.with_traceback(None)
    assert formatted(error).startswith("RuntimeError: ")


def test_of_fit_one_frame_is_left() -> None:
    """Those of pyspark and of the estimator were in between."""
    with pytest.raises(ConfigError, match="set either featuresCol or inputCols") as caught:
        TorchClassifier(module=Net, featuresCol="a", inputCols=["b"]).fit(None)  # type: ignore[arg-type]
    assert [frame.name for frame in traceback.extract_tb(caught.tb)][1:] == ["call"]


def test_an_error_in_a_function_of_the_users_on_spark_has_none_of_our_frames() -> None:
    def fails() -> None:
        raise PythonException("An exception was thrown from the Python worker: ...")

    with pytest.raises(PythonException) as caught:
        plainly(fails)()
    assert [frame.name for frame in traceback.extract_tb(caught.tb)][1:] == ["call"]


def test_ctrl_c_while_an_error_is_told_keeps_the_error() -> None:
    def fails() -> None:
        try:
            run_module()
        except ConfigError as error:
            raise KeyboardInterrupt("interrupted") from error

    with pytest.raises(KeyboardInterrupt) as caught:
        plainly(fails)()
    assert isinstance(caught.value.__cause__, ConfigError)


def test_of_hundreds_of_lines_the_middle_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def even(n: int) -> int:
        return odd(n - 1)

    def odd(n: int) -> int:
        return even(n - 1) if n else 1 // 0

    with pytest.raises(ZeroDivisionError) as caught:
        even(299)
    lines = formatted(caught.value).splitlines()
    assert len(lines) == 201
    assert lines[100].endswith("lines left out; SPARKDL_FULL_TRACEBACKS=1 shows all]")
    assert lines[0].startswith("Traceback") and lines[-1].startswith("ZeroDivisionError")
    monkeypatch.setenv("SPARKDL_FULL_TRACEBACKS", "1")
    assert len(formatted(caught.value).splitlines()) > 500


def test_causes_may_go_round_in_a_circle() -> None:
    def fail() -> None:
        first, second = KeyError("a"), KeyError("b")
        first.__cause__, second.__cause__ = second, first
        raise ConfigError("no") from first

    with pytest.raises(ConfigError, match="no"):
        plainly(fail)()
