from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sparkdl
import sparkdl.models
from sparkdl.cli.job_files.job_file import EstimatorSection, TrainJob
from sparkdl.cli.job_files.prepare_file import PrepareJob
from sparkdl.cli.job_files.study_file import TuneJob
from tests.docs.blocks import DOCS

SOURCES = DOCS / "reference"
FOLDERS = (str(SOURCES / "extensions"), str(DOCS))
ESTIMATORS = ["TorchClassifier", "TorchRegressor", "TorchEstimator"]
MODELS = [f"{name}Model" for name in ESTIMATORS[:2]] + ["TorchModel"]


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports what extends Sphinx, as docs/conf.py and docs/reference/conf.py do."""
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
    yield importlib.import_module
    for name in [n for n, m in sys.modules.items() if _lies_there(m)]:
        del sys.modules[name]


def _lies_there(module: ModuleType) -> bool:
    return str(getattr(module, "__file__", None) or "").startswith(FOLDERS)


def documented() -> Counter[str]:
    text = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES.glob("*.md"))
    return Counter(
        re.findall(r"^\.\. auto(?:class|exception|function|module):: ([\w.]+)$", text, re.MULTILINE)
    )


def test_every_public_name_is_documented_once(extension: Any) -> None:
    names = {name for name in sparkdl.__all__ if not name.startswith("_")}
    found = documented()
    assert {name: count for name, count in found.items() if count > 1} == {}
    others = extension("public_names").other_names(SOURCES)
    own = {name.removeprefix("sparkdl.") for name in found if name.count(".") == 1}
    assert names == set(others) | own - {"models"}
    assert not set(others) & own


def test_names_without_a_page_are_found(extension: Any, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("```{eval-rst}\n.. autoclass:: sparkdl.AllReduce\n```\n")
    others = extension("public_names").other_names(tmp_path)
    assert "Adasum" in others
    assert "AllReduce" not in others


def test_so_are_the_networks() -> None:
    assert documented()["sparkdl.models"] == 1
    for name in sparkdl.models.__all__:
        assert (getattr(sparkdl.models, name).__doc__ or "").strip()


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in sparkdl.__all__
        if f"sparkdl.{name}" in documented() and dataclasses.is_dataclass(getattr(sparkdl, name))
    ],
)
def test_every_field_of_a_dataclass_with_a_page_says_what_it_is(name: str) -> None:
    from sphinx.pycode import ModuleAnalyzer

    cls = getattr(sparkdl, name)
    told: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.startswith("sparkdl"):
            attributes = ModuleAnalyzer.for_module(base.__module__).find_attr_docs()
            told |= {attribute for owner, attribute in attributes if owner == base.__name__}
    assert {field.name for field in dataclasses.fields(cls)} <= told


@pytest.mark.parametrize("names", [ESTIMATORS, MODELS], ids=["estimators", "models"])
def test_the_table_has_every_param(names: list[str], extension: Any) -> None:
    rows = extension("param_tables").rows(names)
    assert len(rows) == len({row[0] for row in rows}) > 15
    assert all(all(cell.strip() for cell in row) for row in rows)
    table = {row[0]: row for row in rows}
    assert "`cross_entropy`" in table["`loss`"][1].replace("'", "")
    assert "`TorchRegressor" in table["`loss`"][1]
    assert "Only in" in table["`labels`"][2] or names == MODELS


@pytest.mark.parametrize("kind", [TrainJob, TuneJob, PrepareJob], ids=lambda k: k.__name__)
def test_the_tables_have_every_key_of_a_job_file(kind: type, extension: Any) -> None:
    text = "\n".join(extension("job_file_tables").lines_of(kind))
    sections = {field.name for field in dataclasses.fields(kind)}
    assert {f"**`[{name}]`**" for name in sections} <= set(
        re.findall(r"\*\*`\[[\w.]+\]`\*\*", text)
    )
    if kind is TrainJob:
        keys = {field.name for field in dataclasses.fields(EstimatorSection)}
        assert keys <= set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
        assert "| `epochs` | an integer | `1` | passes over the training rows" in text
        assert "| `factory` | a string | required |" in text


def test_links_to_files_that_are_pages_of_the_site_are_bent(extension: Any) -> None:
    bent = extension("repository_links").bent
    assert bent("[b](../benchmarks/README.md#a)", "docs") == "[b](benchmarks.md#a)"
    assert bent("[b](../../benchmarks/README.md)", "docs/api") == "[b](../benchmarks.md)"
    assert bent("[b](../CONTRIBUTING.md)", "benchmarks") == "[b](contributing.md)"
    assert bent("[b](docs/api/errors.md#a)", "") == "[b](api/errors.md#a)"
    assert bent("[b](../docs/data.md)", "benchmarks") == "[b](data.md)"
    assert bent("[b](data.md) [c](https://a.b/c)", "docs") == "[b](data.md) [c](https://a.b/c)"


def test_cells_of_tables_are_markdown(extension: Any) -> None:
    tables = extension("tables")
    assert tables.as_markdown("a ``b``\n  and `c`") == "a `b` and `c`"
    assert tables.table(["x"], [["a|b"]]) == ["", "| x |", "| --- |", "| a\\|b |", ""]


def test_parameters_of_a_long_signature_have_a_line_each(extension: Any) -> None:
    from docutils import nodes

    def shown(text: str) -> str:
        found: str = extension("plain_signatures").as_python(nodes.Text(text))
        return found

    assert shown("f(a, *, b=1)") == "f(a, *, b=1)"
    long = "x" * 100
    text = "class s.F(*, a: ~c.abc.Callable[[...], ~typing.Any] = <not set>, "
    assert shown(f"{text}b: Literal['{long}', 'y']) → None") == (
        "class s.F(\n    *,\n    a: Callable[[...], Any] = <not set>,\n"
        f"    b: Literal['{long}', 'y'],\n) → None"
    )


def test_cells_are_not_padded(extension: Any) -> None:
    not_padded = extension("plain_signatures").not_padded
    page = "a  b\n| c   | d |\n|-----|------|\n"
    assert not_padded(page) == "a  b\n| c | d |\n|---|---|\n"


def test_every_source_has_its_page_which_a_git_host_shows() -> None:
    names = {path.name for path in SOURCES.glob("*.md")}
    assert names == {path.name for path in (DOCS / "api").glob("*.md")}
    index = (DOCS / "api/index.md").read_text(encoding="utf-8")
    for name in names - {"index.md"}:
        page = (DOCS / "api" / name).read_text(encoding="utf-8")
        assert "{eval-rst}" not in page
        assert f"]({name})" in index


def test_no_page_is_left_out_of_the_site() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    entries = re.findall(r"^([\w/]+)$", index, re.MULTILINE)
    for page in [*DOCS.glob("*.md"), *(DOCS / "api").glob("*.md")]:
        name = page.relative_to(DOCS).with_suffix("").as_posix()
        assert name == "index" or name in entries
