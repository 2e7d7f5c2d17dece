"""From which checkpoint does a fit go on?"""

from __future__ import annotations

import logging
from typing import Any

from sparkdl.spark.run.run import Run
from sparkdl.storage.checkpoint_format import CheckpointInfo, folders, has_other_runs, latest
from sparkdl.storage.storage import Storage
from sparkdl.train.state import TrainState

logger = logging.getLogger(__name__)


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
