"""The MTP layers of DeepSeek-V3 and GLM-4.5 as draft heads: layers with experts whose input has the embedding first.

Sources: DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2; SGLang's deepseek_nextn.py and glm4_moe_nextn.py.
As in SGLang and in transformers' MtpLayer, the normed output recurs, and the first pair is read as any other. vLLM's
deepseek_mtp.py and glm4_moe_mtp.py zero the first token; the normed output recurs in 0.32.0, the un-normed one in
0.22.0. The layer's copies of the embeddings and of the LM head (`embed_tokens`, `shared_head.head`) are not read.
"""

from __future__ import annotations

from typing import Any, ClassVar

from eagle3_jax.models.checkpoint.table import Entry, kernel, plain
from eagle3_jax.models.drafts.mtp import MtpHead
from eagle3_jax.models.families import deepseek_v3, dense, glm4_moe
from eagle3_jax.models.families.glm4_moe import Glm4MoeConfig


class DeepseekMtp(MtpHead):
    block_type = deepseek_v3.Block


class GlmMtp(MtpHead):
    block_type = glm4_moe.Block
    rotary: ClassVar[Any] = staticmethod(dense.ropes)


def table(config: Any) -> dict[str, Entry]:
    """Maps parameter paths in the head to tensors of the target's checkpoint; the LM head is the target's."""
    h, layer = config.hidden_size, config.num_hidden_layers
    source, family = f"model.layers.{layer}", glm4_moe if isinstance(config, Glm4MoeConfig) else deepseek_v3
    return {f"block/{path}": entry for path, entry in family.layer_table(config, layer).items()} | {
        "token_norm": plain(f"{source}.enorm.weight", h),
        "hidden_norm": plain(f"{source}.hnorm.weight", h),
        "fc": kernel(f"{source}.eh_proj.weight", h, 2 * h),
        "norm": plain(f"{source}.shared_head.norm.weight", h),
    }
