"""Specifications of a module's inputs and labels: what becomes of columns of a DataFrame.

Each is a value that says which columns are read and what a batch makes of them. The same
specification is used for training and by the trained model, so both see rows alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

from sparkdl.errors import ConfigError

CHANNELS = (1, 3, 4)
"""Channels that an image can have: grey, RGB, RGB with transparency."""


@dataclass(frozen=True)
class Specification:
    """Base class of all specifications; use one of the classes below."""

    column: str | tuple[str, ...]
    """The column; a field of a struct column by its dotted name, such as ``"user.age"``. Several
    columns, as a tuple, need a ``transform``."""
    _: KW_ONLY
    transform: Callable[[Any], Any] | None = None
    """A function that makes the rows out of the columns, such as a tokenizer.

    It gets a ``pyarrow.RecordBatch`` of the named columns, as Spark has them (strings too, and
    nulls), and returns as many rows: a pyarrow array, a numpy array or a list. It must give the
    same rows each time, whatever rows stand beside them in the batch. Run while spooling and in
    ``transform()``. Whole numbers become int64, floating ones the module's dtype; booleans and
    uint8 stay.
    """
    own_kind: ClassVar[Any] = None
    """Treatment of the rows of a class that you write, a `sparkdl.data.kinds.OwnKind`; of the
    classes below `sparkdl.data.kinds` says it."""

    def __post_init__(self) -> None:
        given: Any = self.column
        if isinstance(given, Iterable) and not isinstance(given, str):
            object.__setattr__(self, "column", tuple(given))
        is_named = isinstance(given, Iterable) and bool(self.columns)
        if not is_named or not all(isinstance(c, str) and c for c in self.columns):
            raise ConfigError(f"a specification needs a column's name; received {given!r}")
        if len(self.columns) > 1 and self.transform is None:
            raise ConfigError(
                f"{type(self).__name__}({list(self.columns)}) names several columns: pass a "
                "transform that makes one value of them, or an input for each"
            )
        if self.transform is not None and not callable(self.transform):
            raise ConfigError(f"transform must be a function; received {self.transform!r}")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read."""
        return (self.column,) if isinstance(self.column, str) else self.column

    @property
    def name(self) -> str:
        """The columns, as errors name them."""
        return ", ".join(self.columns)

    @property
    def num_parts(self) -> int:
        """Arrays of which the spool keeps a run of values per row; 0: rows of one shape."""
        return 0

    @property
    def has_length(self) -> bool:
        """True if rows have a length of their own, which is the second dimension of a batch."""
        return False

    @property
    def masks(self) -> tuple[str, ...]:
        """Arguments of ``forward`` that get masks, behind the one that gets the values."""
        return ()

    @property
    def keeps_dtype(self) -> bool:
        """True if values are stored in the dtype in which they are read, whatever the module's."""
        return False

    @property
    def skips(self) -> bool:
        """True if rows that cannot be used are left out; otherwise they are an error."""
        return False


@dataclass(frozen=True)
class Tensor(Specification):
    """Rows of one shape: numbers, booleans, arrays of them, Spark ML vectors, binary.

    ``forward`` gets ``(batch, *shape)``.
    """

    _: KW_ONLY
    shape: tuple[int, ...] | None = None
    """Shape of one sample; None keeps the column's own."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shape is not None:
            object.__setattr__(self, "shape", _sizes("shape", self.shape))


@dataclass(frozen=True)
class Sequence(Specification):
    """Rows of different lengths: arrays of numbers, or of arrays of one inner shape.

    ``forward`` gets ``(batch, length, *inner)``, padded to the longest row of the batch, at least
    to length 1.
    """

    _: KW_ONLY
    mask: str | None = None
    """Argument of ``forward`` that gets which values are the row's own, bool ``(batch, length)``;
    None: none."""
    padding_value: float = 0
    """Value behind the end of shorter rows; a number that the column can hold."""
    max_length: int | None = None
    """Longer rows are cut off there; None keeps all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask is not None and not self.mask:
            raise ConfigError("mask must be the name of an argument of forward, or None")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length must be at least 1; received {self.max_length}")

    def check_padding(self, dtype: str) -> None:
        """Refuse a `padding_value` that the rows' values, of ``dtype``, cannot have.

        Raises:
            ConfigError: it would become another number.
        """
        import numpy as np

        values = np.dtype(dtype)
        if values.kind == "f":
            return
        low, high = (0, 1) if values.kind == "b" else (np.iinfo(values).min, np.iinfo(values).max)
        if not float(self.padding_value).is_integer() or not low <= self.padding_value <= high:
            raise ConfigError(
                f'padding_value {self.padding_value} of "{self.name}" is no {dtype}, of which its '
                "values are; choose another, or cast the column"
            )

    @property
    def has_length(self) -> bool:
        return True

    @property
    def masks(self) -> tuple[str, ...]:
        return () if self.mask is None else (self.mask,)

    @property
    def num_parts(self) -> int:
        """See `Specification.num_parts`: the values."""
        return 1


@dataclass(frozen=True)
class Image(Specification):
    """Images: encoded ones in a binary column (JPEG, PNG, ...), or Spark's image struct.

    ``forward`` gets uint8 ``(batch, channels, height, width)``, in the order red, green, blue; the
    module casts it, for example by ``x.float() / 255``. Encoded images need Pillow.
    """

    _: KW_ONLY
    size: tuple[int, int] | None = None
    """Height and width to scale to (bilinear); None: all images have one size."""
    channels: int = 3
    """1 (grey), 3 (RGB) or 4 (RGB and transparency); others are converted."""
    decode: Literal["spool", "batch"] = "spool"
    """Moment at which encoded images are decoded: once, while spooling, or for each batch, which
    costs time in every epoch, but the spool is as small as the files."""
    on_error: Literal["raise", "skip"] = "raise"
    """``skip`` leaves rows out of training whose image is null or cannot be decoded: they are found
    while spooling, counted in the summary, and the same in every epoch. ``transform`` gives such
    rows null, ``evaluate`` leaves them out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size is not None:
            object.__setattr__(self, "size", _sizes("size", self.size))
            if len(self.size) != 2:
                raise ConfigError(f"size must be (height, width); received {self.size}")
        if self.channels not in CHANNELS:
            raise ConfigError(f"channels must be one of {CHANNELS}; received {self.channels!r}")
        if self.decode not in ("spool", "batch"):
            raise ConfigError(f"decode must be 'spool' or 'batch'; received {self.decode!r}")
        if self.on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error must be 'raise' or 'skip'; received {self.on_error!r}")

    @property
    def keeps_dtype(self) -> bool:
        return True

    @property
    def skips(self) -> bool:
        return self.on_error == "skip"

    @property
    def num_parts(self) -> int:
        """See `Specification.num_parts`: the encoded bytes, if they are kept."""
        return 1 if self.decode == "batch" else 0


@dataclass(frozen=True)
class Sparse(Specification):
    """Spark ML vectors, kept sparse until the batch.

    Also structs of ``size``, ``indices`` (array of int) and ``values`` (array of numbers).
    ``forward`` gets ``(batch, size)``.
    """

    _: KW_ONLY
    dense: bool = True
    """True if a batch is a dense tensor; else a coalesced ``torch.sparse_coo`` one."""

    @property
    def num_parts(self) -> int:
        """See `Specification.num_parts`: indices and values."""
        return 2


@dataclass(frozen=True, kw_only=True)
class Named:
    """An input or a label, with the name under which it is passed."""

    argument: str | None
    """Argument of ``forward``, or the label's name; None: by position."""
    specification: Specification


def named(values: Mapping[str, Specification] | Items[Specification]) -> tuple[Named, ...]:
    """The inputs or labels of a mapping by name, or of a list by position."""
    if isinstance(values, Mapping):
        return tuple(Named(argument=name, specification=s) for name, s in values.items())
    return tuple(Named(argument=None, specification=s) for s in values)


def check_names(inputs: Items[Named]) -> None:
    """Refuse an argument of ``forward`` that is given twice; raises ConfigError."""
    masks = [mask for entry in inputs for mask in entry.specification.masks]
    names = [name for name in (*(e.argument for e in inputs), *masks) if name is not None]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"inputs name the argument {twice[0]!r} of forward twice; rename a mask")
    by_position = [e.specification.name for e in inputs if e.argument is None]
    if len(set(by_position)) < len(by_position):
        raise ConfigError(
            f"inputs name a column twice by position: {by_position}; pass a mapping from the names "
            "of forward's arguments"
        )


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    sizes = tuple(value) if isinstance(value, Items) else (value,)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(f"{name} must hold whole numbers of at least 1; received {value!r}")
    return sizes
