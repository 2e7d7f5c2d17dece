"""Search for the values of hyperparameters that train best, as a job file says."""

from __future__ import annotations

import sys

from sparkdl.cli.job_commands import TUNE, run_job

if __name__ == "__main__":
    sys.exit(run_job(TUNE))
