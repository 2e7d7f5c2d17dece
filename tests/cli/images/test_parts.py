from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkdl.cli.images.parts import ImagePart, difference, digest_of, make_parts
from sparkdl.cli.job_files.prepare_file import (
    FolderSection,
    ImageSection,
    PrepareJob,
    PrepareOutput,
    SplitSection,
)

PATHS = [f"class{number % 7}/image {number}.png" for number in range(5000)]


def files_of(parts: tuple[ImagePart, ...], paths: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for part in parts:
        found.setdefault(part.split, []).extend(paths[row] for row in part.rows)
    return found


def test_every_file_is_in_one_part_and_parts_are_full() -> None:
    parts = make_parts(PATHS, SplitSection(validation=0.1, test=0.2), 300)
    assert sorted(np.concatenate([part.rows for part in parts]).tolist()) == list(range(5000))
    by_split: dict[str, list[ImagePart]] = {}
    for part in parts:
        by_split.setdefault(part.split, []).append(part)
    for mine in by_split.values():
        assert [part.number for part in mine] == list(range(len(mine)))
        assert all(len(part.rows) == 300 for part in mine[:-1])
        assert 0 < len(mine[-1].rows) <= 300
    assert parts[0].path == "train/part-00000.parquet"


def test_shares_are_met_and_classes_are_mixed() -> None:
    parts = make_parts(PATHS, SplitSection(validation=0.1, test=0.2), 300)
    found = files_of(parts, PATHS)
    assert len(found["test"]) == pytest.approx(1000, abs=90)
    assert len(found["validation"]) == pytest.approx(500, abs=70)
    first = {path.split("/")[0] for path in found["train"][:60]}
    assert len(first) == 7
    # Rank correlation of place and number is that of a random order: 1 / sqrt(n) = 0.017.
    place = np.array([int(path.split()[-1].split(".")[0]) for path in found["train"]])
    assert abs(np.corrcoef(np.argsort(np.argsort(place)), np.arange(len(place)))[0, 1]) < 0.06


def test_a_file_keeps_its_split_whatever_comes_and_goes() -> None:
    split = SplitSection(validation=0.1, test=0.2)
    whole = files_of(make_parts(PATHS, split, 300), PATHS)
    some = PATHS[::3]
    fewer = files_of(make_parts(some, split, 50), some)
    for name, paths in fewer.items():
        assert set(paths) <= set(whole[name])
    more = files_of(make_parts(PATHS, SplitSection(validation=0.3, test=0.2), 300), PATHS)
    assert set(more["test"]) == set(whole["test"])
    assert set(more["validation"]) > set(whole["validation"])
    other = files_of(make_parts(PATHS, SplitSection(test=0.2, seed=1), 300), PATHS)
    assert set(other["test"]) != set(whole["test"])


def test_the_order_does_not_depend_on_that_of_the_listing() -> None:
    reversed_paths = PATHS[::-1]
    one = files_of(make_parts(PATHS, SplitSection(), 1000), PATHS)
    two = files_of(make_parts(reversed_paths, SplitSection(), 1000), reversed_paths)
    assert one == two


def test_the_plan_of_today_is_that_of_tomorrow() -> None:
    paths = ["a/1.png", "a/2.png", "b/1.png", "b/2.png", "b/3.png"]
    parts = make_parts(paths, SplitSection(test=0.4), 2)
    assert files_of(parts, paths) == {
        "train": ["a/1.png", "a/2.png", "b/1.png", "b/2.png"],
        "test": ["b/3.png"],
    }


def job(**options: Any) -> PrepareJob:
    data, output = FolderSection(path="d"), PrepareOutput(path="o", rows_per_file=9)
    return PrepareJob(data=data, output=output, **options)


def source(**columns: Any) -> pa.Table:
    values = {"path": ["a", "b"], "length": [1, 2], "modified": [5, 6], "label": [0, 1]}
    return pa.table(values | columns)


def test_a_run_that_differs_says_in_what() -> None:
    before = digest_of(source(), ["x", "y"], job())
    assert json.loads(json.dumps(before)) == before
    assert difference(before, digest_of(source().take([1, 0]), ["x", "y"], job())) is None
    changed = {
        "image.encoding was 'file' and is 'png' now": digest_of(
            source(), ["x", "y"], job(image=ImageSection(encoding="png"))
        ),
        "split.seed was 0 and is 3 now": digest_of(
            source(), ["x", "y"], job(split=SplitSection(seed=3))
        ),
        "the classes were ['x', 'y'] and are ['x', 'z'] now": digest_of(
            source(), ["x", "z"], job()
        ),
        "with other names, sizes, times of change or labels": digest_of(
            source(modified=[5, 7]), ["x", "y"], job()
        ),
        "2 files before, 1 now": digest_of(source().slice(0, 1), ["x", "y"], job()),
    }
    for message, now in changed.items():
        found = difference(before, now)
        assert found is not None
        assert message in found
    assert "other version" in str(difference({**before, "version": 0}, before))
