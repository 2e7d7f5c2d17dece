"""Five hundred ranks that report: no report is lost, and the driver does not grow."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from sparkdl.comm.channel import ChannelServer, Hub
from tests.soak.usage import SHARE, usage

NUM_PROCESSES, NUM_RANKS = 4, 500
SECONDS = max(60.0 * SHARE, 15.0)
PAUSE_SECONDS = 1.0
"""A report of each rank a second; workers send four, where the cores of a driver allow it."""
MEMORY_MIB = 16.0
ROOT = Path(__file__).parent.parent.parent


class Driver:
    """Takes the events, as the supervisor does, and counts them."""

    def __init__(self, hub: Hub) -> None:
        self.counts: Counter[int] = Counter()
        self.out_of_order = 0
        self.most_waiting = 0
        self._hub = hub
        self._is_over = threading.Event()
        self.thread = threading.Thread(target=self._take)

    def end(self) -> None:
        """Take what is left."""
        self._is_over.set()
        self.thread.join(60)

    def _take(self) -> None:
        while not self._is_over.wait(0.05) or self._hub.events.qsize():
            waiting = self._hub.events.qsize()
            self.most_waiting = max(self.most_waiting, waiting)
            for _ in range(waiting):
                event = self._hub.events.get()
                if event.body["kind"] == "count":
                    self.out_of_order += event.body["n"] != self.counts[event.rank]
                    self.counts[event.rank] += 1


@pytest.mark.slow
@pytest.mark.gang
@pytest.mark.timeout(400)
def test_all_that_ranks_report_arrives_and_the_driver_does_not_grow() -> None:
    hub = Hub()
    hub.begin(0)
    driver, others = Driver(hub), usage().ports  # such as Spark's
    sent: dict[int, int] = {}
    with ExitStack() as stack:
        server = stack.enter_context(ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1"))
        driver.thread.start()
        stack.callback(driver.end)
        each = NUM_RANKS // NUM_PROCESSES
        processes = []
        for first in range(0, NUM_RANKS, each):
            words = [str(word) for word in (first, each, PAUSE_SECONDS)]
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.report_much", *words],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)  # which does nothing to one that has ended
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(server.address))
            process.stdin.flush()
        deadline = time.monotonic() + 120
        while len(driver.counts) < NUM_RANKS and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(SECONDS / 6)
        warm = usage()
        time.sleep(SECONDS / 2)
        late = usage()
        for process in processes:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.close()
            told = json.loads(process.stdout.read())
            sent.update({int(rank): number for rank, number in told.items()})
            assert process.wait(60) == 0
        driver.end()
        assert driver.counts == sent and len(sent) == NUM_RANKS
        assert driver.out_of_order == 0
    assert min(warm.files, late.files) > NUM_RANKS  # a connection each
    assert warm.ports == others + 1
    assert late.grown(warm, memory_mib=MEMORY_MIB) == []
    print(
        f"\n{sum(sent.values())} reports, {driver.most_waiting} waiting at most: {warm} -> {late}"
    )
