"""The checkpoints of a run: the name under which it keeps them, and those that it goes on from.

Equal data, equal module, equal configuration give an equal name, in another process too, so that
the same fit finds its own checkpoints and no other's.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.data.plan import Column
from sparkdl.data.shuffle_windows import WINDOWS, Windows, from_text
from sparkdl.errors import CheckpointError
from sparkdl.serialization.identity import identity
from sparkdl.spark.run.run import Run
from sparkdl.storage.checkpoint_format import (
    CheckpointInfo,
    folders,
    has_other_runs,
    latest,
    read_manifest,
)
from sparkdl.storage.storage import Storage
from sparkdl.train.state import TrainState

logger = logging.getLogger(__name__)

_LEFT_OUT = ("epochs", "max_steps", "checkpoint", "callbacks", "device")
"""What only says how long to train, or how to watch it: a finished run can be continued."""


def run_key(module: nn.Module, columns: Sequence[Column], config: TrainConfig, content: str) -> str:
    """Name of a run's checkpoints, 16 hexadecimal digits.

    Args:
        module: with its initial weights, which count: a factory, being seeded, gives the same ones
            each time, and a module that was made elsewhere must be made from the same seed.
        columns: those of the plan; the number of workers does not count.
        config: all but the number of epochs and steps, checkpoints, callbacks and device.
        content: fingerprint of the rows.
    """
    described = [
        [c.name, c.role, c.dtype, list(c.shape), c.argument, identity(c.specification)]
        for c in columns
    ]
    options = {
        name: identity(getattr(config, name))
        for name in config.__dataclass_fields__
        if name not in _LEFT_OUT
    }
    text = json.dumps([identity(module), described, options, content], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def windows_to_go_on(
    storage: Storage | None, run_key: str, choose: Callable[[], Windows | None]
) -> Windows | None:
    """The windows of a run's newest checkpoint; if there is none, those that ``choose`` gives.

    What was begun on hosts with more or less memory goes on in the same order of rows.
    """
    if storage is None:
        return choose()
    for path in reversed(folders(storage, run_key)):
        try:
            text = read_manifest(storage, path).environment.get(WINDOWS)
            return choose() if text is None else from_text(text)
        except CheckpointError:  # `find_checkpoint` warns of it
            continue
    return choose()


def find_checkpoint(run: Run, storage: Storage) -> CheckpointInfo | None:
    """The newest whole checkpoint of the run that is not beyond its end, or None.

    Another fit of the same key may have trained for longer; its result is not this one's.

    Raises:
        StorageError: the storage cannot be read.
    """

    def fits(shared: Any) -> bool:
        state = TrainState.from_state_dict(shared["state"])
        return not state.exceeds(run.plan.epochs, run.plan.max_steps)

    found = latest(storage, run.run_key, fits)
    if found is not None:
        logger.info("going on from the checkpoint of step %d (%s)", found.step, found.path)
    elif not folders(storage, run.run_key) and has_other_runs(storage, run.run_key):
        logger.info(
            "%s holds checkpoints of other runs, but none of these rows, module, initial weights "
            "and Params (run key %s): training begins at step 0; a module that a factory makes, "
            "or that is made after torch.manual_seed, has the same initial weights each time",
            storage,
            run.run_key,
        )
    return found
