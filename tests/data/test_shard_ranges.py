import os

import array_record.python.array_record_module as array_record
import pytest

from eagle3_jax.data.shard_ranges import RangedShard


def _write(path, records):
    writer = array_record.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
    for record in records:
        writer.write(record)
    writer.close()
    return path.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [200_000] * 5,
        [65_536 - 40 - 24 - 40 + change for change in range(-80, 80)],  # chunks end at each place around a block's
        [10] * 20_000,  # a footer of several blocks
    ],
    ids=["one", "large", "around-blocks", "small"],
)
def test_each_record_is_one_read(tmp_path, sizes):
    records = [os.urandom(size) for size in sizes]
    content = _write(tmp_path / "x", records)
    asked = []

    def read(start, stop):
        asked.append((start, stop))
        return content[start:stop]

    shard = RangedShard(read, len(content))
    assert len(asked) == 2
    for index in [0, len(sizes) - 1, *range(0, len(sizes), max(1, len(sizes) // 200))]:
        asked.clear()
        assert shard.read([index]) == [records[index]]
        assert len(asked) == 1
        assert asked[0][1] - asked[0][0] <= sizes[index] * 1.01 + 300
    with pytest.raises(IndexError, match=f"expected 0 to {len(sizes) - 1}"):
        shard.read([len(sizes)])


@pytest.mark.parametrize("at", [-65_536 + 30, -65_536 + 70], ids=["header", "postscript"])
def test_a_damaged_index_is_seen(tmp_path, at):
    content = bytearray(_write(tmp_path / "x", [os.urandom(100_000) for _ in range(3)]))
    content[at : at + 40] = b"\xff" * len(content[at : at + 40])
    with pytest.raises(RuntimeError):
        RangedShard(lambda start, stop: bytes(content[start:stop]), len(content))
    for size in (0, 65_536, 131_072, 100_000):  # other files
        with pytest.raises(RuntimeError):
            RangedShard(lambda start, stop: bytes(stop - start), size)
