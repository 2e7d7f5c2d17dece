"""What is wrong with module, configuration or columns is refused before any job."""

from __future__ import annotations

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from sparkdl import Callback
from sparkdl.config import CUSTOM, TrainConfig
from sparkdl.errors import ConfigError
from sparkdl.inference.regression import REGRESSION
from sparkdl.mesh import Mesh
from sparkdl.spark.fit.begin_module import floating_dtype, make_module
from sparkdl.spark.fit.check_request import check_values, prepare_columns
from sparkdl.spark.fit.check_training import (
    check_max_norm,
    check_memory_of_weights,
    check_sync_batch_norm,
    check_training,
)
from sparkdl.spark.fit.check_travels import check_global_hooks
from sparkdl.sync.asynchronous.async_sgd import AsyncSGD
from sparkdl.sync.asynchronous.hogwild import Hogwild
from sparkdl.sync.averaging.block_momentum import BlockMomentum
from sparkdl.sync.averaging.diloco import DiLoCo
from sparkdl.sync.averaging.parameter_averaging import ParameterAveraging
from sparkdl.sync.averaging.slowmo import SlowMo
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.own_weights.elastic_averaging import ElasticAveraging
from tests.spark.fit.requests import request

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_the_users_module_is_copied() -> None:
    module = nn.Linear(4, 3)
    begun = make_module(request(module))
    made, float_dtype = begun.module, begun.float_dtype
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
    made = make_module(request(given)).module
    assert made.place == "cpu"
    if isinstance(given, Elsewhere):
        assert given.place == "cuda"


def test_a_callable_makes_the_same_module_each_time_and_leaves_torchs_generator_alone() -> None:
    before = torch.random.get_rng_state()
    one, two = (make_module(request(lambda: nn.Linear(4, 3))).module for _ in range(2))
    assert torch.equal(one.weight, two.weight)  # type: ignore[arg-type]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_callables_on_several_threads_make_the_same_module() -> None:
    asked = request(lambda: nn.Sequential(*(nn.Linear(100, 100) for _ in range(50))))
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(make_module, [asked, asked])
    assert all(map(torch.equal, one.module.parameters(), two.module.parameters()))


def test_a_callable_must_make_a_module() -> None:
    with pytest.raises(ConfigError, match="callable that returns one; it returned dict"):
        make_module(request(dict))


def test_arguments_that_a_module_does_not_take_are_named() -> None:
    wrong = partial(nn.Linear, 4, outputs=3)
    with pytest.raises(ConfigError, match=r"Linear.*outputs=3.* raised TypeError: .*model\.args"):
        make_module(request(wrong))


def test_a_double_module_takes_double_features() -> None:
    assert make_module(request(nn.Linear(1, 1).double())).float_dtype == "float64"


def test_most_parameters_decide_about_the_dtype_of_features() -> None:
    odd = nn.Sequential(nn.Linear(4, 4), nn.Linear(1, 1).double())
    half = nn.Sequential(nn.Linear(4, 4).bfloat16(), nn.LayerNorm(4))
    found = [floating_dtype(m) for m in (odd, half, nn.Linear(2, 2).half(), nn.ReLU())]
    assert found == ["float32", "bfloat16", "float16", "float32"]
    assert floating_dtype(nn.Sequential(nn.LazyLinear(2), nn.BatchNorm1d(2).double())) == "float64"
    for dtype, part in ((torch.complex128, "float64"), (torch.complex64, "float32")):
        assert floating_dtype(nn.ParameterList([torch.ones(2, dtype=dtype)])) == part


def test_a_fit_inside_of_autocast_is_refused() -> None:
    """Workers would compute in full precision without a word."""
    with torch.autocast("cpu"), pytest.raises(ConfigError, match="precision='bf16' or 'fp16'"):
        check_values(request())


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


def test_a_schedule_of_evaluations_needs_a_gang() -> None:
    on_plateau = request(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    check_training(nn.Linear(4, 3), on_plateau)
    with pytest.raises(ConfigError, match="ReduceLROnPlateau needs executionMode='gang'"):
        check_training(nn.Linear(4, 3), on_plateau, in_rounds=True)
    with pytest.raises(ConfigError, match="a training step gives the loss alone"):
        check_training(nn.Linear(4, 3), request(training_metrics=True, training_step=print))
    with pytest.raises(RuntimeError, match="no CUDA here"):
        check_training(nn.Linear(4, 3), request(optimizer=for_cuda))


def test_sync_batch_norm_needs_layers_and_workers_in_step() -> None:
    config = TrainConfig(sync_batch_norm=True, sync_strategy=AllReduce())
    norm = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    check_sync_batch_norm(norm, config, 2, "gang")
    check_sync_batch_norm(nn.Linear(4, 3), TrainConfig(), 2, "gang")
    with pytest.raises(ConfigError, match="the module has no BatchNorm layer; unset it"):
        check_sync_batch_norm(nn.Linear(4, 3), config, 2, "gang")
    apart = TrainConfig(sync_batch_norm=True, sync_strategy=ParameterAveraging())
    check_sync_batch_norm(norm, apart, 1, "gang")
    with pytest.raises(ConfigError, match="with ParameterAveraging they train apart"):
        check_sync_batch_norm(norm, apart, 2, "gang")


def test_torchs_own_layer_needs_sync_batch_norm() -> None:
    own = nn.Sequential(nn.Linear(4, 3), nn.SyncBatchNorm(3))
    config = TrainConfig(sync_batch_norm=True, sync_strategy=AllReduce())
    check_sync_batch_norm(own, config, 2, "gang")
    check_sync_batch_norm(own, TrainConfig(), 1, "gang")
    check_sync_batch_norm(own, TrainConfig(sync_strategy=ParameterAveraging()), 2, "rounds")
    with pytest.raises(ConfigError, match=r"layer '1' is an nn\.SyncBatchNorm, .*syncBatchNorm"):
        check_sync_batch_norm(own, TrainConfig(), 2, "gang")


@pytest.mark.spark
def test_max_norm_of_embeddings_is_refused() -> None:
    for kind in (nn.Embedding, nn.EmbeddingBag):
        check_max_norm(nn.Sequential(kind(4, 2)))
        with pytest.raises(ConfigError, match=r"^1: max_norm=0.5 shortens .* numWorkers=1"):
            check_max_norm(nn.Sequential(nn.Identity(), kind(4, 2, max_norm=0.5)))
        with pytest.raises(ConfigError, match=r"^1: scale_grad_by_freq .* numWorkers=1"):
            check_max_norm(nn.Sequential(nn.Identity(), kind(4, 2, scale_grad_by_freq=True)))


class ByMemory(nn.Module):
    """Two weights have one memory, and perhaps an attribute shows it."""

    def __init__(self, *, shows: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        if shows:
            self.rows = {"first": self.a.weight.detach().numpy()[0]}
        else:
            self.b.weight.data = self.a.weight.data.t()


@pytest.mark.parametrize(
    ("strategy", "is_tied", "mode", "mesh"),
    [
        (AllReduce(), None, "gang", None),
        (ParameterAveraging(), None, "gang", None),
        (DiLoCo(), None, "gang", None),
        (DiLoCo(num_fragments=2), True, "gang", None),
        (SlowMo(), True, "gang", None),
        (BlockMomentum(), None, "rounds", None),
        (ElasticAveraging(), True, "gang", None),
        (AsyncSGD(), True, "gang", None),
        (Hogwild(), True, "gang", None),
        (Hogwild(), False, "gang", None),
        (AllReduce(), False, "gang", Mesh(shard=2)),
        (AllReduce(), False, "gang", Mesh(pipeline=2)),
    ],
)
def test_memory_of_weights_stays_shared_or_is_refused(
    strategy: Any, is_tied: bool | None, mode: str, mesh: Any
) -> None:
    config = TrainConfig(sync_strategy=strategy, parallelism=mesh)
    check_memory_of_weights(nn.Linear(4, 4), config, mode)
    if is_tied is None:
        for net in (ByMemory(), ByMemory(shows=True)):
            check_memory_of_weights(net, config, mode)
        return
    says = r"a\.weight and b\.weight share memory" if is_tied else r"rows shows the memory of a\.w"
    with pytest.raises(ConfigError, match=says):
        check_memory_of_weights(ByMemory(shows=not is_tied), config, mode)


@pytest.mark.parametrize("options", [{"sync_strategy": Hogwild()}, {"parallelism": Mesh(shard=2)}])
def test_a_buffer_that_shows_a_weight_is_refused_where_weights_move(options: Any) -> None:
    net = nn.BatchNorm1d(4)
    check_memory_of_weights(net, TrainConfig(**options), "gang")
    net.register_buffer("row", net.weight.detach()[:2])
    check_memory_of_weights(net, TrainConfig(), "gang")
    with pytest.raises(ConfigError, match="the buffer row shows the memory of a weight"):
        check_memory_of_weights(net, TrainConfig(**options), "gang")


def test_an_optimizer_has_parameters_of_the_module_only() -> None:
    """Nobody would clear or add up the gradients of others, or keep their values."""
    beside = nn.Parameter(torch.zeros(2))
    net = nn.Linear(3, 1)

    def uncertain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters}, {"params": [beside]}], lr=0.1)

    with pytest.raises(ConfigError, match=r"shape \(2,\) that the module has not got"):
        check_training(net, request(net, optimizer=uncertain))
    net.register_parameter("beside", beside)
    check_training(net, request(net, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1)))


def test_weights_that_lie_beside_each_other_share_nothing() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.utils.spectral_norm(nn.Linear(4, 2)))
    values = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(values.detach(), net.parameters())
    assert len({weight.untyped_storage().data_ptr() for weight in net.parameters()}) == 1
    for strategy in (Hogwild(), AsyncSGD(), SlowMo()):
        check_memory_of_weights(net, TrainConfig(sync_strategy=strategy), "gang")
    net[0].bias.data = net[0].weight.data[0]
    with pytest.raises(ConfigError, match=r"0\.bias and 0\.weight share memory"):
        check_memory_of_weights(net, TrainConfig(sync_strategy=Hogwild()), "gang")


def test_columns_are_cast_for_module_and_task(spark: SparkSession) -> None:
    df = spark.createDataFrame(
        [([0.5, 1.0], 1, 2, True)], "x array<double>, y int, w int, v boolean"
    )

    def kinds(**changes: Any) -> list[tuple[str, str, str, bool]]:
        asked = request(**{"weight_col": "w", "validation_col": "v", **changes})
        prepared, validation = prepare_columns(df, asked, "float32")
        is_wanted = asked.validation_col is not None or asked.validation_fraction is not None
        assert (validation is not None) == is_wanted
        return [(p.name, p.role, p.dtype, p.as_classes) for p in prepared]

    assert kinds() == [
        ("x", "feature", "float32", False),
        ("y", "label", "int64", True),
        ("w", "weight", "float32", False),
    ]
    assert kinds(task=REGRESSION)[1] == ("y", "label", "float32", False)
    assert kinds(task=CUSTOM)[1] == ("y", "label", "int64", False)
    assert kinds(label_col="x", task=CUSTOM)[1] == ("x", "label", "float32", False)
    assert len(kinds(validation_col=None, validation_fraction=0.1)) == 3
    with pytest.raises(ConfigError, match='column "x" is an input twice'):
        kinds(feature_cols=("x", "x"), input_shapes=((2,), (1, 2)))
    assert kinds(label_col=None, weight_col=None, validation_col=None) == [
        ("x", "feature", "float32", False)
    ]


class Locked(nn.Linear):
    """Has what no other process can have."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.lock = threading.Lock()


@pytest.mark.parametrize("module", [Locked, nn.Sequential(Locked())])
def test_a_module_that_cannot_travel_is_told_with_the_attribute(module: Any) -> None:
    """It was a traceback of deepcopy."""
    asked = request(module)
    with pytest.raises(ConfigError, match=r"cannot pickle .* \(its attribute (0\.)?lock\); make"):
        check_values(asked)


def test_a_loss_that_uses_the_modules_own_parameters_is_refused() -> None:
    """Workers have the loss and the module apart, so nobody would train what the loss sees."""
    net, other = nn.Linear(4, 3), nn.Linear(4, 3)
    for used, is_refused in ((net, True), (other, False)):

        def loss(output: torch.Tensor, target: torch.Tensor, used: nn.Linear = used) -> Any:
            return nn.functional.cross_entropy(output, target) + used.weight.square().mean()

        if is_refused:
            with pytest.raises(ConfigError, match=r"loss .*uses weight of the module itself.*Step"):
                check_values(request(net, loss=loss))
        else:
            check_values(request(net, loss=loss))


class LooksAt(Callback):
    def __init__(self, net: nn.Module) -> None:
        self.net = net


def test_a_callback_that_holds_the_module_is_refused() -> None:
    """It would see weights that nobody trains; so would one of the module that a factory keeps."""
    net = nn.Linear(4, 3)
    for given in (net, lambda: net):
        message = r"callbacks .*uses weight of the module itself.*; use state\.model, which is"
        with pytest.raises(ConfigError, match=message):
            check_values(request(given, callbacks=(LooksAt(net),)))
    check_values(request(net, callbacks=(LooksAt(nn.Linear(4, 3)),)))
    drops = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    with pytest.raises(ConfigError, match="it uses 1 of the module itself"):
        check_values(request(drops, callbacks=(LooksAt(drops[1]),)))


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 3, device="meta")])
def test_a_module_without_numbers_is_refused(make: Any) -> None:
    for given in (make, make()):
        with pytest.raises(ConfigError, match="weight has a shape, but no numbers"):
            make_module(request(given))


def test_what_cannot_come_back_is_refused() -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> Any:
            return object()

    with pytest.raises(ConfigError, match=r"cannot be sent back from the workers: .*_extra_state"):
        make_module(request(lambda: Odd(4, 3)))


def test_a_module_needs_parameters_that_train() -> None:
    with pytest.raises(ConfigError, match="the module has no parameters, so that nothing trains"):
        check_values(request(nn.Flatten))


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"sync_strategy": ParameterAveraging()}, "use AllReduce"),
        ({"sync_strategy": AllReduce(compression="bf16")}, "without compression"),
        ({"sync_strategy": AllReduce(double_buffering=True)}, "leave double_buffering"),
        ({"sync_strategy": AllReduce(topology="tree")}, "topology of AllReduce"),
        ({"sync_batch_norm": True}, "unset one"),
    ],
)
def test_bits_need_what_belongs_to_shards(changes: dict[str, Any], remedy: str) -> None:
    check_values(request(nn.Linear(4, 3), elasticity="bits"))
    with pytest.raises(ConfigError, match=remedy):
        check_values(request(nn.Linear(4, 3), elasticity="bits", **changes))


def scripted_outside_of_files() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(3, 1))


class Noisy(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.source = torch.Generator()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: scripted_outside_of_files(), "it is scripted"),
        (lambda: nn.Sequential(Noisy(3, 1)), "its attribute 0.source is a torch.Generator"),
    ],
)
def test_a_module_that_save_will_refuse_is_warned_of(
    make: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    check_values(request(make()))
    check_values(request(make))
    assert [words in record.message for record in caplog.records] == [True, True]
    caplog.clear()
    check_values(request(scripted_outside_of_files))
    check_values(request(nn.Linear(3, 1)))
    assert not caplog.records


def test_a_schedule_that_is_too_short_for_any_rows_is_refused() -> None:
    short = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=3)
    with pytest.raises(ConfigError, match="OneCycleLR fails within the 4 steps"):
        check_values(request(nn.Linear(3, 1), epochs=4, scheduler=short))


@pytest.mark.parametrize(
    ("register", "what"),
    [
        (torch.nn.modules.module.register_module_forward_hook, "module"),
        (torch.nn.modules.module.register_module_full_backward_hook, "module"),
        (register_optimizer_step_pre_hook, "optimizer"),
    ],
)
def test_hooks_of_the_whole_process_are_refused(register: Any, what: str) -> None:
    """Workers do not have them."""
    check_global_hooks()
    handle = register(lambda *_: None)
    try:
        with pytest.raises(ConfigError, match=f"hooks for every {what} of this process"):
            check_values(request())
    finally:
        handle.remove()
    check_global_hooks()


KNOWN: set[int] = set()


def by_id(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    slow = [p for p in parameters if id(p) in KNOWN]
    return torch.optim.SGD(
        [{"params": [p for p in parameters if id(p) not in KNOWN]}, {"params": slow, "lr": 0.0}],
        lr=0.1,
    )


def test_code_that_knows_parameters_by_their_ids_is_refused() -> None:
    """They are others on workers, where nothing would be found."""
    module = nn.Linear(3, 2)
    KNOWN.clear()
    check_values(request(module, optimizer=by_id))
    KNOWN.add(id(module.bias))
    with pytest.raises(ConfigError, match=r"keeps the id\(\) of the parameter 'bias'"):
        check_values(request(module, optimizer=by_id))
    closure = frozenset([id(module.weight)])
    with pytest.raises(ConfigError, match="'weight'"):
        check_values(
            request(
                module, optimizer=lambda ps: torch.optim.SGD([p for p in ps if id(p) in closure])
            )
        )
    KNOWN.clear()
    module.left_out = {"ids": [id(module.bias)]}
    with pytest.raises(ConfigError, match="'bias'"):
        check_values(request(module))
