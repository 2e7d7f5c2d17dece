"""The earlier fit from which a fit goes on, and what must agree for that."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Literal

from sparkdl.errors import ConfigError
from sparkdl.runtime.process import borrowed_generator
from sparkdl.serialization.initial_weights import InitialWeights, load_initial_weights
from sparkdl.spark.run.run import FitRequest
from sparkdl.sync.population.population import PopulationStrategy

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.train.training_state import TrainingMethod, TrainingState


def check_initial_state(
    module: nn.Module, request: FitRequest, mode: Literal["gang", "rounds"]
) -> tuple[TrainingMethod | None, TrainingState | None]:
    """Give the module the weights of the earlier fit, and check that its training can go on.

    Returns:
        How the module is trained, if the fit goes on or another may go on from it, and what the
        earlier fit has left, if there is one.

    Raises:
        ConfigError: the earlier fit was another, or the strategy has states for each member.
        StorageError: the model cannot be read, or has no training state.
    """
    from sparkdl.train.training_state import method_of

    initial, config = request.initial_state, request.config
    if initial is None and not request.keep_training_state:
        return None, None
    param = "keepTrainingState" if initial is None else "initialState"
    if isinstance(config.sync_strategy, PopulationStrategy):
        name = type(config.sync_strategy).__name__
        raise ConfigError(
            f"{param} has no meaning with {name}, whose members have optimizers of their own; "
            "use another strategy, or initialWeights"
        )
    if initial is not None:
        if request.initial_weights is not None:
            raise ConfigError("initialState brings weights too; leave initialWeights out")
        weights, left = initial.read()
        load_initial_weights(module, InitialWeights(source=weights), "the weights of initialState")
    with borrowed_generator(config.seed):
        method = method_of(config, copy.deepcopy(module), mode)
    return method, None if initial is None else left.for_method(method)
