from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.blocks import DOCS
from tests.docs.messages import HOLE, is_said, texts_of

PAGES = ("troubleshooting.md", "debugging.md", "storage.md")
SPARKS_OWN = "## What Spark itself says"
OTHERS = {
    "Permission denied": "Hadoop's",
    "This backward function was compiled with non-empty donated buffers": "torch's",
    "cannot open s3://...": "put together by storage.storage of a verb and a place",
}


def quoted(page: str) -> list[str]:
    """The messages in the first column of the tables of errors, and in the others of debugging."""
    text = (DOCS / page).read_text(encoding="utf-8").split(SPARKS_OWN)[0]
    found: list[str] = []
    for header, rows in re.findall(r"^\| (.+?) \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE):
        if header in ("the error says", "fit says"):
            cells = [row.split("|")[1] for row in rows.splitlines()]
            found += [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]
        elif header == "what":
            found += [c for c in re.findall(r"`([^`]+)`", rows) if "…" in c]
    return [message for message in found if message not in OTHERS]


@pytest.mark.parametrize(
    ("page", "message"), [(page, message) for page in PAGES for message in quoted(page)]
)
def test_the_package_still_says_so(page: str, message: str) -> None:
    words = [part.strip() for part in re.split(r"…|\.\.\.", message)]
    assert any(len(part) >= 2 for part in words)
    assert is_said(message.replace("...", "…")), message


def test_there_are_many_messages() -> None:
    assert len(quoted("troubleshooting.md")) > 60
    assert len(quoted("debugging.md")) >= 3


def test_a_text_is_found_with_its_holes(tmp_path: Path) -> None:
    source = '"""Doc."""\nf"a {x!r} b " f"c {y}"\nprint("d %s e", 1)\n'
    (tmp_path / "a.py").write_text(source)
    assert texts_of(tmp_path / "a.py") >= {f"a {HOLE} b c {HOLE}", f"d {HOLE} e"}
    assert is_said("only … of the … slots")
    assert not is_said("slots … only … of the")
    assert not is_said("no such words are anywhere")
