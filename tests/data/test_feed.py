"""Rows on the devices of a mesh: each record is read by one process, and the batch is the planned one."""

import jax
import numpy as np
import pytest
import tiny
from slow_source import read_log
from test_features import make_record
from test_loader import source

from eagle3_jax.config import MeshConfig
from eagle3_jax.data import features
from eagle3_jax.data.feed import Feed
from eagle3_jax.data.loader import PackedRows, batches
from eagle3_jax.mesh import batch_sharding, make_mesh
from eagle3_jax.sequence import Split


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model", "length"), [(8, 1, 32), (4, 2, 30), (1, 8, 32)])
def test_a_batch_lies_over_the_data_axis(data, model, length):
    rows = PackedRows(source(*range(3, 30)), length, multiple=8)
    mesh = make_mesh(MeshConfig(data=data, model=model))
    feed = Feed(mesh, 8)
    assert feed.rows(0) == list(range(8))
    for number, part in enumerate(batches(rows, 8, feed.rows)):
        for name, array in feed.place(part, number).items():
            np.testing.assert_array_equal(array, np.stack([rows[8 * number + i][name] for i in range(8)]))
            assert array.sharding.is_equivalent_to(batch_sharding(mesh), array.ndim)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model", "sequence", "size"), [(4, 2, 4, 2), (8, 1, 2, 8)])
def test_pieces_of_rows_lie_over_the_data_axis(data, model, sequence, size):
    """The devices of a group have the pieces of their rows, one each of every row."""
    rows = PackedRows(source(*range(3, 30)), 32, multiple=size)
    mesh = make_mesh(MeshConfig(data=data, model=model), jax.devices()[: data * model])
    split = Split.of(mesh, sequence)
    feed, each = Feed(mesh, size, split), size // split.groups
    part = next(iter(batches(rows, size, feed.rows)))
    for name, array in feed.place(part, 0).items():
        whole = np.stack([rows[i][name] for i in range(size)])
        np.testing.assert_array_equal(split.joined(array), whole)
        assert array.sharding.is_equivalent_to(batch_sharding(mesh), array.ndim)
        for shard in array.addressable_shards:
            group, piece = divmod(np.argwhere(mesh.devices == shard.device)[0, 0], sequence)
            own = np.split(whole[group * each :][:each], sequence, axis=1)[piece]
            np.testing.assert_array_equal(shard.data, own)


READ_ALL = """
import json, sys
import jax, numpy as np
from eagle3_jax.runs import command, processes
from eagle3_jax.config import MeshConfig
from eagle3_jax.data import features
from eagle3_jax.data.feed import Feed
from eagle3_jax.data.loader import PackedRows, batches
from eagle3_jax.mesh import fetch, make_mesh
from slow_source import CountedSource

folder, log, data, model, size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
with command.run("train"):
    rows = PackedRows(CountedSource(folder, log), 32, multiple=size)
    rows.source.log = rows.source.log / "read"
    plain = PackedRows(features.FeatureSource(folder), 32, multiple=size)
    feed = Feed(make_mesh(MeshConfig(data=data, model=model)), size)
    for number, part in enumerate(batches(rows, size, feed.rows)):
        for name, array in feed.place(part, number).items():
            np.testing.assert_array_equal(
                fetch(array), np.stack([plain[number * size + i][name] for i in range(size)])
            )
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices", "mesh", "size"),
    [
        (2, 2, (1, 4), 3),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in ((4, 1, (2, 2), 2), (4, 1, (2, 2), 4), (4, 1, (4, 1), 4), (2, 2, (4, 1), 4))
        ),
    ],
)
def test_processes_read_each_record_once(tmp_path, processes, devices, mesh, size):
    folder = tmp_path / "features"
    folder.mkdir()
    for shard in range(3):
        records = (make_record(4 + i % 7, seed=100 * shard + i) for i in range(20))
        features.write_shard(features.shard_path(folder, shard, 3), records)
    (tmp_path / "read").mkdir()
    arguments = ["-c", READ_ALL, str(folder), str(tmp_path), *map(str, mesh), str(size)]
    paths = f"{tiny.REPOSITORY}/tests/data:{tiny.environment()['PYTHONPATH']}"
    ends = tiny.end_processes(tiny.start_processes(processes, arguments, devices, PYTHONPATH=paths))
    assert [status for status, _ in ends] == [0] * processes, ends
    records, _ = read_log(tmp_path / "read")
    assert sorted(records) == list(range(60))
    assert len(list((tmp_path / "read").glob("*.log"))) == processes
