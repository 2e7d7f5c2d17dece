"""Compressions: smaller forms of what travels between ranks, one file each."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sparkdl.errors import ConfigError

if TYPE_CHECKING:
    from sparkdl.comm.compression.compression import Compression

__all__ = ["COMPRESSIONS", "resolve"]

COMPRESSIONS = {
    "bf16": "sparkdl:BF16Compression",
    "fp16": "sparkdl:FP16Compression",
    "int8": "sparkdl:Int8Compression",
    "onebit": "sparkdl:OneBitCompression",
    "powersgd": "sparkdl:PowerSGD",
    "threshold": "sparkdl:ThresholdCompression",
    "topk": "sparkdl:TopKCompression",
    "twobit": "sparkdl:TwoBitCompression",
}
"""Name -> where the class is; classes are imported when they are asked for."""


def resolve(compression: str | Compression | type[Compression] | None) -> Compression | None:
    """The compression that the user named.

    Args:
        compression: an object, which is returned as it is; or a class, a name of `COMPRESSIONS` or
            a ``"package.module:Class"``, which are made with their default options; None means
            none.

    Raises:
        ConfigError: there is no such compression.
    """
    from sparkdl.comm.compression.compression import Compression

    if compression is None or isinstance(compression, Compression):
        return compression
    found: object = compression
    if isinstance(compression, str):
        found = _import(COMPRESSIONS.get(compression.lower(), compression))
    if not (isinstance(found, type) and issubclass(found, Compression)):
        raise ConfigError(
            f"compression must be a Compression, its name, or None; received {compression!r}"
        )
    try:
        return found()
    except TypeError as error:
        raise ConfigError(
            f"compression {compression!r} cannot be made without options ({error}); "
            "pass an object instead of its name"
        ) from error


def _import(path: str) -> object:
    module, _, name = path.partition(":")
    if not name:
        known = ", ".join(sorted(COMPRESSIONS))
        raise ConfigError(
            f"unknown compression {path!r}; known: {known}, or name a class of your own as "
            "'package.module:Class'"
        )
    try:
        found: object = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"compression {path!r} cannot be imported: {error}") from error
    return found
