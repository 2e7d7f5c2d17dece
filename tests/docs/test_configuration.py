"""The page of settings has every entry that sessions are read for, with its default."""

from __future__ import annotations

import re
from dataclasses import fields

from sparkdl.spark.session.settings import Settings
from tests.docs.blocks import DOCS

ROW = re.compile(r"^\| `(spark\.sparkdl\.[\w.]+)` \| (.+?) \|", re.MULTILINE)


def test_the_page_has_every_entry_with_its_default() -> None:
    said = dict(ROW.findall((DOCS / "configuration.md").read_text(encoding="utf-8")))
    defaults = {one.metadata["entry"]: one.default for one in fields(Settings)}
    assert set(said) == set(defaults)
    for entry, default in defaults.items():
        text = said[entry].strip("`").removesuffix(" s")
        if isinstance(default, float):
            assert float(text) == default, entry
        elif entry == "spark.sparkdl.cacheBytes":
            assert default is None, "the page says that it is a quarter of the disk"
        else:
            assert text == (str(default).lower() if default != () else "none"), entry
