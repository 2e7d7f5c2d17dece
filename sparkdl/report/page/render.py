"""HTML from the Jinja2 templates of ``templates/``, in which all but `Markup` is escaped."""

from __future__ import annotations

import functools
import re
from importlib import resources
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from sparkdl.report.page import formats

if TYPE_CHECKING:
    import jinja2

_FILES = resources.files(__package__)
_LINE_BREAKS = re.compile(r"(?<=[>}])\s*\n\s*|\s*\n\s*(?=[<{])")
"""Breaks beside a tag or a brace of a template: for its readers, and not part of the page."""


def render(template: str, **values: Any) -> Markup:
    """A template with these values: a float is as short as it can be, and None is nothing."""
    return Markup(_environment().get_template(template).render(values))


@functools.cache
def _environment() -> jinja2.Environment:
    import jinja2  # which takes long, and is only needed where a page is made

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
    )
    environment.globals["css"] = Markup(_FILES.joinpath("style.css").read_text(encoding="utf-8"))
    shown_as = (formats.duration, formats.moment, formats.value)
    environment.filters.update({function.__name__: function for function in shown_as})
    environment.filters["counted"] = "{:,}".format
    return environment


def _source(name: str) -> str:
    text = _FILES.joinpath("templates", name).read_text(encoding="utf-8")
    return _LINE_BREAKS.sub("", text)


def _shown(value: Any) -> Any:
    if value is None:
        return ""
    return formats.number(value) if isinstance(value, float) else value
