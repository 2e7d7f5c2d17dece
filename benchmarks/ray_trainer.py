"""What does Ray Train make of the same work? `ddp.train` in its workers, in a Python that has ray.

A Ray cluster is started for it on this machine, as ``torchrun`` starts its processes. `fit.py` runs
this with the Python of ``--ray``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import ddp
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def main(folder: str, batch_size: int, epochs: int, output: str) -> None:
    """Train with two workers."""
    ray.init(
        address="local", num_cpus=3, include_dashboard=False, log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        trainer = TorchTrainer(
            ddp.train,
            train_loop_config={
                "folder": folder,
                "batch_size": batch_size,
                "epochs": epochs,
                "output": output,
            },
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
            run_config=RunConfig(storage_path=str(Path(place).resolve())),
        )
        trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
