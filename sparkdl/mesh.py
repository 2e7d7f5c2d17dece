"""A mesh of workers, among which a model is divided that is too large for one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkdl.config import require
from sparkdl.errors import ConfigError

CUTS = ("columns", "rows")
"""What a layout may say of a Linear layer's weight, ``(outputs, inputs)``: its outputs or its
inputs are divided."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How the workers of a gang divide a model: it changes memory and speed, never the result.

    The product of the axes is the number of workers. Neighbouring ranks differ in ``tensor`` first,
    then in ``shard``, then in ``data``, so that the axis that talks most stays on one host.

    Example::

        TorchClassifier(module=Net, parallelism=Mesh(data=4, shard=2))

    After Mesh-TensorFlow (Shazeer et al., 2018) for layouts, ZeRO (Rajbhandari et al., SC 2020) for
    ``shard``, and Megatron-LM (Shoeybi et al., 2019) for ``tensor``.
    """

    data: int = 1
    """Replicas of the model, each of ``shard * tensor`` workers; their gradients are summed by the
    ``syncStrategy``."""
    shard: int = 1
    """Workers among which parameters, gradients and optimizer state of a replica are divided; a
    layer is gathered when it computes. Each trains on rows of its own."""
    tensor: int = 1
    """Workers that compute each layer of the ``layout`` together, on the same rows."""
    layout: Mapping[str, str] = field(default_factory=dict)
    """Pattern of the names of Linear layers -> ``"columns"`` or ``"rows"``: whether their outputs
    or their inputs are divided along ``tensor``. A ``|`` in a part of a pattern separates
    alternatives: ``*.attention.q|k|v``."""
    shard_optimizer: bool = False
    """Whether the optimizer's state is divided along ``data`` though each worker computes with
    whole layers (ZeRO, stage 1): parameters are gathered once per step."""
    smallest_unit: int = 100_000
    """Numbers in the parameters of a layer from which on it is gathered by itself; smaller layers
    are gathered together with what surrounds them."""
    activation_checkpointing: bool = False
    """Whether layers that are made of layers keep only their inputs for the backward pass, and
    compute again what is within (Chen et al., 2016): more time, less memory."""

    def __post_init__(self) -> None:
        for name in ("data", "shard", "tensor", "smallest_unit"):
            value = getattr(self, name)
            is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
            require(is_count, f"Mesh: {name} must be a whole number of at least 1", value)
        layout = self.layout
        require(
            isinstance(layout, Mapping) and all(isinstance(name, str) for name in layout),
            "Mesh: layout must map patterns of layers' names to 'columns' or 'rows'",
            layout,
        )
        for pattern, cut in layout.items():
            require(cut in CUTS, f"Mesh: layout of {pattern!r} must be one of {CUTS}", cut)
        if bool(layout) != (self.tensor > 1):
            raise ConfigError(
                f"Mesh: tensor={self.tensor} and a layout of {len(layout)} patterns; a layout says "
                "which layers are divided along the axis tensor, so set both or neither"
            )
        if self.shard_optimizer and (self.shard > 1 or self.tensor > 1):
            raise ConfigError(
                "Mesh: shard_optimizer divides the optimizer's state along data, and shard and "
                "tensor divide it already; leave them at 1, or shard_optimizer False"
            )

    def __str__(self) -> str:
        axes = ("data", "shard", "tensor")
        text = ", ".join(f"{axis}={getattr(self, axis)}" for axis in axes)
        return f"{text}, shard_optimizer" if self.shard_optimizer else text

    @property
    def size(self) -> int:
        """Workers."""
        return self.num_replicas * self.num_shards * self.tensor

    @property
    def num_readers(self) -> int:
        """Workers that train on different rows."""
        return self.num_replicas * self.num_shards

    @property
    def num_replicas(self) -> int:
        """Groups of workers, each of which has the whole state."""
        return 1 if self.shard_optimizer else self.data

    @property
    def num_shards(self) -> int:
        """Workers among which optimizer state is divided, besides ``tensor``."""
        return self.data if self.shard_optimizer else self.shard

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """Where a rank is along `num_replicas`, `num_shards` and ``tensor``."""
        reader, tensor = divmod(rank, self.tensor)
        replica, shard = divmod(reader, self.num_shards)
        return replica, shard, tensor
