"""Extraction: values against a plain forward pass, batching, resumption, and what is set aside."""

import dataclasses
import functools
import json
import pathlib
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from flax import nnx

from eagle3_jax.config import SPLITS, MeshConfig
from eagle3_jax.data import features
from eagle3_jax.extract import __main__ as extract
from eagle3_jax.extract import hidden_states, pipeline
from eagle3_jax.mesh import make_mesh, own_replica, shardings
from eagle3_jax.models import layers
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.families import llama
from eagle3_jax.runs import manifest


def conversation(name: str, *turns: str, truncated: bool = False) -> dict:
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return {"id": name, "category": "chat", "messages": messages, "truncated": truncated, "answer_ids": None}


CONVERSATIONS = [
    conversation("short", "Hi", "Hello."),
    conversation("long", "Tell me of trees. " * 4, "Trees are tall. " * 6),
    conversation("turns", "One", "two", "Three", "four."),
    conversation("cut", "Count", "1 2 3 4", truncated=True),
    conversation("no answer", "Hello?"),
]


@pytest.fixture
def prepared(run_of):
    def make(folder: pathlib.Path, train=CONVERSATIONS, held_out=CONVERSATIONS[:1], **changes):
        values = {"states": "bfloat16", "max_length": 256, "batch_tokens": 512, "shard_records": 2}
        return run_of(folder, train, held_out, **values | changes)

    return make


@pytest.fixture(scope="module")
def assert_close_to_plain(target):
    """Compares a record with a forward pass of its conversation alone, without padding."""
    model = target.model

    @functools.cache
    def plain(token_ids: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
        return jax.jit(forward)(model, jnp.asarray(token_ids, jnp.int32)[None])

    def forward(model, tokens):
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        cache = model.empty_cache(1, tokens.shape[1])
        hidden, aux, _ = model(tokens, Pass(positions, jnp.zeros(1, jnp.int32)), cache)
        return aux[0], hidden[0], jnp.argmax(model.logits(hidden[0]), axis=-1)

    def check(record: features.Record) -> None:
        aux, hidden, argmax = plain(tuple(record["token_ids"].tolist()))
        # bfloat16 keeps 8 bits; float32 summed in another order may round to the neighbour.
        np.testing.assert_allclose(record["aux"].astype(np.float32), aux, rtol=2**-7, atol=1e-5)
        np.testing.assert_allclose(record["last_hidden"].astype(np.float32), hidden, rtol=2**-7, atol=1e-5)
        np.testing.assert_array_equal(record["argmax"], argmax)

    return check


@pytest.mark.slow
def test_records_equal_a_plain_forward_of_each_conversation(tmp_path, target, assert_close_to_plain, prepared):
    """Of two turns whose text is tokenised otherwise than it was sampled, each is a record of its own."""
    end = target.tokenizer.eos_token_id
    answers = [[300 % target.model.config.vocab_size, 7, end], [9, 5, 7, end]]
    sampled = conversation("sampled", "One", "two", "Three", "four.") | {"answer_ids": answers}
    config = prepared(tmp_path, train=[sampled, *CONVERSATIONS])
    extract.extract(config, target)
    source = features.FeatureSource(config.folder("extract") / "train")
    assert len(source) == 6
    learned = [record["token_ids"][record["loss_mask"] == 1].tolist() for record in source]
    assert all(answer in learned for answer in answers)
    texts = {target.tokenizer.decode(source[i]["token_ids"]): source[i] for i in range(len(source))}
    for record in texts.values():
        assert record["aux"].shape[1] == 3 * 16
        assert record["aux"].dtype == ml_dtypes.bfloat16
        assert_close_to_plain(record)
    turns = next(record for text, record in texts.items() if "four" in text and "two" in text)
    answers = target.tokenizer.decode(turns["token_ids"][turns["loss_mask"] == 1])
    assert answers == "two<|im_end|>four.<|im_end|>"


def test_manifest_vocabulary_and_rejects(tmp_path, target, prepared):
    config = prepared(tmp_path)
    extract.extract(config, target)
    folder = config.folder("extract")
    results = manifest.read(folder, "extract")["results"]
    source = features.FeatureSource(folder / "train")
    answered = np.concatenate([source[i]["token_ids"][source[i]["loss_mask"] == 1] for i in range(len(source))])
    token_ids = np.load(folder / "vocab.npz")["token_ids"]
    assert results["draft_vocabulary_coverage"] == pytest.approx(np.isin(answered, token_ids).mean())
    assert np.bincount(answered).argmax() in token_ids
    counted = {"records": 4, "rejected": 1, "tokens": source.lengths.sum(), "loss_tokens": len(answered)}
    assert {name: results["train"][name] for name in counted} == counted
    assert 0 < results["train"]["padding_share"] < 1
    assert results["held_out"]["records"] == 1
    (reject,) = [json.loads(line) for line in (folder / "train" / "rejects.jsonl").read_text().splitlines()]
    assert reject["id"] == "no answer"
    assert "loss mask" in reject["reason"]


def test_a_killed_run_goes_on_and_a_finished_one_does_nothing(tmp_path, target, monkeypatch, prepared):
    whole = prepared(tmp_path / "whole")
    extract.extract(whole, target)
    config = prepared(tmp_path / "killed")
    monkeypatch.setattr(pipeline, "WRITERS", 1)  # one shard at a time
    write, written = features.write_shard, []

    def killed_at_the_second(path, *args):
        if len(written) == 1:
            path.with_name(f".{path.name}.1.partial").write_bytes(b"half a shard")
            raise KeyboardInterrupt
        written.append(path)
        write(path, *args)

    monkeypatch.setattr(features, "write_shard", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        extract.extract(config, target)
    first = written[0].stat().st_mtime_ns

    monkeypatch.setattr(features, "write_shard", write)
    extract.extract(config, target)
    assert written[0].stat().st_mtime_ns == first
    for split in SPLITS:
        left = features.FeatureSource(whole.folder("extract") / split)
        right = features.FeatureSource(config.folder("extract") / split)
        assert len(left) == len(right)
        for i in range(len(left)):
            assert features.encode_record(left[i]) == features.encode_record(right[i])
    assert not list(config.folder("extract").rglob("*.partial"))
    for file in ("vocab.npz", "train/rejects.jsonl"):
        assert (whole.folder("extract") / file).read_bytes() == (config.folder("extract") / file).read_bytes()

    monkeypatch.setattr(features, "write_shard", None)
    extract.extract(config, target)


def test_a_record_with_a_nan_is_set_aside_and_its_neighbours_kept(tmp_path, target, prepared):
    model = llama.Llama(target.model.config, rngs=nnx.Rngs(0))
    (poison,) = target.tokenizer.encode("Z")
    model.embed[...] = model.embed[...].at[poison].set(jnp.nan)
    lines = [CONVERSATIONS[0], conversation("poisoned", "Zoo?", "Yes."), CONVERSATIONS[2]]
    config = prepared(tmp_path, train=lines, shard_records=3)
    # Logits of all positions see the poisoned row of the tied embedding; only hidden states decide.
    extract.extract(config, dataclasses.replace(target, model=model))
    folder = config.folder("extract") / "train"
    (reject,) = [json.loads(line) for line in (folder / "rejects.jsonl").read_text().splitlines()]
    assert reject == {"id": "poisoned", "reason": "NaN or infinity in the hidden states"}
    assert len(features.FeatureSource(folder)) == 2


def test_what_cannot_be_extracted_is_refused(tmp_path, target, prepared):
    with pytest.raises(ValueError, match=r"none of the conversations could be used, see .*rejects\.jsonl"):
        extract.extract(prepared(tmp_path / "a", train=CONVERSATIONS[-1:]), target)
    with pytest.raises(ValueError, match=r"extract\.max_length: got 1024, expected at most the target's 512"):
        extract.extract(prepared(tmp_path / "b", max_length=1024, batch_tokens=1024), target)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "model"), [(4, 1), (2, 2)])
def test_a_mesh_gives_the_same_records(tmp_path, target, assert_close_to_plain, data, model, prepared):
    config = prepared(tmp_path)
    config = dataclasses.replace(config, mesh=MeshConfig(data=data, model=model))
    placed = jax.device_put(target.model, shardings(target.model, make_mesh(config.mesh), layers.SHARDING_RULES))
    extract.extract(config, dataclasses.replace(target, model=placed))
    source = features.FeatureSource(config.folder("extract") / "train")
    assert len(source) == 4
    for i in range(len(source)):
        assert_close_to_plain(source[i])


@pytest.mark.slow
def test_states_in_8_bits_are_close_to_those_in_16(tmp_path, target, prepared):
    wide, narrow = prepared(tmp_path / "wide"), prepared(tmp_path / "narrow", states="fp8")
    for config in (wide, narrow):
        extract.extract(config, target)
    sources = [features.FeatureSource(config.folder("extract") / "train") for config in (wide, narrow)]
    for i in range(len(sources[0])):
        plain, coded = (source[i] for source in sources)
        for name in ("token_ids", "loss_mask", "argmax"):
            np.testing.assert_array_equal(coded[name], plain[name])
        for name, states in (("aux", 3), ("last_hidden", 1)):
            assert coded[name].dtype == ml_dtypes.float8_e4m3fn
            assert coded[f"{name}_scale"].shape == (len(plain[name]), states)
            parts = coded[name].astype(np.float32).reshape(len(plain[name]), states, -1)
            got = (parts * coded[f"{name}_scale"][..., None]).reshape(plain[name].shape)
            expected = plain[name].astype(np.float32)
            np.testing.assert_allclose(got, expected, rtol=2**-4, atol=2**-8 * np.abs(expected).max())


def test_what_fails_ends_the_run_and_leaves_no_half_shard(tmp_path, target, monkeypatch, prepared):
    def full(*_):
        raise OSError(28, "No space left on device")

    for module, name, fails, error in (
        (hidden_states, "target_states", lambda *_: 1 / 0, ZeroDivisionError),
        (features, "write_shard", full, OSError),
    ):
        config = prepared(tmp_path / name)
        with monkeypatch.context() as patched, pytest.raises(error):
            patched.setattr(module, name, fails)
            extract.extract(config, target)
        assert not list(config.folder("extract").glob("train/*"))


@pytest.mark.long
@pytest.mark.parametrize("seconds", [0.002, 0.4])
def test_a_slow_store_costs_no_more_than_its_rate(tmp_path, target, monkeypatch, seconds, prepared):
    """A forward pass of 50 milliseconds; a writer's store takes so long for a batch's record."""
    shards, forward, size = 32, 0.05, 500
    lines = [conversation(f"c{i}", "Hi " * (i % 5 + 1), "Hello. " * 8) for i in range(4 * shards)]
    config = prepared(tmp_path, train=lines, states="none", shard_records=4, max_length=64, batch_tokens=64)
    written: list[int] = []

    class Store:
        """Takes bytes at a rate, each writer its own."""

        def __init__(self, path, _):
            self.path = pathlib.Path(path)
            self.path.touch()

        def write(self, data):
            written.append(len(data))
            time.sleep(seconds * len(data) / size)

        def close(self):
            pass

    monkeypatch.setattr(features.array_record, "ArrayRecordWriter", Store)

    def computed(*_):
        time.sleep(forward)

    monkeypatch.setattr(hidden_states, "forward", computed)
    extract_states = dataclasses.replace(config.extract, states="fp8")
    replica = own_replica(make_mesh(MeshConfig(data=1)))
    for attempt in range(3):  # a machine that does other work
        written.clear()
        made = [
            pipeline.Shard(number, tmp_path / f"{attempt}-{number}.array_record", [*map(json.dumps, of_shard)])
            for number, of_shard in enumerate(lines[4 * number :][:4] for number in range(shards))
        ]
        with pipeline.ConversationBar(len(lines), "extract") as progress, tiny.no_type_checks():
            start = time.monotonic()
            pipeline.run(made, extract_states, target, replica, (64,), np.asarray, progress)
            wall = time.monotonic() - start
        batches = sum(len(shard.batches) for shard in made)
        assert len(written) == batches == len(lines)
        store = sum(written) / size * seconds / pipeline.WRITERS
        if wall <= 1.1 * max(batches * forward, store):
            return
    pytest.fail(f"took {wall:.2f} seconds, computing {batches * forward:.2f}, storing {store:.2f}")
