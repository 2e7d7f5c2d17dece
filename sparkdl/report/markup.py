"""How is HTML put together so that no text of a run can become markup by accident?

Whatever is not `Markup` is escaped, wherever it is put.
"""

from __future__ import annotations

import html

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
    """An element.

    Args:
        name: of the element.
        children: what is in it.
        attributes: by name, where ``_`` stands for ``-`` and one at the end for nothing
            (``class_``); those that are None or False are left out.
    """
    shown = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{markup(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _EMPTY and not children:
        return Markup(f"<{name}{shown}/>")
    return Markup(f"<{name}{shown}>{joined(*children)}</{name}>")


def number(value: float) -> str:
    """A number of a drawing, as short as it can be."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
