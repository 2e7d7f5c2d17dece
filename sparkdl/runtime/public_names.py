"""The public names of sparkdl, under which saved files refer to what it defines.

A saved file says ``sparkdl:AllReduce``, never in which file of the package the class lies, so that
files may move without breaking what was saved. Versions before that wrote the module's path;
`current_path` reads these.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pkgutil import get_data
from typing import Any

_PUBLIC_PACKAGES = ("sparkdl", "sparkdl.models")
_FORMER_MODULES = {
    "sparkdl.compress.base": "sparkdl",
    "sparkdl.compress.cast": "sparkdl",
    "sparkdl.compress.int8": "sparkdl",
    "sparkdl.compress.onebit": "sparkdl",
    "sparkdl.compress.powersgd": "sparkdl",
    "sparkdl.compress.threshold": "sparkdl",
    "sparkdl.compress.topk": "sparkdl",
    "sparkdl.compress.twobit": "sparkdl",
    "sparkdl.config": "sparkdl",
    "sparkdl.data.dataset": "sparkdl",
    "sparkdl.data.parquet": "sparkdl",
    "sparkdl.data.petastorm": "sparkdl",
    "sparkdl.demo": "sparkdl.models.demo",
    "sparkdl.initialweights": "sparkdl",
    "sparkdl.listeners": "sparkdl",
    "sparkdl.mlflow": "sparkdl",
    "sparkdl.onnxfile": "sparkdl",
    "sparkdl.outputs": "sparkdl",
    "sparkdl.runcontext": "sparkdl",
    "sparkdl.saved": "sparkdl",
    "sparkdl.sync.adasum": "sparkdl",
    "sparkdl.sync.allreduce": "sparkdl",
    "sparkdl.sync.async_sgd": "sparkdl",
    "sparkdl.sync.base": "sparkdl",
    "sparkdl.sync.block_momentum": "sparkdl",
    "sparkdl.sync.diloco": "sparkdl",
    "sparkdl.sync.elastic_averaging": "sparkdl",
    "sparkdl.sync.gossip": "sparkdl",
    "sparkdl.sync.hogwild": "sparkdl",
    "sparkdl.sync.local_sgd": "sparkdl",
    "sparkdl.sync.one_shot_averaging": "sparkdl",
    "sparkdl.sync.parameter_averaging": "sparkdl",
    "sparkdl.sync.population_based": "sparkdl",
    "sparkdl.sync.slowmo": "sparkdl",
    "sparkdl.sync.tournament": "sparkdl",
    "sparkdl.tensorboard": "sparkdl",
    "sparkdl.train.callbacks": "sparkdl",
    "sparkdl.train.large_batch": "sparkdl",
    "sparkdl.train.warmup": "sparkdl",
}
"""Modules whose paths older versions wrote, and where their public names are today."""


def public_names() -> dict[str, str]:
    """Return the public names of sparkdl and the module of each, as ``__init__.pyi`` lists them."""
    stub = ast.parse(get_data("sparkdl", "__init__.pyi") or b"")
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom))
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def public_module(module: str, name: str, value: Any) -> str:
    """Return the module that an artefact names for ``value``, which ``module:name`` is today."""
    for package in _PUBLIC_PACKAGES:
        if module.startswith(f"{package}.") and _found(package, name) == value:
            return package
    return module


def current_path(path: str) -> str:
    """Return ``path`` as it is today, if an older version of sparkdl wrote it."""
    module, _, name = path.partition(":")
    former = _FORMER_MODULES.get(module)
    return path if former is None else f"{former}:{name}"


def _found(package: str, name: str) -> Any:
    """The object of a dotted name, if its first part is public in ``package``; else None."""
    first, *others = name.split(".")
    found = getattr(import_module(package), first, None)
    for part in others:
        found = getattr(found, part, None)
    return found
