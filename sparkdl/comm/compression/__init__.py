"""Compressions: smaller forms of what travels between ranks, one file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkdl.runtime.public_names import make_named, public_classes

if TYPE_CHECKING:
    from sparkdl.comm.compression.compression import Compression

__all__ = ["COMPRESSIONS", "resolve"]

COMPRESSIONS = {
    name.removesuffix("compression"): path
    for name, path in public_classes(__name__).items()
    if path not in ("sparkdl:Compression", "sparkdl:Compressor")
}
"""Name -> path of the class, of all that ``sparkdl/__init__.pyi`` lists; imported when needed."""


def resolve(compression: str | Compression | type[Compression] | None) -> Compression | None:
    """The compression that the user named, as `public_names.make_named` does; None means none."""
    from sparkdl.comm.compression.compression import Compression

    if compression is None:
        return None
    made: Compression = make_named(compression, Compression, COMPRESSIONS, "compression")
    return made
