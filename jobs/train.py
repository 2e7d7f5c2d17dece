"""Train a PyTorch model as a job file says, save it, and test it on rows it has never seen."""

from __future__ import annotations

import sys

from sparkdl.cli.command_line import run_job
from sparkdl.cli.job_commands import TRAIN

if __name__ == "__main__":
    sys.exit(run_job(TRAIN))
