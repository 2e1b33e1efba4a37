"""A draft pass of tpu-inference's own loader and classes, on a CPU, is this package's."""

import dataclasses
import json
import pathlib
import subprocess
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_heads
from tiny_blocks import make_block_head

from eagle3_jax.formats.blocks.kinds import DFLASH
from eagle3_jax.formats.eagle3 import EAGLE3
from eagle3_jax.formats.tensors import LM_HEAD
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.drafts.dflash import DFlash
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.layers import LinearScaling, RopeScaling

ROOT = pathlib.Path(__file__).parents[2]
LLAMA3 = RopeScaling(32.0, 1.0, 4.0, 64)
SEEN = 40  # tokens of the context


@pytest.fixture(scope="module")
def python() -> pathlib.Path:
    """The Python of tpu-inference's environment, which is made where it is not there yet."""
    subprocess.run(["bash", str(ROOT / "tools/install_tpu_inference.sh")], check=True, cwd=ROOT, timeout=1800)
    return ROOT / ".venv-tpu-inference/bin/python"


@pytest.fixture
def theirs(python, tmp_path):
    def run(method: str, shape: Any, overrides: dict[str, Any], **given: Any) -> Any:
        """Runs the head in tmp_path / "head" for a target of this shape. Returns their arrays, or raises."""
        (tmp_path / "target").mkdir(exist_ok=True)
        (tmp_path / "target/config.json").write_text(json.dumps(shape.to_hf()))
        np.savez(tmp_path / "in.npz", **given)
        files = [tmp_path / name for name in ("head", "target", "in.npz", "out.npz")]
        script = pathlib.Path(__file__).with_name("tpu_inference_process.py")
        command = [python, script, method, *files[:2], json.dumps(overrides), *files[2:]]
        ended = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False)
        if ended.returncode:
            raise RuntimeError(ended.stderr[-2000:])
        return np.load(files[3])

    return run


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def ours(draft: Draft, embed: np.ndarray, ids: np.ndarray, aux: np.ndarray) -> np.ndarray:
    """The normed states of EAGLE-3 for all pairs, causally."""
    head, t = draft.head, len(ids)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("btnd,bsnd->bnts", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -jnp.inf), axis=-1)
        return jnp.einsum("bnts,bsnd->btnd", weights, v)

    features = head.fuse(jnp.asarray(aux)[None])
    state = head(jnp.asarray(embed)[ids][None], features, Pass(jnp.arange(t)[None], jnp.zeros(1, int)), attend)
    return np.asarray(head.output_hidden(state)[0])


@pytest.mark.long
@pytest.mark.parametrize("changes", [{}, {"rope_scaling": LLAMA3, "rope_theta": 500.0}, {"norm_before_residual": True}])
def test_eagle3(theirs, tmp_path, changes) -> None:
    """Their projections of queries, keys and values are in bfloat16, whatever the head's dtype."""
    shape, draft = tiny_heads.TARGET, tiny_heads.make_draft(head_dim=64, **changes)
    EAGLE3.write(tmp_path / "head", EAGLE3.stored(draft, shape, "float32", None), "vllm")
    ids, aux = np.arange(SEEN) % 50, drawn(SEEN, 48)
    given = {"embed": drawn(50, 16), "ids": ids, "aux": aux}
    got, expected = theirs("eagle3", shape, {}, **given), ours(draft, **given)
    np.testing.assert_allclose(got["hidden"], expected, atol=0.05 * np.abs(expected).max())
    logits = expected @ np.asarray(draft.head.lm_head[...]).T
    np.testing.assert_allclose(got["logits"][:, draft.token_ids], logits, atol=0.05 * np.abs(logits).max())
    assert np.isneginf(np.delete(got["logits"], draft.token_ids, axis=1)).all()


@pytest.mark.long
def test_a_scaling_that_is_not_llama_3s_is_ignored(theirs, tmp_path) -> None:
    shape, draft = tiny_heads.TARGET, tiny_heads.make_draft(head_dim=64, rope_scaling=LinearScaling(4.0))
    EAGLE3.write(tmp_path / "head", EAGLE3.stored(draft, shape, "float32", None), "vllm")
    given = {"embed": drawn(50, 16), "ids": np.arange(SEEN) % 50, "aux": drawn(SEEN, 48)}
    got, expected = theirs("eagle3", shape, {}, **given)["hidden"], ours(draft, **given)
    assert np.abs(got - expected).max() > 0.1 * np.abs(expected).max()


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "lm_head", "message"),
    [
        ({"fc_norm": True}, True, "fc_norm.0 is not a valid param path"),
        ({"ids": list(range(50))}, True, "draft_id_to_target_id"),
        ({"ids": list(range(50))}, False, "lm_head"),
    ],
)
def test_what_the_table_says_fails(theirs, tmp_path, changes, lm_head, message) -> None:
    shape, draft = tiny_heads.TARGET, tiny_heads.make_draft(head_dim=64, **changes)
    head = EAGLE3.stored(draft, shape, "float32", None)
    if not lm_head:
        head = dataclasses.replace(head, tensors={x: y for x, y in head.tensors.items() if x != LM_HEAD})
    EAGLE3.write(tmp_path / "head", head, "vllm")
    with pytest.raises(RuntimeError, match=message):
        theirs("eagle3", shape, {}, embed=drawn(50, 16), ids=np.arange(SEEN) % 50, aux=drawn(SEEN, 48))


@pytest.mark.long
@pytest.mark.parametrize("scaling", [None, LLAMA3])
def test_dflash(theirs, tmp_path, scaling, monkeypatch) -> None:
    """RoPE is right by the overrides of tools/serve_tpu_inference.sh, and wrong without them."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    from draft_size import rope_overrides

    shape = dataclasses.replace(tiny_heads.TARGET, vocab_size=60, rope_scaling=scaling)
    own = {"draft_vocab_size": 60, "head_dim": 64, "aux_layers": (1, 2, 4), "rope_scaling": scaling}
    head = make_block_head(DFlash, **own)
    stored = DFLASH.stored(Draft(head, jnp.arange(60)), shape, "float32", None)
    DFLASH.write(tmp_path / "head", stored, "vllm")
    embed, aux, root = drawn(60, 16), drawn(SEEN, 48), 7
    given = {"embed": embed, "aux": aux, "ids": np.array([root, 59, 59, 59])}
    overrides = rope_overrides(stored.config, shape)
    right, wrong = (theirs("dflash", shape, x, **given)["hidden"] for x in (overrides, {}))
    at = jnp.array([[SEEN]])
    context = head.context(head.fuse(jnp.asarray(aux)[None]), jnp.arange(SEEN)[None])
    expected = np.asarray(head.states(jnp.asarray(embed), jnp.array([[root]]), at, context, 0 * at, at)[0, 0])
    off, missed = (np.abs(x[1:] - expected).max() / np.abs(expected).max() for x in (right, wrong))
    assert off < 0.01 and missed > 5 * off, (off, missed)  # parts of theirs are in bfloat16, as in EAGLE-3
