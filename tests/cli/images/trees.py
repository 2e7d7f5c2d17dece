"""Image files for the tests of `prepare`."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def digit_files(root: Path, count: int) -> dict[str, int]:
    """scikit-learn's first digits as PNG files, ``<label>/<number>.png``; path -> label."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    written: dict[str, int] = {}
    for number in range(count):
        label = int(digits.target[number])
        path = f"{label}/{number:04d}.png"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(png((digits.images[number] * 15.9375).astype(np.uint8)))
        written[path] = label
    return written


def job(data: Path, output: Path, **options: Any) -> Any:
    """A `PrepareJob`; ``output_...`` are options of its output."""
    from sparkdl.cli.job_files.prepare_file import PrepareJob
    from sparkdl.cli.job_files.toml_values import build

    prefix = "output_"
    own = {k.removeprefix(prefix): v for k, v in options.items() if k.startswith(prefix)}
    sections = {key: value for key, value in options.items() if not key.startswith(prefix)}
    tables = {"data": {"path": str(data)}, "output": {"path": str(output), **own}, **sections}
    return build(PrepareJob, tables)
