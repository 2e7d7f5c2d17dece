"""A folder of image files becomes Parquet: the whole of ``jobs/prepare.py``, in order.

Spark lists, reads and writes, so whatever it can reach will do. Parts are written several at a
time, moved to their places and recorded; a run that was killed goes on after the last record.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from sparkdl.cli.images.image_labels import SHOWN, Labelled, by_folder, by_table
from sparkdl.cli.images.ledger import Ledger, Record, Report
from sparkdl.cli.images.list_files import Listed, list_files, qualified, tuned
from sparkdl.cli.images.parts import ImagePart, digest_of, make_parts
from sparkdl.cli.images.write_parquet import ImageFiles, PartWriter
from sparkdl.cli.job_files.prepare_file import PrepareJob
from sparkdl.data.images import require_pillow
from sparkdl.errors import ConfigError, DataError
from sparkdl.report.live.progress import terminal_columns
from sparkdl.spark.frames.columns import quoted
from sparkdl.spark.session.compat import described, num_slots
from sparkdl.spark.session.stage_progress import working
from sparkdl.storage.hadoop_storage import open_on_driver
from sparkdl.storage.storage import check_writable, without_password

logger = logging.getLogger(__name__)

_EMPTY = "the file is empty"
_ABSENT = "named in the table of labels, but not in the folder"


def prepare(spark: SparkSession, job: PrepareJob, label_table: DataFrame | None = None) -> Report:
    """Make Parquet of a folder of image files, or go on where an earlier run has stopped.

    ``label_table`` has the rows of ``[labels.table]``. Raises ConfigError, DataError, StorageError.
    """
    require_pillow()
    place = qualified(spark, job.output.path)
    data = qualified(spark, job.data.path)
    inner, outer = sorted((f"{data.rstrip('/')}/", f"{place.rstrip('/')}/"), key=len, reverse=True)
    if inner.startswith(outer):
        raise ConfigError(
            f"output.path {place} and data.path {data} lie one in the other; choose another "
            "output.path"
        )
    with working(spark, "listing the image files"):
        source = find_source(spark, job, label_table)
    storage = open_on_driver(spark, place)
    check_writable(storage)
    ledger = Ledger(storage, digest_of(source.table, source.names, job))
    if ledger.begin(overwrite=job.output.overwrite) == "finished":
        logger.warning("%s is finished already; nothing to do", place)
        return ledger.report()
    writer = PartWriter(spark, source, job.image, place, storage)
    with tuned(spark), described(spark, without_password(f"sparkdl prepare {place}")):
        records = _write_all(spark, job, source, ledger, writer)
    return ledger.finish(records, source.unusable, source.names)


def find_source(spark: SparkSession, job: PrepareJob, label_table: DataFrame | None) -> ImageFiles:
    """List the files, and find their labels; raises DataError if there are none, or wrong ones."""
    listed = list_files(spark, job.data)
    if not listed.table.num_rows:
        raise DataError(
            f"there are no image files below {job.data.path} ({listed.num_others:,} files with "
            f"other endings, {len(listed.empty):,} empty ones); check data.path and data.extensions"
        )
    labelled = _labelled(job, listed, label_table)
    if not labelled.files.num_rows:
        raise DataError("the table of labels names none of the files; check labels.path_col")
    empty = set(listed.empty)
    unread = labelled.absent if job.labels.source == "table" else listed.empty
    unusable = tuple((path, _EMPTY if path in empty else _ABSENT) for path in unread)
    if unusable and job.output.on_error == "fail":
        raise DataError(_refusal(unusable))
    if listed.num_others:
        logger.warning("left alone for their endings: %d file(s)", listed.num_others)
    if num_unlabelled := listed.table.num_rows - labelled.files.num_rows:
        logger.warning("left out, as the table of labels lacks them: %d file(s)", num_unlabelled)
    return ImageFiles(
        table=labelled.files, root=listed.root, names=labelled.names, unusable=unusable
    )


def _labelled(job: PrepareJob, listed: Listed, label_table: DataFrame | None) -> Labelled:
    section = job.labels
    if section.source == "folder":
        return by_folder(listed.table, section.names)
    if section.source == "none":
        return Labelled(files=listed.table)
    assert label_table is not None, "the table of labels was not read"
    columns = {"path": section.path_col, "label": section.label_col}
    for name in columns.values():
        if name not in label_table.columns:
            known = ", ".join(label_table.columns)
            raise DataError(f'the table of labels has no column "{name}"; its columns: {known}')
    chosen = [F.col(quoted(name)).alias(alias) for alias, name in columns.items()]
    table = label_table.select(*chosen).toArrow()
    roots = (listed.root, job.data.path, listed.root.removeprefix("file:"))
    return by_table(listed.table, table, section.names, roots)


def _write_all(
    spark: SparkSession,
    job: PrepareJob,
    source: ImageFiles,
    ledger: Ledger,
    writer: PartWriter,
) -> dict[str, Record]:
    """Write all parts that have no record yet, up to bad files; give the records of all."""
    paths = source.table["path"].to_pylist()
    parts = make_parts(paths, job.split, job.output.rows_per_file)
    records = ledger.done()
    waiting = [part for part in parts if part.name not in records]
    together = max(1, num_slots(spark))
    writer.clear()
    with contextlib.closing(_bar(parts, records)) as bar:
        for start in range(0, len(waiting), together):
            chosen = waiting[start : start + together]
            written = writer.write(chosen)
            bad = [entry for record in written.values() for entry in record.bad]
            if job.output.on_error == "fail":
                chosen = [part for part in chosen if not written[part.name].bad]
            for part in chosen:
                writer.put_in_place(part, written[part.name])
                ledger.write(part, written[part.name])
                records[part.name] = written[part.name]
                bar.update(len(part.rows))
            if bad and job.output.on_error == "fail":
                raise DataError(_refusal(bad))
            num_bad = sum(len(record.bad) for record in records.values())
            bar.set_postfix_str(f"{num_bad:,} skipped" * (num_bad > 0))
    writer.clear()
    return records


def _bar(parts: Sequence[ImagePart], records: Mapping[str, Record]) -> Any:
    from tqdm.auto import tqdm

    return tqdm(
        total=sum(len(part.rows) for part in parts),
        initial=sum(len(part.rows) for part in parts if part.name in records),
        desc="preparing",
        unit=" files",
        dynamic_ncols=True,
        mininterval=0.1 if terminal_columns() else 30.0,  # of a file, each update fills a line
        file=sys.stderr,
    )


def _refusal(bad: Sequence[tuple[str, str]]) -> str:
    shown = "".join(f"\n  {path}: {why}" for path, why in bad[:SHOWN])
    more = f"\n  and {len(bad) - SHOWN:,} more" * (len(bad) > SHOWN)
    files = f"{len(bad):,} file{'s' * (len(bad) != 1)}"
    return (
        f"{files} cannot be used:{shown}{more}\n"
        "Go on without such files, from here: --set output.on_error=skip. Or mend or remove them "
        "and begin anew: "
        "--set output.overwrite=true."
    )
