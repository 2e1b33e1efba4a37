"""Loading checkpoints: round trips, sharded files, and every error by name in one message."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from eagle3_jax.config import MeshConfig
from eagle3_jax.mesh import make_mesh, parameter_path
from eagle3_jax.models.checkpoint import load
from eagle3_jax.models.checkpoint.load import WeightsError, load_model
from eagle3_jax.models.families import llama
from eagle3_jax.models.target import TargetModel

CONFIG = tiny.llama_config(num_hidden_layers=2, tie_word_embeddings=False, aux_layers=(0, 1, 2))


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=shape).astype(np.float32)
        for entry in llama.table(CONFIG).values()
        for name, shape in entry.tensors.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def leaves(model: TargetModel) -> dict[str, np.ndarray]:
    return {parameter_path(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(model)}


def test_table_covers_every_parameter(folder):
    loaded = leaves(load_model(folder, CONFIG, jnp.float32))
    assert loaded.keys() == llama.table(CONFIG).keys()
    tensors = load_file(folder / "model.safetensors")
    qkv = loaded["blocks/1/attention/qkv"].reshape(16, 2, 4, 4)
    heads = np.concatenate([qkv[:, k, :2].reshape(16, -1) for k in range(2)], axis=1)
    np.testing.assert_array_equal(heads.T, tensors["model.layers.1.self_attn.q_proj.weight"])
    np.testing.assert_array_equal(qkv[:, :, 2].reshape(16, -1).T, tensors["model.layers.1.self_attn.k_proj.weight"])
    np.testing.assert_array_equal(loaded["blocks/0/mlp/up"].T, tensors["model.layers.0.mlp.up_proj.weight"])


class Counted:
    """A tensor that counts the numbers that are read of it."""

    def __init__(self, held, read):
        self.held, self.read = held, read

    def __getitem__(self, index):
        got = self.held[index]
        self.read.append(got.size)
        return got

    def __getattr__(self, name):
        return getattr(self.held, name)


@pytest.mark.parametrize(("data", "model"), [(1, 2), (2, 2), (2, 4)])  # 4: a part is half a KV head
def test_each_device_gets_its_part_and_every_number_is_read_once(folder, data, model, monkeypatch):
    whole = leaves(load_model(folder, CONFIG, jnp.float32))
    read = []

    def counting(files):
        tensor = reader(files)
        return lambda name: Counted(tensor(name), read)

    reader, tensors = load.reader, load_file(folder / "model.safetensors")
    monkeypatch.setattr(load, "reader", counting)
    mesh = make_mesh(MeshConfig(data=data, model=model), jax.devices()[: data * model])
    loaded = load_model(folder, CONFIG, jnp.float32, mesh)
    for name, value in leaves(loaded).items():
        np.testing.assert_array_equal(value, whole[name], err_msg=name)
    shard = loaded.blocks[0].attention.qkv[...].addressable_shards[0].data
    assert shard.shape[1] * model == loaded.blocks[0].attention.qkv[...].shape[1]
    # Both devices of a KV head read all of it.
    twice = [
        x.size for name, x in tensors.items() if model == 4 and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
    ]
    assert sum(read) == sum(x.size for x in tensors.values()) + sum(twice)


def test_only_what_is_asked_for_is_read(folder):
    whole = leaves(load_model(folder, CONFIG, jnp.float32))
    part = load_model(folder, CONFIG, jnp.float32, only=("embed", "lm_head"))
    for path, leaf in jax.tree_util.tree_leaves_with_path(part):
        name = parameter_path(path)
        if name in ("embed", "lm_head"):
            np.testing.assert_array_equal(leaf, whole[name])
        else:
            assert isinstance(leaf, jax.ShapeDtypeStruct), name


def split(folder, drop=()):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held if name not in drop}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return names


def test_every_problem_in_one_message(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.layers.7.extra"] = np.zeros(3, np.float32)
    tensors["lm_head.weight"] = np.zeros((40, 8), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        load_model(folder, CONFIG, jnp.float32)
    message = str(caught.value)
    assert "3 problems" in message
    assert "missing tensor model.norm.weight [16]" in message
    assert "surplus tensor model.layers.7.extra" in message
    assert "lm_head.weight: got shape [40, 8], expected [40, 16]" in message


def test_index_that_promises_too_much(folder):
    name = split(folder, drop={"model.norm.weight"})
    assert "model.norm.weight" in name
    with pytest.raises(WeightsError, match=r"the index promises model\.norm\.weight"):
        load_model(folder, CONFIG, jnp.float32)
    (folder / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"missing: b\.safetensors"):
        load_model(folder, CONFIG, jnp.float32)


@pytest.mark.parametrize("keep", [0, 100, 5000])
def test_truncated_file(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match="truncated"):
        load_model(folder, CONFIG, jnp.float32)


TIED = tiny.llama_config(num_hidden_layers=1, tie_word_embeddings=True, aux_layers=(0, 1))


def tied(folder, copy):
    """A checkpoint that declares its embeddings as its LM head, and holds `copy(embeddings)` as well."""
    rng = np.random.default_rng(0)
    tensors = {
        name: rng.normal(size=shape).astype(jnp.bfloat16)
        for entry in llama.table(TIED).values()
        for name, shape in entry.tensors.items()
    }
    tensors["lm_head.weight"] = copy(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors")
    return tensors


@pytest.mark.parametrize("only", [None, ("norm",), ("embed",)])
def test_a_tied_lm_head_of_other_values_is_refused(tmp_path, monkeypatch, only):
    def other(embeddings):
        copy = np.array(embeddings)
        copy[-1, -1] += 1  # behind the first part that is compared
        return copy

    monkeypatch.setattr(load, "_ROWS", 10)
    tied(tmp_path, other)
    message = (
        "lm_head.weight: got other values than model.embed_tokens.weight, expected equal ones or none, as tie_word_emb"
    )
    with pytest.raises(WeightsError, match=message):
        load_model(tmp_path, TIED, jnp.float32, only=only)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32])
def test_a_tied_lm_head_may_be_stored_again(tmp_path, monkeypatch, dtype):
    tensors = tied(tmp_path, lambda embeddings: np.array(embeddings, dtype))
    read, reader = [], load.reader
    monkeypatch.setattr(load, "reader", lambda files: read.append(set(files)) or reader(files))
    model = load_model(tmp_path, TIED, jnp.bfloat16, only=("embed",))
    np.testing.assert_array_equal(model.embed[...], tensors["model.embed_tokens.weight"])
    assert not hasattr(model, "lm_head")
    # Nothing but these two is read to compare them.
    assert read[0] == {"lm_head.weight", "model.embed_tokens.weight"} and len(read) == 2
