"""A listener that writes the curves of a run for TensorBoard, on the driver."""

from __future__ import annotations

import base64
import math
import re
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sparkdl.config import Looks
from sparkdl.errors import SparkDLError, import_or
from sparkdl.report.listeners.listener import Listener, RunListener, RunStart

if TYPE_CHECKING:
    from torch import nn

    from sparkdl.report.record.run_record import RunRecord


@dataclass(frozen=True, kw_only=True)
class TensorBoard(Listener):
    """Writes each run's values for TensorBoard, into a folder of its own below ``log_dir``.

    Scalars by step: ``step/loss`` and ``step/rows_per_second`` twice a second at most,
    ``epoch/<name>`` for every value of the history, and ``update_ratio/<layer>``, the decimal
    logarithm of how far a step moves the layer. Histograms of ``weights/<name>`` and
    ``gradients/<name>`` of rank 0, which looks at 16,384 numbers of each tensor. Images of its
    first batch, as the module gets them, if an input is a batch of images. The module's graph.
    Texts: Params, facts, failures.

    Example::

        TorchClassifier(module=make_net, listeners=[TensorBoard(log_dir="tb")]).fit(df)
        # tensorboard --logdir tb

    Raises, when a fit begins:
        SparkDLError: the package tensorboard is not installed.
    """

    log_dir: str = "runs/tensorboard"
    """A directory of the driver, or a URL that TensorBoard's own files can be written to."""
    flush_seconds: float = 5.0
    """Time that values may wait before they are written."""
    histograms: bool = True
    """True if rank 0 makes histograms, which takes it a moment; twice a second at most."""
    layer_interval: int | None = None
    """Steps between two looks at the layers, for ratios and histograms; None: once per epoch, and
    twenty times in a run of fewer epochs."""
    images: int = 8
    """Number of images of the first batch that are shown; 0: none."""

    @property
    def looks(self) -> Looks:
        return Looks(every=self.layer_interval, histograms=self.histograms, images=self.images)

    def start(self, run: RunStart) -> RunListener:
        missing = "listeners=[TensorBoard(...)] needs tensorboard; install it on the driver with: "
        with import_or(SparkDLError(f"{missing}pip install tensorboard")):
            from torch.utils.tensorboard import SummaryWriter
        folder = f"{self.log_dir.rstrip('/')}/{run.folder}"
        writer = SummaryWriter(folder, flush_secs=max(1, round(self.flush_seconds)))
        writer.add_text("params", _as_table(run.params))
        return _InOneRun(writer)


class _InOneRun(RunListener):
    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._num_failures = 0

    def facts(self, facts: Mapping[str, Any]) -> None:
        self._writer.add_text("facts", _as_table(facts))

    def graph(self, graph: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        drawn = _graph(graph).SerializeToString()
        self._writer.file_writer.add_event(Event(graph_def=drawn))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self._add("step", step, values)

    def layers(self, step: int, found: Mapping[str, Any]) -> None:
        ratios = {layer: ratio for layer, ratio in found.get("ratios", {}).items() if ratio}
        self._add("update_ratio", step, {name: math.log10(r) for name, r in ratios.items()})
        for name, counted in found.get("histograms", {}).items():
            low, high, counts = counted["low"], counted["high"], counted["counts"]
            width = (high - low) / len(counts)
            self._writer.add_histogram_raw(
                name,
                min=low,
                max=high,
                num=sum(counts),
                sum=counted["sum"],
                sum_squares=counted["sum_squares"],
                bucket_limits=[*(low + width * (k + 1) for k in range(len(counts) - 1)), high],
                bucket_counts=counts,
                global_step=step,
            )
        if images := found.get("images"):
            shades = np.frombuffer(zlib.decompress(base64.b64decode(images["data"])), np.uint8)
            pictures = shades.reshape(images["shape"])
            self._writer.add_images(f"batch/{images['name']}", pictures, step)

    def epoch(self, step: int, record: Mapping[str, float]) -> None:
        own = {k: v for k, v in record.items() if k not in ("epoch", "report", "steps")}
        self._add("epoch", step, own)

    def failure(self, reason: str) -> None:
        self._num_failures += 1
        self._writer.add_text("failures", reason, self._num_failures)

    def end(self, record: RunRecord, module: nn.Module | None) -> None:
        self._writer.add_text("status", record.status)
        self._writer.close()

    def _add(self, group: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if math.isfinite(value):
                self._writer.add_scalar(f"{group}/{name}", value, step)


def _graph(graph: Mapping[str, Any]) -> Any:
    """A module's graph as TensorFlow writes it: parts of a part are in its scope."""
    from tensorboard.compat.proto.attr_value_pb2 import AttrValue
    from tensorboard.compat.proto.graph_pb2 import GraphDef
    from tensorboard.compat.proto.node_def_pb2 import NodeDef

    counts: Counter[str] = Counter()
    names: list[str] = []
    for node in graph["nodes"]:
        path = re.sub(r"[^\w/]", "_", node["name"].replace(".", "/"))
        counts[path] += 1
        names.append(path if counts[path] == 1 else f"{path}_{counts[path] - 1}")
    inputs: dict[int, list[str]] = {}
    for source, target in graph["edges"]:
        inputs.setdefault(target, []).append(names[source])
    drawn = GraphDef()
    for number, node in enumerate(graph["nodes"]):
        shown = {name: node[name] for name in ("shape", "parameters", "detail") if node.get(name)}
        drawn.node.append(
            NodeDef(
                name=names[number],
                op=node["op"],
                input=inputs.get(number, []),
                attr={name: AttrValue(s=str(value).encode()) for name, value in shown.items()},
            )
        )
    return drawn


def _as_table(values: Mapping[str, Any]) -> str:
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in values.items()]
    return "\n".join(["| name | value |", "|---|---|", *rows])


def _cell(value: Any) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
