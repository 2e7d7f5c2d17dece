"""A module of a user's own, sent with --py-files: a network, and callbacks that observe."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pyspark import TaskContext

import sparkdl
from sparkdl.models.demo import DigitsNet
from sparkdl.train.callbacks import Callback, CallbackState


class Net(DigitsNet):
    """A network that only this file knows."""


@dataclass
class TellWhereabouts(Callback):
    """Writes where a worker's code comes from, to ``folder`` on the same machine."""

    folder: str

    def on_step_end(self, state: CallbackState) -> None:
        if state.step > 1:
            return
        parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode().split("\0")
        context = TaskContext.get()
        assert context is not None
        gpus = context.resources().get("gpu")
        status = Path("/proc/self/status").read_text()
        found = {
            "peak_mib": int(status.split("VmHWM:")[1].split()[0]) >> 10,
            "gpus": gpus.addresses if gpus is not None else [],
            "sparkdl": sparkdl.__file__,
            "networks": __file__,
            "cwd": str(Path.cwd()),
            "daemon": parent,
            "python": sys.executable,
        }
        Path(self.folder, f"{state.rank}.json").write_text(json.dumps(found))


@dataclass
class Slow(Callback):
    """Makes every step last, so that there is time to strike."""

    seconds: float

    def on_step_end(self, state: CallbackState) -> None:
        time.sleep(self.seconds)
