"""The settings of conf/clusters/*.conf, also those that are off."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent.parent.parent / "conf" / "clusters"
FILES = sorted(FOLDER.glob("*.conf"))
_SETTING = re.compile(r"(# )?(spark\.\S+)\s+(\S.*)")


def lines(path: Path) -> list[tuple[str, str, bool]]:
    """Key, value, and whether it is on, in the file's order."""
    found = [_SETTING.fullmatch(line) for line in path.read_text().splitlines()]
    return [(one[2], one[3].strip(), one[1] is None) for one in found if one]


def active(name: str) -> dict[str, str]:
    """What Spark reads from ``<name>.conf``."""
    return {key: value for key, value, is_on in lines(FOLDER / f"{name}.conf") if is_on}
