"""Module, data and configuration must fit together before anything is launched."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.data.plan import Column, Shard, TrainPlan, make_plan
from sparkdl.data.spool.writer import ColumnStats, SpoolSummary
from sparkdl.errors import ConfigError, DataError
from sparkdl.inputs import Sequence
from sparkdl.spark.fit.checks import (
    check_labels,
    check_sync_batch_norm,
    check_training,
    make_module,
    prepare_columns,
    shaped,
)
from sparkdl.spark.fit.dry_run import check_empty_batches, dry_run, watched_run
from sparkdl.spark.frames.shard_table import SpooledShard
from sparkdl.spark.run.run import FitRequest
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

X = Column(name="x", role="feature", dtype="float32", shape=(4,))
Y = Column(name="y", role="label", dtype="int64", shape=())


CONFIG = {field.name for field in fields(TrainConfig)}


def config(**options: Any) -> TrainConfig:
    task = options.setdefault("task", "classification")
    return TrainConfig(
        **{"loss": "cross_entropy" if task == "classification" else "mse", "seed": 3, **options}
    )


def request(module: Any = None, **changes: Any) -> FitRequest:
    values: dict[str, Any] = {
        "module": module if module is not None else nn.Linear(4, 3),
        "config": config(**{name: changes.pop(name) for name in CONFIG & changes.keys()}),
        "feature_cols": ("x",), "input_shapes": (None,), "label_col": "y", "weight_col": None,
        "validation_col": None, "num_workers": None, "max_restarts": 0, "verbose": 0,
        "cpus_per_worker": None, "gpus_per_worker": None,
    }  # fmt: skip
    return FitRequest(**{**values, **changes})


def test_the_users_module_is_copied() -> None:
    module = nn.Linear(4, 3)
    made, float_dtype = make_module(request(module))
    assert made is not module
    assert torch.equal(made.weight, module.weight)  # type: ignore[arg-type]
    assert float_dtype == "float32"


class Elsewhere(nn.Linear):
    """As if on a GPU: remembers where it is."""

    place = "cuda"

    def cpu(self) -> Elsewhere:
        self.place = "cpu"
        return self


@pytest.mark.parametrize("given", [Elsewhere(4, 3), lambda: Elsewhere(4, 3)])
def test_the_drivers_module_is_on_the_cpu(given: Any) -> None:
    made, _ = make_module(request(given))
    assert made.place == "cpu"
    if isinstance(given, Elsewhere):
        assert given.place == "cuda"


def test_a_callable_makes_the_same_module_each_time_and_leaves_torchs_generator_alone() -> None:
    before = torch.random.get_rng_state()
    one, two = (make_module(request(lambda: nn.Linear(4, 3)))[0] for _ in range(2))
    assert torch.equal(one.weight, two.weight)  # type: ignore[arg-type]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_callables_on_several_threads_make_the_same_module() -> None:
    asked = request(lambda: nn.Sequential(*(nn.Linear(100, 100) for _ in range(50))))
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(make_module, [asked, asked])
    assert all(map(torch.equal, one[0].parameters(), two[0].parameters()))


def test_a_callable_must_make_a_module() -> None:
    with pytest.raises(ConfigError, match="callable that returns one; it returned dict"):
        make_module(request(dict))


def test_a_double_module_takes_double_features() -> None:
    assert make_module(request(nn.Linear(1, 1).double()))[1] == "float64"


class Shy(nn.Linear):
    """Cannot be looked at."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._forward_hooks:
            raise RuntimeError("somebody looks")
        return super().forward(x)


def test_a_module_that_cannot_be_looked_at_trains_without_a_graph() -> None:
    graphs: list[Any] = []
    assert watched_run(Shy(4, 3), [X, Y], request(), graphs.append).num_classes == 3
    assert graphs == []
    watched_run(nn.Linear(4, 3), [X, Y], request(), graphs.append)
    assert [node["op"] for node in graphs[0]["nodes"]] == ["input", "Linear", "output"]
    with pytest.raises(ConfigError, match="cannot take the features"):
        watched_run(nn.Linear(5, 3), [X, Y], request(), graphs.append)


def test_dry_run_counts_the_classes() -> None:
    assert dry_run(nn.Linear(4, 3), [X, Y], request()).num_classes == 3
    one = request(loss="bce_with_logits")
    assert dry_run(nn.Linear(4, 1), [X, Y], one).num_classes == 2
    assert dry_run(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), [X, Y], one).num_classes == 2
    assert dry_run(nn.Linear(4, 1), [X, Y], request(task="regression")).num_classes is None


@pytest.mark.parametrize("module", [nn.Linear(4, 1), nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))])
def test_one_output_is_no_output_for_each_class(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"one output, .* give the module two, or use loss='bce_"):
        dry_run(module, [X, Y], request())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "bce_with_logits"}, r"output has shape \(2, 3\) but the target has shape \(2,\)"),
        ({"task": "regression", "loss": "mse"}, "so that they are equal"),
        (
            {"task": "regression", "loss": nn.GaussianNLLLoss()},
            r"cannot compare the module's output with \"y\" int64 \('batch',\): TypeError: ",
        ),
    ],
)
def test_the_loss_must_take_output_and_label(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dry_run(nn.Linear(4, 3), [X, Y], request(**options))


def refuses(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise AssertionError("zeros")


def test_a_loss_of_the_users_is_not_tried() -> None:
    assert dry_run(nn.Linear(4, 3), [X, Y], request(loss=refuses)).num_classes == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "bce"}, "BCELoss compares numbers, but a classifier's outputs"),
        ({"loss": "cros_entropy"}, "unknown loss"),
        ({"optimizer": "adamm"}, "unknown optimizer"),
        ({"optimizer": "sgd", "optimizer_params": {"momentumm": 1}}, "refused .*momentumm"),
        ({"optimizer": lambda parameters: parameters}, "must make a torch.optim.Optimizer"),
        ({"scheduler": lambda optimizer: optimizer}, "must return an LRScheduler"),
        ({"metrics": {"x": dict}}, "'x' must be a torchmetrics.Metric"),
    ],
)
def test_what_workers_could_not_build_is_refused_on_the_driver(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_training(nn.Linear(4, 3), request(**options))


def test_building_for_the_check_changes_nothing() -> None:
    def greedy(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        first.data.fill_(torch.rand(()))
        return torch.optim.SGD([first, *others], lr=0.1)

    module = nn.Linear(4, 3)
    asked = request(module, optimizer=greedy)
    weights, before = module.weight.clone(), torch.random.get_rng_state()
    check_training(module, asked)
    assert torch.equal(module.weight, weights)
    assert torch.equal(torch.random.get_rng_state(), before)


def for_cuda(parameters: Any) -> torch.optim.Optimizer:
    raise RuntimeError("no CUDA here")


def test_what_the_driver_cannot_build_is_left_to_the_workers() -> None:
    check_training(nn.Linear(4, 3), request(optimizer=for_cuda, device="cuda"))
    check_training(nn.LazyLinear(3), request(optimizer=for_cuda))
    with pytest.raises(RuntimeError, match="no CUDA here"):
        check_training(nn.Linear(4, 3), request(optimizer=for_cuda))


class Recorder(nn.Module):
    """Remembers its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(2)
        self.norm = nn.BatchNorm1d(2)
        self.inputs: tuple[torch.Tensor, ...] = ()

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.inputs = inputs
        out: torch.Tensor = self.norm(self.lazy(inputs[0]))
        return out + torch.rand(1)


def test_dry_run_gives_what_training_will_give() -> None:
    columns = [
        X,
        Column(name="image", role="feature", dtype="uint8", shape=(1, 8, 8)),
        Column(name="flag", role="feature", dtype="bool", shape=()),
    ]
    module = Recorder().train()
    asked = request(module)
    torch.manual_seed(1)
    assert dry_run(module, columns, asked).num_classes == 2
    assert [(i.dtype, tuple(i.shape)) for i in module.inputs] == [
        (torch.float32, (2, 4)),
        (torch.uint8, (2, 1, 8, 8)),
        (torch.bool, (2,)),
    ]
    assert module.training
    assert not nn.parameter.is_lazy(module.lazy.weight)
    assert module.norm.num_batches_tracked == 0
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(3))


def test_lazy_weights_follow_from_the_seed() -> None:
    modules = [nn.LazyLinear(3) for _ in range(3)]
    for number, module in enumerate(modules):
        torch.manual_seed(number)
        dry_run(module, [X], request(seed=min(number, 1)))
    assert not torch.equal(modules[0].weight, modules[1].weight)
    assert torch.equal(modules[1].weight, modules[2].weight)


def test_a_module_that_does_not_take_the_features() -> None:
    module = nn.Linear(5, 3).train()
    with pytest.raises(ConfigError) as caught:
        dry_run(module, [X, Y], request())
    message = str(caught.value)
    assert message.startswith("the module cannot take the features (\"x\" float32 ('batch', 4)): ")
    assert message.endswith("adapt the module, or set inputShape")
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert module.training


def test_whole_numbers_where_the_module_takes_floating_ones() -> None:
    counts = Column(name="n", role="feature", dtype="int32", shape=(4,))
    with pytest.raises(
        ConfigError, match=r'adapt the module, cast "n" to float, or set inputShape'
    ):
        dry_run(nn.Linear(4, 3), [counts, Y], request())


def test_a_classifier_returns_a_tensor() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    with pytest.raises(ConfigError, match="it returned tuple; use TorchEstimator"):
        dry_run(Two(), [X], request())
    assert dry_run(Two(), [X], request(task="custom")).num_classes is None


class Viewing(nn.Module):
    """Cannot tell the second dimension of a batch without rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1) + torch.rand(1)


def plan_of(rows: list[int]) -> TrainPlan:
    shards = [
        Shard(
            shard_id=i, host="", path="", num_rows=n, num_validation_rows=0, fingerprint="",
            num_bytes=0,
        )
        for i, n in enumerate(rows)
    ]  # fmt: skip
    return make_plan(columns=[X, Y], shards=shards, world_size=len(rows), batch_size=4, epochs=1)


def test_sync_batch_norm_needs_layers_and_workers_in_step() -> None:
    config = TrainConfig(sync_batch_norm=True)
    norm = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    check_sync_batch_norm(norm, config, 2)
    check_sync_batch_norm(nn.Linear(4, 3), TrainConfig(), 2)
    with pytest.raises(ConfigError, match="the module has no BatchNorm layer; unset it"):
        check_sync_batch_norm(nn.Linear(4, 3), config, 2)
    apart = TrainConfig(sync_batch_norm=True, sync_strategy=ParameterAveraging())
    check_sync_batch_norm(norm, apart, 1)
    with pytest.raises(ConfigError, match="with ParameterAveraging they train apart"):
        check_sync_batch_norm(norm, apart, 2)


@pytest.mark.parametrize(
    ("rows", "parts", "is_set", "is_refused"),
    [
        ([8, 1], 1, True, True),  # two steps, one row
        ([8, 2], 1, True, False),
        ([8, 2], 2, True, True),  # one row a step, in two parts
        ([8, 1], 1, False, False),
        ([1], 4, True, False),
    ],
)
def test_sync_batch_norm_may_need_modules_that_take_no_rows(
    rows: list[int], parts: int, is_set: bool, is_refused: bool
) -> None:
    config = TrainConfig(sync_batch_norm=is_set, gradient_accumulation_steps=parts, batch_size=4)
    before = torch.random.get_rng_state()
    check_empty_batches(nn.Flatten(), plan_of(rows), config)
    if is_refused:
        with pytest.raises(ConfigError, match=r"without rows, .* torch\.flatten\(x, 1\)"):
            check_empty_batches(Viewing(), plan_of(rows), config)
    else:
        check_empty_batches(Viewing(), plan_of(rows), config)
    assert torch.equal(torch.random.get_rng_state(), before)


class Table:
    """A shard table that knows its columns."""

    def columns(self, shards: Any) -> tuple[Column, ...]:
        return (X, Y)

    def check_indicator(self, name: str, shards: Any) -> None:
        raise DataError(f"asked for {name}")


def test_input_shape_reshapes_the_features() -> None:
    table: Any = Table()
    columns = shaped(table, [], request(input_shapes=((1, 2, 2),)))
    assert [column.shape for column in columns] == [(1, 2, 2), ()]
    assert shaped(table, [], request()) == (X, Y)
    with pytest.raises(DataError, match=r'"x" has 4 values per row \(shape \(4,\)\), which'):
        shaped(table, [], request(input_shapes=((3, 3),)))
    with pytest.raises(DataError, match="asked for v"):
        shaped(table, [], request(validation_col="v"))


def test_sequences_are_padded_with_values_of_their_own() -> None:
    class Padded(Table):
        def columns(self, shards: Any) -> tuple[Column, ...]:
            kind = Sequence("x", padding_value=0.5)
            return (replace(X, dtype="int64", shape=(), specification=kind), Y)

    table: Any = Padded()
    with pytest.raises(ConfigError, match=r'padding_value 0.5 of "x" is no int64'):
        shaped(table, [], request())


def with_maximum(*maxima: float | None) -> list[SpooledShard]:
    parts = []
    for shard_id, maximum in enumerate(maxima):
        shard = Shard(
            shard_id=shard_id, host="", path="", num_rows=1, num_validation_rows=0,
            fingerprint="", num_bytes=0,
        )  # fmt: skip
        summary = SpoolSummary(
            num_rows=1, num_validation_rows=0, fingerprint="", content=0, num_bytes=0,
            columns=(ColumnStats(), ColumnStats(minimum=0.0, maximum=maximum)),
        )  # fmt: skip
        parts.append(SpooledShard(shard=shard, summary=summary, memory_bytes=1 << 30))
    return parts


def test_labels_inside_the_classes_cost_no_job() -> None:
    df: Any = None  # not even looked at
    check_labels(df, "y", 3, 1, with_maximum(2.0, None, 0.0))
    check_labels(df, "y", 3, 1, with_maximum(None, None))


@pytest.mark.spark
def test_labels_outside_the_classes(spark: SparkSession) -> None:
    rows = [(i, float(i % 5)) for i in range(20)]
    df = spark.createDataFrame(rows, "id int, `the label` double")
    with pytest.raises(DataError) as caught:
        check_labels(df, "the label", 3, 1, with_maximum(2.0, 4.0))
    message = str(caught.value)
    assert message.startswith(
        'column "the label" has 8 label(s) outside the 3 classes of the module\'s output, 0 to 2 '
        "(example row: Row(id=3, the label=3.0))"
    )


@pytest.mark.spark
def test_columns_are_cast_for_module_and_task(spark: SparkSession) -> None:
    df = spark.createDataFrame(
        [([0.5, 1.0], 1, 2, True)], "x array<double>, y int, w int, v boolean"
    )

    def kinds(**changes: Any) -> list[tuple[str, str, str, bool]]:
        asked = request(**{"weight_col": "w", "validation_col": "v", **changes})
        prepared, validation = prepare_columns(df, asked, "float32")
        assert (validation is None) == (asked.validation_col is None)
        return [(p.name, p.role, p.dtype, p.as_classes) for p in prepared]

    assert kinds() == [
        ("x", "feature", "float32", False),
        ("y", "label", "int64", True),
        ("w", "weight", "float32", False),
    ]
    assert kinds(task="regression")[1] == ("y", "label", "float32", False)
    assert kinds(task="custom")[1] == ("y", "label", "int64", False)
    assert kinds(label_col="x", task="custom")[1] == ("x", "label", "float32", False)
    with pytest.raises(ConfigError, match='column "x" is an input twice'):
        kinds(feature_cols=("x", "x"), input_shapes=((2,), (1, 2)))
    assert kinds(label_col=None, weight_col=None, validation_col=None) == [
        ("x", "feature", "float32", False)
    ]
