"""One draft pass of tpu-inference on a CPU, in an environment of its own (tools/install_tpu_inference.sh).

    python tpu_inference_process.py METHOD HEAD TARGET OVERRIDES IN.npz OUT.npz

The configs go through vLLM's own code, the folder through tpu-inference's loader and its class of the method. Its
attention is a kernel for TPUs: here it is plain, without a cache. Of torchax and tokamax a draft calls nothing.
"""

import functools
import importlib.abc
import importlib.machinery
import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        known = name.partition(".")[0] in ("torchax", "tokamax")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: Any) -> Any:
        return mock.MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module: Any) -> None:
        pass


sys.meta_path.insert(0, Absent())

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from flax import nnx  # noqa: E402
from tpu_inference.layers.common.attention_metadata import AttentionMetadata  # noqa: E402
from tpu_inference.models.common.model_loader import _get_model_architecture  # noqa: E402
from vllm.transformers_utils.config import get_config  # noqa: E402
from vllm.transformers_utils.configs.eagle import EAGLEConfig  # noqa: E402


def attention(
    kv_cache: Any,
    q: Any,
    k: Any,
    v: Any,
    *_: Any,
    sm_scale: float | None = None,
    use_causal_mask: bool = True,
    **__: Any,
) -> Any:
    keys, values = (k, v) if kv_cache is None else map(jnp.concatenate, zip(kv_cache, (k, v), strict=True))
    grouped = [jnp.repeat(x, q.shape[1] // x.shape[1], axis=1).astype(jnp.float32) for x in (keys, values)]
    scores = jnp.einsum("tnd,snd->nts", q.astype(jnp.float32), grouped[0]) * (sm_scale or _HEAD**-0.5)
    seen = jnp.arange(len(keys))[None] <= len(keys) - len(q) + jnp.arange(len(q))[:, None]
    weights = jax.nn.softmax(jnp.where(seen | (not use_causal_mask), scores, -jnp.inf), axis=-1)
    return (keys, values), jnp.einsum("nts,snd->tnd", weights, grouped[1]).astype(q.dtype)


method, head, target, overrides, source, made = sys.argv[1:]
given = dict(np.load(source))
config = EAGLEConfig(get_config(head, trust_remote_code=False), method=method, model_type="eagle")
target_config = get_config(target, trust_remote_code=False, hf_overrides_kw=json.loads(overrides))
_HEAD = config.head_dim
sizes = {"get_vocab_size": lambda: config.vocab_size, "get_hidden_size": lambda: config.hidden_size}
sizes |= {"get_head_size": lambda: config.head_dim, "is_multimodal_model": False, "seed": 0}
draft_model = SimpleNamespace(hf_config=config, model=head, **sizes)
engine = SimpleNamespace(
    speculative_config=SimpleNamespace(draft_model_config=draft_model, method=method),
    model_config=SimpleNamespace(hf_config=target_config, model=target, dtype=jnp.float32, **sizes),
    load_config=SimpleNamespace(download_dir=None),
    parallel_config=SimpleNamespace(tensor_parallel_size=1),
    cache_config=SimpleNamespace(cache_dtype="auto"),
)
mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1, 1), ("data", "attn_dp", "expert", "model"))
network = _get_model_architecture(config)
with jax.set_mesh(mesh), mock.patch.multiple("tpu_inference.models.jax.llama3", attention=attention):
    with mock.patch.multiple("tpu_inference.models.jax.dflash", attention=attention):
        model = nnx.eval_shape(functools.partial(network, engine, jax.random.key(0), mesh))
        model.load_weights(jax.random.key(0))
        leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model))
        missing = [jax.tree_util.keystr(path) for path, x in leaves if isinstance(x, jax.ShapeDtypeStruct)]
        assert not missing, f"not loaded: {missing}"
        model.model.embed_tokens.embedding.value = jnp.asarray(given["embed"])
        ids, aux = jnp.asarray(given["ids"]), jnp.asarray(given["aux"])
        positions = jnp.arange(len(ids)) + (len(aux) if method == "dflash" else 0)
        this = AttentionMetadata(positions, seq_lens=jnp.array([len(aux)]))
        features = model.combine_hidden_states(aux)
        if method == "dflash":
            model.lm_head.weight.value = jnp.asarray(given["embed"]).T
            features = (features, None, jnp.arange(len(aux)))
        _, hidden, _, _ = model([None] * config.num_hidden_layers, ids, features, this)
        np.savez(made, hidden=hidden, logits=model.compute_logits(hidden))
