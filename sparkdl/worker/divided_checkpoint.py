"""A training function's checkpoint whose tensors are divided among ranks.

Each rank writes the regions that it holds of DTensors, and no region is written twice. A later
run reads what its own tensors need, so it may have another mesh, other ranks, or none.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from sparkdl.errors import CheckpointError
from sparkdl.storage.tensor_tree import DTYPES
from sparkdl.sync.regions import Region

Path = tuple[str | int, ...]
"""Keys and numbers that lead to a value of a tree of dicts, lists and tuples."""
Part = Mapping[str, Any]
"""A rank's part of a checkpoint: what `Division.part` gives."""

_ABSENT = object()
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class DividedTensor:
    """Stands in `Context.checkpoint` where a tensor lies in parts.

    `Context.load_checkpoint` reads it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


def is_divided(tree: Any) -> bool:
    """Return True if a tree has tensors that are divided among ranks."""
    return any(_is_dtensor(leaf) for _, leaf in _leaves(tree))


class Division:
    """A rank's checkpoint, taken apart into what ranks share and what this rank holds."""

    def __init__(self, tree: Any) -> None:
        """Take apart what the function has reported; copies nothing.

        Raises:
            CheckpointError: a tensor is a sum of which each rank has a part, or is cut otherwise
                than in boxes.
        """
        self._tree = tree
        self._regions: dict[Path, tuple[torch.Tensor, Region]] = {}
        self._values: dict[Path, Any] = {}
        for path, leaf in _leaves(tree):
            if _is_dtensor(leaf):
                self._regions[path] = leaf, _region(leaf, path)
            else:
                self._values[path] = leaf

    @property
    def shared(self) -> dict[str, Any]:
        """The tree without what is divided, and which tensors these are."""
        return {
            "checkpoint": _mapped(self._tree, lambda _, leaf: None if _is_dtensor(leaf) else leaf),
            "divided": [
                [list(path), list(tensor.shape), DTYPES[tensor.dtype]]
                for path, (tensor, _) in self._regions.items()
            ],
        }

    def held(self) -> list[str]:
        """Short names of what this rank holds, equal on all ranks that hold the same."""
        return [*map(_name, self._values), *(_name(p, r) for p, (_, r) in self._regions.items())]

    def whole_tensors(self) -> list[str]:
        """The names of tensors that are not divided."""
        return [_shown(p) for p, leaf in self._values.items() if isinstance(leaf, torch.Tensor)]

    def part(self, held_before: set[str] | None) -> dict[str, Any]:
        """Return what this rank writes, given what the ranks before it hold; None: it is rank 0.

        Besides regions these are values that no rank before has under their path; rank 0's are in
        what is shared.
        """
        is_first, held_before = held_before is None, held_before or set()
        regions = [
            (path, tensor, region)
            for path, (tensor, region) in self._regions.items()
            if all(region.size) and _name(path, region) not in held_before
        ]
        return {
            "regions": [
                [list(path), list(tensor.shape), list(region.start), list(region.size)]
                for path, tensor, region in regions
            ],
            "tensors": [_local(tensor) for _, tensor, _ in regions],
            "values": [
                [list(path), value]
                for path, value in self._values.items()
                if not is_first and _name(path) not in held_before
            ],
        }


def check_stages(names: Iterable[tuple[int, Iterable[str]]]) -> None:
    """Refuse a tensor that ranks of two stages have under one name, as only one would be kept.

    ``names`` are of each rank its place along ``pipeline``, and `Division.whole_tensors`.

    Raises:
        CheckpointError: there is one; on all ranks.
    """
    stages: dict[str, int] = {}
    for stage, own in names:
        for name in own:
            if stages.setdefault(name, stage) != stage:
                raise CheckpointError(
                    f"the ranks {stages[name]} and {stage} along pipeline both report a tensor as "
                    f"{name!r}, of which a checkpoint would keep one; give each stage a name of "
                    "its own, as in {'stage 1': model.state_dict()}"
                )


def joined(shared: Mapping[str, Any]) -> Any:
    """The tree of `Division.shared`, with a `DividedTensor` where one was left out."""
    divided = {
        tuple(path): DividedTensor(tuple(shape), _TORCH[dtype])
        for path, shape, dtype in shared.get("divided", ())
    }
    if not divided:
        return shared["checkpoint"]
    return _mapped(shared["checkpoint"], lambda path, leaf: divided.get(path, leaf))


def fill(state: Any, tree: Any, parts: Callable[[], Iterable[Part]]) -> Any:
    """Take the values of ``state`` from a checkpoint, in place where they can be changed.

    Args:
        state: what is wanted. Of a `DTensor` only this rank's region is read.
        tree: what `joined` gives.
        parts: of the ranks that wrote the checkpoint; read as far as they are needed.

    Returns:
        ``state``, or what stands for it if it is neither.

    Raises:
        CheckpointError: the checkpoint lacks something, or has it in another shape.
    """
    values: dict[Path, Any] = {}
    targets: dict[Path, _Target] = {}
    for path, leaf in _wanted(state):
        found = _at(tree, path)
        if not isinstance(leaf, torch.Tensor):
            _refuse_divided(path, found)
            values[path] = found
            continue
        target = _Target.of(path, leaf)
        if isinstance(found, torch.Tensor):
            target.take(Region.whole(found.shape), tuple(found.shape), found)
        elif found is _ABSENT or isinstance(found, DividedTensor):
            targets[path] = target
        else:
            raise CheckpointError(
                f"{_shown(path)} is {type(found).__name__} in the checkpoint, and a tensor in the "
                "state to be filled"
            )
    missing = {path for path, value in values.items() if value is _ABSENT}
    missing |= {path for path, target in targets.items() if target.left}
    for part in parts() if missing else ():
        for (keys, shape, *box), tensor in zip(part["regions"], part["tensors"], strict=True):
            path = tuple(keys)
            if path in missing and path in targets:
                targets[path].take(Region(*map(tuple, box)), tuple(shape), tensor)
        for keys, value in part["values"]:
            path = tuple(keys)
            if path in missing and path in targets and isinstance(value, torch.Tensor):
                targets[path].take(Region.whole(value.shape), tuple(value.shape), value)
            elif path in missing and path in values:
                values[path] = value
        missing = {path for path in missing if path in targets and targets[path].left} | {
            path for path in missing if values.get(path) is _ABSENT
        }
        if not missing:
            break
    if missing:
        names = ", ".join(sorted(map(_shown, missing))[:5])
        raise CheckpointError(
            f"the checkpoint lacks {names}; it was reported by a function with other names, or "
            "without that"
        )
    return _put(state, values)


@dataclass
class _Target:
    """A tensor that is filled."""

    path: Path
    shape: tuple[int, ...]
    region: Region
    values: torch.Tensor
    """This rank's."""
    left: int
    """Numbers that are not there yet."""
    seen: set[Region]

    @classmethod
    def of(cls, path: Path, tensor: torch.Tensor) -> _Target:
        if _is_dtensor(tensor):
            region, values = _region(tensor, path), _local(tensor)
        else:
            region, values = Region.whole(tensor.shape), tensor.detach()
        return cls(path, tuple(tensor.shape), region, values, values.numel(), set())

    def take(self, theirs: Region, shape: tuple[int, ...], source: torch.Tensor) -> None:
        if shape != self.shape:
            raise CheckpointError(
                f"{_shown(self.path)} has the shape {shape} in the checkpoint, and {self.shape} in "
                "the state to be filled"
            )
        if theirs not in self.seen:
            self.seen.add(theirs)
            self.left -= self.region.copy_from(theirs, source, self.values)


def _is_dtensor(leaf: Any) -> bool:
    if type(leaf) in (torch.Tensor, torch.nn.Parameter) or not isinstance(leaf, torch.Tensor):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(leaf, DTensor)


def _local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.detach().to_local()
    return found


def _region(tensor: Any, path: Path) -> Region:
    """The box of a `DTensor` that this rank has."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    for number, placement in enumerate(placements):
        factor = getattr(placement, "split_factor", None)
        later = [
            mesh.size(other)
            for other in range(number + 1, mesh.ndim)
            if placements[other].is_shard(getattr(placement, "dim", None))
        ]
        is_box = factor is None or factor == torch.Size(later).numel()
        if placement.is_partial() or not is_box:
            raise CheckpointError(
                f"{_shown(path)} is placed by {placement}, which a checkpoint cannot hold; report "
                "tensor.redistribute(placements=...) with Shard or Replicate"
            )
    size, start = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return Region(tuple(start), tuple(size))


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if not isinstance(tree, (dict, list, tuple)):
        yield path, tree
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _leaves(value, (*path, key))


def _wanted(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of a state that is filled: a list without tensors, and an empty dict, are one."""
    is_list = isinstance(tree, (list, tuple))
    has_tensors = is_list and any(isinstance(leaf, torch.Tensor) for _, leaf in _leaves(tree))
    if not (has_tensors or (isinstance(tree, dict) and tree)):
        yield path, tree
        return
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield from _wanted(value, (*path, key))


def _put(tree: Any, values: Mapping[Path, Any], path: Path = ()) -> Any:
    """The tree with other values under their paths."""
    if path in values:
        return values[path]
    if isinstance(tree, tuple):
        return tuple(_put(item, values, (*path, number)) for number, item in enumerate(tree))
    if isinstance(tree, (dict, list)):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            tree[key] = _put(tree[key], values, (*path, key))
    return tree


def _mapped(tree: Any, change: Callable[[Path, Any], Any], path: Path = ()) -> Any:
    """The tree with other leaves."""
    if isinstance(tree, dict):
        found = copy.copy(tree)  # of its own kind; state dicts have attributes
        for key, value in tree.items():
            found[key] = _mapped(value, change, (*path, key))
        return found
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(item, change, (*path, n)) for n, item in enumerate(tree))
    return change(path, tree)


def _at(tree: Any, path: Path) -> Any:
    """Return what a tree has under a path; `_ABSENT`: nothing."""
    for key in path:
        if isinstance(tree, dict):
            tree = tree.get(key, _ABSENT)
        elif isinstance(tree, (list, tuple)) and isinstance(key, int) and key < len(tree):
            tree = tree[key]
        else:
            return _ABSENT
    return tree


def _refuse_divided(path: Path, found: Any) -> None:
    for below, leaf in _leaves(found, path):
        if isinstance(leaf, DividedTensor):
            raise CheckpointError(
                f"{_shown(below)} lies in parts in the checkpoint, and the state to be filled has "
                f"no tensor there; make it first. An optimizer has its state before the first step "
                "by torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
            )


def _name(path: Path, region: Region | None = None) -> str:
    box = None if region is None else [region.start, region.size]
    return hashlib.blake2b(json.dumps([path, box]).encode(), digest_size=8).hexdigest()


def _shown(path: Path) -> str:
    return ".".join(map(str, path)) or "the state"
