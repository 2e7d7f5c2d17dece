"""A real browser draws a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparkdl.report.page.report_page import page
from tests.browser import dom, screenshot
from tests.report.runs import record


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


def colours(path: Path) -> list[tuple[int, ...]]:
    """Every tenth pixel of every tenth line."""
    from PIL import Image

    with Image.open(path) as picture:
        small = picture.convert("RGB").resize((112, 140), Image.Resampling.NEAREST)
        data = small.tobytes()
    return [tuple(data[k : k + 3]) for k in range(0, len(data), 3)]
