"""Feature records and shards: round trip, random access, pickling, and the errors of broken files."""

import os
import pickle
import re

import grain
import ml_dtypes
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.data import features


def make_record(length: int, seed: int = 0, aux: int = 12, hidden: int = 4) -> features.Record:
    rng = np.random.default_rng(seed)
    return {
        "token_ids": rng.integers(0, 100, length).astype(np.int32),
        "loss_mask": rng.integers(0, 2, length).astype(np.uint8),
        "aux": rng.normal(size=(length, aux)).astype(ml_dtypes.bfloat16),
        "last_hidden": rng.normal(size=(length, hidden)).astype(ml_dtypes.bfloat16),
        "argmax": rng.integers(0, 100, length).astype(np.int32),
    }


def make_fp8_record(length: int, seed: int = 0, states: int = 3, hidden: int = 4) -> features.Record:
    record, rng = make_record(length, seed, states * hidden, hidden), np.random.default_rng(seed)
    for name, count in (("aux", states), ("last_hidden", 1)):
        record[name] = record[name].astype(ml_dtypes.float8_e4m3fn)
        record[f"{name}_scale"] = rng.uniform(0.1, 9, (length, count)).astype(np.float32)
    return record


def assert_same(left: features.Record, right: features.Record) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert left[name].shape == right[name].shape
        assert left[name].tobytes() == right[name].tobytes(), name


@pytest.fixture
def folder(tmp_path):
    for shard, lengths in enumerate(([3, 5, 1], [], [7, 2])):
        records = (make_record(length, seed=10 * shard + i) for i, length in enumerate(lengths))
        features.write_shard(features.shard_path(tmp_path, shard, 3), records, notes={"shard": shard})
    return tmp_path


@examples(20)
@given(length=st.integers(1, 40), hidden=st.integers(1, 9), seed=st.integers(0, 1000))
def test_a_record_survives_encoding_bit_for_bit(length, hidden, seed):
    """In 16 and in 8 bits; a strided array by its values."""
    record = make_record(length, seed, aux=6 * hidden, hidden=hidden)
    for one in (record, record | {"aux": record["aux"][:, ::2]}, make_fp8_record(length, seed, hidden=hidden)):
        assert_same(features.decode_record(features.encode_record(one)), one)


@pytest.mark.parametrize(
    ("name", "scale"), [("aux_scale", 0.0), ("aux_scale", np.nan), ("last_hidden_scale", -1.0), ("aux_scale", np.inf)]
)
def test_a_corrupt_scale_is_refused_by_name(name, scale):
    record = make_fp8_record(4)
    data = features.encode_record(record)
    record[name][2, 0] = scale
    message = rf"{name}: got .* at token 2, expected finite numbers above 0"
    with pytest.raises(features.FeatureError, match=message):
        features.encode_record(record)
    sound = make_fp8_record(4)[name]
    corrupt = data.replace(sound.tobytes(), record[name].tobytes())
    assert corrupt != data
    with pytest.raises(features.FeatureError, match=message):
        features.decode_record(corrupt)


def test_a_token_of_an_8b_takes_half_in_8_bits():
    assert features.token_bytes(3, 4096, "fp8") <= 16_500
    assert features.token_bytes(3, 4096, "bfloat16") == 32_777
    record = make_fp8_record(10, hidden=64)
    assert sum(x.nbytes for x in record.values()) == 10 * features.token_bytes(3, 64, "fp8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("argmax"), r"argmax: missing"),
        (lambda r: r.update(extra=r["argmax"]), r"extra: not a field"),
        (lambda r: r.update(aux=r["aux"].astype(np.float32)), r"aux: got float32 \[4, 12\], expected bfloat16"),
        (lambda r: r.update(loss_mask=r["loss_mask"][:-1]), r"loss_mask: got uint8 \[3\], .* with L = 4"),
        (
            lambda r: r.update(make_fp8_record(4) | {"aux_scale": np.ones((4, 5), np.float32)}),
            "aux_scale: got 5 scales a token, expected a divisor of the width 12",
        ),
    ],
)
def test_a_record_of_a_wrong_form_is_refused_by_field(change, message):
    record = make_record(4)
    change(record)
    with pytest.raises(features.FeatureError, match=message):
        features.encode_record(record)


@pytest.mark.parametrize("data", [b"", b"nonsense that is no record", features.encode_record(make_record(4))[:-3]])
def test_bytes_that_are_no_record_are_refused(data):
    with pytest.raises(features.FeatureError, match="feature record"):
        features.decode_record(data)


def test_random_access_over_all_shards(folder):
    source = features.FeatureSource(folder)
    assert len(source) == 5
    assert source.lengths.dtype == np.int32
    np.testing.assert_array_equal(source.lengths, [3, 5, 1, 7, 2])
    expected = [make_record(3, 0), make_record(5, 1), make_record(1, 2), make_record(7, 20), make_record(2, 21)]
    for index in (4, 0, 3, 1, 2, -1):
        assert_same(source[index], expected[index])
    with pytest.raises(IndexError):
        source[5]
    assert_same(pickle.loads(pickle.dumps(source))[0], expected[0])  # without its open files
    dataset = grain.MapDataset.source(source).shuffle(seed=1).map(lambda r: len(r["token_ids"]))
    assert sorted(int(dataset[i] or 0) for i in range(len(dataset))) == [1, 2, 3, 5, 7]


def test_notes_come_back_and_may_grow_while_records_are_written(tmp_path):
    path, notes = features.shard_path(tmp_path, 0, 1), {"seen": 0}

    def records():
        for i in range(3):
            notes["seen"] += 1
            yield make_record(2, i)

    features.write_shard(path, records(), notes)
    assert features.read_notes(path) == {"seen": 3}
    assert features.is_complete(path)


def test_a_failed_shard_leaves_nothing_behind(tmp_path):
    path = features.shard_path(tmp_path, 0, 1)
    bad = make_record(3)
    del bad["aux"]
    with pytest.raises(features.FeatureError, match="aux: missing"):
        features.write_shard(path, [make_record(3), bad])
    assert os.listdir(tmp_path) == []
    with pytest.raises(features.FeatureError, match=r"eagle3_jax\.extract"):  # who fills the folder
        features.FeatureSource(tmp_path)


def test_an_altered_shard_is_refused_by_name(tmp_path):
    path = features.shard_path(tmp_path, 0, 1)
    features.write_shard(path, [make_record(200, aux=300)])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(features.FeatureError, match=rf"{re.escape(str(path))}, record 0: unreadable .*hash mismatch"):
        features.FeatureSource(tmp_path)[0]


def test_a_shard_of_another_run_is_refused_by_name(tmp_path):
    """As long as the one that its sidecar describes, and sound in itself."""
    (tmp_path / "other").mkdir()
    path, other = (features.shard_path(folder, 0, 1) for folder in (tmp_path, tmp_path / "other"))
    for seed, where in enumerate((path, other)):
        features.write_shard(where, [make_record(5, seed)])
    path.write_bytes(other.read_bytes())
    with pytest.raises(features.FeatureError, match=rf"{re.escape(str(path))}, record 0: .*another checksum"):
        features.FeatureSource(tmp_path)[0]


def test_an_altered_sidecar_is_refused_by_name(folder):
    sidecar = features.shard_path(folder, 0, 3).with_suffix(".json")
    sidecar.write_text(sidecar.read_text().replace('"shard": 0', '"shard": 7'))
    with pytest.raises(features.FeatureError, match=rf"{re.escape(str(sidecar))}: altered since it was written"):
        features.FeatureSource(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: path.write_bytes(b"cut"),
            r"00001-of-00003.array_record: got 3 bytes, expected \d+",
        ),
        (lambda path: path.unlink(), r"got 2 shards, expected 3; missing: 00001-of-00003.array_record; foreign: none"),
        (lambda path: path.rename(path.with_name("x.array_record")), "missing: 00001.*; foreign: x.array_record"),
        (lambda path: path.with_suffix(".json").unlink(), "00001-of-00003.json: not found, .* incomplete"),
    ],
)
def test_what_is_missing_or_cut_is_named(folder, damage, message):
    path = features.shard_path(folder, 1, 3)
    damage(path)
    assert not features.is_complete(path)
    with pytest.raises(features.FeatureError, match=message):
        features.FeatureSource(folder)
