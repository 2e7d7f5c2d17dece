"""A driver program for the fault suite: trains with a checkpointDir, and prints the weights.

Usage: drive.py MASTER ADDRESS FOLDER CHECKPOINT_DIR REPORT_DIR [ENTRY=VALUE ...]

``entries`` are of the session.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sparkdl.config import CheckpointConfig
from sparkdl.spark.fit.fit import fit
from tests.cluster.test_recovery import digest
from tests.faults.cluster import session
from tests.faults.oracle import fit_request, training_data


def main(
    url: str, address: str, folder: str, directory: str, report_dir: str, *entries: str
) -> None:
    """Train; the digest of the weights is the last word."""
    spark = session(url, address, Path(folder), **dict(entry.split("=", 1) for entry in entries))
    checkpoint = CheckpointConfig(directory=directory, interval=5)
    request = fit_request(checkpoint=checkpoint, report_dir=report_dir)
    result = fit(training_data(spark), request)
    print("restarts", result.summary.restarts, "digest", digest(result), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
