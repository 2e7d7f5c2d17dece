"""HTML, put together so that no text becomes markup by accident: all but `Markup` is escaped."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Sequence
from itertools import zip_longest

_EMPTY = frozenset(("br", "circle", "line", "link", "meta", "path", "rect"))


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | float | None


def markup(value: Content) -> Markup:
    """A value as HTML: text is escaped, None is nothing."""
    if isinstance(value, Markup):
        return value
    if value is None:
        return Markup("")
    return Markup(html.escape(number(value) if isinstance(value, float) else str(value)))


def joined(*parts: Content) -> Markup:
    """Several pieces, one after the other."""
    return Markup("".join(map(markup, parts)))


def tag(name: str, /, *children: Content, **attributes: Content | bool) -> Markup:
    """An element with its children; attributes that are None or False are left out.

    In names of attributes ``_`` stands for ``-``, and one at the end for nothing (``class_``).
    """
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{markup(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY and not children:
        return Markup(f"<{name}{shown}/>")
    return Markup(f"<{name}{shown}>{joined(*children)}</{name}>")


def row(
    *cells: Content, kind: str = "td", names: Sequence[str] = (), **attributes: Content | bool
) -> Markup:
    """A row of a table whose cells are ``kind``; ``th`` makes it a head.

    On narrow screens rows of tables of class ``rows`` become paragraphs, with ``names`` in them.
    """
    named = zip_longest(cells, names)
    return tag("tr", *(tag(kind, c, data_name=name or None, **attributes) for c, name in named))


def section(title: str, *children: Content, **attributes: Content | bool) -> Markup:
    """A part of a page, with its title."""
    return tag("section", tag("h2", title), *children, **attributes)


def drawing(
    title: str, across: float, down: float, /, *parts: Content, class_: str, **attributes: Content
) -> Markup:
    """An SVG element of this size, with its title."""
    box = f"0 0 {number(across)} {number(down)}"
    shown = {"viewBox": box, **attributes, "role": "img", "class_": class_}
    return tag("svg", tag("title", title), *parts, **shown)


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
