"""Rows to try a module on, and copies of it that may be tried."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparkdl.data.plan import Column
from sparkdl.serialization.travel.packed_module import travelled

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.data.batches import Batch
    from sparkdl.data.collate import Arguments, Rows
    from sparkdl.serialization.recorded.recipe import RecordedWeights

ROWS = 2
"""Rows on which a module runs."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """Rows to try a module on."""

    columns: tuple[Column, ...]
    rows: Mapping[str, Rows] | None = None
    """Key of a column -> real rows of it; None: zeros of the same shapes are taken."""

    @property
    def num_rows(self) -> int:
        """The number of rows there are to run on at once."""
        if self.rows is None:
            return ROWS
        return min(ROWS, *(len(rows) for rows in self.rows.values()))

    def of(self, role: str, num_rows: int) -> Arguments:
        """The first rows of the columns of a role; copies, which a module may change."""
        from sparkdl.data.collate import arguments, copied, example_arguments

        columns = [column for column in self.columns if column.role == role]
        if self.rows is None:
            return example_arguments(columns, num_rows)
        return arguments(columns, [copied(self.rows[c.key][:num_rows]) for c in columns])

    def batch(self, num_rows: int) -> Batch:
        """The same of all columns, as a worker gets them."""
        from sparkdl.data.batches import Batch

        roles = {column.role for column in self.columns}
        features = self.of("feature", num_rows)
        labels = self.of("label", num_rows).values if "label" in roles else ()
        weights = self.of("weight", num_rows).values if "weight" in roles else ()
        names = [column.argument for column in self.columns if column.role == "label"]
        target: Any = features.packed()
        if names:
            target = labels[0] if names[0] is None else dict(zip(names, labels, strict=True))
        return Batch(
            inputs=features.values,
            target=target,
            weight=weights[0] if weights else None,
            num_rows=num_rows,
            names=features.names if any(features.names) else (),
            has_label=bool(names),
        )


def own_copy(module: nn.Module, weights: RecordedWeights | None) -> nn.Module:
    """A copy of the module; its parameters are the same where others know them by identity."""
    if weights is None:
        return travelled(module, copies=True)
    return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


def is_compiled(module: nn.Module) -> bool:
    """True if torch has compiled some of the module, which nobody may look into then."""
    return any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )


def lent_weights(weights: RecordedWeights | None) -> AbstractContextManager[None]:
    """Lets a module compute whose parameters may be on the meta device."""
    from sparkdl.serialization.recorded.lending import lent

    return nullcontext() if weights is None else lent(weights)
