"""Imports point down: from floor to floor, and within a package without circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "sparkdl"
FILES = {
    ".".join(("sparkdl", *path.relative_to(PACKAGE).with_suffix("").parts)): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MODULES = {name.removesuffix(".__init__"): path for name, path in FILES.items()}

# From bottom to top, as docs/architecture.md draws them. A room may import those before it.
FLOORS = [
    "familiar_names",
    "errors",
    "runtime",
    "inputs",
    "config",
    "mesh",
    "storage",
    "comm",
    "data",
    "sync",
    "train",
    "models",
    "serialization",
    "inference",
    "report",
    "worker",
    "explain",
    "spark",
    "runner",
    "model",
    "estimator",
    "tuning",
    "cli",
    "__main__",
]
# The rooms inside spark, likewise.
SPARK_FLOORS = [
    "daemon",
    "session",
    "cluster",
    "frames",
    "run",
    "rounds",
    "fit",
    "explain",
    "functions",
    "inference",
    "params",
]
# Rooms whose files may import pyspark; all others work without a JVM.
SPARK_SIDE = {"spark", "runner", "model", "estimator", "tuning", "cli"}
# Rooms and files that are quick to import, also where torch is not installed.
LIGHT = {
    *("familiar_names", "errors", "inputs", "config", "mesh", "report", "cli", "runtime"),
    *("plan", "shuffle_windows", "scores"),
}
# Files of these rooms that are imported only once a command runs.
IMPORTED_LATE = {"images", "jobs", "spark_session", "cluster_checks"}
HEAVY = {"torch", "pyspark", "pyarrow", "pandas", "torchmetrics", "matplotlib"}


def imported(path: Path, *, also_later: bool) -> Iterator[str]:
    """Modules that a file imports: all of them, or those that its own import brings along."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if also_later else run_on_import(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def run_on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import: not those in functions, not what only type checkers see."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from run_on_import(node.orelse)
            continue
        yield node
        for name in ("body", "orelse", "finalbody"):
            yield from run_on_import(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from run_on_import(handler.body)


def own_imports() -> Iterator[tuple[str, str]]:
    """Pairs of files of the package, of which the first imports the second."""
    for name, path in MODULES.items():
        for target in imported(path, also_later=True):
            if target in MODULES and target not in (name, "sparkdl"):
                yield name, target


def room(module: str, depth: int = 1) -> str:
    return (*module.split("."), "", "")[depth]


def test_imports_point_down() -> None:
    upward = []
    for name, target in own_imports():
        if name == "sparkdl":
            continue
        pair = FLOORS.index(room(target)), FLOORS.index(room(name))
        if pair == (FLOORS.index("spark"),) * 2 and room(name, 2) and room(target, 2):
            pair = SPARK_FLOORS.index(room(target, 2)), SPARK_FLOORS.index(room(name, 2))
        if pair[0] > pair[1]:
            upward.append(f"{name} -> {target}")
    assert upward == []


def test_no_files_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for name, target in own_imports():
        graph.setdefault(name, set()).add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(reversed(error.args[1]))) from None


def test_rooms_are_few_and_say_what_they_are_for() -> None:
    packages = [path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]
    modules = [path for path in PACKAGE.glob("*.py") if not path.name.startswith("__")]
    assert len(packages) <= 15 and len(modules) <= 8
    for init in PACKAGE.rglob("__init__.py"):
        assert len(list(init.parent.glob("*.py"))) <= 16, init.parent
        purpose = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
        assert purpose.partition("\n")[0].endswith("."), init
    stems = [path.stem for path in FILES.values() if path.name != "__init__.py"]
    assert len(stems) == len(set(stems)), "two files of one name"


def test_pyspark_and_torch_stay_on_their_sides() -> None:
    for name, path in MODULES.items():
        if name == "sparkdl":
            continue
        top = {module.split(".")[0] for module in imported(path, also_later=False)}
        if room(name) not in SPARK_SIDE:
            assert "pyspark" not in top, name
        parts = set(name.split("."))
        is_light = (LIGHT & parts and not IMPORTED_LATE & parts) or path.name == "__init__.py"
        if is_light and name != "sparkdl.models":
            assert not HEAVY & top, name


def test_folders_do_not_import_each_other() -> None:
    pairs = {(folder(name), folder(target)) for name, target in own_imports()}
    mutual = {(a, b) for a, b in pairs if a < b and (b, a) in pairs and a != "sparkdl"}
    assert mutual == set()


def folder(module: str) -> str:
    return ".".join(("sparkdl", *MODULES[module].parent.relative_to(PACKAGE).parts))


def test_a_method_without_a_docstring_has_the_name_of_one_that_has() -> None:
    documented, others = set(), set()
    for name, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                        where = f"{name}.{node.name}.{method.name}"
                        (documented if ast.get_docstring(method) else others).add(where)
    names = {where.rpartition(".")[2] for where in documented}
    assert [where for where in sorted(others) if where.rpartition(".")[2] not in names] == []


def test_the_walk_sees_what_runs_on_import_and_nothing_else() -> None:
    source = (
        "import a\n"
        "if TYPE_CHECKING:\n    import b\n"
        "try:\n    import c\nexcept ImportError:\n    import d\n"
        "def f():\n    import e\n"
        "class C:\n    import g\n    def m(self):\n        import h\n"
    )
    body = ast.parse(source).body
    found = [n.names[0].name for n in run_on_import(body) if isinstance(n, ast.Import)]
    assert found == ["a", "c", "d", "g"]
