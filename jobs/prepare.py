"""Make Parquet of a folder of image files, as a job file says; a killed run goes on."""

from __future__ import annotations

import sys

from sparkdl.cli.job_commands import PREPARE, run_job

if __name__ == "__main__":
    sys.exit(run_job(PREPARE))
