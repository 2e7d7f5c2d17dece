from __future__ import annotations

import functools
import importlib
import json
import logging
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from pyspark.ml import PipelineModel, Transformer
from pyspark.ml.util import DefaultParamsReadable
from pyspark.sql import SparkSession
from torch import nn

from sparkdl import AllReduce, EarlyStopping, Mesh, ParameterAveraging, warmup
from sparkdl.data.plan import Column
from sparkdl.errors import ConfigError, StorageError
from sparkdl.estimator import TorchClassifier, TorchEstimator, TorchRegressor
from sparkdl.model import TorchClassifierModel, TorchModel, TorchRegressorModel
from sparkdl.report.summary import TrainingSummary
from sparkdl.serialization.initial_weights import InitialWeights
from sparkdl.serialization.json_objects import DescribeError
from sparkdl.serialization.load import load_module
from sparkdl.spark.params import save_stage, stage_metadata
from sparkdl.spark.params.stage_metadata import load_instance
from sparkdl.storage.storage import LocalStorage

pytestmark = pytest.mark.spark
COLUMN = Column(name="x", role="feature", dtype="float32", shape=(3,))


class Custom(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def make_custom() -> nn.Module:
    return Custom(3)


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    state = other.state_dict()
    return all(torch.equal(value, state[name]) for name, value in one.state_dict().items())


def test_estimator_round_trip(spark: SparkSession, tmp_path: Path) -> None:
    estimator = TorchClassifier(
        module=make_custom,
        loss=nn.CrossEntropyLoss,
        optimizer=torch.optim.AdamW,
        optimizerParams={"betas": (0.8, 0.9)},
        scheduler=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3),
        earlyStopping=EarlyStopping(patience=2),
        metrics={"mse": torchmetrics.MeanSquaredError},
        inputCols=["a", "b"],
        inputShape=[(3,), None],
        learningRate=0.25,
        epochs=3,
    )
    estimator.save(str(tmp_path / "e"))
    loaded = TorchClassifier.load(str(tmp_path / "e"))
    assert loaded.uid == estimator.uid
    for param in estimator.params:
        assert loaded.isSet(param.name) == estimator.isSet(param.name), param.name
        if estimator.isDefined(param) and param.name != "scheduler":
            assert loaded.getOrDefault(param.name) == estimator.getOrDefault(param), param.name
    assert loaded.getScheduler().keywords == {"step_size": 3}


@pytest.mark.parametrize("cls", [TorchEstimator, TorchRegressor])
def test_params_name_only_code_that_is_trusted(
    spark: SparkSession, tmp_path: Path, cls: Any
) -> None:
    path = str(tmp_path / "e")
    cls(module=make_custom, augmentation=json.dumps).save(path)
    with pytest.raises(ConfigError, match=r"'json:dumps'.*trustedPackages=json"):
        cls.load(path)
    assert cls.read().trusting("json").load(path).getAugmentation() is json.dumps
    spark.conf.set("spark.sparkdl.trustedPackages", "json")
    try:
        assert cls.load(path).getAugmentation() is json.dumps
    finally:
        spark.conf.unset("spark.sparkdl.trustedPackages")


@pytest.mark.parametrize("cls", [TorchEstimator, TorchRegressor])
def test_estimator_keeps_the_weights_of_its_module(
    spark: SparkSession, tmp_path: Path, cls: Any
) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    cls(module=module).save(str(tmp_path / "e"))
    loaded = cls.load(str(tmp_path / "e")).getModule()
    assert same_weights(module, loaded)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [TorchModel, TorchClassifierModel, TorchRegressorModel])
def test_model_round_trip(spark: SparkSession, tmp_path: Path, cls: Any) -> None:
    summary = TrainingSummary(history=[{"epoch": 0, "loss": 0.5}], restarts=1)
    model = cls(Custom(3), [COLUMN], num_classes=2, summary=summary)
    model.module_factory = make_custom
    model.setBatchSize(7).setPredictionCol("p")
    path = str(tmp_path / "a model")
    model.save(path)
    assert {entry.name for entry in (tmp_path / "a model").iterdir()} == {"metadata", "model"}
    for _ in range(2):  # a loaded model can be saved again
        loaded = cls.load(path)
        assert type(loaded) is cls
        assert same_weights(model.module, loaded.module)
        assert (loaded.uid, loaded.columns, loaded.summary) == (model.uid, (COLUMN,), summary)
        assert loaded._num_classes == 2
        assert loaded.extractParamMap() == model.extractParamMap()
        path = str(tmp_path / "again")
        loaded.write().overwrite().save(path)


def test_model_without_summary(spark: SparkSession, tmp_path: Path) -> None:
    TorchModel(nn.Linear(3, 1), [COLUMN]).save(str(tmp_path / "m"))
    assert not TorchModel.load(str(tmp_path / "m")).hasSummary


def test_a_loss_that_cannot_be_saved_stays_behind(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = TorchModel(nn.Linear(3, 1), [COLUMN]).setLoss(lambda output, target: output)
    with caplog.at_level(logging.WARNING):
        model.save(str(tmp_path / "m"))
    assert "need loss=" in caplog.text
    loaded = TorchModel.load(str(tmp_path / "m"))
    df = spark.createDataFrame([([1.0, 2.0, 3.0],)], "x array<float>")
    assert loaded.transform(df).count() == 1
    with pytest.raises(ConfigError, match="could not be saved with it; pass loss="):
        loaded.evaluate(df)
    with pytest.raises(DescribeError, match="Param 'preprocessing'"):
        model.setPreprocessing(lambda x: x).write().overwrite().save(str(tmp_path / "m"))


def test_inside_a_pipeline_model(spark: SparkSession, tmp_path: Path) -> None:
    stage = TorchRegressorModel(nn.Linear(3, 1), [COLUMN])
    PipelineModel([stage]).save(str(tmp_path / "p"))
    (loaded,) = PipelineModel.load(str(tmp_path / "p")).stages
    assert isinstance(loaded, TorchRegressorModel)
    assert same_weights(stage.module, loaded.module)


def test_a_tilde_is_the_home_and_a_path_is_a_text(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the program runs, but within a pipeline's folder, which pyspark names."""
    (home := tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    model = TorchRegressorModel(nn.Linear(3, 1), [COLUMN])
    model.save("~/m")
    model.write().overwrite().save(Path("~/m"))
    model.write().save(home / "other")
    assert {path.name for path in home.iterdir()} == {"m", "other"}
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    for place in ("~/m", Path("~/m"), home / "m", home / "other"):
        assert same_weights(TorchRegressorModel.load(place).module, model.module)
        assert same_weights(load_module(place), model.module)
    assert isinstance(load_instance("~/m", spark), TorchRegressorModel)
    assert stage_metadata.at_home("~/p/stages/0_TorchModel_1") == "~/p/stages/0_TorchModel_1"


@pytest.mark.classic
def test_a_place_that_cannot_be_written_is_one_sentence(
    spark: SparkSession, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Spark's job would end in the stacks of Java, on the console too."""
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "model"
    with pytest.raises(StorageError) as caught:
        TorchRegressor(module=nn.Identity).save(place)
    told = str(caught.value)
    assert told.startswith(f"cannot write {place.parent}/sparkdl-probe-")
    assert told.count("\n") == 0
    assert "\tat " not in capfd.readouterr().err


def test_numbers_of_numpy_are_saved_as_plain_ones(spark: SparkSession, tmp_path: Path) -> None:
    made = TorchRegressor(
        module=make_custom,
        epochs=np.int32(3),
        learningRate=np.float32(0.5),
        syncStrategy=ParameterAveraging(averaging_period=np.int64(2)),
        earlyStopping=EarlyStopping(patience=np.int16(2), min_delta=np.float32(0.25)),
        parallelism=Mesh(shard=np.int64(2)),
        scheduler=warmup(steps=np.int64(5)),
    )
    made.save(tmp_path / "e")
    loaded = TorchRegressor.load(tmp_path / "e")
    assert (loaded.getEpochs(), loaded.getLearningRate()) == (3, 0.5)
    assert loaded.getSyncStrategy() == ParameterAveraging(averaging_period=2)
    assert loaded.getEarlyStopping() == EarlyStopping(patience=2, min_delta=0.25)
    assert loaded.getParallelism() == Mesh(shard=2)
    assert loaded.getScheduler().keywords["steps"] == 5


def test_existing_path_needs_overwrite(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "m")
    first, second = (TorchModel(nn.Linear(3, 1), [COLUMN]) for _ in range(2))
    first.save(path)
    with pytest.raises(StorageError, match=r"/m already exists; use write\(\).overwrite\(\)"):
        second.save(path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    with pytest.raises(StorageError, match=r"/other holds notes, and no saved model; choose ano"):
        second.save(str(tmp_path / "other"))
    assert same_weights(first.module, TorchModel.load(path).module)
    second.write().overwrite().save(path)
    assert same_weights(second.module, TorchModel.load(path).module)


@pytest.mark.parametrize("name", ["run-?", "run-*", "run-[12]", "{run-1,x}", "a,b"])
def test_a_name_that_means_other_folders_is_refused(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "run-1"
    folder.mkdir()
    (folder / "file").touch()
    model = TorchModel(nn.Linear(3, 1), [COLUMN])
    for writer in (model.write(), model.write().overwrite()):
        with pytest.raises(StorageError, match=r"a pattern, .* choose a name without"):
            writer.save(str(tmp_path / name))
    assert [file.name for file in tmp_path.rglob("*")] == ["run-1", "file"]


def test_what_cannot_be_saved_is_named_and_destroys_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = str(tmp_path / "e")
    TorchRegressor(module=make_custom, epochs=9).save(path)
    with pytest.raises(DescribeError, match=r"Param 'loss'.*lambda"):
        TorchRegressor(module=make_custom, loss=lambda a, b: a).write().overwrite().save(path)
    with pytest.raises(DescribeError, match="Param 'module'"):
        TorchRegressor(module=Custom(3)).write().overwrite().save(path)
    assert TorchRegressor.load(path).getEpochs() == 9


def test_a_search_says_before_it_trains_that_what_holds_the_estimator_cannot_be_saved(
    spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    df = spark.createDataFrame([([1.0, 2.0, 3.0], 0.5)], "features array<double>, label double")
    estimator = TorchRegressor(module=make_custom, loss=lambda a, b: a)
    for _ in range(2):
        estimator.fitMultiple(df, [{}])
    (text,) = caplog.messages
    assert text.startswith("this estimator cannot be saved, and so neither a CrossValidatorModel")
    assert "loss: a lambda cannot be imported by name" in text and "bestModel" in text
    caplog.clear()
    TorchRegressor(module=make_custom, loss="mse").fitMultiple(df, [{}])
    assert not caplog.records


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_disk_that_fills_up_costs_no_model(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    path = tmp_path / "m"
    first, second = (TorchModel(nn.Linear(3, 1), [COLUMN]) for _ in range(2))
    if overwrite:
        first.save(str(path))
    write = LocalStorage.write

    def full(self: LocalStorage, name: str, data: Any) -> None:
        if name.endswith("module.json"):
            raise StorageError("cannot write: No space left on device")
        write(self, name, data)

    monkeypatch.setattr(LocalStorage, "write", full)
    with pytest.raises(StorageError, match="No space left"):
        (second.write().overwrite() if overwrite else second.write()).save(str(path))
    monkeypatch.undo()
    if overwrite:
        assert same_weights(first.module, TorchModel.load(str(path)).module)
        assert {entry.name for entry in path.iterdir()} == {"metadata", "model"}
    else:
        second.save(str(path))  # nothing is left that would be in the way


@pytest.mark.slow
def test_what_replaces_a_model_leaves_nothing_of_it(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "m"
    PipelineModel([TorchModel(nn.Linear(3, 1), [COLUMN])]).save(str(path))
    model = TorchModel(nn.Linear(3, 2), [COLUMN])
    model.write().overwrite().save(f"{path}/")
    assert {entry.name for entry in path.iterdir()} == {"metadata", "model"}
    assert same_weights(model.module, load_instance(str(path), spark).module)


def test_damaged_metadata_is_found_before_the_class_is_imported(
    spark: SparkSession, tmp_path: Path
) -> None:
    TorchModel(nn.Linear(3, 1), [COLUMN]).save(str(tmp_path / "m"))
    part = metadata_file(tmp_path / "m")
    part.write_text(part.read_text().replace("sparkdl.model.", "antigravity."))
    with pytest.raises(StorageError, match="metadata is damaged: it is not what was written"):
        load_instance(str(tmp_path / "m"), spark)
    assert "antigravity" not in sys.modules


def write_stage(place: Path, cls: str, **params: Any) -> None:
    """The metadata of a part, as whoever can write to the folder may have them."""
    metadata = {"class": cls, "timestamp": 1, "sparkVersion": "4.0.0", "uid": "U_1"}
    place.joinpath("metadata").mkdir(parents=True)
    text = json.dumps({**metadata, "paramMap": params, "defaultParamMap": {}})
    place.joinpath("metadata", "part-00000").write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        ("pyspark.shell.x", "'pyspark.shell:x', which is code of pyspark.shell"),
        ("pyspark.ml.torch.distributor.os", "damaged: .* is no class of what is saved"),
        ("pyspark.ml.util.MLReadable", "damaged: .* is no class of what is saved"),
        ("org.apache.spark.ml.feature.Nope", "no attribute 'Nope'"),
        ("sparkdl.__main__.main", "which is code of sparkdl.cli.main"),
        ("sparkdl.storage.storage.LocalStorage", "which is code of sparkdl.storage.storage"),
        ("sparkdl.sync.gradients.allreduce.AllReduce", "damaged: .* is no class of what is saved"),
        ("antigravity.x", "'antigravity:x'.*trustedPackages=antigravity"),
        ("digits.evil.Go", "'digits.evil:Go'.*trustedPackages=digits"),
    ],
)
def test_metadata_name_only_what_is_saved_and_loaded(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cls: str, message: str
) -> None:
    """Of an instance, and of a part of a pipeline, which Spark imports whatever it is."""
    monkeypatch.syspath_prepend(str(tmp_path))  # as where a program lies beside the folder
    root = tmp_path / "digits"
    write_stage(root, "pyspark.ml.pipeline.PipelineModel", stageUids=["U_1"], language="Python")
    write_stage(root / "stages" / "0_U_1", cls)
    for name in (root, root / "stages"):
        (name / "__init__.py").touch()
    (root / "evil.py").write_text("raise AssertionError('this file ran')")
    for path in (root, root / "stages" / "0_U_1"):
        with pytest.raises((ConfigError, StorageError), match=message):
            load_instance(str(path), spark)
    assert {"digits", "antigravity", "pyspark.shell"}.isdisjoint(sys.modules)


def test_parts_of_a_pipeline_may_be_of_packages_that_are_trusted(
    spark: SparkSession, tmp_path: Path
) -> None:
    root = tmp_path / "p"
    write_stage(root, "pyspark.ml.pipeline.PipelineModel", stageUids=["U_1"], language="Python")
    write_stage(root / "stages" / "0_U_1", f"{Marker.__module__}.Marker")
    assert isinstance(load_instance(str(root), spark).stages[0], Marker)
    assert isinstance(PipelineModel.load(str(root)).stages[0], Marker)  # Spark's own way is as ever
    part = metadata_file(root)
    part.write_text(part.read_text().replace('"stageUids"', '"others"'))
    with pytest.raises(StorageError, match="metadata is damaged: KeyError"):
        load_instance(str(root), spark)


@pytest.mark.parametrize(
    "value",
    ["digits:Go", {"dataclass": "sparkdl:AllReduce", "fields": {"compression": "digits:Go"}}],
)
def test_a_strategy_that_is_named_is_code_that_is_trusted(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    """A user may name a class of any package; whoever has written the folder may not."""
    monkeypatch.syspath_prepend(str(tmp_path))
    estimator = TorchRegressor(module=make_custom, syncStrategy=AllReduce(compression="fp16"))
    estimator.save(tmp_path / "digits")
    assert TorchRegressor.load(tmp_path / "digits").getSyncStrategy().compression == "fp16"
    (tmp_path / "digits" / "__init__.py").write_text("raise AssertionError('this file ran')")
    edit_metadata(tmp_path / "digits", paramMap={"syncStrategy": value})
    with pytest.raises(ConfigError, match=r"'digits:Go'.*trustedPackages=digits"):
        TorchRegressor.load(tmp_path / "digits")


@pytest.mark.parametrize("value", [{"epochs": []}, {"trainingMetrics": {"x": 1}}, [], None, "x"])
def test_values_of_wrong_kinds_are_damage(spark: SparkSession, tmp_path: Path, value: Any) -> None:
    TorchRegressor(module=make_custom).save(tmp_path / "e")
    edit_metadata(tmp_path / "e", paramMap=value)
    with pytest.raises((ConfigError, StorageError)):
        TorchRegressor.load(tmp_path / "e")
    edit_metadata(tmp_path / "e", paramMap={}, defaultParamMap={"optimizer": None})
    with pytest.raises(StorageError, match=r"damaged: .*the default of 'optimizer' is null"):
        TorchRegressor.load(tmp_path / "e")
    edit_metadata(tmp_path / "e", sparkdl=5)
    with pytest.raises(StorageError, match="damaged"):
        TorchRegressor.load(tmp_path / "e")


class Marker(Transformer, DefaultParamsReadable):
    """A stage of the user's own."""

    def _transform(self, dataset: Any) -> Any:
        return dataset


def test_another_class_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    TorchRegressor(module=make_custom).save(str(tmp_path / "e"))
    with pytest.raises(StorageError, match=r"holds a sparkdl\.estimator\.TorchRegressor"):
        TorchClassifier.load(str(tmp_path / "e"))


def edit_metadata(folder: Path, **changes: Any) -> None:
    """Change entries, and the sums with them."""
    part = metadata_file(folder)
    metadata = {**json.loads(part.read_text()), **changes}
    if isinstance(metadata["sparkdl"], dict):
        metadata["sparkdl"]["sha256"] = stage_metadata.sum_of(metadata)
    part.write_text(json.dumps(metadata))


def metadata_file(folder: Path) -> Path:
    """Without Spark's own checksum, which object stores do not have."""
    for checksum in (folder / "metadata").glob(".part-*.crc"):
        checksum.unlink()
    (part,) = (folder / "metadata").glob("part-*")
    return part


def test_another_format_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    TorchRegressor(module=make_custom).save(str(tmp_path / "e"))
    edit_metadata(tmp_path / "e", sparkdl={"format": 99, "version": "9.9"})
    with pytest.raises(StorageError, match=r"sparkdl 9\.9 in format 99"):
        TorchRegressor.load(str(tmp_path / "e"))


def test_an_unknown_param_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    TorchRegressor(module=make_custom).save(str(tmp_path / "e"))
    edit_metadata(tmp_path / "e", paramMap={"momentum": 1})
    with pytest.raises(StorageError, match="'momentum'"):
        TorchRegressor.load(str(tmp_path / "e"))


LOG: list[str] = []


def logged_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square()


def logging_factory() -> nn.Module:
    LOG.append("made")
    return Custom(3)


def test_metadata_with_any_other_byte_is_refused_before_code_is_imported(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TorchRegressor(module=logging_factory, loss=logged_loss).save(str(tmp_path / "e"))
    part = metadata_file(tmp_path / "e")
    data = part.read_bytes()
    own = len(data) - data.index(b'"uid"')

    def refuse(*_: Any) -> None:
        raise AssertionError("restored from damaged metadata")

    monkeypatch.setattr(save_stage, "restore", refuse)
    places = [data.index(word) for word in (b"logged_loss", b"learningRate", b'"uid"', b"TorchReg")]
    for at in (*places, len(data) - own + 9):
        part.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(StorageError):
            TorchRegressor.load(str(tmp_path / "e"))
    for length in (0, 1, len(data) // 2, len(data) - 3):
        part.write_bytes(data[:length])
        with pytest.raises(StorageError, match="metadata is damaged"):
            TorchRegressor.load(str(tmp_path / "e"))
    monkeypatch.undo()
    part.write_bytes(data)
    assert TorchRegressor.load(str(tmp_path / "e")).getLoss() is logged_loss


def test_metadata_that_spark_finds_damaged_or_absent_is_our_error(
    spark: SparkSession, tmp_path: Path
) -> None:
    TorchRegressor(module=make_custom).save(str(tmp_path / "e"))
    (part,) = (tmp_path / "e" / "metadata").glob("part-*")  # its checksum is still there
    part.write_bytes(part.read_bytes().replace(b"Torch", b"Tprch"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "weights.bin").touch()
    for path, message in (("e", "e/metadata"), ("absent", "nothing is saved at .*/absent"),
                          ("other", "other holds no saved model.*save")):  # fmt: skip
        with pytest.raises(StorageError, match=message):
            TorchRegressor.load(str(tmp_path / path))


@pytest.mark.parametrize("name", ["summary.json", "weights.safetensors", "module.json"])
def test_a_models_files_are_checked_before_its_factory_is_called(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    summary = TrainingSummary(history=[{"epoch": 0, "loss": 0.5}], restarts=1)
    model = TorchModel(Custom(3), [COLUMN], summary=summary)
    model.module_factory = logging_factory
    model.save(str(tmp_path / "m"))
    file = tmp_path / "m" / "model" / name
    data = file.read_bytes()
    LOG.clear()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    for changed in (data[:-1], flipped, b""):
        file.write_bytes(changed)
        with pytest.raises(StorageError, match=name):
            TorchModel.load(str(tmp_path / "m"))
    assert LOG == []
    file.write_bytes(data)
    assert TorchModel.load(str(tmp_path / "m")).summary == summary
    assert LOG == ["made"]


def test_initial_weights_are_saved_with_an_estimator(spark: SparkSession, tmp_path: Path) -> None:
    source = Custom(300)  # larger than what JSON takes
    source.inner = nn.Linear(300, 200)
    in_memory = TorchRegressor(
        module=make_custom, initialWeights=InitialWeights(source=source, skip=("inner.bias",))
    )
    by_path = TorchRegressor(module=make_custom, initialWeights="s3://models/m")
    for name, estimator in (("a", in_memory), ("b", by_path)):
        estimator.save(str(tmp_path / name))
    loaded = TorchRegressor.load(str(tmp_path / "a")).getInitialWeights()
    assert loaded.skip == ("inner.bias",)
    assert loaded.source.keys() == source.state_dict().keys()
    assert all(torch.equal(v, loaded.source[n]) for n, v in source.state_dict().items())
    assert TorchRegressor.load(str(tmp_path / "b")).getInitialWeights() == InitialWeights(
        source="s3://models/m"
    )
    weights = tmp_path / "a" / "initialWeights" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(StorageError, match=r"weights\.safetensors is damaged"):
        TorchRegressor.load(str(tmp_path / "a"))


def test_passwords_are_not_saved(
    spark: SparkSession, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = "webhdfs://me:secret@host:9870/m"
    weights = InitialWeights(source=url, skip=("inner",))
    estimator = TorchRegressor(module=make_custom, checkpointDir=url, initialWeights=weights)
    estimator.save(str(tmp_path / "e"))
    assert "secret" not in metadata_file(tmp_path / "e").read_text()
    assert caplog.text.count("is not saved; set it again") == 2 and "secret" not in caplog.text
    loaded = TorchRegressor.load(str(tmp_path / "e"))
    assert loaded.getCheckpointDir() == "webhdfs://me@host:9870/m"
    assert loaded.getInitialWeights() == replace(weights, source="webhdfs://me@host:9870/m")
    assert estimator.getCheckpointDir() == url


def test_fine_tuning_params_are_saved(spark: SparkSession, tmp_path: Path) -> None:
    groups = {"head": {"lr": 0.1, "betas": (0.8, 0.9)}, "*.bias": {"weight_decay": 0.0}}
    estimator = TorchRegressor(
        module=make_custom, parameterGroups=groups, frozenLayers=["inner.weight"]
    )
    estimator.save(str(tmp_path / "e"))
    loaded = TorchRegressor.load(str(tmp_path / "e"))
    assert list(loaded.getParameterGroups().items()) == list(groups.items())
    assert loaded.getFrozenLayers() == ["inner.weight"]


def test_missing_model_files_are_named(spark: SparkSession, tmp_path: Path) -> None:
    TorchModel(nn.Linear(3, 1), [COLUMN]).save(str(tmp_path / "m"))
    (tmp_path / "m" / "model" / "weights.safetensors").unlink()
    with pytest.raises(StorageError, match=r"weights\.safetensors"):
        TorchModel.load(str(tmp_path / "m"))


def test_a_client_that_does_not_see_the_servers_disk_is_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[bool] = []
    monkeypatch.setattr(stage_metadata, "is_connect", lambda _: True)
    monkeypatch.setattr(
        stage_metadata, "make_way", lambda path, overwrite, _: cleared.append(overwrite)
    )
    monkeypatch.setattr(stage_metadata, "qualified", lambda *_: f"file:{tmp_path}/elsewhere")
    with pytest.raises(StorageError, match=r"elsewhere lies on the host of the Spark Connect serv"):
        TorchRegressor(module=make_custom).save(str(tmp_path / "e"))
    assert cleared == [False, True]
    assert not (tmp_path / "elsewhere").exists()


def test_nor_does_such_a_client_delete_what_is_there(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "m")
    model = TorchModel(nn.Linear(3, 1), [COLUMN])
    model.save(path)
    cleared: list[str] = []
    monkeypatch.setattr(stage_metadata, "is_connect", lambda _: True)
    monkeypatch.setattr(stage_metadata, "make_way", lambda path, *_: cleared.append(path))
    monkeypatch.setattr(stage_metadata, "qualified", lambda *_: f"file:{tmp_path}/elsewhere")
    with pytest.raises(StorageError, match=r"elsewhere lies on the host of the Spark Connect serv"):
        TorchModel(nn.Linear(3, 1), [COLUMN]).write().overwrite().save(path)
    monkeypatch.undo()
    assert [place.startswith(f"{path}/new-") for place in cleared] == [True]
    assert same_weights(model.module, TorchModel.load(path).module)


CELLS = """
import torch
from torch import nn
SCALE, OTHER = 2.0, [1.0]
def scaled(x): return x * SCALE
class Net(nn.Linear):
    def __init__(self): super().__init__(3, 1)
    def forward(self, x): return scaled(super().forward(x)) * OTHER[0]
"""


@pytest.mark.slow
def test_save_names_what_cells_of_a_notebook_have_changed_since_the_fit(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    notebook = vars(sys.modules["__main__"])
    exec(CELLS, notebook)
    df = spark.createDataFrame(
        [([1.0, 2.0, float(i)], 1.0) for i in range(8)], "features array<double>, label double"
    )
    model = TorchRegressor(module=notebook["Net"], epochs=1, verbose=0, numWorkers=1).fit(df)

    def told() -> list[str]:
        caplog.clear()
        model.write().overwrite().save(str(tmp_path / "saved"))
        return [text for text in caplog.messages if "has changed" in text]

    assert told() == []
    exec("SCALE = 2.0", notebook)  # the cell once more
    assert told() == []
    exec("SCALE = 50.0", notebook)
    (said,) = told()
    assert said.startswith(f"{model.uid}: the program has changed SCALE since the fit, and what")
    exec("SCALE = 2.0\ndef scaled(x): return -x", notebook)
    notebook["OTHER"][0] = 3.0
    (said,) = told()
    assert "has changed OTHER, scaled since the fit" in said
    model = TorchRegressorModel.load(str(tmp_path / "saved"))
    assert told() == []


def test_save_names_what_the_program_has_changed_in_files(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = (
        "from torch import nn\nFACTOR = 1.0\nclass Net(nn.Linear):\n"
        "    def __init__(self): super().__init__(3, 1)\n"
        "    def forward(self, x): return super().forward(x) * FACTOR\n"
        "def doubled(x): return x * FACTOR\n"
    )
    (tmp_path / "net_of_a_factor.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    own: Any = importlib.import_module("net_of_a_factor")
    model = TorchRegressorModel(own.Net(), [COLUMN])
    others = [TorchModel(nn.Linear(3, 1), [COLUMN]), TorchRegressor(module=nn.Linear(3, 1))]
    others[0].setPostprocessing(own.doubled)
    stages: list[Any] = [model, *others, TorchRegressor(module=own.Net)]

    def saved() -> list[str]:
        caplog.clear()
        for number, stage in enumerate(stages):
            stage.write().overwrite().save(str(tmp_path / f"saved{number}"))
        return [text for text in caplog.messages if "other values of" in text]

    assert saved() == []
    monkeypatch.setattr(own, "FACTOR", 0.123)
    said = saved()
    named = r"{}: the program has other values of net_of_a_factor\.FACTOR than .*attribute"
    assert len(said) == 3
    for stage, message in zip([model, stages[1], stages[3]], said, strict=True):
        assert re.match(named.format(stage.uid), message)
    program = TorchRegressorModel(own.Net(), [COLUMN])
    monkeypatch.setattr(own.Net, "__module__", "__main__")  # is saved as a program, with the value
    stages[:] = [program]
    assert saved() == []
