"""Pages of the site fit every screen, also those of wide tables and long lines of code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import too_wide

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = ("strategies", "reliability", "clusters", "architecture", "comparison")


@pytest.mark.slow
def test_nobody_has_to_scroll_sideways(tmp_path: Path) -> None:
    source, site = tmp_path / "docs", tmp_path / "site"
    shutil.copytree(DOCS / "static", source / "static")
    for name in PAGES:
        shutil.copy(DOCS / f"{name}.md", source)
    shutil.copy(source / f"{PAGES[0]}.md", source / "index.md")
    settings = {
        "extensions": "myst_parser", "html_theme": "furo", "highlight_language": "text",
        "html_static_path": "static", "html_css_files": "site.css",
    }  # fmt: skip
    options = [word for name, value in settings.items() for word in ("-D", f"{name}={value}")]
    subprocess.run(
        [sys.executable, "-m", "sphinx", "-C", "-Q", *options, str(source), str(site)],
        check=True,
        timeout=120,
    )
    pages = [f"{name}.html" for name in PAGES]
    assert "site.css" in (site / pages[0]).read_text(encoding="utf-8")
    assert too_wide(site, pages, (320, 360, 740, 1000, 1280, 1400, 1600)) == []
