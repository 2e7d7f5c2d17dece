"""A real browser draws a report."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from sparkdl.report.live.notebook import Board, NotebookView
from sparkdl.report.page.report_page import document, page
from sparkdl.report.page.run_list import comparison, run_list
from tests.browser import dom, screenshot, too_wide
from tests.report.runs import confusion, record


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(page(record()), encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_browser_finds_all_that_was_drawn(report: Path) -> None:
    text = dom(report.as_uri())
    assert text.count("<figure>") == 5
    assert text.count('class="ground"') == 4
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script" not in text


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_is_readable_by_day_and_by_night(report: Path, tmp_path: Path, dark: bool) -> None:
    path = tmp_path / "page.png"
    screenshot(report.as_uri(), path, width=1120, height=1400, dark=dark)
    pixels = colours(path)
    corner = pixels[0]
    assert (sum(corner) < 3 * 60) == dark  # the ground
    assert len(set(pixels)) > 50  # and things drawn on it


@pytest.mark.slow
def test_nobody_has_to_scroll_sideways(tmp_path: Path) -> None:
    """Neither on a telephone nor on a wide screen, also with long words and large tables."""
    many = record(num_ranks=40)
    machine = {**many.hardware["0"], "host": f"{'ip-10-0-3-117-' * 4}.compute.internal"}
    layers = {
        f"transformer.encoder.layers.{k}.self_attn.out_proj": 10 ** (-k / 8) for k in range(60)
    }
    large = dataclasses.replace(
        many,
        error={"type": "WorkerError", "message": "x" * 300, "traceback": "y" * 400},
        hardware={**many.hardware, "0": machine},
        layers=[{"step": step, "ratios": layers} for step in range(150)],
        confusion={"epoch": 1, "counts": confusion(24, random.Random(1))},
    )
    shown: dict[str, str] = {}
    board = Board(lambda name, bundle: shown.update({name: bundle.get("text/html", "")}))
    view = NotebookView(board, shows_logs=False)
    view.epoch({"report": 1, **{f"a_value_with_a_long_name_{k}": 0.123456 for k in range(9)}})
    view.close()
    pages = {
        "small.html": page(record()),
        "large.html": page(large),
        "runs.html": document("Runs", run_list([("a", record()), ("b" * 60, large)])),
        "comparison.html": document("Comparison", comparison({"a": record(), "b": large})),
        "notebook.html": f"<!DOCTYPE html><body>{shown['progress']}</body>",
    }
    for name, text in pages.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert too_wide(tmp_path, pages, (320, 360, 600, 768, 900, 1050, 1280, 1600)) == []
    (tmp_path / "wide.html").write_text(f"<!DOCTYPE html><pre>{'x' * 100}</pre>")
    assert len(too_wide(tmp_path, ["wide.html"], (360, 1600))) == 1  # it can see it


def colours(path: Path) -> list[tuple[int, ...]]:
    """Every tenth pixel of every tenth line."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").resize((112, 140), Image.Resampling.NEAREST)
        data = small.tobytes()
    return [tuple(data[k : k + 3]) for k in range(0, len(data), 3)]
