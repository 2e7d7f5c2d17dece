"""The parts of a DataFrame's plan that may give other rows when Spark makes them again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame

from sparkdl.spark.session.compat import is_connect

_LIMITS = ("GlobalLimit", "LocalLimit", "Offset", "Tail")
_ROW_BY_ROW = (*_LIMITS, "Project", "SubqueryAlias", "View")
"""Plans whose rows are some of those below, in their order."""
_SHUFFLES = ("Aggregate", "Deduplicate", "Distinct", "Join", "Repartition", "Sort", "Window")
"""Plans, or beginnings of their names, whose rows come in the order in which tasks end."""
_BY_ORDER = ("any_value", "collect_list", "collect_set", "first", "last")
"""Aggregates that depend on the order of rows."""


def unstable_operator(df: DataFrame) -> str | None:
    """Name what may give other rows when they are made again; None: nothing that Spark shows.

    No job is run. Spark Connect does not show a plan.
    """
    if is_connect(df.sparkSession):
        return None
    plan = df._jdf.queryExecution().analyzed()  # what the user has cached is still made of this
    return next((found for node in _nodes(plan) if (found := _of_plan(node)) is not None), None)


def _of_plan(plan: Any) -> str | None:
    name = _name(plan)
    if name in _LIMITS:
        inner = next((node for node in _nodes(plan) if _name(node) not in _ROW_BY_ROW), None)
        if inner is None or _name(inner) != "Sort":
            return "a limit without an order"
    if name == "Sample" and any(_name(node).startswith(_SHUFFLES) for node in _nodes(plan)):
        return "a sample of rows that come in no order"
    if name == "Deduplicate" and plan.keys().size() < plan.output().size():
        return "dropDuplicates of some of its columns, which keeps any row"
    expressions = plan.expressions()
    for number in range(expressions.size()):
        for expression in _nodes(expressions.apply(number)):
            found = _of_expression(expression)
            if found is not None:
                return found
    return None


def _of_expression(expression: Any) -> str | None:
    if _name(expression) == "PythonUDF":
        named = f"the function {expression.name()}, which is marked as not deterministic"
        return None if expression.udfDeterministic() else named
    name = str(expression.prettyName())
    if name in _BY_ORDER:
        return f"{name}, which depends on the order of rows"
    children = _children(expression)
    is_random = not expression.deterministic() and all(one.deterministic() for one in children)
    return f"{name}()" if is_random or name.startswith(("current_", "now")) else None


def _nodes(tree: Any) -> Iterator[Any]:
    yield tree
    for child in _children(tree):
        yield from _nodes(child)


def _children(tree: Any) -> list[Any]:
    children = tree.children()
    return [children.apply(number) for number in range(children.size())]


def _name(tree: Any) -> str:
    return str(tree.getClass().getSimpleName())
