"""How long does a script take to start and to end? `TorchRunner` against TorchDistributor.

Both run `runner_script.py` on two workers: cold in a new Spark session, whose own start is not
counted, and warm in a session that has run it before. Start-up is the time from the call until the
script's first line after its imports; the total is that of the whole call.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common
from common import HERE, Measurements, spark_session

SCRIPT = HERE / "runner_script.py"
CONTENDERS = ("TorchRunner", "TorchDistributor")


def main() -> None:
    """Measure, several times in turn."""
    if len(sys.argv) > 1 and sys.argv[1] in CONTENDERS:
        print(json.dumps(in_new_session(sys.argv[1], int(sys.argv[2]))))
        return
    options = common.arguments(5, warm=(3, "warm runs in each session"))
    found = Measurements()
    for _ in range(options.runs):
        for name in CONTENDERS:
            common.wait_until_idle(options.patience)
            command = [sys.executable, __file__, name, str(1 + options.warm)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=600)
            cold, *warm = json.loads(done.stdout.splitlines()[-1])
            for kind, runs in (("cold", [cold]), ("warm", warm)):
                for what, values in zip(("start", "total"), zip(*runs, strict=True), strict=True):
                    found.add(f"{name}, {kind}: {what} s", sorted(values)[len(values) // 2])
    for kind in ("cold", "warm"):
        for what in ("start", "total"):
            names = [f"{name}, {kind}: {what} s" for name in reversed(CONTENDERS)]
            found.ratio(f"TorchDistributor / TorchRunner, {kind} {what}", *names)
    found.report("runner", options)


def in_new_session(name: str, times: int) -> list[tuple[float, float]]:
    """Start-up and total seconds of each run in a new session."""
    daemon = "sparkdl.spark.daemon" if name == "TorchRunner" else "pyspark.daemon"
    spark = spark_session(daemon=daemon)
    found = []
    for _ in range(times):
        with tempfile.TemporaryDirectory() as place:
            began = time.time()
            run(name, place)
            ended = time.time()
            found.append((float(Path(place, "began").read_text()) - began, ended - began))
    spark.stop()
    return found


def run(name: str, place: str) -> None:
    """The script on two workers."""
    if name == "TorchRunner":
        from sparkdl import TorchRunner

        TorchRunner(num_workers=2, device="cpu", verbose=0).run(str(SCRIPT), place)
    else:
        from pyspark.ml.torch.distributor import TorchDistributor

        distributor = TorchDistributor(num_processes=2, local_mode=False, use_gpu=False)
        distributor.run(str(SCRIPT), place)


if __name__ == "__main__":
    main()
