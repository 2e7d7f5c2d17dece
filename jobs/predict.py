"""Write a saved model's predictions for the rows that a job file names."""

from __future__ import annotations

import sys

from sparkdl.cli.job_commands import PREDICT, run_job

if __name__ == "__main__":
    sys.exit(run_job(PREDICT))
