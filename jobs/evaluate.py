"""Measure how good a saved model's predictions are, as a job file says."""

from __future__ import annotations

import sys

from sparkdl.cli.job_commands import EVALUATE, run_job

if __name__ == "__main__":
    sys.exit(run_job(EVALUATE))
