"""The graph of a module: its layers, and what flowed between them in one call.

Hooks see the layers, and a torch function mode what happens between them; both belong to this
thread alone. The graph is plain values: ``{"nodes": [...], "edges": [[from, to], ...]}``, where a
node has ``name``, its path, ``op``, ``detail``, ``shape`` without the batch, and ``parameters``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

_MOST_NODES = 2000
_MOST_INPUTS, _MOST_LEVELS = 50, 100
"""Edges for each node, and layers in each other, that are drawn."""
_PASSED_THROUGH = frozenset(
    ("view", "reshape", "transpose", "permute", "unsqueeze", "squeeze", "contiguous", "flatten",
     "__getitem__", "chunk", "split", "unbind", "expand", "expand_as", "to", "float", "double",
     "half", "long", "type_as", "clone", "detach", "__get__", "movedim", "swapaxes", "t",
     "unflatten", "view_as", "narrow", "select", "as_subclass", "requires_grad_")
)  # fmt: skip
"""Functions that make no node: what they give is what they were given, seen otherwise."""
_CONTAINERS = ("torch.nn.modules.container", "torch.nn.modules.transformer")


@contextlib.contextmanager
def traced(module: nn.Module, sink: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
    """Let ``sink`` have the graph of the first call of ``module`` in the block, if there is one."""
    import torch
    from torch.overrides import TorchFunctionMode

    tracer = _Tracer(module)

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            tracer.called(func, (args, kwargs), result)
            return result

    with contextlib.ExitStack() as stack:
        for part in module.modules():
            if not isinstance(part, torch.jit.ScriptModule):
                before = part.register_forward_pre_hook(tracer.enter, with_kwargs=True)
                after = part.register_forward_hook(tracer.leave, with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
        stack.enter_context(Mode())
        yield
    if tracer.is_done:
        sink(tracer.graph)


class _Tracer:
    def __init__(self, module: nn.Module) -> None:
        self._root = module
        self.is_done = False
        self._is_inside = False
        self._leaf: nn.Module | None = None
        self._nodes: list[dict[str, Any]] = []
        self._edges: list[list[int]] = []
        self._source: dict[int, int] = {}
        self._kept: list[Any] = []  # so that no two tensors have the same id
        self._paths = {part: name for name, part in module.named_modules()}
        self._around: list[str] = [""]

    def __deepcopy__(self, memo: Any) -> _Tracer:
        """Stay one where forward copies a layer, with the hooks that lead here."""
        return self

    @property
    def graph(self) -> dict[str, Any]:
        classes = {name: type(part).__name__ for part, name in self._paths.items()}
        return {"nodes": self._nodes, "edges": self._edges, "classes": classes}

    def enter(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        if part is self._root and not self.is_done:
            self._is_inside = True
            for number, value in enumerate(tensors_in((args, kwargs))):
                self._add(f"input {number + 1}", "input", value, [])
        if not self._is_inside or self._leaf is not None or part not in self._paths:
            return
        if is_leaf(part):
            self._leaf = part
        else:
            self._around.append(self._paths[part])

    def leave(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._is_inside and self._leaf is part:
            self._leaf = None
            detail = part.extra_repr().replace("\n", " ")
            size = sum(p.numel() for p in part.parameters())
            name = self._paths[part] or type(part).__name__
            node = {"detail": detail[:120], "parameters": size}
            self._add(name, type(part).__name__, output, tensors_in((args, kwargs)), **node)
        elif self._is_inside and self._leaf is None and part in self._paths:
            self._around.pop()
        if part is self._root and self._is_inside:
            self._add("output", "output", output, tensors_in(output))
            self._is_inside, self.is_done = False, True
            self._kept.clear()

    def called(self, func: Any, inputs: Any, result: Any) -> None:
        if not self._is_inside or self._leaf is not None:
            return
        name = getattr(func, "__name__", "function")
        given = [value for value in tensors_in(inputs) if id(value) in self._source]
        made = tensors_in(result)
        if not given or not made:
            return
        if name in _PASSED_THROUGH:
            for value in made:
                self._own(value, self._source[id(given[0])])
            return
        path = ".".join(filter(None, (self._around[-1], name.strip("_"))))
        self._add(path, name.strip("_"), result, given)

    def _add(
        self, name: str, op: str, output: Any, inputs: list[torch.Tensor], **more: Any
    ) -> None:
        if len(self._nodes) >= _MOST_NODES:
            return
        number, made = len(self._nodes), tensors_in(output)
        shape = list(made[0].shape[1:]) if made else []
        self._nodes.append({"name": name, "op": op, "shape": shape, **more})
        sources = {self._source[id(value)] for value in inputs if id(value) in self._source}
        self._edges += [[source, number] for source in sorted(sources)]
        for value in made if op != "output" else ():
            self._own(value, number)

    def _own(self, value: torch.Tensor, number: int) -> None:
        self._source[id(value)] = number
        self._kept.append(value)


def is_leaf(part: nn.Module) -> bool:
    """Return True if a module is shown as one, whatever is inside: torch's own layers are."""
    origin = type(part).__module__
    is_torchs = origin.startswith("torch.nn.modules") and origin not in _CONTAINERS
    return is_torchs or not any(True for _ in part.children())


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in (nested) tuples, lists and dicts, in order; of these each once."""
    import torch

    found: list[torch.Tensor] = []
    seen: dict[int, Any] = {}  # the objects too, so that no id is used twice
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, Mapping | tuple | list) and id(one) not in seen:
            seen[id(one)] = one
            todo += reversed([*(one.values() if isinstance(one, Mapping) else one)])
    return found


def condensed(graph: Mapping[str, Any], limit: int = 48) -> dict[str, Any]:
    """The graph with at most about ``limit`` nodes: deep layers are shown as what they are in.

    ValueError if it is larger than those of runs, which would take hours.
    """
    deepest = max((node["name"].count(".") for node in graph["nodes"]), default=0) + 1
    if max(len(graph["nodes"]), len(graph["edges"]) / _MOST_INPUTS) > _MOST_NODES:
        raise ValueError(f"a graph of {len(graph['nodes'])} nodes, {len(graph['edges'])} edges")
    if deepest > _MOST_LEVELS:
        raise ValueError(f"a layer at {deepest} levels")
    for depth in range(deepest, 1, -1):
        smaller = _at_depth(graph, depth)
        if len(smaller["nodes"]) <= limit:
            return smaller
    return _at_depth(graph, 1)


def _at_depth(graph: Mapping[str, Any], depth: int) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []
    place: dict[str, int] = {}
    moved: list[int] = []
    for node in graph["nodes"]:
        path = node["name"].split(".")
        key = ".".join(path[:depth])
        is_inside = len(path) > depth
        if is_inside and place.get(key, -1) >= 0:
            whole = nodes[place[key]]
            whole["parameters"] = whole.get("parameters", 0) + node.get("parameters", 0)
            whole["shape"] = node["shape"]
            whole["inside"] += 1
            moved.append(place[key])
            continue
        moved.append(len(nodes))
        if is_inside:
            place[key] = len(nodes)
            op = graph.get("classes", {}).get(key, "")
            nodes.append({**node, "name": key, "op": op, "detail": "", "inside": 1})
        else:
            nodes.append(dict(node))
    edges = {(moved[a], moved[b]) for a, b in graph["edges"] if moved[a] != moved[b]}
    return {"nodes": nodes, "edges": sorted(list(edge) for edge in edges)}
