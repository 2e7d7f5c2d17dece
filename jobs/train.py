"""Train a PyTorch model as a job file says, save it, and test it on rows it has never seen."""

from __future__ import annotations

import sys

from sparkdl.cli.job_commands import TRAIN, run_job

if __name__ == "__main__":
    sys.exit(run_job(TRAIN))
