"""How many workers are worth their network? Speed-up and efficiency of 2 to 1,000 of them.

Steps are simulated event by event (``tests/explain/simulate.py``) from what was measured here: the
steps of a network in one process, and messages between two processes that each have a network
namespace of their own, behind a bridge, with cables that ``tc`` limits. Whether the simulation is
right is checked with 2, 4 and 8 such processes, which sleep as long as a step takes and then sum
as many bytes as the network has parameters by torch's gloo.

A second network has the step and the parameters that the command line gives: these are assumed,
not measured. Needs root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import torch.distributed as dist
from common import HERE
from strategies import device, limit, shell

from sparkdl.comm.process_group import process_group
from sparkdl.config import CheckpointConfig, TrainConfig
from sparkdl.data.plan import Shard, make_plan
from sparkdl.explain.calibrate import spreads
from sparkdl.explain.comparison import choose_strategy, ladder, strategy_text
from sparkdl.explain.cost_model import (
    Calibration,
    Compute,
    Gang,
    Layout,
    Network,
    NetworkLink,
    fit_line,
)
from sparkdl.explain.predict_times import Predictor
from sparkdl.models import ResNet56
from sparkdl.sync.averaging.local_sgd import LocalSGD
from sparkdl.sync.exchange_pattern import ModelSize, Pattern
from sparkdl.sync.gradients.allreduce import AllReduce
from sparkdl.sync.strategy import SyncStrategy
from tests.explain.simulate import Cluster, simulate

BATCH = 64
RATES = {"1 Gbit/s": "1gbit", "10 Gbit/s": "10gbit"}
SIZES = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
CHECKED = (2, 4, 8)
CASES = tuple((world_size, share) for world_size in CHECKED for share in (1, 0))
"""Workers, and which part of a step they sleep before each sum: all of it, or nothing."""
PER_HOST = 8
LINK_BYTES = (8, 1 << 20, 1 << 24)
TENSOR = 1 << 18
"""Parameters of each tensor of the assumed network, which says nothing of its layers."""


def ways() -> dict[str, tuple[SyncStrategy, int]]:
    """What is compared: a strategy, and workers of each host."""
    return {
        "ring": (AllReduce(topology="ring"), 1),
        "tree": (AllReduce(topology="tree"), 1),
        "hierarchical": (AllReduce(topology="hierarchical"), PER_HOST),
        "every 16 steps": (LocalSGD(averaging_period=16, topology="ring"), 1),
        "fp16": (AllReduce(compression="fp16", topology="ring"), 1),
    }


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A network, and what a worker's own part of its steps takes."""

    name: str
    median_seconds: float
    spread: float
    """Standard deviation of the logarithm, from step to step."""
    parameters: int
    cast_seconds: float
    """To make all gradients half as large, and to make them large again."""
    is_measured: bool

    @property
    def compute(self) -> Compute:
        """For the simulation; hosts are taken to be equally fast."""
        return Compute(
            threads=1, fixed_seconds=self.median_seconds, row_seconds=0.0, step_spread=self.spread
        )

    @property
    def size(self) -> ModelSize:
        """Its parameters and nothing else."""
        tensors, rest = divmod(self.parameters, TENSOR)
        return ModelSize(
            shapes=((TENSOR,),) * tensors + ((rest,),) * (rest > 0), element_size=4,
            replica_bytes=4 * self.parameters, buffer_bytes=0, optimizer_bytes=0,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the simulation is given, and how it compares with real processes."""

    reference: Reference
    links: dict[str, NetworkLink]
    checks: list[dict[str, Any]]
    environment: Mapping[str, Any]
    """Where and with what."""


def main() -> None:
    """Measure, check the simulation, and print the tables."""
    options = arguments()
    try:
        measured = known(options.measured) if options.measured else measure(options)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"skipped: network namespaces cannot be made here ({error})")
        return
    assumed = Reference(
        name=options.name, median_seconds=options.step_ms / 1e3, spread=options.spread,
        parameters=options.parameters, cast_seconds=0.0, is_measured=False,
    )  # fmt: skip
    rows = []
    for reference in (measured.reference, assumed):
        for name, link in measured.links.items():
            found = [scaled(reference, name, link, world_size) for world_size in SIZES]
            rows += found
            print(f"\n{described(reference)}, {name}\n{shown(found)}", flush=True)
    report = {
        "measured": asdict(measured),
        "assumed": asdict(assumed),
        "shared memory": asdict(shared_memory()),
        "rows": rows,
        "options": {k: v for k, v in vars(options).items() if not isinstance(v, Path)},
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "scale.json").write_text(json.dumps(report, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    """The command line. The defaults of what is assumed: see benchmarks/README.md."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="of which the quickest counts")
    parser.add_argument("--steps", type=int, default=10, help="steps of each run")
    parser.add_argument("--name", default="ResNet-101 on a P100", help="of the assumed network")
    parser.add_argument("--step-ms", type=float, default=618.0, help="its step on one worker")
    parser.add_argument("--spread", type=float, default=0.02, help="of that step's logarithm")
    parser.add_argument("--parameters", type=int, default=44_549_160, help="its parameters")
    parser.add_argument("--measured", type=Path, help="scale.json with what was measured before")
    parser.add_argument("--patience", type=int, default=30, help="longest wait for idle CPUs")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    return parser.parse_args()


# --- measurements ---------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> Measured:
    """All that is measured; raises OSError or CalledProcessError where that is not permitted."""
    links, checks = {}, []
    with Workers.started(max(CHECKED)) as workers:
        reference = measured_reference(options)
        print(described(reference), flush=True)
        for name, rate in RATES.items():
            least = quickest(workers, rate, reference, options)
            links[name] = link = link_of(least["sums"])
            speed = 1e-6 / link.byte_seconds
            print(f"{name}: {link.latency_seconds * 1e6:.0f} us + {speed:.0f} MB/s", flush=True)
            checks += checked(name, link, reference, least["steps"], options.steps)
    return Measured(
        reference=reference, links=links, checks=checks, environment=common.environment()
    )


def known(path: Path) -> Measured:
    """What a report has."""
    found = json.loads(path.read_text())["measured"]
    return Measured(
        reference=Reference(**found["reference"]),
        links={name: NetworkLink(**link) for name, link in found["links"].items()},
        checks=found["checks"],
        environment=found["environment"],
    )


def measured_reference(options: argparse.Namespace) -> Reference:
    """ResNet-56 on one thread; CPU seconds, since other programs may be at work."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = ResNet56()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(images), labels).backward()
        optimizer.step()

    parameters = sum(one.numel() for one in module.parameters())
    gradients = torch.randn(parameters)

    def steps() -> list[float]:
        return [cpu_seconds(step) for _ in range(options.steps + 3)][3:]

    seconds = min(runs(options, steps), key=statistics.median)
    casts = [cpu_seconds(lambda: gradients.copy_(gradients.half())) for _ in range(20)]
    return Reference(
        name="ResNet-56 on one thread",
        median_seconds=statistics.median(seconds),
        spread=spreads([seconds])[0],
        parameters=parameters,
        cast_seconds=statistics.median(casts),
        is_measured=True,
    )


def runs(options: argparse.Namespace, measure: Callable[[], Any]) -> list[Any]:
    """Several, of which the quickest counts: what slows one down is other programs."""
    found = []
    for _ in range(options.runs):
        common.wait_until_idle(options.patience)
        found.append(measure())
    return found


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call in this process."""
    started = time.process_time()
    work()
    return time.process_time() - started


def quickest(
    workers: Workers, rate: str, reference: Reference, options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of sums by two processes, and per step of `CASES`.

    Of each sum and step the quickest run counts: all runs sleep equally long.
    """
    step = {"do": "steps", "count": options.steps, "bytes": 4 * reference.parameters,
            "spread": reference.spread}  # fmt: skip

    def measure() -> dict[str, list[list[float]]]:
        return {
            "sums": workers.run(2, rate, {"do": "sums"}),
            "steps": [
                workers.run(world_size, rate, {**step, "median": share * reference.median_seconds})
                for world_size, share in CASES
            ],
        }

    found = runs(options, measure)
    least = {what: np.min([run[what] for run in found], axis=0) for what in found[0]}
    return {
        "sums": np.median(least["sums"], axis=1).tolist(),
        "steps": least["steps"].mean(axis=1).tolist(),
    }


def link_of(seconds: Sequence[float]) -> NetworkLink:
    """A message between two ranks, from sums of several sizes, as `explain` has it."""
    points = [(size / 2, took / 2) for size, took in zip(LINK_BYTES, seconds, strict=True)]
    latency, byte = fit_line(points)
    return NetworkLink(latency_seconds=latency, byte_seconds=byte)


def shared_memory() -> NetworkLink:
    """A sum in the memory of one host, by two processes, as ``allreduce.py`` has measured it."""
    medians = json.loads((HERE / "results" / "allreduce.json").read_text())["medians"]
    sizes = {"4 KB": 4 << 10, "64 KB": 64 << 10, "4 MB": 4 << 20, "100 MB": 100 << 20}
    points = [(size, medians[f"shared, {name}, ms"] / 1e3) for name, size in sizes.items()]
    latency, byte = fit_line(points)
    return NetworkLink(latency_seconds=latency, byte_seconds=byte)


def checked(
    name: str, link: NetworkLink, reference: Reference, measured: Sequence[float], num_steps: int
) -> list[dict[str, Any]]:
    """Seconds per step of the real processes beside the simulation's."""
    found = []
    for (world_size, share), real in zip(CASES, measured, strict=True):
        median = share * reference.median_seconds
        cluster = Cluster(
            compute=replace(reference.compute, fixed_seconds=median),
            network=Network(messages=link),
            layout=Layout(world_size=world_size, num_nodes=world_size),
        )
        pattern = Pattern(num_bytes=4 * reference.parameters)
        simulated = simulated_seconds(cluster, pattern, "ring", num_steps)
        what, ratio = "steps" if share else "sums alone", simulated / real
        verdict = "agrees" if 1 / 1.3 <= ratio <= 1.3 else "DOES NOT AGREE within 30 %"
        print(
            f"{name}, {world_size} workers, {what}: real {real * 1e3:.1f} ms, simulated "
            f"{simulated * 1e3:.1f} ms, ratio {ratio:.2f}: {verdict}",
            flush=True,
        )
        found.append({
            "link": name, "workers": world_size, "what": what, "real seconds": real,
            "simulated seconds": simulated, "ratio": ratio,
        })  # fmt: skip
    return found


# --- the table ------------------------------------------------------------------------------------


def scaled(reference: Reference, name: str, link: NetworkLink, world_size: int) -> dict[str, Any]:
    """The efficiency of each way, and of what `explain` takes."""
    efficiency = {
        way: efficiency_of(reference, link, world_size, strategy, per_host)
        for way, (strategy, per_host) in ways().items()
    }
    taken = recommended(reference, link, world_size)
    return {
        "network": reference.name,
        "is measured": reference.is_measured,
        "link": name,
        "workers": world_size,
        "efficiency": efficiency,
        "speed-up": {way: world_size * value for way, value in efficiency.items()},
        "explain": {
            "strategy": strategy_text(taken),
            "efficiency": efficiency_of(reference, link, world_size, taken, 1),
        },
    }


def efficiency_of(
    reference: Reference, link: NetworkLink, world_size: int, strategy: SyncStrategy, per_host: int
) -> float:
    """Seconds of a lone worker's step over those of a step of so many."""
    pattern = strategy.pattern(reference.size, world_size)
    compute = reference.compute
    if pattern.codec:
        compute = replace(compute, fixed_seconds=compute.fixed_seconds + reference.cast_seconds)
    num_nodes = math.ceil(world_size / per_host)
    # The workers of a host send at the same time, over its one cable.
    at_once = min(per_host, world_size)
    messages = replace(link, byte_seconds=at_once * link.byte_seconds)
    cluster = Cluster(
        compute=compute,
        network=Network(messages=messages, shared=shared_memory(), shared_ranks=2),
        layout=Layout(world_size=world_size, num_nodes=num_nodes),
    )
    topology = "ring" if pattern.topology == "auto" else pattern.topology
    num_steps = 2 * round(pattern.period) if pattern.period > 1 else 8
    seconds = simulated_seconds(cluster, pattern, topology, num_steps)
    return reference.compute.mean_seconds(0) / seconds


def simulated_seconds(cluster: Cluster, pattern: Pattern, topology: str, num_steps: int) -> float:
    """Mean of several seeds; of many workers one says as much."""
    play = partial(simulate, cluster, pattern, topology, rows=0, num_steps=num_steps)
    return statistics.mean(play(seed=s) for s in range(1 if cluster.layout.world_size > 100 else 5))


def recommended(reference: Reference, link: NetworkLink, world_size: int) -> SyncStrategy:
    """What `explain` takes for so many hosts of one worker each, and rows for 10,000 steps."""
    rows = 10_000 * BATCH
    gang = Gang(
        levels={}, network=Network(messages=link),
        codec_seconds={"BF16Compression": reference.cast_seconds},
    )  # fmt: skip
    shards = [
        Shard(shard_id=i, num_rows=rows, num_validation_rows=0, fingerprint="")
        for i in range(world_size)
    ]
    predictor = Predictor(
        calibration=Calibration(
            gang=gang, levels={1: reference.compute}, task_levels={}, stages=None
        ),
        plan=make_plan(
            columns=(), shards=shards, world_size=world_size, batch_size=BATCH, epochs=1
        ),
        size=reference.size,
        num_nodes=world_size,
        slots=world_size,
        config=TrainConfig(checkpoint=CheckpointConfig(interval=-1)),
        largest_rows=lambda workers: rows * world_size // workers,
        check=lambda strategy, workers: None,
    )
    strategy = choose_strategy(ladder(predictor, [1, world_size]))[0].value
    assert isinstance(strategy, SyncStrategy)
    return strategy


def described(reference: Reference) -> str:
    """A network in words."""
    return (
        f"{reference.name}: {reference.median_seconds * 1e3:.0f} ms with a spread of "
        f"{reference.spread:.3f}, {reference.parameters:,} parameters, "
        f"{'measured' if reference.is_measured else 'assumed'}"
    )


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """Speed-ups and efficiencies, one line for each number of workers."""
    lines = []
    for row in rows:
        cells = [
            f"{row['speed-up'][way]:.3g} ({value:.0%})" for way, value in row["efficiency"].items()
        ]
        taken = row["explain"]
        lines.append(
            (str(row["workers"]), *cells, f"{taken['efficiency']:.0%} {taken['strategy']}")
        )
    return common.table(("workers", *ways(), "explain takes"), lines)


# --- processes in namespaces ----------------------------------------------------------------------


class Workers:
    """Processes of this file, each in a network namespace of its own, behind one bridge."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._names, self._folder = names, folder
        self._jobs = 0
        self.processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, __file__, "be", str(rank)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": device(name)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank, name in enumerate(names)
        ]  # fmt: skip

    @classmethod
    @contextlib.contextmanager
    def started(cls, count: int) -> Iterator[Workers]:
        """So many; they and their namespaces are gone at the end."""
        with bridged(count) as names, tempfile.TemporaryDirectory() as folder:
            workers = cls(names, Path(folder))
            try:
                yield workers
            finally:
                for process in workers.processes:
                    process.kill()
                    process.wait()

    def run(self, world_size: int, rate: str, job: dict[str, Any]) -> Any:
        """Have the first ones do a job over cables of this rate; what rank 0 has found."""
        limit(self._names[:world_size], rate)
        self._jobs += 1
        store = str(self._folder / str(self._jobs))
        told = json.dumps({**job, "world_size": world_size, "store": store})
        at_work = self.processes[:world_size]
        for process in at_work:
            assert process.stdin is not None
            process.stdin.write(told + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in at_work if process.stdout]
        if not all(answers):
            raise RuntimeError("a worker has ended")
        return json.loads(answers[0])


@contextlib.contextmanager
def bridged(count: int) -> Iterator[list[str]]:
    """So many network namespaces behind one bridge; gone at the end."""
    bridge = f"sparkdl{os.getpid()}-b"
    names = [f"sparkdl{os.getpid()}-{side}" for side in range(count)]
    with contextlib.ExitStack() as stack:
        for name in (bridge, *names):
            shell("ip", "netns", "add", name)
            stack.callback(shell, "ip", "netns", "del", name)
        shell("ip", "-n", bridge, "link", "add", "name", "bridge", "type", "bridge")
        shell("ip", "-n", bridge, "link", "set", "bridge", "up")
        for side, name in enumerate(names):
            cable, port = device(name), f"port{side}"
            shell("ip", "link", "add", cable, "netns", name, "type", "veth",
                  "peer", "name", port, "netns", bridge)  # fmt: skip
            shell("ip", "-n", bridge, "link", "set", port, "master", "bridge", "up")
            shell("ip", "-n", name, "addr", "add", f"10.231.9.{side + 1}/24", "dev", cable)
            for link in ("lo", cable):
                shell("ip", "-n", name, "link", "set", link, "up")
        yield names


def be(rank: int) -> None:
    """Do what the jobs on stdin ask for."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        with process_group(
            backend="gloo",
            store=dist.FileStore(job["store"], job["world_size"]),
            rank=rank,
            world_size=job["world_size"],
            timeout_seconds=60,
        ):
            found = seconds_of_sums() if job["do"] == "sums" else seconds_of_steps(rank, job)
        print(json.dumps(found), flush=True)


def seconds_of_sums() -> list[list[float]]:
    """Of some sums of each size."""
    found = []
    for num_bytes in LINK_BYTES:
        tensor = torch.zeros(num_bytes // 4)
        dist.all_reduce(tensor)
        found.append([])
        for _ in range(10):
            dist.barrier()
            found[-1].append(common.seconds(partial(dist.all_reduce, tensor)))
    return found


def seconds_of_steps(rank: int, job: dict[str, Any]) -> list[float]:
    """Steps that are slept, each with a sum after it."""
    generator = np.random.default_rng((1, rank))
    draws = generator.standard_normal(job["count"])
    tensor = torch.zeros(job["bytes"] // 4)
    dist.all_reduce(tensor)  # connects
    dist.barrier()
    ends = [time.perf_counter()]
    for seconds in (job["median"] * np.exp(job["spread"] * draws)).tolist():
        time.sleep(seconds)
        dist.all_reduce(tensor)
        ends.append(time.perf_counter())
    return np.diff(ends).tolist()


if __name__ == "__main__":
    if sys.argv[1:2] == ["be"]:
        be(int(sys.argv[2]))
    else:
        main()
