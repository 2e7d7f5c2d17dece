"""A whole fit lives on HDFS: data, checkpoints, resume, models; also when a data node is lost."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparkdl.errors import StorageError
from sparkdl.serialization.initial_weights import InitialWeights
from sparkdl.storage.checkpoint_format import folders
from tests.cluster import faults
from tests.hdfs.daemons import Hdfs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from torch import nn

    from sparkdl.model import TorchClassifierModel
    from sparkdl.storage.storage import Storage

    Models = dict[str, TorchClassifierModel]

pytestmark = [pytest.mark.spark, pytest.mark.gang, pytest.mark.slow, pytest.mark.timeout(240)]

MODES = ("gang", "rounds")
LAST = 18
"""The last step of `fitted`."""


def make_net() -> nn.Module:
    from torch import nn

    return nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))


@pytest.fixture(scope="module")
def df(spark: SparkSession, hdfs: Hdfs) -> DataFrame:
    """Parquet on HDFS: each epoch has nine steps."""
    from pyspark.sql import functions as F

    features = [((F.col("id") * k) % 7 - 3).cast("float") for k in (1, 2, 3)]
    rows = spark.range(0, 240, 1, 3).select(
        F.array(*features).alias("features"), (F.col("id") % 3).alias("label")
    )
    rows.write.parquet(f"{hdfs.url}/rows")
    return spark.read.parquet(f"{hdfs.url}/rows")


def fitted(df: DataFrame, mode: str, *callbacks: Any, **changes: Any) -> TorchClassifierModel:
    from sparkdl import ParameterAveraging, TorchClassifier

    strategy = {"gang": "allreduce", "rounds": ParameterAveraging(averaging_period=4)}[mode]
    params = {"epochs": 2, "checkpointInterval": 4, **changes}
    classifier = TorchClassifier(
        module=make_net,
        syncStrategy=strategy,
        executionMode=mode,
        batchSize=16,
        seed=7,
        numWorkers=2,
        verbose=0,
        callbacks=list(callbacks),
        **params,
    )
    return classifier.fit(df)


def digest(model: Any) -> str:
    module = getattr(model, "module", model)
    data = b"".join(tensor.numpy().tobytes() for tensor in module.state_dict().values())
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def undisturbed(df: DataFrame) -> dict[str, TorchClassifierModel]:
    """What comes out without checkpointDir and without faults."""
    return {mode: fitted(df, mode) for mode in MODES}


def test_in_a_gang_a_killed_worker_and_a_torn_checkpoint_change_no_bit(
    spark: SparkSession, df: DataFrame, undisturbed: Models, url: str, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from sparkdl.storage.hadoop_storage import open_on_driver

    caplog.set_level(logging.INFO, "sparkdl")
    strike = faults.KillWorker(marker=str(tmp_path / "struck"), rank=1, step=15)
    model = fitted(df, "gang", strike, faults.Slow(0.1), checkpointDir=url)
    assert (tmp_path / "struck").exists() and model.summary.restarts == 1
    assert digest(model) == digest(undisturbed["gang"])
    assert f"checkpoints reach {url} by way of the driver, since executors cannot" in caplog.text
    assert "going on from the checkpoint of step " in caplog.text

    storage = open_on_driver(spark, url)
    (key,) = storage.list("")  # no marker, no probe
    newest = folders(storage, key)[-1].path
    assert newest.endswith(f"step-{LAST:08}-final")
    manifest = storage.read(f"{newest}/manifest.json")
    storage.write(f"{newest}/manifest.json", manifest[: len(manifest) // 2])
    caplog.clear()
    assert digest(fitted(df, "gang", checkpointDir=url)) == digest(model)
    assert f"passed over {newest}: " in caplog.text
    assert "going on from the checkpoint of step " in caplog.text


def test_in_rounds_a_killed_worker_changes_no_bit_and_a_finished_run_is_found_again(
    df: DataFrame, undisturbed: Models, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sparkdl")
    strike = faults.KillWorker(marker=str(tmp_path / "struck"), rank=1, step=7)
    model = fitted(df, "rounds", strike, checkpointDir=url)
    assert (tmp_path / "struck").exists() and model.summary.restarts == 0
    assert digest(model) == digest(undisturbed["rounds"])
    assert "by way of the driver" not in caplog.text  # only the driver writes

    never = faults.Fail(marker=str(tmp_path / "never"), rank=0, step=1)
    assert digest(fitted(df, "rounds", never, checkpointDir=url)) == digest(model)
    assert f"going on from the checkpoint of step {LAST}" in caplog.text


class DataNodeKiller:
    """Kills a data node as soon as a checkpoint is whole."""

    def __init__(self, hdfs: Hdfs, storage: Storage) -> None:
        self.struck_at: str | None = None
        """The newest checkpoint at that time."""
        self._hdfs = hdfs
        self._storage = storage
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Start the data node again."""
        self._thread.join(120)
        if self.struck_at is not None:
            self._hdfs.start_data_node(0)

    def _watch(self) -> None:
        deadline = time.monotonic() + 120
        while self.struck_at is None and time.monotonic() < deadline:
            for key in self._storage.list(""):
                for folder in folders(self._storage, key):
                    if self._storage.exists(f"{folder.path}/manifest.json"):
                        self.struck_at = folder.path.rpartition("/")[2]
            time.sleep(0.05)
        self._hdfs.kill_data_node(0)


def test_a_data_node_that_dies_in_mid_fit_changes_no_bit(
    spark: SparkSession, df: DataFrame, hdfs: Hdfs, undisturbed: Models, url: str
) -> None:
    """In a gang, whose ranks write; in rounds the driver alone writes in the same way."""
    from sparkdl.storage.checkpoint_format import latest, load_rank, load_shared
    from sparkdl.storage.hadoop_storage import open_on_driver

    storage = open_on_driver(spark, url)
    with contextlib.closing(DataNodeKiller(hdfs, storage)) as killer:
        model = fitted(df, "gang", faults.Slow(0.2), checkpointDir=url)
        assert killer.struck_at is not None and killer.struck_at < f"step-{LAST - 4:08}"
        assert digest(model) == digest(undisturbed["gang"])
        assert model.summary.restarts == 0
        # What was written with one data node left is read with it.
        last = latest(storage, storage.list("")[0])
        assert last is not None and last.step == LAST and last.complete
        assert load_shared(last)["state"] and load_rank(last, 0) is not None


def in_safe_mode(spark: SparkSession, url: str, seconds: float) -> None:
    """Have the name node refuse every change for a while."""
    from sparkdl.storage.hadoop_storage import HadoopStorage

    session: Any = spark
    action = session._jvm.org.apache.hadoop.fs.SafeModeAction
    files = HadoopStorage(spark, url)._fs
    files.setSafeMode(action.ENTER)
    time.sleep(seconds)
    files.setSafeMode(action.LEAVE)


def newest_whole(storage: Storage) -> str:
    found = [folder for key in storage.list("") for folder in folders(storage, key)]
    whole = [f.path for f in found if storage.exists(f"{f.path}/manifest.json")]
    return whole[-1] if whole else ""


def test_a_name_node_that_is_paused_in_safe_mode_or_away_changes_no_bit(
    spark: SparkSession, df: DataFrame, hdfs: Hdfs, url: str
) -> None:
    """One after the other in one fit, with a whole checkpoint before each, and after the last."""
    from sparkdl.storage.hadoop_storage import open_on_driver

    storage = open_on_driver(spark, url)
    healed: list[str] = []
    over = threading.Event()

    def strike() -> None:
        for fault in (
            lambda: hdfs.pause_name_node(5),
            lambda: in_safe_mode(spark, url, 4),
            lambda: hdfs.restart_name_node(2),
        ):
            before = newest_whole(storage)
            while (now := newest_whole(storage)) <= before and not over.wait(0.1):
                pass
            if over.is_set():
                return
            fault()
            healed.append(now)

    thread = threading.Thread(target=strike)
    thread.start()
    try:
        model = fitted(df, "gang", faults.Slow(0.4), checkpointDir=url, epochs=8)
        last = newest_whole(storage)
    finally:
        over.set()
        thread.join(120)
    assert len(healed) == 3 and healed == sorted(set(healed))
    assert last > healed[-1] and last.endswith("-final")
    assert model.summary.restarts == 0
    assert digest(model) == digest(fitted(df, "gang", epochs=8))


def test_models_estimators_and_pipelines_are_saved_and_loaded(
    df: DataFrame, undisturbed: Models, url: str
) -> None:
    from pyspark.ml import PipelineModel

    from sparkdl import TorchClassifier, TorchClassifierModel

    model = undisturbed["gang"]
    expected = model.transform(df).select("prediction").collect()
    model.save(f"{url}/model")
    with pytest.raises(Exception, match="already exists"):
        model.save(f"{url}/model")
    model.write().overwrite().save(f"{url}/model")
    loaded = TorchClassifierModel.load(f"{url}/model")
    assert digest(loaded) == digest(model)
    assert loaded.summary == model.summary
    assert loaded.transform(df).select("prediction").collect() == expected

    weights = InitialWeights(source=f"{url}/model", skip=("3.*",))
    TorchClassifier(module=make_net(), epochs=7, initialWeights=weights).save(f"{url}/estimator")
    estimator = TorchClassifier.load(f"{url}/estimator")
    assert estimator.getEpochs() == 7 and estimator.getInitialWeights() == weights

    PipelineModel([model]).save(f"{url}/pipeline")
    (stage,) = PipelineModel.load(f"{url}/pipeline").stages
    assert digest(stage) == digest(model)


def test_modules_are_loaded_without_a_session_at_hand_and_checked(
    spark: SparkSession, undisturbed: Models, url: str
) -> None:
    from sparkdl import load_module, load_signature
    from sparkdl.serialization.initial_weights import load_initial_weights
    from sparkdl.storage.hadoop_storage import open_on_driver

    model = undisturbed["gang"]
    model.save(f"{url}/model")
    assert digest(load_module(f"{url}/model")) == digest(model)
    assert load_signature(f"{url}/model").inputs == model.columns
    storage = open_on_driver(spark, f"{url}/model/model")
    for source in (f"{url}/model", f"{url}/model/model/weights.safetensors"):
        module = make_net()
        load_initial_weights(module, InitialWeights(source=source))
        assert digest(module) == digest(model)
    content = storage.read("weights.safetensors")
    storage.write("weights.safetensors", content[:-1])
    for load in (load_module, type(model).load):
        with pytest.raises(StorageError, match=r"weights\.safetensors is damaged"):
            load(f"{url}/model")


def test_training_starts_from_weights_on_hdfs(df: DataFrame, undisturbed: Models, url: str) -> None:
    model = undisturbed["gang"]
    model.save(f"{url}/model")
    start = {"learningRate": 1e-30, "epochs": 1}
    by_url = fitted(df, "rounds", initialWeights=InitialWeights(source=f"{url}/model"), **start)
    assert digest(by_url) == digest(model)


def test_jobs_read_and_write_by_url(
    spark: SparkSession, df: DataFrame, hdfs: Hdfs, undisturbed: Models, url: str
) -> None:
    from sparkdl.cli.job_files.job_file import DataSection, PredictJob, PredictOutput, SavedModel
    from sparkdl.cli.jobs import run_predict
    from sparkdl.errors import ConfigError

    model = undisturbed["gang"]
    model.save(f"{url}/model")
    job = PredictJob(
        data=DataSection(path=f"{hdfs.url}/rows"),
        model=SavedModel(path=f"{url}/model"),
        output=PredictOutput(path=f"{url}/predictions", columns=("prediction",)),
    )
    written = sorted(row.prediction for row in run_predict(job, spark).collect())
    assert written == sorted(row.prediction for row in model.transform(df).collect())
    with pytest.raises(ConfigError, match="there is something at hdfs://"):
        run_predict(job, spark)
