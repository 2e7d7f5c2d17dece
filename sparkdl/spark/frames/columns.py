"""The columns of a DataFrame by their names, as Spark finds them."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from sparkdl.errors import ConfigError, DataError, did_you_mean
from sparkdl.spark.session.compat import is_case_sensitive

_RESOLUTION = 1_000_000
"""Number of positions that the hash of a row can have; rows at the first ones are drawn."""


class CaseSensitive(T.StructType):
    """The schema of a session that takes names which differ in case only for two columns."""


def schema_of(df: DataFrame) -> T.StructType:
    """The columns of a DataFrame, as its session finds them by name."""
    return CaseSensitive(df.schema.fields) if is_case_sensitive(df.sparkSession) else df.schema


def find(schema: T.StructType, name: str) -> list[T.StructField]:
    """The fields that Spark takes for ``name``, whatever their case unless the session minds it."""
    if isinstance(schema, CaseSensitive):
        return [field for field in schema.fields if field.name == name]
    return [field for field in schema.fields if field.name.lower() == name.lower()]


def require(schema: T.StructType, name: str, remedy: str = "") -> T.StructField:
    """The field that Spark takes for ``name``; raises DataError if there is none, or several.

    ``remedy`` is said of a name that is like none of the columns'.
    """
    found = find(schema, name)
    if len(found) > 1:
        names = ", ".join(f'"{field.name}"' for field in found)
        remedy = "by df.toDF(...), or before a join; df.drop would take all of them"
        if len({field.name for field in found}) == len(found):
            remedy = "by df.toDF(...), or set spark.sql.caseSensitive=true"
        raise DataError(
            f'column "{name}" is in the DataFrame {len(found)} times ({names}); give each a name '
            f"of its own {remedy}"
        )
    if found:
        return found[0]
    known = ", ".join(schema.names) + (did_you_mean(name, schema.names) or remedy)
    raise DataError(f'column "{name}" is not in the DataFrame; its columns: {known}')


def refuse_outputs(schema: T.StructType, names: Sequence[str], owner: str) -> None:
    """See that the columns that ``owner`` shall add differ, and that none is there already.

    Raises:
        ConfigError: two have one name.
        DataError: one is there.
    """
    given = names if isinstance(schema, CaseSensitive) else [name.lower() for name in names]
    if len(set(given)) < len(names):
        raise ConfigError(f"the output columns of {owner} must differ; received {list(names)}")
    if there := [found[0].name for name in names if (found := find(schema, name))]:
        listed = ", ".join(f'"{name}"' for name in there)
        is_one = len(there) == 1
        raise DataError(
            f"column{'s' * (not is_one)} {listed} {'is' if is_one else 'are'} in the DataFrame "
            f"already; drop {'it' if is_one else 'them'}, or choose "
            f"{'another name' if is_one else 'other names'} for the output of {owner}"
        )


def resolve(schema: T.StructType, name: str, remedy: str = "") -> tuple[T.StructField, SparkColumn]:
    """The column of that name, or else the field of a struct column: ``a.b`` is ``b`` in ``a``.

    Returns:
        Its type, under the whole name, and its expression.

    Raises:
        DataError: there is none, and which there are; or there are several.
    """
    parts = name.split(".")
    if len(parts) == 1 or find(schema, name):
        return require(schema, name, remedy), F.col(quoted(name))
    for length in range(len(parts) - 1, 0, -1):
        top = ".".join(parts[:length])
        found = find(schema, top)
        if found and isinstance(found[0].dataType, T.StructType):
            field, column = require(schema, top), F.col(quoted(top))
            for part in parts[length:]:
                field = _field_of(field, part, top, type(schema))
                column, top = column.getField(field.name), f"{top}.{field.name}"
            return T.StructField(name, field.dataType), column
    require(schema, name, remedy)
    raise AssertionError("unreachable: require has raised")


def _field_of(
    field: T.StructField, name: str, path: str, kind: type[T.StructType]
) -> T.StructField:
    if isinstance(field.dataType, T.StructType):
        found = find(kind(field.dataType.fields), name)
        if len(found) == 1:
            return found[0]
    raise DataError(
        f'column "{path}" has no field "{name}"; its type is {field.dataType.simpleString()}'
    )


def validation_indicator(schema: T.StructType, name: str) -> SparkColumn:
    """The boolean column that marks validation rows; raises DataError."""
    field, column = resolve(schema, name)
    if not isinstance(field.dataType, T.BooleanType):
        raise DataError(
            f'column "{name}" marks validation rows and must be boolean; '
            f"it is {field.dataType.simpleString()}; make it of a comparison, such as "
            f'F.col("{name}") == ...'
        )
    return column


def drawn(columns: Sequence[SparkColumn], fraction: float) -> SparkColumn:
    """True for a part of the rows, chosen by a hash of some columns: each row stays on its side.

    The hash is not that which deals rows to shards, so every shard has its part.
    """
    position = F.pmod(F.xxhash64(F.lit("validation"), *columns), F.lit(_RESOLUTION))
    return position < round(fraction * _RESOLUTION)


def has_hash(data_type: T.DataType) -> bool:
    """True if Spark can make a hash of such values: not of maps and variants."""
    if isinstance(data_type, T.ArrayType):
        return has_hash(data_type.elementType)
    if isinstance(data_type, T.StructType):
        return all(has_hash(field.dataType) for field in data_type.fields)
    return not isinstance(data_type, (T.MapType, T.VariantType))


def quoted(name: str) -> str:
    """A column name in backticks, so that dots in it are part of the name."""
    return "`" + name.replace("`", "``") + "`"
