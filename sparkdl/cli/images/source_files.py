"""Which files are prepared, and with which labels?"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from sparkdl.cli.images.parts import Part


@dataclass(frozen=True, kw_only=True)
class Source:
    """The files to prepare."""

    table: pa.Table
    """Columns ``path`` below the root, ``length``, ``modified`` and, with labels, ``label``."""
    root: str
    """The folder's URL; ``<root>/<path>`` is a file."""
    names: tuple[str, ...] = ()
    """The classes; empty where labels are numbers, or there are none."""
    unusable: tuple[tuple[str, str], ...] = ()
    """Path and reason of files that are not in the table, since there is nothing to read."""

    @property
    def label_type(self) -> pa.DataType | None:
        """``int64`` or ``double``; None without labels."""
        has_labels = "label" in self.table.column_names
        return self.table.schema.field("label").type if has_labels else None

    def paths_of(self, part: Part) -> list[str]:
        """The files of a part, in its order."""
        paths: list[str] = self.table["path"].take(pa.array(part.rows)).to_pylist()
        return paths
