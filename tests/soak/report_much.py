"""Ranks that report to a driver: ``python -m tests.soak.report_much FIRST NUM PAUSE``.

Each has a connection of its own, and reports a numbered event every PAUSE seconds, or as often as
the driver answers. stdin gives the driver's address, and ends when they shall. Prints how many
events were sent by each rank, as JSON.
"""

from __future__ import annotations

import json
import pickle
import sys
import threading
import time

from sparkdl.comm.channel import ChannelClient


def report(
    client: ChannelClient, rank: int, ends: threading.Event, pause: float, sent: list[int]
) -> None:
    """Report until the end; each report has a heartbeat and the rank's next number."""
    next_report = time.monotonic() + pause * (rank % 100) / 100  # they do not come all at once
    while not ends.wait(max(0.0, next_report - time.monotonic())):
        events = [{"kind": "heartbeat", "step": sent[rank]}, {"kind": "count", "n": sent[rank]}]
        client.report(attempt=0, rank=rank, events=events)
        sent[rank] += 1
        next_report = max(next_report + pause, time.monotonic())
    client.close()


def main() -> None:
    """Run the threads of all ranks."""
    first, num, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    address = pickle.load(sys.stdin.buffer)
    ranks = range(first, first + num)
    clients = [ChannelClient(address.of_rank(rank), timeout_seconds=120) for rank in ranks]
    sent = [0] * (first + num)
    ends = threading.Event()
    threads = [
        threading.Thread(target=report, args=(client, rank, ends, pause, sent))
        for client, rank in zip(clients, ranks, strict=True)
    ]
    for thread in threads:
        thread.start()
    sys.stdin.buffer.read()
    ends.set()
    for thread in threads:
        thread.join()
    print(json.dumps({rank: sent[rank] for rank in ranks}))


if __name__ == "__main__":
    main()
