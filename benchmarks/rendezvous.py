"""What do many ranks cost the driver? They meet at its channel, and report to it.

The server is the real one, in a process of its own. Ranks are connections of a few processes, so
they do nothing but ask. What they ask is what a worker asks until its first collective, and then
while it trains. Each minute the server's memory, threads and open files are printed: with
``--seconds 600 --ranks 500 --runs 1`` this shows whether they grow.
"""

from __future__ import annotations

import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import common
from common import Measurements

from sparkdl.comm.channel import ChannelClient, ChannelServer, Hub

PATIENCE = 300
"""Seconds after which a rank gives up."""
SIZES = (10, 100, 400, 1000)


def main() -> None:
    """Measure each number of ranks, and print the table."""
    options = common.arguments(
        3,
        ranks=(0, "ranks; 0: several numbers"),
        processes=(4, "processes that they are connections of"),
        seconds=(20, "for which they report"),
    )
    found, lines = Measurements(), []
    for ranks in (options.ranks,) if options.ranks else SIZES:
        names = ("meet s", "server CPU s to meet", "server CPU share of reports", "reports/s",
                 "server threads", "server MB")  # fmt: skip
        for _ in range(options.runs):
            common.wait_until_idle(options.patience)
            command = [sys.executable, __file__, "serve", str(ranks), str(options.processes)]
            output = subprocess.run(
                [*command, str(options.seconds)], check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            for name, value in zip(names, output.splitlines()[-1].split(), strict=True):
                found.add(f"{ranks}: {name}", float(value))
        lines.append((str(ranks), *(f"{found.median(f'{ranks}: {n}'):.3g}" for n in names)))
        print(*lines[-1], sep="  ", flush=True)
    print(common.table(("ranks", *names), lines))
    found.report("rendezvous", options)


def serve(ranks: int, processes: int, seconds: int) -> None:
    """Be the driver, and print what it took."""
    hub = Hub(keeps_events=False)
    server = ChannelServer(hub, bind="127.0.0.1", announce="127.0.0.1")
    told = pickle.dumps(server.address)
    children = []
    for first in range(processes):
        child = subprocess.Popen(
            [sys.executable, __file__, "be", *map(str, (first, ranks, processes, seconds))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert child.stdin is not None
        child.stdin.write(told)
        child.stdin.close()
        children.append(child)
    hub.wait([f"0/connected/{first}" for first in range(processes)], PATIENCE)
    before, most = time.process_time(), 0
    hub.set("0/go", b"")
    met = {f"0/met/{first}" for first in range(processes)}
    while hub.missing(list(met)):
        most = max(most, sum(1 for _ in Path("/proc/self/task").iterdir()))
        time.sleep(0.05)
    to_meet = time.process_time() - before
    time.sleep(2)
    before, began = time.process_time(), time.perf_counter()
    reported = [f"0/reported/{first}" for first in range(processes)]
    for minute in range(1 + seconds // 60):
        print(f"{ranks} ranks, minute {minute}: {held()}", file=sys.stderr, flush=True)
        until = time.monotonic() + 60
        while hub.missing(reported) and time.monotonic() < until:
            time.sleep(0.1)
    hub.wait(reported, PATIENCE)
    share = (time.process_time() - before) / (time.perf_counter() - began)
    took = [float(hub.get(f"0/met/{first}") or b"") for first in range(processes)]
    reports = [float(hub.get(f"0/reported/{first}") or b"") for first in range(processes)]
    for child in children:
        child.wait()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(max(took), to_meet, share, sum(reports), most, peak, flush=True)
    server.shutdown()


def held() -> str:
    """What this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads, files = (len(list(Path("/proc/self", kind).iterdir())) for kind in ("task", "fd"))
    memory = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return f"{memory:.1f} MiB, {threads} threads, {files} open files"


def end_with_parent() -> None:
    """End this process when the one that has started it is gone."""
    parent = os.getppid()

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def be(first: int, ranks: int, processes: int, seconds: int) -> None:
    """Be every ``processes``-th rank."""
    end_with_parent()
    address = pickle.loads(sys.stdin.buffer.read())
    own = {rank: ChannelClient(address.of_rank(rank)) for rank in range(first, ranks, processes)}
    for client in own.values():
        client.get("go")  # connects
    mine = own[first]
    mine.set(f"connected/{first}", b"")
    mine.wait(["go"], PATIENCE)
    slowest, count, lock = 0.0, 0, threading.Lock()

    def live(rank: int, client: ChannelClient) -> None:
        nonlocal slowest, count
        began = time.perf_counter()
        for what in ("hello", "met"):
            found = client.gather(what, rank, ranks, f"192.0.2.1/host-{rank}", PATIENCE)
            assert found[rank] == f"192.0.2.1/host-{rank}"
        took = time.perf_counter() - began
        with lock:
            slowest = max(slowest, took)
        all_met.wait()
        until, pause = time.monotonic() + seconds, 0.0
        time.sleep(0.25 * rank / ranks)
        while time.monotonic() < until:
            _, pause = client.report(
                attempt=0, rank=rank, events=[{"kind": "heartbeat", "phase": "train"}]
            )
            with lock:
                count += 1
            time.sleep(pause)

    all_met = threading.Barrier(len(own), lambda: mine.set(f"met/{first}", f"{slowest}".encode()))
    threads = [threading.Thread(target=live, args=pair) for pair in own.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    mine.set(f"reported/{first}", f"{count / seconds}".encode())


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(*map(int, sys.argv[2:]))
    elif sys.argv[1:2] == ["be"]:
        be(*map(int, sys.argv[2:]))
    else:
        main()
