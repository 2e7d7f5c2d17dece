"""Code blocks are found, and say their language and why they are not run."""

from __future__ import annotations

import ast
import builtins
import json
import symtable
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.docs.blocks import REASONS, Block, blocks, blocks_of, pages, parsed

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


def undefined(codes: list[str]) -> Iterator[str]:
    """Names that a page's Python uses in one of its blocks, and defines in none up to there."""
    defined = set(dir(builtins)) | {"__file__", "__name__"}
    for code in codes:
        tables = [symtable.symtable(code, "page", "exec")]
        defined |= {one.get_name() for one in tables[0].get_symbols() if one.is_assigned()}
        defined |= {one.get_name() for one in tables[0].get_symbols() if one.is_imported()}
        while tables:
            table = tables.pop()
            tables += table.get_children()
            names = [one for one in table.get_symbols() if one.is_referenced()]
            is_module = table.get_type() == "module"
            yield from (
                one.get_name()
                for one in names
                if (is_module or one.is_global()) and one.get_name() not in defined
            )


def test_names_without_a_definition_are_found() -> None:
    assert list(undefined(["x = 1", "def f(a):\n    return a + x + y\n", "f(z)"])) == ["y", "z"]
    assert not list(undefined(["import os.path as p\nclass A(list): b = [p for q in 'a']\nA"]))


@pytest.mark.parametrize("page", pages())
def test_a_page_can_be_copied_from_top_to_bottom(page: str) -> None:
    """All that its examples use is on the page, above them, so a reader needs no other."""
    codes = [block.text for block in blocks_of(page) if block.language == "python"]
    assert sorted(set(undefined(codes))) == []
