"""Finds the layers of a module that can be divided along ``tensor`` where no layout names them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from torch import nn

from sparkdl.mesh import CUTS, check_layout, paired

_ELEMENTWISE = (
    nn.CELU, nn.Dropout, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh,
    nn.Identity, nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU,
    nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink, nn.Threshold,
)  # fmt: skip
"""Layers without parameters that treat each number by itself. A PReLU is none of them: each worker
would have the gradient of its own part only."""

Named = Callable[[Mapping[str, str], nn.Module], dict[str, str]]


def found_layers(module: nn.Module, tensor: int, named: Named) -> dict[str, str]:
    """Name of each layer to divide among ``tensor`` workers -> ``"columns"`` or ``"rows"``.

    The ``tensor_layout`` of a module, a layout or a method that gives one for ``tensor``, is for
    all within it. Else Linear layers of an `nn.Sequential` are paired. Layers that are used twice,
    or share parameters, stay whole. ``named`` gives the layers that a layout means in a module.
    """
    every = list(module.named_modules(remove_duplicate=False))
    uses = Counter(id(layer) for _, layer in every)
    tied = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))

    def is_free(layer: nn.Module) -> bool:
        alone = uses[id(layer)] == 1 and all(tied[id(p)] == 1 for p in layer.parameters())
        return type(layer) is nn.Linear and alone and not _has_hooks(layer)

    def within(part: nn.Module, prefix: str) -> dict[str, str]:
        own = getattr(part, "tensor_layout", None)
        if own is not None:
            layout = own(tensor) if callable(own) else own
            check_layout(layout, f"{type(part).__name__}.tensor_layout", CUTS)
            return {prefix + name: cut for name, cut in named(layout, part).items()}
        found: dict[str, str] = {}
        if not _is_chain(part):
            for name, child in part.named_children():
                found |= within(child, f"{prefix}{name}.")
            return found
        run: list[tuple[str, int, int]] = []
        for name, step in _steps(part, prefix):
            if isinstance(step, nn.Linear) and is_free(step):
                run.append((name, step.in_features, step.out_features))
            elif type(step) not in _ELEMENTWISE or _has_hooks(step) or _is_inplace(step):
                found |= paired(run, tensor) | within(step, f"{name}.")
                run = []
        return found | paired(run, tensor)

    return within(module, "")


def _steps(chain: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield what a chain computes, in order; also what it computes twice."""
    for name, part in chain._modules.items():
        assert part is not None
        if _is_chain(part) and not hasattr(part, "tensor_layout"):
            yield from _steps(part, f"{prefix}{name}.")
        else:
            yield prefix + name, part


def _is_chain(part: nn.Module) -> bool:
    return type(part).forward is nn.Sequential.forward and not _has_hooks(part)


def _has_hooks(part: nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks)


def _is_inplace(part: nn.Module) -> bool:
    return bool(getattr(part, "inplace", False))
