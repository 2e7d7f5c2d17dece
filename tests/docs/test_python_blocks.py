"""The Python blocks of every page run from top to bottom."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from tests import jvm
from tests.docs.blocks import Block, blocks, blocks_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGES = sorted({block.page for block in blocks("python") if block.excuse is None} - {"README.md"})


def setup_of(page: str) -> ModuleType | None:
    """The module that has what a page's blocks find, ``setups/<page>.py``, if there is one."""
    name = page.removeprefix("docs/").removesuffix(".md").replace("/", "_")
    if importlib.util.find_spec(f"tests.docs.setups.{name}") is None:
        return None
    return importlib.import_module(f"tests.docs.setups.{name}")


def run(block: Block, names: dict[str, Any]) -> None:
    """Run a block; its lines have the page's numbers in a traceback."""
    padded = "\n" * (block.line - 1) + block.text
    exec(compile(padded, block.page, "exec"), names)


def test_a_traceback_names_the_line_of_the_page() -> None:
    block = Block(page="docs/a.md", line=7, language="python", text="x = 1\n1 / 0\n", excuse=None)
    with pytest.raises(ZeroDivisionError) as caught:
        run(block, {})
    assert caught.traceback[-1].lineno + 1 == 8


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_twenty_lines_are_a_program_that_prints_what_it_is_asked_for(clone: Path) -> None:
    """Nobody has told Spark which Python to use, and the first of the PATH has no packages."""
    (block,) = [block for block in blocks_of("README.md") if block.language == "python"]
    (clone / "first.py").write_text(block.text)
    other = clone / "bin" / "python3"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    hidden = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment["SPARK_SUBMIT_OPTS"] = jvm.OPTIONS  # Spark's log is what it is by default
    environment["PATH"] = os.pathsep.join([str(other.parent), environment["PATH"]])
    done = subprocess.run(
        [sys.executable, "first.py"],
        env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^\|label\|prediction\|$", done.stdout, re.MULTILINE)
    stacks = ("\tat ", "Traceback")
    assert not [line for line in done.stderr.splitlines() if line.startswith(stacks)]
    assert (clone / "models" / "net" / "metadata").is_dir()


# One namespace for a page, from top to bottom. Its name is that of a program, so that what the
# blocks define travels to the workers, as it does from a user's program.
@pytest.mark.spark
@pytest.mark.classic
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("clone_of_the_jvm", "s3_server")
@pytest.mark.parametrize("page", PAGES)
def test_the_blocks_of_a_page_run(page: str, spark: SparkSession) -> None:
    setup = setup_of(page)
    names: dict[str, Any] = {"__name__": "__main__", "spark": spark}
    if setup is not None and hasattr(setup, "prepare"):
        names |= setup.prepare(spark) or {}
    for block in blocks_of(page):
        if block.language == "python" and block.excuse is None:
            run(block, names)
    if setup is not None and hasattr(setup, "check"):
        setup.check(names)
    spark.catalog.clearCache()
