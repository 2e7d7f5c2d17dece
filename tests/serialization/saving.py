"""Saves a module as a folder in one call, and loads one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from sparkdl.serialization.example_inputs import Given
from sparkdl.serialization.saved_module import open_module, prepare_module
from sparkdl.storage.storage import Storage


def save_module(
    module: nn.Module,
    factory: Any | None,
    storage: Storage,
    path: str,
    *,
    example_inputs: Given | None,
    extra: Mapping[str, Any],
) -> None:
    prepared = prepare_module(module, factory, example_inputs=example_inputs, extra=extra)
    prepared.write(storage, path)


def load_module_from(storage: Storage, path: str) -> tuple[nn.Module, dict[str, Any]]:
    """The module, and what was saved along with it."""
    saved = open_module(storage, path)
    return saved.make(), saved.extra()
