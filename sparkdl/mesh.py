"""A mesh of workers, among which a model is divided that is too large for one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from numbers import Integral
from typing import NamedTuple

from sparkdl.config import require
from sparkdl.errors import ConfigError

CUTS = ("columns", "rows", "gathered", "channels")
"""Cuts that a layout may name for a layer: its outputs are divided, its inputs (of an Embedding the
ids) are, its outputs are divided and put together again, or, of a BatchNorm between two others, its
channels are."""
SCHEDULES = ("1f1b", "gpipe", "interleaved")


class MeshPlace(NamedTuple):
    """The place of a rank in a mesh."""

    replica: int
    stage: int
    """Along ``pipeline``."""
    shard: int
    tensor: int


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Divides a model among the workers of a gang: it changes memory and speed, never the result.

    The product of the axes is the number of workers. Neighbouring ranks differ in ``tensor`` first,
    then in ``shard``, ``pipeline`` and ``data``, so that the axis that talks most stays on one
    host.

    Example::

        TorchClassifier(module=Net, parallelism=Mesh(data=4, shard=2))

    After Mesh-TensorFlow (Shazeer et al., 2018) for layouts, ZeRO (Rajbhandari et al., SC 2020) for
    ``shard``, Megatron-LM (Shoeybi et al., 2019) for ``tensor``, and GPipe (Huang et al., 2019) and
    PipeDream-Flush (Narayanan et al., 2021) for ``pipeline``.
    """

    data: int = 1
    """Replicas of the model, each of ``pipeline * shard * tensor`` workers; the ``syncStrategy`` is
    at work between them."""
    shard: int = 1
    """Workers among which parameters, gradients and optimizer state of a replica are divided; a
    layer is gathered when it computes. Each trains on rows of its own."""
    tensor: int = 1
    """Workers that compute each layer of the ``layout`` together, on the same rows."""
    layout: Mapping[str, str] | str = "auto"
    """Pattern of the names of Linear, Embedding and convolution layers -> ``"columns"`` or
    ``"rows"``: whether their outputs or their inputs are divided along ``tensor``; or
    ``"gathered"``: outputs are, and are put together again behind the layer; ``"channels"`` of a
    BatchNorm between two convolutions. ``"sequence"`` of a list of layers that take and give
    ``(rows, length, ...)`` divides values between these layers along ``length``. A ``|`` in a
    part of a pattern separates alternatives, and two numbers with a ``-`` are a range:
    ``blocks.0-3.attention.q|k|v``. ``"auto"``: that of the module's ``tensor_layout``, and what
    is found in its `nn.Sequential` chains."""
    pipeline: int = 1
    """Workers that compute the model's ``stages``, one after the other, each on another part of the
    batch at a time. They train on the same rows."""
    stages: Sequence[str] | str = "auto"
    """For each stage in order, a pattern of the names of its layers, such as ``"encoder.0-5"``.
    What comes before the second stage's first layer belongs to the first stage, and so on.
    ``"auto"`` cuts the longest list of layers so that stages have nearly equally many weights."""
    micro_batches: int | None = None
    """Parts of a batch that are on their way through the stages; None: four times ``pipeline``."""
    schedule: str = "1f1b"
    """In which order a worker computes the forward and backward passes of the parts: ``"1f1b"``
    alternates them, ``"gpipe"`` computes all forward passes first and keeps all activations for it,
    ``"interleaved"`` alternates and gives each worker several stages in turn, as many ``stages`` as
    there are patterns."""
    shard_optimizer: bool = False
    """True if the optimizer's state is divided along ``data`` though each worker computes with
    whole layers (ZeRO, stage 1): parameters are gathered once per step."""
    smallest_unit: int = 100_000
    """Numbers in the parameters of a layer from which on it is gathered by itself; smaller layers
    are gathered together with what surrounds them."""
    activation_checkpointing: bool = False
    """True if layers that are made of layers keep only their inputs for the backward pass, and
    compute again what is within (Chen et al., 2016): more time, less memory."""

    def __post_init__(self) -> None:
        for name in ("data", "shard", "tensor", "pipeline", "smallest_unit", "micro_batches"):
            value = getattr(self, name)
            if name == "micro_batches" and value is None:
                continue
            is_whole = isinstance(value, Integral) and not isinstance(value, bool)
            is_count = is_whole and int(value) >= 1
            require(is_count, f"Mesh: {name} must be a whole number of at least 1", value)
            object.__setattr__(self, name, int(value))  # it may be one of numpy's
        for name in ("shard_optimizer", "activation_checkpointing"):
            value = getattr(self, name)
            require(isinstance(value, bool), f"Mesh: {name} must be True or False", value)
        layout = self.layout
        if layout != "auto":
            check_layout(layout, "Mesh: layout", (*CUTS, "sequence"), or_else="be 'auto', or ")
            if self.pipeline > 1 and self.divides_sequence:
                raise ConfigError(
                    "Mesh: a layout cannot divide values by sequence between the layers of a "
                    "pipeline, which sends them whole; leave 'sequence' out, or pipeline at 1"
                )
        if layout != "auto" and bool(layout) != (self.tensor > 1):
            raise ConfigError(
                f"Mesh: tensor={self.tensor} and a layout of {len(layout)} patterns; a layout says "
                "which layers are divided along the axis tensor, so set both or neither, or "
                "leave it 'auto'"
            )
        if self.shard_optimizer and self.shard * self.tensor * self.pipeline > 1:
            raise ConfigError(
                "Mesh: shard_optimizer divides the optimizer's state along data, and the other "
                "axes divide it already; leave them at 1, or shard_optimizer False"
            )
        if self.shard_optimizer and self.data == 1:
            raise ConfigError(
                "Mesh: shard_optimizer divides the optimizer's state along data, which is 1; set "
                "data, the number of workers"
            )
        self._check_pipeline()

    def _check_pipeline(self) -> None:
        require(
            self.schedule in SCHEDULES, f"Mesh: schedule must be one of {SCHEDULES}", self.schedule
        )
        stages = self.stages
        if stages != "auto":
            is_list = not isinstance(stages, str) and isinstance(stages, Sequence)
            is_list = is_list and all(isinstance(pattern, str) for pattern in stages)
            require(is_list, "Mesh: stages must be a list of patterns of layers' names", stages)
            object.__setattr__(self, "stages", tuple(stages))
        if self.pipeline == 1:
            if stages != "auto" or self.micro_batches is not None or self.schedule != "1f1b":
                raise ConfigError(
                    "Mesh: stages, micro_batches and schedule are those of a pipeline; set "
                    "pipeline, or leave them unset"
                )
            return
        count, per_worker = self.num_stages, self.num_stages // self.pipeline
        if self.schedule == "interleaved":
            if count % self.pipeline or per_worker < 2:
                raise ConfigError(
                    f"Mesh: the schedule 'interleaved' gives each of {self.pipeline} workers "
                    f"several stages, and there are {count}; give a multiple of {self.pipeline}"
                )
            if self.shard > 1 or self.tensor > 1:
                raise ConfigError(
                    "Mesh: a worker with several stages cannot share them along shard or tensor; "
                    "set schedule='1f1b', or leave the other two at 1"
                )
            if self.num_micro_batches % self.pipeline:
                raise ConfigError(
                    f"Mesh: the schedule 'interleaved' needs a multiple of pipeline={self.pipeline}"
                    f" as micro_batches; received {self.num_micro_batches}"
                )
        elif count != self.pipeline:
            raise ConfigError(
                f"Mesh: pipeline={self.pipeline} and {count} stages; give each worker one, or set "
                "schedule='interleaved'"
            )
        if self.num_micro_batches < count:
            raise ConfigError(
                f"Mesh: micro_batches={self.num_micro_batches} are fewer than the {count} stages, "
                f"of which some would always wait; set at least {count}, better four times that"
            )

    def __str__(self) -> str:
        axes = {axis: getattr(self, axis) for axis in ("data", "shard", "tensor", "pipeline")}
        longer = [f"{axis}={size}" for axis, size in axes.items() if size > 1]
        text = ", ".join(longer or ["data=1"])
        return f"{text}, shard_optimizer=True" if self.shard_optimizer else text

    @property
    def size(self) -> int:
        """Workers."""
        return self.num_replicas * self.pipeline * self.num_shards * self.tensor

    @property
    def num_stages(self) -> int:
        """Stages of the model; a worker has several in turn if they are interleaved."""
        if isinstance(self.stages, str):
            return self.pipeline * (2 if self.schedule == "interleaved" else 1)
        return len(self.stages)

    @property
    def num_micro_batches(self) -> int:
        """Parts into which a batch is cut for the stages."""
        return self.micro_batches or 4 * self.pipeline

    @property
    def num_readers(self) -> int:
        """Workers that train on different rows."""
        return self.num_replicas * self.num_shards

    @property
    def is_divided(self) -> bool:
        """True if any worker has only a part of the model."""
        return self.num_replicas < self.size

    @property
    def num_replicas(self) -> int:
        """Groups of workers, each of which has the whole state."""
        return 1 if self.shard_optimizer else self.data

    @property
    def num_shards(self) -> int:
        """Workers among which a stage's optimizer state is divided, besides ``tensor``."""
        return self.data if self.shard_optimizer else self.shard

    @property
    def divides_model(self) -> bool:
        """True if no worker computes with all weights at once."""
        return self.is_divided and not self.shard_optimizer

    @property
    def divides_sequence(self) -> bool:
        """True if the layout divides values between layers along their second dimension."""
        return not isinstance(self.layout, str) and "sequence" in self.layout.values()

    @property
    def for_inference(self) -> Mesh:
        """The mesh along which rows are predicted: its workers share layers instead of stages."""
        return replace(
            self, pipeline=1, stages="auto", micro_batches=None, schedule="1f1b",
            shard=self.shard * self.pipeline, activation_checkpointing=False,
        )  # fmt: skip

    def coordinates(self, rank: int) -> MeshPlace:
        """Return the place of a rank along each axis."""
        rank, tensor = divmod(rank, self.tensor)
        rank, shard = divmod(rank, self.num_shards)
        replica, stage = divmod(rank, self.pipeline)
        return MeshPlace(replica, stage, shard, tensor)

    def reader(self, rank: int) -> int:
        """Return the number of the group of ranks with the same rows that ``rank`` belongs to."""
        place = self.coordinates(rank)
        return place.replica * self.num_shards + place.shard


def check_layout(layout: object, whose: str, cuts: Sequence[str], *, or_else: str = "") -> None:
    """Raise ConfigError, with ``whose`` it is, for what is no layout with these cuts.

    ``or_else`` is what else it may be.
    """
    is_mapping = isinstance(layout, Mapping) and all(isinstance(name, str) for name in layout)
    rule = f"must {or_else}map patterns of layers' names to one of {', '.join(cuts)}"
    require(is_mapping, f"{whose} {rule}", layout)
    assert isinstance(layout, Mapping)
    for pattern, cut in layout.items():
        require(cut in cuts, f"{whose} of {pattern!r} must be one of {', '.join(cuts)}", cut)


def paired(chain: Sequence[tuple[str, int, int]], tensor: int) -> dict[str, str]:
    """The pairs of a chain of Linear layers that divide most weights among ``tensor`` workers.

    Args:
        chain: name, inputs and outputs of each; only elementwise functions are between them.
        tensor: workers. A pair whose layers share a number of values that these cannot share
            evenly stays whole.

    Returns:
        Name of each layer of a pair -> ``"columns"`` or ``"rows"``.
    """
    before: tuple[int, dict[str, str]] = (0, {})
    best = before
    for (first, inputs, shared), (second, taken, outputs) in pairwise(chain):
        here = best
        size = shared * (inputs + outputs)
        if shared == taken and shared % tensor == 0 and before[0] + size > best[0]:
            here = before[0] + size, {**before[1], first: "columns", second: "rows"}
        before, best = best, here
    return best[1]
