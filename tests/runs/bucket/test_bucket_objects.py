"""Objects of a bucket: read by ranges, written in the place of one generation."""

import emulator
import pytest

from eagle3_jax.runs import disk
from eagle3_jax.runs.bucket import objects


@pytest.fixture
def folder():
    """A run's folder in a bucket."""
    return disk.path_of(f"{emulator.new_bucket()}/run")


def test_ranges(folder):
    with disk.atomic(folder / "x") as temporary:
        temporary.write_bytes(bytes(range(256)))
    assert objects.read(folder / "x", 3, 7) == bytes(range(3, 7))
    with disk.open_binary(folder / "x") as stream:
        stream.seek(250)
        assert stream.read() == bytes(range(250, 256))


def test_two_writers_of_one_object(folder):
    """The one that began earlier and ends later does not undo the other's work."""
    with (
        pytest.raises(objects.Conflict, match=r"run/x: another writer was first"),
        disk.atomic(folder / "x") as temporary,
    ):
        temporary.write_text("slow")
        disk.write_json(folder / "x", {"fast": 1})
    assert disk.read_json(folder / "x") == {"fast": 1}


@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_an_upload_whose_answer_was_lost_knows_its_own_object(folder, tmp_path, kind):
    """Asked again, it meets the generation that it wrote itself; other content is another writer's."""

    def put(content: bytes) -> int:
        (tmp_path / "x").write_bytes(content)
        return objects.put(folder / "x", content if kind == "bytes" else tmp_path / "x", objects.ABSENT)

    assert put(b"one shard") == put(b"one shard") == objects.generation(folder / "x")
    with pytest.raises(objects.Conflict, match=r"run/x: another writer was first"):
        put(b"two shard")
    assert objects.read(folder / "x") == b"one shard"
