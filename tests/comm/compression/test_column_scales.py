from __future__ import annotations

import itertools

import pytest
import torch

from sparkdl.comm.compression.column_scales import BLOCK, ColumnLayout, column_shapes, lay_out
from sparkdl.comm.compression.dense_reduce_scatter import cut
from sparkdl.comm.compression.onebit import OneBitCodec


def lengths(layout: ColumnLayout) -> list[int]:
    """Length of each column."""
    found = []
    for group in layout.groups:
        size = group.blocks[-1][1] - group.blocks[0][0]
        found += [size // group.num_columns] * group.num_columns
    return found


def test_rows_are_columns_unless_they_are_short() -> None:
    shapes = [(5, 20), (30,), (4, 3), (), (0, 7), (2, 3, 4, 5)]
    assert column_shapes(shapes, per_row=True) == [(5, 20), (1, 30), (1, 12), (1, 1), (2, 60)]
    assert column_shapes(shapes, per_row=False) == [(1, 100), (1, 30), (1, 12), (1, 1), (1, 120)]


def test_slices_cut_columns() -> None:
    columns = [(3, 20), (1, 5)]
    assert lengths(lay_out(columns, 0, 30)) == [20, 10]
    assert lengths(lay_out(columns, 30, 65)) == [10, 20, 5]
    assert lengths(lay_out(columns, 22, 38)) == [16]
    assert lengths(lay_out(columns, 65, 65)) == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
def test_every_value_is_in_one_column_of_one_slice(world_size: int) -> None:
    columns = [(7, 33), (1, 1), (2, 400), (1, 90)]
    numel = sum(rows * length for rows, length in columns)
    bounds = cut(numel, world_size)
    assert bounds[0][0] == 0 and bounds[-1][1] == numel
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))
    for start, stop in bounds:
        layout = lay_out(columns, start, stop)
        places = [block for group in layout.groups for block in group.blocks]
        assert [place for block in places for place in range(*block)] == list(range(stop - start))
        assert layout.num_columns == len(lengths(layout))
        assert [g.first for g in layout.groups] == [
            sum(h.num_columns for h in layout.groups[:i]) for i in range(len(layout.groups))
        ]


def test_long_columns_have_several_blocks_and_short_ones_share_one() -> None:
    layout = lay_out([(2, BLOCK + 3), (BLOCK, 2)], 0, 4 * BLOCK + 6)
    assert [len(group.blocks) for group in layout.groups] == [2, 2, 1, 1]
    assert [group.num_columns for group in layout.groups] == [1, 1, BLOCK // 2, BLOCK // 2]


def test_messages_of_all_slices_have_one_size() -> None:
    codecs = OneBitCodec.of_slices([(5, 20), (33,)], 3, torch.float32)
    sizes = {codec.message_bytes for codec in codecs}
    # Slices of 48, 48 and 37 values, in columns of 20, 20, 8; 12, 20, 16; 4, 33. The two rows
    # that are whole begin at one byte: at most 6 bytes of bits, filled up to 8.
    assert sizes == {3 * 2 * 4 + 8}
