"""The numbers that the pages compare were measured."""

from __future__ import annotations

import json
import re

import pytest

from tests.docs.blocks import DOCS, ROOT

RESULTS = ROOT / "benchmarks" / "results"
PAGES = {
    name: (DOCS / name).read_text(encoding="utf-8") for name in ("comparison.md", "large_data.md")
}

# Start of a row of the page -> per cell the file, the median's key, and how it is written.
ROWS = {
    "| steps per second in the loop, `torchrun` |": [
        ("fit", "fit steps/s", "{:.1f}"),
        ("fit", "torchrun steps/s", "{:.1f}"),
        ("fit", "fit / torchrun steps", "{:.2f} ({:.2f} to {:.2f})"),
    ],
    "| the same, loops alone": [
        ("loop", "fit, channels last steps/s", "{:.1f}"),
        ("loop", "torchrun, channels last steps/s", "{:.1f}"),
        ("loop", "fit / torchrun, channels last", "{:.2f} ({:.2f} to {:.2f})"),
    ],
    "| steps per second in the loop, `TorchDistributor`": [
        ("fit", "fit steps/s", "{:.1f}"),
        ("fit", "TorchDistributor steps/s", "{:.1f}"),
        ("fit", "fit / TorchDistributor steps", "{:.2f} ({:.2f} to {:.2f})"),
    ],
    "| steps per second in the loop, Ray Train": [
        ("fit_ray", "fit steps/s", "{:.1f}"),
        ("fit_ray", "Ray Train steps/s", "{:.1f}"),
        ("fit_ray", "fit / Ray Train steps", "{:.2f} ({:.2f} to {:.2f})"),
    ],
    "| seconds of everything but the loop, `TorchDistributor`": [
        ("fit", "fit rest s", "{:.1f}"),
        ("fit", "TorchDistributor rest s", "{:.1f}"),
    ],
    "| seconds of everything but the loop, Ray Train": [
        ("fit_ray", "fit rest s", "{:.1f}"),
        ("fit_ray", "Ray Train rest s", "{:.1f}"),
    ],
    "| seconds of everything but the loop, `torchrun`": [
        ("fit", "fit rest s", "{:.1f}"),
        ("fit", "torchrun rest s", "{:.1f}"),
    ],
    "| the same of the [first `fit`": [
        ("fit_floats_cold", "cold fit rest s", "{:.1f}"),
        ("fit_floats_cold", "torchrun rest s", "{:.1f}"),
    ],
    "| seconds of a function of ten steps": [
        ("runner", "TorchRunner, cold: total s", "{:.1f}"),
        ("runner", "TorchDistributor, cold: total s", "{:.1f}"),
        ("runner", "TorchDistributor / TorchRunner, cold total", "{:.1f} ({:.1f} to {:.1f})"),
    ],
    "| the same, in a session that has run it": [
        ("runner", "TorchRunner, warm: total s", "{:.2f}"),
        ("runner", "TorchDistributor, warm: total s", "{:.2f}"),
        ("runner", "TorchDistributor / TorchRunner, warm total", "{:.1f} ({:.1f} to {:.1f})"),
    ],
    "| `transform` with the network": [
        ("transform", "CNN: transform rows/s", "{:,.0f}"),
        ("transform", "CNN: predict_batch_udf rows/s", "{:,.0f}"),
        ("transform", "CNN: transform / predict_batch_udf", "{:.2f} ({:.2f} to {:.2f})"),
    ],
    "| random batches from local files": [
        ("feeding", "sparkdl: later epochs rows/s", "{:,.0f}"),
        ("feeding", "petastorm: later epochs rows/s", "{:,.0f}"),
        ("feeding", "sparkdl / petastorm, later epochs", "{:.0f} ({:.0f} to {:.0f})"),
    ],
}  # fmt: skip
_DIGITS = {"transform": -2, "feeding": -3}


@pytest.mark.parametrize("start", ROWS)
def test_what_is_said_was_measured(start: str) -> None:
    (line,) = [line for line in PAGES["comparison.md"].splitlines() if line.startswith(start)]
    cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
    for cell, (name, key, form) in zip(cells, ROWS[start], strict=False):
        result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        values = [result["medians"][key], min(result["values"][key]), max(result["values"][key])]
        if "," in form:
            values = [round(value, _DIGITS[name]) for value in values]
        assert cell == form.format(*values), key


def test_day_machine_and_versions_are_those_of_the_results() -> None:
    page = " ".join(PAGES["comparison.md"].split())
    for name in {name for cells in ROWS.values() for name, _, _ in cells}:
        result = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        assert result["date"] in page
        assert f"{result['cores']} cores ({result['cpu']}) and {result['memory GiB']} GiB" in page
        assert result["versions"]["torch"].startswith("2.13")
        assert result["versions"]["pyspark"].startswith("4.3")


PHASES = {
    "preflight": ("preflight",),
    "first rows": ("first rows",),
    "executors": ("executors",),
    "spool": ("spool",),
    "clean up": ("train", "clean up"),
}


def test_so_are_the_seconds_of_a_first_fit() -> None:
    page = (DOCS / "startup.md").read_text(encoding="utf-8")
    medians = json.loads((RESULTS / "fit_floats_cold.json").read_text(encoding="utf-8"))["medians"]
    rows = [[cell.strip() for cell in line.split("|")[1:]] for line in page.splitlines()]
    said = {cells[0].split("`")[-2]: cells[1:3] for cells in rows if cells and "`" in cells[0]}
    for row, phases in PHASES.items():
        for cell, kind in zip(said[row], ("cold fit", "fit"), strict=True):
            seconds = sum(medians[f"{kind}, fit: {phase} s"] for phase in phases)
            assert cell == f"{seconds:.1f}", row
    (last,) = [cells for cells in rows if cells and cells[0].startswith("with Spark's first job")]
    assert last[0] == f"with Spark's first job, {medians['cold fit, read.parquet s']:.1f} s"
    assert last[1:3] == [f"{medians[f'{kind} rest s']:.1f}" for kind in ("cold fit", "fit")]
    assert f"`torchrun` takes {medians['torchrun rest s']:.1f}" in last[3]


def test_so_is_what_the_page_on_large_data_says() -> None:
    medians = json.loads((RESULTS / "larger.json").read_text(encoding="utf-8"))["medians"]
    said = {
        float(number.replace(",", ""))
        for number in re.findall(r"at ([\d.,]+) MB/s", PAGES["large_data.md"])
    }
    measured = {round(value, digits) for value in medians.values() for digits in (0, 1)}
    assert said <= measured
