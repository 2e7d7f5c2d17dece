"""The directive ``params`` lists the Params of some classes, from the classes.

```{params} TorchClassifier TorchRegressor TorchEstimator
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from pyspark.ml.param import Params
from sphinx.util.docutils import SphinxDirective
from tables import as_markdown, table

import sparkdl
from sparkdl.spark.params import param_table

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx


def rows(names: list[str]) -> list[tuple[str, str, str]]:
    """Name, default, meaning; in the order of the table of Params, which is that of tasks."""
    instances = [_instance(name) for name in names]
    there = {param.name for each in instances for param in each.params}
    tables = [each for name, each in vars(param_table).items() if name.endswith("Arguments")]
    order = dict.fromkeys(name for each in tables for name in param_table.options(each))
    if missing := there - order.keys():
        raise ValueError(f"the table of Params lacks {sorted(missing)}")
    return [
        (f"`{name}`", _default(instances, name), _meaning(instances, name))
        for name in order
        if name in there
    ]


def _instance(name: str) -> Params:
    """An instance with its defaults; models are given a module that does nothing."""
    cls: Any = getattr(sparkdl, name)
    if not name.endswith("Model"):
        return cls()
    from torch import nn

    from sparkdl.data.plan import Column

    column = Column(name="features", role="feature", shape=(1,), dtype="float32")
    return cls(nn.Identity(), [column], num_classes=2)


def _default(instances: list[Params], name: str) -> str:
    """The default; where classes differ, those of each."""
    values: dict[str, list[str]] = {}
    for each in instances:
        if each.hasParam(name):
            values.setdefault(_shown(each, name), []).append(f"`{type(each).__name__}`")
    if len(values) == 1:
        return next(iter(values))
    return "; ".join(f"{value} in {', '.join(owners)}" for value, owners in values.items())


def _shown(each: Params, name: str) -> str:
    if not each.hasDefault(name):
        return "not set"
    value = each._defaultParamMap[each.getParam(name)]
    if isinstance(value, sparkdl.SyncStrategy):
        return f"`{type(value).__name__}()`"
    return f"`{value!r}`"


def _meaning(instances: list[Params], name: str) -> str:
    """What the Param is; where classes differ, what each says."""
    meanings: dict[str, list[str]] = {}
    for each in instances:
        if each.hasParam(name):
            doc = as_markdown(each.getParam(name).doc)
            meanings.setdefault(doc, []).append(f"`{type(each).__name__}`")
    if len(meanings) > 1:
        return " ".join(f"In {', '.join(owners)}: {doc}" for doc, owners in meanings.items())
    ((doc, owners),) = meanings.items()
    return doc + (f" Only in {', '.join(owners)}." if len(owners) < len(instances) else "")


class ParamsDirective(SphinxDirective):
    """Lists the Params of the classes that its arguments name."""

    required_arguments = 1
    optional_arguments = 9
    option_spec: ClassVar = {}

    def run(self) -> list[nodes.Node]:
        """The table."""
        lines = table(("Param", "default", "meaning"), rows(self.arguments))
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.add_directive("params", ParamsDirective)
    return {"parallel_read_safe": True}
