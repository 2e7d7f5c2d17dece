"""The stub that shows type checkers the Params of the classes, made from the table.

After a change of the table: ``python -m tests.spark.params.test_accessors`` writes it anew.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from sparkdl.spark.params import param_table

TABLE = Path(param_table.__file__)
STUB = TABLE.with_name("accessors.pyi")
HEAD = '''"""Params with setters and getters, made by test_accessors.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

from pyspark.ml.param import Param

from sparkdl.config import EarlyStopping
from sparkdl.inputs import Specification
from sparkdl.mesh import Mesh
from sparkdl.report.listeners.listener import Listener
from sparkdl.spark.params.converters import Metrics
from sparkdl.sync.strategy import SyncStrategy
'''


def lines(tables: list[ast.ClassDef]) -> Iterator[str]:
    for table in tables:
        bases = [ast.unparse(base).replace("Arguments", "Accessors") for base in table.bases]
        named = f"({', '.join(bases)})" if bases != ["TypedDict"] else ""
        rows = [row for row in table.body if isinstance(row, ast.AnnAssign)]
        name = table.name.replace("Arguments", "Accessors")
        yield f"\nclass {name}{named}:{'' if rows else ' ...'}\n"
        for row in rows:
            assert isinstance(row.annotation, ast.Subscript)
            assert isinstance(row.annotation.slice, ast.Tuple)
            hint, option = row.annotation.slice.elts
            assert isinstance(option, ast.Call)
            param, given = ast.unparse(row.target), ast.unparse(hint).replace("'", '"')
            is_converted = any(word.arg == "convert" for word in option.keywords)
            kept = "Any" if is_converted else given
            suffix = param[0].upper() + param[1:]
            yield f"    {param}: Param[{kept}]\n"
            setter = f"    def set{suffix}(self, value: {given}) -> Self: ..."
            broken = setter.replace("(self", "(\n        self").replace(") ->", "\n    ) ->")
            yield (setter if len(setter) <= 100 else broken) + "\n"
            yield f"    def get{suffix}(self) -> {kept}: ...\n"


def stub() -> str:
    body = ast.parse(TABLE.read_text(encoding="utf-8")).body
    tables = [part for part in body if isinstance(part, ast.ClassDef) and part.keywords]
    return HEAD + "".join(lines(tables))


def test_the_stub_is_that_of_the_table() -> None:
    remedy = f"{STUB.name} is stale: python -m tests.spark.params.test_accessors"
    assert STUB.read_text(encoding="utf-8") == stub(), remedy


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
