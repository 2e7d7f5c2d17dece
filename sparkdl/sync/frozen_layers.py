"""Freezes the parts of a module that stay as they are while the rest trains.

A frozen parameter has no gradient, so it costs neither a message nor optimizer state. A layer all
of whose parameters are frozen, or which has none and whose buffers are meant, keeps its buffers
too: it runs in evaluation mode, as Keras does it with ``trainable=False``, so that BatchNorm keeps
the statistics that go with its weights. Layers without buffers, such as dropout, keep their mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar
from weakref import WeakSet

import torch
from torch import nn

from sparkdl.errors import ConfigError
from sparkdl.runtime.name_patterns import check_fit, fits_any

M = TypeVar("M", bound=nn.Module)

_HELD: WeakSet[nn.Module] = WeakSet()
"""Layers whose buffers do not change."""


def freeze(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Let the parameters that ``patterns`` mean take no part in training; returns their names.

    ConfigError if a pattern means nothing, or nothing is left to train.
    """
    parameters = dict(nn.Module.named_parameters(module, remove_duplicate=False))
    check_fit(patterns, [*parameters, *dict(module.named_buffers())], "frozenLayers")
    meant = [name for name, p in parameters.items() if p.requires_grad and fits_any(patterns, name)]
    for name in meant:
        parameters[name].requires_grad = False  # lazy ones have no requires_grad_
    if patterns and not any(p.requires_grad for p in parameters.values()):
        thaw(module, meant)
        raise ConfigError(
            f"frozenLayers {list(patterns)} leave no parameter to train; freeze fewer"
        )
    return meant


def thaw(module: nn.Module, names: Sequence[str]) -> None:
    """Let the parameters ``names`` train again."""
    parameters = dict(nn.Module.named_parameters(module, remove_duplicate=False))
    for name in parameters.keys() & names:  # a callback may have changed layers
        parameters[name].requires_grad = True


@contextlib.contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every submodule has the mode that it had before.

    ``train()`` of the module leads back: one of the user's own may take out what its ``eval()``
    has put in, such as an update that is merged into a weight.
    """
    modes = [(part, part.training) for part in module.modules()]
    was_trained = module.training
    module.eval()
    try:
        yield
    finally:
        if was_trained:
            module.train()
        for part, was_training in modes:
            part.training = was_training


def evaluating(module: M) -> M:
    """The module, in evaluation mode; a ``train()`` of its own may return nothing."""
    module.eval()
    return module


def training_mode(module: nn.Module, patterns: Sequence[str]) -> None:
    """Put a module into training mode, but for the layers that frozen patterns hold."""
    module.train()
    for name, layer in module.named_modules():
        if _is_held(name, layer, patterns):
            layer.training = False
            _HELD.add(layer)
        else:
            _HELD.discard(layer)


def is_held(layer: nn.Module) -> bool:
    """True if the layer's buffers stay as they are, by `training_mode`."""
    return layer in _HELD


def moving_buffers(module: nn.Module) -> list[torch.Tensor]:
    """The buffers that training may change, which replicas must agree on."""
    still = {id(buffer) for buffer in _held_buffers(module)}
    return [buffer for buffer in module.buffers() if id(buffer) not in still]


def still_names(module: nn.Module) -> frozenset[str]:
    """Names, in the state dict, of what training does not change, unless forward does."""
    buffers = {id(buffer) for buffer in _held_buffers(module)}
    still = {n for n, b in module.named_buffers(remove_duplicate=False) if id(b) in buffers}
    parameters = nn.Module.named_parameters(module, remove_duplicate=False)
    return frozenset(still | {name for name, p in parameters if not p.requires_grad})


def _is_held(name: str, layer: nn.Module, patterns: Sequence[str]) -> bool:
    prefix = f"{name}." if name else ""
    parameters = [prefix + own for own, _ in layer.named_parameters(recurse=False)]
    buffers = [prefix + own for own, _ in layer.named_buffers(recurse=False)]
    return bool(buffers) and all(fits_any(patterns, own) for own in parameters or buffers)


def _held_buffers(module: nn.Module) -> Iterator[torch.Tensor]:
    for layer in module.modules():
        if layer in _HELD:
            yield from layer.buffers(recurse=False)
