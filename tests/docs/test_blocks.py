"""Code blocks are found, and say their language and why they are not run."""

from __future__ import annotations

import ast
import json
from collections import Counter

import pytest

from tests.docs.blocks import REASONS, Block, blocks, parsed

LANGUAGES = {
    "bash", "css", "diff", "dockerfile", "html", "ini", "json", "properties", "python", "text",
    "toml", "yaml",
}  # fmt: skip
ALL = blocks()


def test_a_page_is_taken_apart() -> None:
    text = (
        "# A\n\n```python\nx = 1\n```\n\n<!-- not run: needs YARN -->\n```bash\nls\n```\n\n"
        "```{toctree}\nb\n```\n\n1. b\n   ```toml\n   a = 1\n   ```\n"
    )
    found = list(parsed("a.md", text))
    assert [(b.language, b.line, b.excuse) for b in found] == [
        ("python", 4, None),
        ("bash", 9, "needs YARN"),
        ("toml", 18, None),
    ]
    assert found[2].text == "a = 1\n"


def test_blocks_of_commands_need_not_say_so() -> None:
    text = "```\nmake train\n```\n\n```\nA=1 b\n```\n\n```\na -> b\n```\n\n```\n```\n"
    assert [b.language for b in parsed("a.md", text)] == ["bash", "bash", "text", "text"]


def test_an_excuse_is_for_the_next_block_alone() -> None:
    text = "<!-- not run: needs YARN -->\n\ntext\n\n```bash\nls\n```\n"
    assert [b.excuse for b in parsed("a.md", text)] == [None]


@pytest.mark.parametrize("block", ALL, ids=str)
def test_the_language_of_every_block_is_known(block: Block) -> None:
    assert block.language in LANGUAGES


def test_there_are_few_reasons_not_to_run_a_block_and_few_such_blocks() -> None:
    code = [block for block in ALL if block.language in ("bash", "python")]
    excuses = Counter(block.excuse for block in code if block.excuse is not None)
    assert set(excuses) <= set(REASONS)
    assert sum(excuses.values()) <= len(code) / 4
    python = [block for block in code if block.language == "python" and block.excuse]
    assert len(python) <= 3, python


@pytest.mark.parametrize("block", [b for b in ALL if b.language == "diff"], ids=str)
def test_both_sides_of_a_diff_are_python(block: Block) -> None:
    lines = block.text.splitlines()
    assert {line[:1] for line in lines} <= {"+", "-", " "}
    for other in "-+":
        ast.parse("\n".join(line[1:] for line in lines if line[0] != other))


@pytest.mark.parametrize("block", [b for b in ALL if b.language in ("json", "yaml")], ids=str)
def test_data_can_be_read(block: Block) -> None:
    if block.language == "json":
        json.loads(block.text)
    else:
        yaml = pytest.importorskip("yaml")
        assert list(yaml.safe_load_all(block.text))
