"""The fitted model, in memory or saved, from whose training state a fit goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sparkdl.errors import ConfigError, StorageError
from sparkdl.storage.storage import Folder, absolute, without_password

if TYPE_CHECKING:
    from sparkdl.train.training_state import TrainingState

STATE = "training"
"""Folder beside that of a saved model's weights, which holds the training state."""
_REMEDY = "fit it with keepTrainingState=True, or pass it as initialWeights"


@dataclass(frozen=True, kw_only=True)
class InitialState:
    """Weights and training state to begin from: those of a fitted model, or the place of one."""

    source: str | None = None
    """Path or URL of a saved model; None: they are in memory."""
    weights: Mapping[str, Any] = field(default_factory=dict, repr=False)
    training: TrainingState | None = None

    @classmethod
    def of(cls, value: Any) -> InitialState:
        """Make a state of what the Param ``initialState`` takes.

        ConfigError if it is no path and no fitted model that has kept its training state.
        """
        if isinstance(value, InitialState):
            return value
        if isinstance(value, str | os.PathLike):
            return cls(source=absolute(value))
        if not hasattr(value, "trainingState") or not hasattr(value, "module"):
            raise ConfigError(
                "initialState must be a fitted model, or the path or URL of a saved one; received "
                f"{type(value).__name__}"
            )
        if value.trainingState is None:
            raise ConfigError(f"initialState: the model has no training state; {_REMEDY}")
        return cls(weights=value.module.state_dict(), training=value.trainingState)

    def read(self) -> tuple[Mapping[str, Any], TrainingState]:
        """The weights, and the state; nothing is imported or run for them.

        StorageError if there is no such model, it is damaged, or has no training state.
        """
        from sparkdl.serialization.load import open_saved, place_of_saved
        from sparkdl.storage.hadoop_storage import open_place

        if self.source is None:
            assert self.training is not None
            return self.weights, self.training
        storage = open_place(self.source)
        training = read_training_state(storage, place_of_saved(storage))
        if training is None:
            shown = without_password(self.source)
            raise StorageError(f"the model in {shown} has no training state; {_REMEDY}")
        return open_saved(self.source).weights(), training


def read_training_state(storage: Folder, model: str) -> TrainingState | None:
    """The state that was saved beside the folder of a model; None if there is none.

    StorageError if it is damaged, or of another version.
    """
    from sparkdl.serialization.saved_module import open_module
    from sparkdl.serialization.trust import INDEX
    from sparkdl.train.training_state import TrainingState

    folder = f"{model.rpartition('/')[0]}/{STATE}".lstrip("/")
    if not storage.exists(f"{folder}/{INDEX}"):
        return None
    return TrainingState.from_tree(open_module(storage, folder).weights())
