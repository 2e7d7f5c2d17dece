"""What `docker build` sees: what .dockerignore lets through and the Dockerfile copies."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from docker.utils.build import exclude_paths

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = ROOT / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Instructions and their arguments, continued lines joined and comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = [line.split(None, 1) for line in joined.splitlines() if line.strip()]
    return [(name, rest) for name, rest in found]


def ignored_patterns() -> list[str]:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


def visible_files() -> set[str]:
    """Files below the repository's root that are sent to the builder."""
    paths = exclude_paths(str(ROOT), ignored_patterns(), dockerfile="docker/Dockerfile")
    return {path for path in paths if (ROOT / path).is_file()}


def copies() -> list[tuple[list[str], str]]:
    """Sources and target of every COPY from the context."""
    found = []
    for name, rest in instructions():
        if name == "COPY":
            *sources, target = shlex.split(rest)
            assert not any(source.startswith("--") for source in sources), "none so far"
            found.append((sources, target))
    return found


def copied_files(source: str) -> set[str]:
    """Which files of the context a source of COPY stands for."""
    return {path for path in visible_files() if path == source or path.startswith(f"{source}/")}


def lay_out(folder: Path) -> None:
    """Copy the context to where the image would have it, relative to the first WORKDIR."""
    for sources, target in copies():
        for source in sources:
            for path in copied_files(source):
                inside = Path(path).relative_to(source) if path != source else Path()
                name = Path(target) / inside if path != source else Path(target) / Path(path).name
                if path == source and not target.endswith("/"):
                    name = Path(target)
                place = folder / str(name).lstrip("/")
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / path, place)
