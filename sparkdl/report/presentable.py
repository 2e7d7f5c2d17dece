"""How may what is known of a run be shown to others? Without passwords, in texts that any can read.

Every text of a run goes through here before it is kept: messages, tracebacks, warnings, Params.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sparkdl.storage.storage import without_password


def presentable(value: Any) -> Any:
    """A plain value whose texts are without URLs' passwords, and can be encoded.

    Names of files that are no UTF-8 come as lone surrogates, which no file or page can hold.
    """
    if isinstance(value, str):
        return without_password(value).encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, Mapping):
        return {name: presentable(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [presentable(entry) for entry in value]
    return value
