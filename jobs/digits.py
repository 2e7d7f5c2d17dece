"""Where do the rows of the digits example come from?

Writes scikit-learn's 1,797 handwritten digits as Parquet: ``train`` and, for the final check,
``test``. Columns: ``image``, 64 bytes from 0 to 16, row by row; ``label``, the digit.

    python jobs/digits.py --output data/digits

With ``--files`` they become PNG files instead, in a folder for each digit, for `jobs/prepare.py`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

NUM_FILES = 4
TEST_SHARE = 0.2


def write(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write one split as several files, which Spark reads in parallel."""
    folder.mkdir(parents=True)
    rows = np.array_split(np.arange(len(labels)), NUM_FILES)
    for number, chosen in enumerate(rows):
        table = pa.table(
            {
                "image": pa.array([image.tobytes() for image in images[chosen]], pa.binary()),
                "label": pa.array(labels[chosen], pa.int64()),
            }
        )
        pq.write_table(table, folder / f"part-{number:05d}.parquet")


def write_files(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    """Write each digit as a PNG file of its own, ``<label>/<number>.png``."""
    from PIL import Image

    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        target = folder / str(label) / f"{number:04d}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        # Pixels go from 0 to 16, those of PNG to 255.
        Image.fromarray((image.reshape(8, 8) * 15.9375).astype(np.uint8)).save(target)


def main() -> None:
    """Write both splits, or nothing if interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("data/digits"), help="folder to write")
    parser.add_argument("--files", action="store_true", help="write PNG files, not Parquet")
    given = parser.parse_args()

    digits = load_digits()
    images, output = digits.data.astype(np.uint8), given.output
    unfinished = output.with_name(output.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    if given.files:
        write_files(unfinished, images, digits.target)
        written = f"{len(images)} digits as PNG files"
    else:
        splits = train_test_split(
            images, digits.target, test_size=TEST_SHARE, random_state=0, stratify=digits.target
        )
        write(unfinished / "train", splits[0], splits[2])
        write(unfinished / "test", splits[1], splits[3])
        written = f"{len(splits[2])} training and {len(splits[3])} test digits"
    shutil.rmtree(output, ignore_errors=True)
    unfinished.rename(output)
    print(f"wrote {written} to {output}")


if __name__ == "__main__":
    main()
