"""The directive ``job-file`` lists what may stand in a job file, from the dataclasses.

```{job-file} sparkdl.cli.job_files.job_file:TrainJob
```
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from sphinx.util.docutils import SphinxDirective
from tables import as_markdown, table

from sparkdl.cli.job_files.key_reference import Key, sections_of

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx


def lines_of(kind: type) -> Iterator[str]:
    """A heading-like line and a table for each section of a file."""
    for section in sections_of(kind):
        need = ", required" if section.is_required else ""
        yield from ("", f"**`[{section.name}]`**{need}. {as_markdown(section.doc)}", "")
        if section.keys:
            yield from table(("key", "value", "default", "meaning"), map(_row, section.keys))


def _row(key: Key) -> tuple[str, ...]:
    default = "required" if key.is_required else f"`{key.default}`" * bool(key.default)
    return f"`{key.name}`", key.value.replace("'", "`"), default, as_markdown(key.doc)


class JobFileDirective(SphinxDirective):
    """Lists the sections and keys of a job's class, given as ``module:Class``."""

    required_arguments = 1
    option_spec: ClassVar = {}

    def run(self) -> list[nodes.Node]:
        """A table for each section."""
        module, _, name = self.arguments[0].partition(":")
        import_module(module)
        kind = getattr(sys.modules[module], name)
        return self.parse_text_to_nodes("\n".join(lines_of(kind)))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.add_directive("job-file", JobFileDirective)
    return {"parallel_read_safe": True}
