"""Numbers, times and sizes as pages and messages write them."""

from __future__ import annotations

import math
import time


def number(value: float) -> str:
    """A number of a drawing, as short as it can be."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def duration(seconds: float) -> str:
    """``0.42 s``, ``38 s``, ``3 min 20 s``, ``2 h 5 min``."""
    if seconds < 9.95:
        return f"{seconds:.2f} s" if seconds < 0.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def moment(epoch_seconds: float) -> str:
    """A moment, in UTC, since a report may be read anywhere."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(epoch_seconds))


def size(num_bytes: float) -> str:
    """``512 B``, ``1.2 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def value(number: float | None) -> str:
    """A measured value; what JSON could not hold was no finite number."""
    if number is None or not math.isfinite(number):
        return "not finite"
    if number == int(number) and abs(number) < 1e15:
        return f"{int(number):,}"
    return f"{number:,.1f}" if abs(number) >= 1000 else f"{number:.4g}"


def share(part: float, whole: float) -> str:
    """``12 %``."""
    return f"{100 * part / whole:.0f} %" if whole > 0 else "0 %"


def ranks(numbers: list[int]) -> str:
    """``0-3, 7``."""
    runs: list[list[int]] = []
    for rank in sorted(numbers):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{r[0]}\u2013{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs)
