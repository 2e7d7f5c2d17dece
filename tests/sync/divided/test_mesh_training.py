"""A model that is divided along a mesh learns what one process learns, and goes on on another."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.comm.communicator import Communicator, LocalCommunicator
from sparkdl.config import CUSTOM, EarlyStopping, TrainConfig
from sparkdl.data.spool.mapped import MappedRows, ShardData
from sparkdl.errors import ConfigError
from sparkdl.inference.regression import REGRESSION
from sparkdl.mesh import Mesh
from sparkdl.models import LanguageModel
from sparkdl.serialization.travel.attributes import Attributes
from sparkdl.storage.checkpoint_format import decode
from sparkdl.sync.divided.dividing import whole_weights
from sparkdl.sync.divided.mesh_ranks import MeshRanks
from sparkdl.train.callbacks import NullObserver
from sparkdl.train.loop import train
from sparkdl.train.rank_state import ResumePoint, united
from tests.gang import Gang
from tests.train.runs import NUM_FEATURES, Keeper, make_data, plan_for, seeded

pytestmark = pytest.mark.gang

ROWS = [23, 7, 16, 11]
LAYOUT = {"blocks.*.first": "columns", "blocks.*.second": "rows"}
MESHES = {
    "shard": Mesh(shard=2, smallest_unit=1),
    "shard as one unit": Mesh(shard=2),
    "activations again": Mesh(shard=2, smallest_unit=1, activation_checkpointing=True),
    "optimizer": Mesh(data=2, shard_optimizer=True),
    "tensor": Mesh(tensor=2, layout=LAYOUT),
    "data": Mesh(data=2),
    "pipeline": Mesh(pipeline=2, micro_batches=3),
    "gpipe": Mesh(pipeline=2, stages=["blocks.0", "blocks.1"], schedule="gpipe"),
    "interleaved": Mesh(
        pipeline=2, stages=["into", "blocks.0", "blocks.1", "out"], schedule="interleaved"
    ),
}
PAIRS = {
    "data, shard": Mesh(data=2, shard=2, smallest_unit=1),
    "data, tensor": Mesh(data=2, tensor=2, layout=LAYOUT),
    "shard, tensor": Mesh(
        shard=2, tensor=2, layout=LAYOUT, smallest_unit=1, activation_checkpointing=True
    ),
    "shard": Mesh(shard=4, smallest_unit=1),
    "data, pipeline": Mesh(data=2, pipeline=2),
    "shard, pipeline": Mesh(shard=2, pipeline=2, smallest_unit=1, activation_checkpointing=True),
    "tensor, pipeline": Mesh(tensor=2, layout=LAYOUT, pipeline=2),
}


class Block(nn.Module):
    """Two layers that a layout may divide, and a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 6, dtype=torch.float64)
        self.second = nn.Linear(6, 7, dtype=torch.float64)
        self.norm = nn.LayerNorm(7, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.second(torch.tanh(self.first(x))))


class Net(nn.Module):
    """Blocks between two layers; 7 numbers cannot be shared evenly, and the last row not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(NUM_FEATURES, 7, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(7, 1, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def train_on_rank(
    comm: Communicator,
    config: TrainConfig,
    *,
    save_at: int | None = None,
    before: Sequence[ResumePoint] = (),
    own: ResumePoint | None = None,
    rows: Sequence[int] = ROWS,
    make: Callable[[], nn.Module] | None = None,
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], dict[int, ResumePoint]]:
    """Train this rank's part; whole weights, history, and what was saved."""
    is_text = config.loss == "cross_entropy"
    data, validation = ((text if is_text else make_data)(some) for some in (rows, [3, 0, 14, 2]))
    mesh = config.parallelism or Mesh(data=comm.world_size)
    plan = plan_for(data, config, validation=validation, world_size=mesh.num_readers,
                    weighted=not is_text)  # fmt: skip
    if make is None:
        make = Net
        if is_text:
            make = partial(LanguageModel, num_tokens=12, max_length=8, width=12, num_heads=2,
                           feedforward=14)  # fmt: skip
    held = [shard.shard_id for shard in plan.shards_of(mesh.reader(comm.rank))]
    net, resume = seeded(make).double(), own
    if before:
        state = united([point.rank_state or {} for point in before])
        parts = [(point.rank_state or {}).get("divided") for point in before]
        resume = dataclasses.replace(before[0], rank_state=state)
        if parts[0] is not None:
            parts = [part for part in parts if part is not None]
            resume = dataclasses.replace(resume, parts=lambda: iter(parts))
    sink = Keeper(() if save_at is None else (save_at,))
    outcome = train(
        module=net, config=config, plan=plan, comm=comm, device=torch.device("cpu"),
        shards=[MappedRows(data[number], plan) for number in held],
        validation=[MappedRows(validation[number], plan) for number in held],
        checkpoints=sink, resume=resume, observer=NullObserver(),
        held=Attributes(net, is_divided=mesh.is_divided),
    )  # fmt: skip
    whole = decode(b"".join(whole_weights(net, outcome.pipeline)), "the weights")
    return whole, outcome.history, sink.points


def text(rows: Sequence[int]) -> list[ShardData]:
    """Counting in steps of 1 to 3, modulo 11: tokens, and those that follow."""
    shards = []
    for number, count in enumerate(rows):
        starts = torch.arange(count)[:, None] + number
        tokens = (starts + (starts % 3 + 1) * torch.arange(9)) % 11
        columns = {"feature x": tokens[:, :-1].clone(), "label y": tokens[:, 1:].clone()}
        shards.append(ShardData(f"shard {number}", columns))
    return shards


BASE: dict[str, Any] = {
    "loss": "mse", "task": REGRESSION, "epochs": 3, "batch_size": 8, "optimizer": "adamw",
    "learning_rate": 0.01,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "adam, clipped, in two parts": {
        "gradient_clip_norm": 0.5, "gradient_accumulation_steps": 2,
        "parameter_groups": {"*.bias": {"weight_decay": 0.0}}, "frozen_layers": ("into",),
    },
    "momentum, the best": {
        "optimizer": "sgd", "optimizer_params": {"momentum": 0.9}, "learning_rate": 0.05,
        "early_stopping": EarlyStopping(monitor="val_loss", patience=5),
    },
}  # fmt: skip


def config_of(case: str, mesh: Mesh | None = None, **other: Any) -> TrainConfig:
    return TrainConfig(**{**BASE, **CASES[case], "parallelism": mesh, **other})


def one_process(config: TrainConfig) -> Any:
    return train_on_rank(LocalCommunicator(), dataclasses.replace(config, parallelism=None))


@cache
def one_process_of(case: str) -> Any:
    """What each mesh is compared with."""
    return one_process(config_of(case))


def train_made(comm: Communicator, config: TrainConfig, make: Callable[[], nn.Module]) -> Any:
    return train_on_rank(comm, config, make=make)


def alone_with(config: TrainConfig, make: Callable[[], nn.Module]) -> Any:
    return train_made(LocalCommunicator(), dataclasses.replace(config, parallelism=None), make)


def assert_equal(found: Any, expected: Any) -> None:
    for name, value in expected[0].items():
        assert torch.allclose(found[0][name], value, rtol=1e-12, atol=1e-12), name
    assert len(found[1]) == len(expected[1])
    for own, other in zip(found[1], expected[1], strict=True):
        assert own.keys() == other.keys()
        for name in own.keys() - {"seconds"}:
            assert own[name] == pytest.approx(other[name], rel=1e-11), name


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_learn_what_one_process_learns(gang: Gang, case: str, mesh: str) -> None:
    for found in gang.run(train_on_rank, config_of(case, MESHES[mesh])):
        assert_equal(found, one_process_of(case))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", PAIRS)
def test_four_ranks_learn_what_one_process_learns(gang4: Gang, mesh: str) -> None:
    case = list(CASES)["shard" in mesh]
    for found in gang4.run(train_on_rank, config_of(case, PAIRS[mesh])):
        assert_equal(found, one_process_of(case))


@pytest.mark.slow
def test_a_language_model_has_the_same_curve_along_each_mesh(gang: Gang) -> None:
    attention = {"*.attention.q|k|v": "columns", "*.attention.out": "rows"}
    layout = {**attention, "*.mlp.0": "columns", "*.mlp.2": "rows"}
    tensor = Mesh(tensor=2, layout={**layout, "embedding": "rows", "head": "gathered"})
    meshes = (Mesh(shard=2, smallest_unit=1), tensor, MESHES["optimizer"], Mesh(pipeline=2))
    text: dict[str, Any] = {
        **BASE, "loss": "cross_entropy", "task": CUSTOM, "epochs": 6, "learning_rate": 0.05,
    }  # fmt: skip
    alone = one_process(TrainConfig(**text))
    assert alone[1][-1]["val_loss"] < 0.75 < 1.5 < alone[1][0]["val_loss"]
    for mesh in meshes:
        for found in gang.run(train_on_rank, TrainConfig(**text, parallelism=mesh)):
            assert_equal(found, alone)


class Mixed(nn.Module):
    """Torch's own layers of sequences, a mask, and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.out = nn.Linear(8, 12)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        padded = (tokens == 0) & (torch.arange(tokens.shape[1]) > 0)
        states = self.encoder(self.embedding(tokens), src_key_padding_mask=padded)
        states, _ = self.gru(states)
        return {"logits": self.out(states).transpose(1, 2), "states": states}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # without stages
@pytest.mark.slow
@pytest.mark.parametrize("stages", ["auto", ["encoder.layers.0-2", "gru"]], ids=["auto", "gru"])
def test_layers_of_torchs_own_go_through_stages(gang: Gang, stages: Any) -> None:
    # The gradient of a bias of attention's keys is nothing but rounding, which Adam makes large.
    values = {**BASE, "optimizer": "sgd", "learning_rate": 0.1, "loss": "cross_entropy"}
    mesh = Mesh(pipeline=2, stages=stages, micro_batches=2)
    config = TrainConfig(**{**values, "task": CUSTOM, "epochs": 2}, parallelism=mesh)
    alone = alone_with(config, Mixed)
    for found in gang.run(train_made, config, Mixed):
        assert_equal(found, alone)


class Shaping(Net):
    """Changes shapes in place before a stage begins, within a mode of torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.device("cpu"):
            x = self.into(x).repeat(1, 2)
            x.unsqueeze_(0)
            x = x[0, :, :7] + torch.arange(7)
            x.t_()
            x = torch.cat([x, x])[:7].t()
            for block in self.blocks:
                x = block(x)
            return self.out(x)


@pytest.mark.slow
def test_values_of_other_stages_may_be_changed_in_place(gang: Gang) -> None:
    stages = ["into", "blocks.0", "blocks.1", "out"]
    mesh = Mesh(pipeline=2, stages=stages, schedule="interleaved", micro_batches=4)
    config = TrainConfig(**BASE, parallelism=mesh)
    alone = alone_with(config, Shaping)
    for found in gang.run(train_made, config, Shaping):
        assert_equal(found, alone)


class Convolved(nn.Module):
    """Convolutions along the features, with statistics between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Conv1d(4, 3, 3)
        self.out = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = torch.relu(self.norm(self.first(x.unsqueeze(1))))
        return self.out(self.second(maps).mean(2))


def test_channels_and_their_statistics_are_divided(gang: Gang) -> None:
    layout = {"first": "columns", "norm": "channels", "second": "rows"}
    for case in CASES:
        config = config_of(case, Mesh(tensor=2, layout=layout), frozen_layers=())
        alone = alone_with(config, Convolved)
        for found in gang.run(train_made, config, Convolved):
            assert_equal(found, alone)


class Turned(Net):
    """Gives a view of what its last layer gives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).t().t()


def in_place(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    output *= 2
    return (output.squeeze(1) - target).square()


@pytest.mark.parametrize("mesh", ["shard", "optimizer"])
def test_a_loss_may_change_outputs_in_place(gang: Gang, mesh: str) -> None:
    config = TrainConfig(**{**BASE, "loss": in_place}, parallelism=MESHES[mesh])
    alone = alone_with(config, Turned)
    for found in gang.run(train_made, config, Turned):
        assert_equal(found, alone)


class Single(Net):
    """Net in float32, between inputs and outputs in float64."""

    def double(self) -> Single:
        return self.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).double()


def test_stages_send_what_bf16_computes_in(gang: Gang) -> None:
    config = TrainConfig(**BASE, precision="bf16", parallelism=MESHES["pipeline"])
    _, alone, _ = alone_with(config, Single)
    for found in gang.run(train_made, config, Single):
        losses = [record["val_loss"] for record in found[1]]
        assert losses == pytest.approx([record["val_loss"] for record in alone], rel=0.02)


class Masking(nn.Module):
    """Gives a mask of its inputs besides what it computes with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, 7, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), (x.sum(1, keepdim=True) > 0).to(x.dtype)


class Masked(Net):
    def __init__(self) -> None:
        super().__init__()
        self.into = Masking()  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, mask = self.into(x)
        for block in self.blocks:
            x = block(x) * mask
        return self.out(x)


def test_a_layer_of_an_earlier_stage_gives_each_part_a_mask_of_its_own(gang: Gang) -> None:
    config = TrainConfig(**BASE, parallelism=MESHES["pipeline"])
    alone = alone_with(config, Masked)
    for found in gang.run(train_made, config, Masked):
        assert_equal(found, alone)


class InPlace(nn.Module):
    """Changes what it gets, and in training alone gives and takes two values."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> Any:
        found = self.layer(nn.functional.relu(x, inplace=True))
        return found if more is None else (found + more, more)


class ByMode(Net):
    """Uses in evaluation alone a layer of the first stage, and sends other values."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Linear(NUM_FEATURES, NUM_FEATURES).requires_grad_(False)
        self.blocks[1] = InPlace()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.into(x if self.training else self.judge(x)))
        x = self.blocks[1](x, x.detach().tanh())[0] if self.training else self.blocks[1](x)
        return self.out(x)


@pytest.mark.parametrize("mesh", ["pipeline", "gpipe"])
def test_stages_do_in_each_mode_what_the_module_does(gang: Gang, mesh: str) -> None:
    config = TrainConfig(**BASE, parallelism=MESHES[mesh])
    alone = alone_with(config, ByMode)
    for found in gang.run(train_made, config, ByMode):
        assert_equal(found, alone)


def points(found: Sequence[Any], step: int) -> list[ResumePoint]:
    return [one[2][step] for one in found]


def test_a_run_that_goes_on_along_the_same_mesh_has_the_same_bits(gang: Gang) -> None:
    for mesh in (MESHES["shard"], MESHES["tensor"], MESHES["pipeline"]):
        config = config_of("momentum, the best", mesh, epochs=2)
        whole = gang.run(train_on_rank, config)
        saved = points(gang.run(save_on_rank, config, 4), 4)
        again = gang.run(resume_on_rank, config, saved)
        for own, other in zip(whole, again, strict=True):
            assert all(torch.equal(own[0][name], value) for name, value in other[0].items())


class Centered(Net):
    """A weight without gradient follows the rows that its replica has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(NUM_FEATURES), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and len(x):
            with torch.no_grad():
                self.center.lerp_(x.mean(0), 0.2)
        return super().forward(x - self.center)


def test_frozen_weights_that_forward_changes_are_those_of_their_replica(gang: Gang) -> None:
    """As without a mesh, also after a run goes on in the midst of an epoch."""
    for mesh in (MESHES["data"], MESHES["tensor"]):
        config = config_of("momentum, the best", mesh, epochs=2)
        whole = gang.run(train_made, config, Centered)
        if mesh.data == 2:
            assert_equal(
                whole[0],
                gang.run(train_made, config_of("momentum, the best", epochs=2), Centered)[0],
            )
        saved = points(gang.run(save_on_rank, config, 4, Centered), 4)
        again = gang.run(resume_on_rank, config, saved, Centered)
        for own, other in zip(whole, again, strict=True):
            assert all(torch.equal(own[0][name], value) for name, value in other[0].items())


def save_on_rank(comm: Communicator, config: TrainConfig, step: int, make: Any = None) -> Any:
    config = dataclasses.replace(config, max_steps=step + 1)
    return train_on_rank(comm, config, save_at=step, make=make)


def resume_on_rank(
    comm: Communicator, config: TrainConfig, saved: Sequence[ResumePoint], make: Any = None
) -> Any:
    """Go on with this rank's own file; another replica's has the parameters."""
    kept = [(point.rank_state or {})["divided"] for point in saved]
    part = kept[comm.rank] or kept[0]
    own = dataclasses.replace(saved[comm.rank], parts=lambda: iter([part]))
    return train_on_rank(comm, config, own=own, make=make)


@pytest.mark.parametrize(
    ("first", "then", "case"),
    [
        ("shard", "tensor", "adam, clipped, in two parts"),
        ("tensor", "optimizer", "momentum, the best"),
        ("shard", "data", "momentum, the best"),
        ("data", "shard", "adam, clipped, in two parts"),
        ("pipeline", "shard", "momentum, the best"),
        ("tensor", "interleaved", "adam, clipped, in two parts"),
    ],
)
def test_a_run_goes_on_along_another_mesh(gang: Gang, first: str, then: str, case: str) -> None:
    before, after = (config_of(case, MESHES[name]) for name in (first, then))
    saved = points(gang.run(save_on_rank, before, 4), 4)
    for found in gang.run(go_on_elsewhere, after, saved):
        assert_equal(found, one_process_of(case))
    # With none.
    alone = go_on_elsewhere(LocalCommunicator(), config_of(case), saved)
    assert_equal(alone, one_process_of(case))


def go_on_elsewhere(comm: Communicator, config: TrainConfig, saved: Sequence[ResumePoint]) -> Any:
    """Go on with what the ranks of another mesh have saved."""
    return train_on_rank(comm, config, before=saved)


@pytest.mark.parametrize(
    ("layout", "remedy"),
    [
        ({"blocks.*.first": "columns"}, "cannot compute"),
        ({"blocks.*.second": "rows", "into": "rows"}, "cannot compute|something else"),
    ],
)
def test_a_layout_that_changes_the_result_is_refused(
    gang: Gang, layout: dict[str, str], remedy: str
) -> None:
    config = config_of("momentum, the best", Mesh(tensor=2, layout=layout))
    for error in gang.run(error_on_rank, config):
        assert re.search(remedy, error), error


def error_on_rank(comm: Communicator, config: TrainConfig) -> str:
    try:
        train_on_rank(comm, config)
    except ConfigError as error:
        return str(error)
    return "no error"


def test_torch_takes_no_mesh_for_that_of_an_earlier_fit(gang: Gang) -> None:
    """It would use groups of that fit, which are gone, by what it has cached."""
    assert gang.run(are_meshes_equal) == [False, False]


def are_meshes_equal(comm: Communicator) -> bool:
    first, second = (MeshRanks.of(Mesh(shard=2), comm, torch.device("cpu")) for _ in range(2))
    return first.shard_mesh == second.shard_mesh
