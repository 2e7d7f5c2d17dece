"""The sections and keys of a job file for ``jobs/prepare.py``, read without Spark and Pillow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from sparkdl.cli.job_files.job_file import DataSection, SparkSection
from sparkdl.config import require
from sparkdl.errors import ConfigError

EXTENSIONS = (
    ".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
"""Endings of image files, in lower case."""
QUALITY = 95
"""Quality of JPEG, where none is asked for."""

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class FolderSection:
    """``[data]``: the image files."""

    path: str
    """A folder, with folders in it to any depth: a path, or a URL that Spark can read. Names that
    begin with a dot or an underscore are passed over, as Spark does."""
    extensions: tuple[str, ...] = EXTENSIONS
    """Endings of the files to take, in any case; all others are left alone."""

    def __post_init__(self) -> None:
        require(self.path.rstrip("/") != "", "path must name a folder of images", self.path)
        wrong = [ending for ending in self.extensions if not ending.startswith(".")]
        rule = "extensions must be endings with their dot, such as '.jpg'"
        require(bool(self.extensions) and not wrong, rule, wrong)


@dataclass(frozen=True, kw_only=True)
class LabelSection:
    """``[labels]``: where the label of a file comes from."""

    source: Literal["folder", "table", "none"] = "folder"
    """``folder``: the name of the folder directly below ``data.path`` is the class. ``table``: a
    table of paths and labels; files that it does not name are left out. ``none``: no label."""
    names: tuple[str, ...] = ()
    """The classes in the order of their numbers, for example those of another run; else all names
    that there are, sorted."""
    table: DataSection | None = None
    """The table: ``format``, ``path``, ``options``, ``select`` as in ``[data]`` of training."""
    path_col: str = "path"
    """The table's column with the files' paths, below ``data.path`` or in full."""
    label_col: str = "label"
    """The table's column with the labels. Strings are classes; whole numbers are class numbers
    already, and other numbers are left as they are."""

    def __post_init__(self) -> None:
        if (self.source == "table") != (self.table is not None):
            raise ConfigError("source = 'table' and the section [labels.table] need each other")
        if self.source == "none" and self.names:
            raise ConfigError("names can have no effect with source = 'none'; leave them out")
        defaults = LabelSection.path_col, LabelSection.label_col
        if self.source != "table" and (self.path_col, self.label_col) != defaults:
            raise ConfigError(
                f"path_col and label_col are for source = 'table'; leave them out with "
                f"{self.source!r}"
            )
        names = list(self.names)
        require(len(set(names)) == len(names), "names must differ", names)


@dataclass(frozen=True, kw_only=True)
class ImageSection:
    """``[image]``: what becomes of each image."""

    encoding: Literal["file", "jpeg", "png", "struct"] = "file"
    """``file`` keeps the files' own bytes, after decoding each to see that it can be; ``jpeg`` and
    ``png`` encode anew; ``struct`` gives pixels, as Spark's image struct."""
    size: tuple[int, ...] | None = None
    """Height and width to scale to (bilinear)."""
    shorter_side: int | None = None
    """Length to scale the shorter side to; the longer one follows. Smaller images grow."""
    mode: Literal["RGB", "L", "RGBA"] | None = None
    """Colours of images that are encoded anew; RGB unless it is set. ``L`` is grey."""
    quality: int | None = None
    """Quality of JPEG, from 1 to 100; 95 unless it is set."""

    def __post_init__(self) -> None:
        changes = [name for name in ("size", "shorter_side", "mode") if getattr(self, name)]
        if self.encoding == "file" and changes:
            raise ConfigError(
                f"encoding 'file' keeps the files' bytes, so {changes[0]} can have no effect; set "
                "encoding to 'jpeg', 'png' or 'struct'"
            )
        if self.size is not None and self.shorter_side is not None:
            raise ConfigError("set either size or shorter_side, not both")
        if self.size is not None:
            is_size = len(self.size) == 2 and min(self.size) >= 1
            require(is_size, "size must be [height, width]", list(self.size))
        side, quality = self.shorter_side, self.quality
        require(side is None or side >= 1, "shorter_side must be at least 1", side)
        if self.encoding == "jpeg" and self.mode == "RGBA":
            raise ConfigError("JPEG has no transparency; set encoding 'png' or another mode")
        is_quality = quality is None or 1 <= quality <= 100
        require(is_quality, "quality must be between 1 and 100", quality)
        if quality is not None and self.encoding != "jpeg":
            raise ConfigError(
                f"quality has no effect with encoding {self.encoding!r}; set encoding 'jpeg', or "
                "leave it out"
            )


@dataclass(frozen=True, kw_only=True)
class SplitSection:
    """``[split]``: which share of the files goes to which folder of the output.

    A file's place follows from its path and the seed alone: it keeps it when others come or go.
    """

    validation: float = 0.0
    test: float = 0.0
    seed: int = 0
    """Another seed draws other files."""

    def __post_init__(self) -> None:
        shares = self.validation, self.test
        rule = "validation and test must be shares from 0 that leave something for training"
        require(min(shares) >= 0 and sum(shares) < 1, rule, shares)


@dataclass(frozen=True, kw_only=True)
class PrepareOutput:
    """``[output]``: where the rows go, and what happens to bad files."""

    path: str
    """A folder that gets ``train``, ``validation`` and ``test``, ``labels.json``,
    ``prepare.json`` and, if there were any, ``bad_files.jsonl``."""
    rows_per_file: int = 1000
    """Images in a Parquet file, fewer where some were skipped, and in the last one."""
    on_error: Literal["fail", "skip"] = "fail"
    """``skip`` leaves files out that cannot be decoded, and lists them in ``bad_files.jsonl``."""
    overwrite: bool = False
    """True if what another run has prepared there is removed. The same run goes on in any case."""

    def __post_init__(self) -> None:
        require(self.rows_per_file >= 1, "rows_per_file must be at least 1", self.rows_per_file)


@dataclass(frozen=True, kw_only=True)
class PrepareJob:
    """A file for ``jobs/prepare.py``."""

    data: FolderSection
    output: PrepareOutput
    labels: LabelSection = field(default_factory=LabelSection)
    image: ImageSection = field(default_factory=ImageSection)
    split: SplitSection = field(default_factory=SplitSection)
    spark: SparkSection = field(default_factory=SparkSection)

    @property
    def result_options(self) -> Mapping[str, Any]:
        """The options of which the rows depend; a run with others is another run."""
        return {
            "image": asdict(self.image),
            "split": asdict(self.split),
            "rows_per_file": self.output.rows_per_file,
        }
