"""Workers read HDFS from the data node on their own host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.cluster import PATIENCE, started_cluster
from tests.faults.hosts import network_of, started_hosts, what_is_missing
from tests.hdfs.daemons import Hdfs
from tests.hdfs.jars import cached_jars, skip_if_told
from tests.hdfs.local_reads import EPOCHS, FILES, ROWS, WIDTH

ROOT = Path(__file__).parent.parent.parent
BYTES = EPOCHS * FILES * ROWS * WIDTH * 4
"""Of the numbers that a fit reads, of which there are half on each data node, more or less."""


@pytest.mark.slow
@pytest.mark.timeout(400 * PATIENCE)
def test_row_groups_are_read_on_the_hosts_that_have_them(tmp_path: Path) -> None:
    """Three hosts: name node and driver, and two with a data node and an executor each."""
    skip_if_told()
    missing = what_is_missing()
    if missing is not None:
        pytest.skip(f"this test needs hosts of its own, and lacks {missing}")
    (tmp_path / "hdfs").mkdir()
    with (
        started_hosts(tmp_path, ("driver", "worker-1", "worker-2")) as hosts,
        network_of(hosts[0]),
        started_cluster(tmp_path, hosts) as cluster,
        Hdfs(tmp_path / "hdfs", cached_jars(), replication=1, hosts=hosts) as hdfs,
    ):
        places = [cluster.url, hosts[0].address, str(tmp_path), hdfs.url, hdfs.webhdfs_url]
        done = subprocess.run(
            hosts[0].command([sys.executable, "-m", "tests.hdfs.local_reads", *places]),
            cwd=ROOT, capture_output=True, text=True, timeout=300 * PATIENCE, check=False,
            env={**os.environ, "SPARK_CONF_DIR": str(ROOT / "conf")},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    by_name = {name: found[name]["bytes"] for name in ("local", "anywhere")}
    print(by_name, "of", BYTES)
    by_hadoop, by_web = found["blocks"]
    assert by_hadoop == by_web and len(by_web) == FILES
    names = {tuple(host) for blocks in by_web.values() for _, _, (host,) in blocks}
    assert names == {("worker-1", hosts[1].address), ("worker-2", hosts[2].address)}
    local, anywhere = found["local"], found["anywhere"]
    assert local["rows"] == anywhere["rows"] == FILES * ROWS
    assert anywhere["hosts"] == [[], []]
    assert any("2 of 2 shards lie mostly on one host" in note for note in found["explained"])
    # HDFS draws the data nodes of files: half of what one has more than the other must travel, and
    # the file that is cut between the two shards is read by both.
    held = dict.fromkeys(("worker-1", "worker-2"), 0)
    for blocks in by_web.values():
        for start, stop, ((name, _),) in blocks:
            held[name] += stop - start
    travels = EPOCHS * (abs(held["worker-1"] - held["worker-2"]) / 2 + sum(held.values()) / FILES)
    for name in ("worker-1", "worker-2"):
        mine, ours = by_name["local"][name], by_name["anywhere"][name]
        assert mine["disk"] > 0.6 * BYTES / 2 and ours["disk"] > 0.6 * BYTES / 2
        assert mine["eth0"] < 0.05 * mine["disk"] + travels
        assert ours["eth0"] > 0.3 * BYTES / 2
