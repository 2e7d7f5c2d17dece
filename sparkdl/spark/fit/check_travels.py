"""Checks that what is asked for can go to workers, and that no hooks of this process stay here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError
from sparkdl.serialization.program.named_code import functions_of
from sparkdl.serialization.travel.operators import imported_by
from sparkdl.serialization.travel.pickling import SentCode, UsesModule, dumps

if TYPE_CHECKING:
    from torch import nn


_EVERYWHERE = {"cloudpickle", "numpy", "pyarrow", "pyspark", "sparkdl", "torch"}
"""Packages without which no executor gets as far as to be asked for others."""


def check_travels(values: Mapping[str, Any], module: nn.Module | None = None) -> None:
    """Refuse what cannot be sent to other processes, such as a lock; raises ConfigError.

    Refused is also what uses a parameter of ``module``, of which workers train another one, and a
    callback that has one of its layers.
    """
    strange = {} if module is None else {id(p): name for name, p in module.named_parameters()}
    layers = {} if module is None else {id(m): name for name, m in module.named_modules() if name}
    for name, value in values.items():
        try:
            dumps(value, strange | layers if name == "callbacks" else strange)
        except UsesModule as error:
            remedy = "trainingStep, which gets the module that they train"
            if name == "callbacks":
                remedy = "state.model, which is the module that they train"
            raise ConfigError(
                f"{name} cannot be sent to the workers: {error}; use {remedy}"
            ) from error
        except Exception as error:  # whatever the user's classes raise when they are pickled
            raise ConfigError(
                f"{name} cannot be sent to the workers: {error}; make such things in the "
                "worker, for example in on_train_begin"
            ) from error


def foreign_names(sent: SentCode) -> frozenset[tuple[str, str]]:
    """Names of what is in modules which executors may not have; empty: of the whole module."""
    names = {(str(one.__module__), one.__qualname__) for one, is_by_name in sent.code if is_by_name}
    names |= {(module, "") for module in sent.modules}
    by_value = [one for one, is_by_name in sent.code if not is_by_name]
    imported = {name for one in functions_of(by_value) for name in imported_by(one.__code__)}
    # A module without a file is one that the program has made.
    made = {name for name in imported if getattr(sys.modules.get(name, sys), "__spec__", 0) is None}
    names |= {(module, "") for module in made - {"__main__"}}
    known = sys.stdlib_module_names | _EVERYWHERE
    return frozenset(name for name in names if name[0].split(".")[0] not in known)


def check_autocast() -> None:
    """Refuse a fit inside of ``torch.autocast``, which workers would not have; ConfigError."""
    import torch

    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ConfigError(
            "fit is called inside of torch.autocast, which workers do not have; call it outside, "
            "and set precision='bf16' or 'fp16', or use torch.autocast in forward"
        )


def check_global_hooks() -> None:
    """Refuse hooks of this process that workers would not have; raises ConfigError."""
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    names = {
        "module": [
            f"_global_{kind}_hooks"
            for kind in ("forward_pre", "forward", "backward_pre", "backward")
        ],
        "optimizer": ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"],
    }
    for what, owner in (("module", modules), ("optimizer", optimizers)):
        if any(getattr(owner, name, None) for name in names[what]):
            raise ConfigError(
                f"torch has hooks for every {what} of this process, which workers do not have; "
                "remove them (their handle's remove()), and register hooks on "
                + ("the module itself" if what == "module" else "the one that optimizer= makes")
            )
