"""Other implementations of attention for tools/tpu_profile.py: plain XLA, the kernels in JAX, and tpu-inference's.

Block sizes are the best of a few tried on v6e. Only flash attention supports a tree of drafts, as a bias on every
score; the other kernels are causal.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import types
from typing import Any

from tpu_cases import Attention, Call

from eagle3_jax.runs.disk import digest

TPU_INFERENCE = "tpu-inference==0.32.0"
_WHEEL_DIGEST = "7c25a3c76cefd383f06ef115a6ed4d7bed82c081f047046bfef55f5913ea06d4"  # sha256
VMEM_LIMIT = 56 << 20


def flash(case: Attention) -> Call:
    """JAX's flash attention on rows folded as in this package, with the tree as a bias."""
    from jax.experimental.pallas.ops.tpu import flash_attention as jax_flash

    c = case
    sizes = jax_flash.BlockSizes(block_q=min(c.rows, 256), block_k_major=1024, block_k=1024, block_b=1)
    q, kv = (c.batch, c.kv_heads, c.rows, c.head_dim), (c.batch, c.kv_heads, c.keys, c.head_dim)

    def attend(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return jax_flash.flash_attention(q, k, v, bias, sm_scale=c.head_dim**-0.5, block_sizes=sizes)

    bias = ((c.batch, c.kv_heads, c.rows, c.keys), "float32")
    return Call(attend, [(q, c.dtype), (kv, c.dtype), (kv, c.dtype), bias])


def xla(case: Attention) -> Call:
    """Computes it by plain XLA operations on folded rows, with a dense mask."""
    import jax
    import jax.numpy as jnp

    c = case
    q, kv = (c.batch, c.kv_heads, c.rows, c.head_dim), (c.batch, c.kv_heads, c.keys, c.head_dim)

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = jnp.einsum("bkrd,bksd->bkrs", q, k, preferred_element_type=jnp.float32) * c.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
        return jnp.einsum("bkrs,bksd->bkrd", weights.astype(v.dtype), v)

    return Call(attend, [(q, c.dtype), (kv, c.dtype), (kv, c.dtype), ((c.batch, c.rows, c.keys), "bool")])


def paged(case: Attention) -> Call:
    """JAX's paged attention, for one token of each sequence."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    from eagle3_jax.kernels.dispatch import cores

    c, pages = case, case.keys // case.page
    cache = ((c.kv_heads, c.batch * pages, c.page, c.head_dim), c.dtype)
    arguments = [
        ((c.batch, c.query_heads, c.head_dim), c.dtype),
        cache,
        cache,
        ((c.batch,), "int32"),
        ((c.batch, pages), "int32"),
    ]

    def attend(q: Any, k: Any, v: Any, lengths: Any, table: Any) -> Any:
        both = "batch" if cores() == 2 else None
        return paged_attention(q, k, v, lengths, table, pages_per_compute_block=pages, megacore_mode=both)

    return Call(attend, arguments, {"paged_attention": [c.batch // cores() * c.kv_heads]})


def ragged(case: Attention) -> Call:
    """JAX's ragged paged attention, for concatenated new tokens of several sequences, causal."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    c, pages, keys = case, case.keys // case.page, 2048
    arguments = [
        ((c.batch * c.nodes, c.query_heads, c.head_dim), c.dtype),
        ((c.batch * pages, c.page, 2 * c.kv_heads, c.head_dim), c.dtype),
        ((c.batch,), "int32"),
        ((c.batch, pages), "int32"),
        ((c.batch + 1,), "int32"),
        ((1,), "int32"),
    ]

    def attend(*operands: Any) -> Any:
        return ragged_paged_attention(
            *operands,
            sm_scale=c.head_dim**-0.5,
            num_kv_pages_per_block=keys // c.page,
            num_queries_per_block=c.nodes,
            vmem_limit_bytes=VMEM_LIMIT,
        )

    return Call(attend, arguments, {"ragged_paged_attention": [c.batch * c.keys // keys]})


def ragged_v3(case: Attention) -> Call:
    """Calls tpu-inference's kernel for the same, which also writes the new keys and values."""
    import jax

    ragged_paged_attention = _tpu_inference(jax.sharding.get_abstract_mesh().abstract_device.device_kind)
    c, pages, keys = case, case.keys // case.page, 2048
    new = (c.batch * c.nodes, c.kv_heads, c.head_dim)
    arguments = [
        ((c.batch * c.nodes, c.query_heads, c.head_dim), c.dtype),
        (new, c.dtype),
        (new, c.dtype),
        ((c.batch * pages, c.page, c.kv_heads, 2, c.head_dim), c.dtype),
        ((c.batch,), "int32"),
        ((c.batch * pages,), "int32"),
        ((c.batch + 1,), "int32"),
        ((3,), "int32"),
    ]

    # The kernel makes two calls, for sequences with one new token and for all others. The idle one gets small blocks.
    sizes, idle = (c.nodes, c.keys, c.nodes, keys), (1, c.page, 1, c.page)
    name, chosen = (
        ("RPAd", {"d_block_sizes": sizes, "m_block_sizes": idle})
        if c.nodes == 1
        else ("RPAm", {"d_block_sizes": idle, "m_block_sizes": sizes})
    )

    def attend(*operands: Any) -> Any:
        return ragged_paged_attention(*operands, sm_scale=c.head_dim**-0.5, vmem_limit_bytes=VMEM_LIMIT, **chosen)

    return Call(attend, arguments, {name: [c.batch * c.keys // keys]})


def _tpu_inference(device_kind: str) -> Any:
    """Imports `ragged_paged_attention` v3 from the wheel, downloaded once, without importing its parent packages."""
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "eagle3_jax/wheels"
    if not (wheels := list(folder.glob("tpu_inference-*.whl"))):
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        if subprocess.run([*download, "--dest", folder, TPU_INFERENCE]).returncode:
            raise ImportError(f"pip cannot download {TPU_INFERENCE}")
        wheels = list(folder.glob("tpu_inference-*.whl"))
    if (got := digest(wheels[0])) != _WHEEL_DIGEST:
        raise ImportError(f"{wheels[0]}: sha256 {got}, expected {_WHEEL_DIGEST}; remove it")
    names = "tpu_inference", "kernels", "ragged_paged_attention", "v3"
    for end in range(1, len(names) + 1):
        package = types.ModuleType(".".join(names[:end]))
        package.__path__ = ["/".join([str(wheels[0]), *names[:end]])]
        sys.modules[package.__name__] = package
    from tpu_inference.kernels.ragged_paged_attention.v3 import util

    # The original reads the process's first device, which is not a TPU here.
    util.get_tpu_version = lambda: {"TPU v5 lite": 5, "TPU v5": 5, "TPU v6 lite": 6, "TPU7x": 7}[device_kind]
    from tpu_inference.kernels.ragged_paged_attention.v3 import kernel

    return kernel.ragged_paged_attention
