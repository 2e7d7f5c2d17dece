from __future__ import annotations

import json
from dataclasses import replace

from sparkdl.data.arrow_arrays import Findings
from sparkdl.data.column_stats import ColumnStats, SpooledShard, merge_stats
from sparkdl.data.plan import Shard, SpoolColumn
from sparkdl.inputs import Image, Sequence


def spooled(columns: list[ColumnStats]) -> SpooledShard:
    shard = Shard(shard_id=3, num_rows=5, num_validation_rows=0, fingerprint="f")
    return SpooledShard(shard=shard, content=7, columns=tuple(columns))


def test_equal_statistics_of_many_columns_travel_once() -> None:
    """A thousand shards of wide tables are one driver's."""
    plain = [ColumnStats(shape=(), dtype="float32") for _ in range(500)]
    nulls = ColumnStats(nulls_and_shapes=Findings(nulls=2, first_null="row 1"), minimum=-1.0)
    sent = spooled([*plain, nulls, ColumnStats(minimum=-1.0)])
    text = json.dumps(sent.to_dict())
    assert len(text) < 4000
    found = SpooledShard.from_dict(json.loads(text))
    assert found == sent
    assert len(set(map(id, found.columns))) == 3
    assert SpooledShard.from_dict(found.to_dict()) == sent


def test_statistics_of_shards_add_up_and_stay_as_they_are() -> None:
    nothing = ColumnStats()
    first = ColumnStats(shape=(2,), dtype="int64", minimum=0, maximum=3, bad_values=1, longest=4)
    second = replace(first, minimum=-1, maximum=None, nulls_and_shapes=Findings(nulls=2))
    merged = merge_stats([nothing, first, second, first])
    assert (merged.minimum, merged.maximum, merged.bad_values) == (-1, 3, 3)
    assert (merged.shape, merged.dtype, merged.longest) == ((2,), "int64", 4)
    assert merged.nulls_and_shapes.nulls == 2
    assert (nothing, second.nulls_and_shapes.nulls) == (ColumnStats(), 2)


RAGGED = (
    'column "x" is ragged: most rows have shape (4,), but 1 do not (first: row 9, of shape (2,)); '
)


def test_the_remedy_for_rows_of_other_shapes_is_that_of_the_column() -> None:
    found = Findings()
    found.note_shape((4,), "row 0", 3)
    found.note_shape((2,), "row 9")
    numbers = SpoolColumn(name="x", role="feature", dtype="float32")
    for column, remedy in (
        (numbers, 'pad or drop them, or let inputs=[sparkdl.Sequence("x")] pad each batch'),
        (replace(numbers, role="label"), "pad or drop them"),
        (replace(numbers, specification=Sequence("x")), "pad or drop them"),
        (
            replace(numbers, dtype="uint8"),
            'if they are files of images, inputs=[sparkdl.Image("x")] decodes them',
        ),
        (
            replace(numbers, dtype="uint8", specification=Image("x")),
            'scale them: sparkdl.Image("x", size=(height, width))',
        ),
    ):
        assert ColumnStats(nulls_and_shapes=found).problem(column) == RAGGED + remedy
