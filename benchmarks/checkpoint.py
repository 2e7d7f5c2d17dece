"""How long does a checkpoint hold up training? Against a plain copy of the same bytes.

The training thread copies the state and goes on; a background thread writes it. One rank, local
storage. "first" saves into fresh memory, later ones into the buffers of the one before.
"""

from __future__ import annotations

import tempfile
import time

import common
import torch
from common import Measurements, seconds
from torch import nn

from sparkdl.comm.channel import Hub
from sparkdl.config import CheckpointConfig
from sparkdl.storage.checkpoint_format import Writer
from sparkdl.storage.checkpoint_writer import CheckpointManager
from sparkdl.storage.storage import open_storage

WIDTH = 1024


class Keys:
    """The run's keys, in this process."""

    def __init__(self) -> None:
        self._hub = Hub()
        self.set, self.get, self.delete = self._hub.set, self._hub.get, self._hub.delete

    def wait(self, keys: list[str], timeout_seconds: float) -> None:
        """Return when all keys are set."""
        if self._hub.missing(keys, timeout_seconds):
            raise TimeoutError


def main() -> None:
    """Measure, several times in turn."""
    options = common.arguments(11, layers=(16, "linear layers of 1024 x 1024, with Adam"))
    torch.set_num_threads(1)
    found = Measurements()
    model, optimizer = trained(options.layers)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    tensors = [*model.state_dict().values()]
    tensors += [t for entry in optimizer.state.values() for t in entry.values()]
    targets = [torch.empty_like(tensor) for tensor in tensors]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    found.add("state MB", size / 1e6)
    copy(tensors, targets)
    with tempfile.TemporaryDirectory() as folder:
        manager = CheckpointManager(
            open_storage(folder),
            CheckpointConfig(interval=1),
            rank=0,
            world_size=1,
            writer=Writer(run_key="benchmark", run_id="run", attempt=0),
            environment={},
            signal=Keys(),
        )
        for run in range(options.runs + 1):
            common.wait_until_idle(options.patience)
            plain = seconds(lambda: copy(tensors, targets))
            stall, whole = save(manager, run + 1, state)
            if run == 0:
                found.add("first stall ms", stall * 1e3)
                continue
            found.add("memcpy ms", plain * 1e3)
            found.add("stall ms", stall * 1e3)
            found.add("until visible ms", whole * 1e3)
            found.add("write GB/s", size / 1e9 / (whole - stall))
    found.ratio("stall / memcpy", "stall ms", "memcpy ms")
    found.report("checkpoint", options)


def trained(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network after one step, so that its optimizer has a state."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    return model, optimizer


def copy(tensors: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    """The plain copy: memory to memory that is there already."""
    with torch.no_grad():
        for tensor, target in zip(tensors, targets, strict=True):
            target.copy_(tensor)


def save(manager: CheckpointManager, step: int, state: dict[str, object]) -> tuple[float, float]:
    """Seconds for which the caller waits, and until the checkpoint is visible."""
    before = manager.stall_seconds
    started = time.perf_counter()
    manager.save(step, state, {"rng": torch.get_rng_state()})
    stall = manager.stall_seconds - before
    manager.close()
    return stall, time.perf_counter() - started


if __name__ == "__main__":
    main()
