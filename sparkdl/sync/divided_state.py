"""The state of a replica by the names of its parameters, in parts that fit any mesh.

A part says of each parameter which region it holds. A checkpoint of one mesh is read on another, or
on none, by copying what regions have in common; no rank ever needs more than its own regions and
one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sparkdl.errors import CheckpointError
from sparkdl.sync.own_attributes import check_fused
from sparkdl.sync.regions import Region

Part = Mapping[str, Any]
"""The result of `DividedState.part`."""


class DividedState:
    """Parameters and optimizer state of one rank."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        regions: Mapping[str, Region] | None = None,
        *,
        is_kept: bool = True,
        has_own_rows: bool = True,
        stepped: Sequence[str] | None = None,
    ) -> None:
        """Keep ``module``, whose parameters are plain tensors, each a region of one of that name.

        Args:
            module: what lies on this rank.
            optimizer: of its parameters.
            regions: by name; None: the parameters are whole.
            is_kept: whether checkpoints hold this rank's part; those of other replicas are equal.
            has_own_rows: whether this rank counts where numbers add up over rows.
            stepped: names of the whole model's parameters, of which some may be elsewhere, by the
                numbers that they would have in an optimizer of all; None: all are here.
        """
        self.has_own_rows = has_own_rows
        self.is_kept = is_kept
        self.module = module
        self.parameters = dict(module.named_parameters())
        self._optimizer = optimizer
        self._regions = regions or {
            name: Region.whole(parameter.shape) for name, parameter in self.parameters.items()
        }
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        here = [
            names[id(parameter)]
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self._stepped = here
        """Names by the numbers that parameters have in the optimizer's state."""
        self._all_stepped = list(stepped or here)

    def part(self, best: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return this rank's part of a checkpoint, or None; tensors are its own, not copies.

        ``best`` is the state dict of the module at another time.
        """
        if not self.is_kept:
            return None
        return {
            "regions": {
                name: [list(region.start), list(region.size)]
                for name, region in self._regions.items()
            },
            "parameters": {name: value.detach() for name, value in self.parameters.items()},
            "best": best,
            "optimizer": self._optimizer.state_dict(),
            "stepped": list(self._stepped),
        }

    def load(self, parts: Iterable[Part]) -> dict[str, Any] | None:
        """Take the own regions from parts that have all together; returns their ``best``.

        Raises:
            CheckpointError: they lack something.
        """
        best: dict[str, Any] | None = None
        state: dict[int, dict[str, Any]] = {}
        groups: Any = None
        left = {name: value.numel() for name, value in self.parameters.items()}
        seen: set[tuple[str, Region]] = set()
        for part in parts:
            groups = part["optimizer"]["param_groups"]
            stepped = part["stepped"] or self._all_stepped
            if part["best"] is not None and best is None:
                best = dict(part["best"])
                best |= {name: torch.empty_like(v) for name, v in self.parameters.items()}
            for name in self.parameters.keys() & part["regions"].keys():
                theirs = Region(*map(tuple, part["regions"][name]))
                if (name, theirs) in seen:
                    continue
                seen.add((name, theirs))
                source, target = part["parameters"][name], self.parameters[name].detach()
                left[name] -= self._regions[name].copy_from(theirs, source, target)
                if best is not None:
                    self._regions[name].copy_from(theirs, part["best"][name], best[name])
                if name in self._stepped and name in stepped:
                    found = part["optimizer"]["state"].get(stepped.index(name), {})
                    own = state.setdefault(self._stepped.index(name), {})
                    self._add(own, name, found, theirs)
        missing = [name for name, count in left.items() if count]
        if groups is None or missing:
            raise CheckpointError(
                f"the checkpoint does not hold all of the parameters {missing[:5]}; it was "
                "written by another model, or a rank's file is missing"
            )
        numbers = self._optimizer.state_dict()["param_groups"]
        groups = [
            {**group, "params": own["params"]} for group, own in zip(groups, numbers, strict=True)
        ]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        check_fused(self._optimizer)
        return best

    def _add(
        self, state: dict[str, Any], name: str, found: Mapping[str, Any], theirs: Region
    ) -> None:
        """Take what an optimizer keeps of a region of a parameter."""
        for key, value in found.items():
            is_cut = isinstance(value, torch.Tensor) and tuple(value.shape) == theirs.size
            if not is_cut or not theirs.size:
                state.setdefault(key, value)
                continue
            own = self._regions[name]
            if key not in state:
                state[key] = torch.zeros(own.size, dtype=value.dtype, device=value.device)
            own.copy_from(theirs, value, state[key])


def whole_part(shared: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a checkpoint of a replica that was not divided to a `Part`."""
    model = shared["model"]
    return {
        "regions": {name: [[0] * value.dim(), list(value.shape)] for name, value in model.items()},
        "parameters": model,
        "best": shared["best_model"],
        "optimizer": shared["optimizer"],
        "stepped": None,
    }
