"""Do imports point down only, as docs/architecture.md draws them?"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "sparkdl"
FILES = sorted(PACKAGE.rglob("*.py"))

# Files and folders that may import pyspark; everything else runs without a JVM.
SPARK_SIDE = {
    "estimator",
    "model",
    "params",
    "dataparams",
    "modelparams",
    "parambase",
    "persist",
    "job",
    "jobobjects",
    "multiplefits",
    "runner",
    "scoring",
    "spark",
    "tuning",
}
# Run without Spark too; ask it only from inside a function, where they were called by it.
ASKS_SPARK_LAZILY = {"doctor", "packing", "places", "predict"}
# Values and texts: usable where torch is not installed, quick to import.
WITHOUT_TORCH = {
    "cli", "commands", "config", "doctor", "errors", "inputs", "installation", "jobfile",
    "listeners", "livecurves", "log", "mlflow", "notebook", "plan", "progress", "report", "scores",
    "studyfile", "summary", "tensorboard", "tomlvalues", "ui", "views", "windows",
}  # fmt: skip
FACES = {
    "__main__",
    "commands",
    "doctor",
    "estimator",
    "model",
    "params",
    "dataparams",
    "modelparams",
    "parambase",
    "persist",
    "job",
    "jobobjects",
    "runner",
    "scoring",
    "tuning",
    "cli",
}


def part_of(path: Path) -> str:
    """The file's own name at the top level, else its folder's."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(path: Path, *, everywhere: bool) -> Iterator[str]:
    """Modules that a file imports: all of them, or those that its own import brings along."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if everywhere else at_module_level(tree.body)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def at_module_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import; not functions, not what only type checkers see."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_module_level(node.orelse)
            continue
        yield node
        for name in ("body", "orelse", "finalbody"):
            yield from at_module_level(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from at_module_level(handler.body)


def top(module: str) -> str:
    return module.split(".")[0]


def names(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", FILES, ids=names)
def test_pyspark_stays_on_its_side(path: Path) -> None:
    if part_of(path) not in SPARK_SIDE:
        everywhere = part_of(path) not in ASKS_SPARK_LAZILY
        assert "pyspark" not in {top(module) for module in imports(path, everywhere=everywhere)}


@pytest.mark.parametrize("path", FILES, ids=names)
def test_values_import_without_torch(path: Path) -> None:
    if part_of(path) in WITHOUT_TORCH or path.name == "__init__.py":
        heavy = {"torch", "pyspark", "pyarrow", "pandas", "torchmetrics", "matplotlib"}
        assert not heavy & {top(module) for module in imports(path, everywhere=False)}


@pytest.mark.parametrize("path", FILES, ids=names)
def test_nothing_below_imports_the_faces(path: Path) -> None:
    if part_of(path) in FACES or part_of(path) == "__init__":
        return
    faces = {f"sparkdl.{name}" for name in FACES - {"parambase"}}
    assert not faces & set(imports(path, everywhere=True))


@pytest.mark.parametrize("path", FILES, ids=names)
def test_training_knows_nothing_of_spark(path: Path) -> None:
    if part_of(path) in {"train", "data", "sync", "checkpoint", "comm", "plan", "config"}:
        assert not any(
            module.startswith("sparkdl.spark") for module in imports(path, everywhere=True)
        )


def test_the_walk_sees_what_runs_on_import_and_nothing_else() -> None:
    source = (
        "import a\n"
        "if TYPE_CHECKING:\n    import b\n"
        "try:\n    import c\nexcept ImportError:\n    import d\n"
        "def f():\n    import e\n"
        "class C:\n    import g\n    def m(self):\n        import h\n"
    )
    body = ast.parse(source).body
    found = [n.names[0].name for n in at_module_level(body) if isinstance(n, ast.Import)]
    assert found == ["a", "c", "d", "g"]
