"""How does a user's function change the inputs of a training batch?

It runs on the device, before the batch is cut into micro-batches, and draws from torch's global
generator, whose state every checkpoint holds; so a resumed run draws what it would have drawn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sparkdl.data.batches import Batch
from sparkdl.errors import ConfigError


def augmented(batch: Batch, augmentation: Callable[[Any], Any]) -> Batch:
    """The batch with other inputs; its target stays.

    Args:
        batch: a training batch of at least one sample.
        augmentation: gets the input tensor, the tuple of several, or, if all have names, a dict;
            and returns the same with as many samples. It must not change what it gets in place
            where the inputs are the target too.

    Raises:
        ConfigError: it returned something else.
    """
    try:
        changed = batch.arguments.repacked(augmentation(batch.arguments.packed()))
    except TypeError as error:
        raise ConfigError(f"augmentation must return what it gets, changed: {error}") from error
    for value in changed.values:
        if value.dim() == 0 or len(value) != batch.num_rows:
            raise ConfigError(
                f"augmentation must keep the {batch.num_rows} samples of a batch; it returned a "
                f"tensor of shape {tuple(value.shape)}"
            )
    return dataclasses.replace(batch, inputs=changed.values)
