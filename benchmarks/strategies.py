"""Which strategy learns fastest over which network? Two workers, each in a namespace of its own.

Both workers train the same network on the handwritten digits of scikit-learn until the held-out
accuracy is reached, over a virtual cable whose speed ``tc`` limits. Noted are the seconds of
training until then (evaluation left out) and the bytes that the workers' interfaces sent.

Needs root, ``ip`` and ``tc``; where that is not permitted it says so and stops. Namespaces and
cables carry the process's own number and are removed at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import common
from common import HERE, table

from sparkdl.comm.certificates import make_certificate

LINKS = {"unlimited": None, "1 Gbit/s": "1gbit", "100 Mbit/s": "100mbit"}
ADDRESSES = ("10.231.7.1", "10.231.7.2")


def main() -> None:
    """Measure every strategy at every link speed, print a table and draw a plot."""
    options = arguments()
    with contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(namespaces())
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"skipped: network namespaces cannot be made here ({error})")
            return
        rows = []
        for link in options.links:
            limit(names, LINKS[link])
            common.wait_until_idle(options.patience)
            for found in run(names, options):
                rows.append({"link": link, **found})
                print(f"{link:12} {found['strategy']:28} {describe(found)}", flush=True)
    report = {"rows": rows, "options": shown(options), **common.environment()}
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "strategies.json").write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{summary(rows, options.links)}")
    plot(rows, options.links, options.output / "strategies.png")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--links", nargs="+", choices=list(LINKS), default=list(LINKS))
    parser.add_argument("--strategies", nargs="+", default=[], help="names; default: all")
    parser.add_argument("--accuracy", type=float, default=0.97, help="held-out accuracy to reach")
    parser.add_argument("--epochs", type=int, default=40, help="epochs after which to give up")
    parser.add_argument("--width", type=int, default=512, help="units of the two hidden layers")
    parser.add_argument("--runs", type=int, default=3, help="runs of which the median is taken")
    parser.add_argument("--patience", type=int, default=30, help="longest wait for idle CPUs")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    return parser.parse_args()


def shown(options: argparse.Namespace) -> dict[str, object]:
    """The options that matter for the result."""
    return {name: value for name, value in vars(options).items() if name != "output"}


@contextlib.contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a virtual cable; gone at the end."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise OSError(f"{program} is not installed")
    names = tuple(f"sparkdl{os.getpid()}-{side}" for side in (0, 1))
    devices = tuple(device(name) for name in names)
    with contextlib.ExitStack() as stack:
        for name in names:
            shell("ip", "netns", "add", name)
            stack.callback(shell, "ip", "netns", "del", name)
        first, second = devices
        shell("ip", "link", "add", first, "netns", names[0], "type", "veth",
              "peer", "name", second, "netns", names[1])  # fmt: skip
        for name, cable, address in zip(names, devices, ADDRESSES, strict=True):
            shell("ip", "-n", name, "addr", "add", f"{address}/24", "dev", cable)
            for link in ("lo", cable):
                shell("ip", "-n", name, "link", "set", link, "up")
        yield names


def limit(names: tuple[str, str], rate: str | None) -> None:
    """Let each side of the cable send at most ``rate``."""
    for name in names:
        inside = ("ip", "netns", "exec", name, "tc")
        cable = device(name)
        subprocess.run(
            [*inside, "qdisc", "del", "dev", cable, "root"], capture_output=True, check=False
        )
        if rate is not None:
            shell(*inside, "qdisc", "add", "dev", cable, "root", "handle", "1:", "htb",
                  "default", "1")  # fmt: skip
            shell(*inside, "class", "add", "dev", cable, "parent", "1:", "classid", "1:1", "htb",
                  "rate", rate, "burst", "64k")  # fmt: skip


def device(name: str) -> str:
    """Name of the cable's end in a namespace."""
    return f"v{name.removeprefix('sparkdl')}"


def run(names: tuple[str, str], options: argparse.Namespace) -> list[dict[str, object]]:
    """Two workers train with every strategy in turn; what rank 0 found."""
    with tempfile.TemporaryDirectory() as place:
        handed = json.dumps({**shown(options), "certificate": asdict(make_certificate())})
        workers = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, HERE / "strategy_worker.py",
                 str(rank), ADDRESSES[rank], device(name), place, handed],
                env={**os.environ, "GLOO_SOCKET_IFNAME": device(name)},
            )
            for rank, name in enumerate(names)
        ]  # fmt: skip
        try:
            for worker in workers:
                if worker.wait(timeout=3600) != 0:
                    raise RuntimeError("a worker failed")
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()
        return json.loads((Path(place) / "found.json").read_text())


def shell(*words: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(words, check=True, capture_output=True, text=True)


def describe(found: dict[str, object]) -> str:
    """One result in words."""
    if found["seconds"] is None:
        return f"not reached; {found['best']:.3f} at best"
    return (
        f"{found['seconds']:8.2f} s  {found['epochs']:3.0f} epochs  "
        f"{found['bytes'] / 2**20:9.2f} MiB sent"
    )


def summary(rows: list[dict[str, object]], links: list[str]) -> str:
    """One line per strategy: seconds to the accuracy at each link speed, and bytes."""
    lines = []
    for name in dict.fromkeys(row["strategy"] for row in rows):
        mine = {row["link"]: row for row in rows if row["strategy"] == name}
        cells = [cell(mine.get(link)) for link in links]
        last = mine[links[-1]]
        steps = f"{last['bytes_per_step'] / 1024:,.1f}" if last["bytes_per_step"] else "-"
        lines.append((str(name), *cells, f"{last['epochs'] or 0:.0f}", steps))
    head = ("strategy", *(f"s, {link}" for link in links), "epochs", "KiB/step")
    return table(head, lines)


def cell(row: dict[str, object] | None) -> str:
    """Seconds to the accuracy."""
    return "-" if row is None or row["seconds"] is None else f"{row['seconds']:.2f}"


def plot(rows: list[dict[str, object]], links: list[str], path: Path) -> None:
    """Draw the seconds to the accuracy, one group of points per strategy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row["strategy"] for row in rows))
    by_key = {(row["strategy"], row["link"]): row["seconds"] for row in rows}
    names.sort(key=lambda name: by_key.get((name, links[-1])) or float("inf"), reverse=True)
    figure, axes = pyplot.subplots(figsize=(8, 0.32 * len(names) + 1.6), layout="constrained")
    for marker, link in zip("os^", links, strict=False):
        points = [(by_key.get((name, link)), place) for place, name in enumerate(names)]
        seen = [(seconds, place) for seconds, place in points if seconds is not None]
        axes.plot(*zip(*seen, strict=True), marker, label=link, markersize=7, alpha=0.85)
    axes.set_yticks(range(len(names)), names)
    axes.set_xscale("log")
    axes.set_xlabel("seconds of training until the held-out accuracy is reached (log scale)")
    axes.grid(axis="x", which="both", alpha=0.25)
    axes.legend(title="link between the two workers", loc="upper right")
    figure.savefig(path, dpi=140)


if __name__ == "__main__":
    main()
