"""Gemma 4's assistants on disk, as they are published (`Gemma4AssistantForCausalLM`), read and written."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.formats import fields, files
from eagle3_jax.formats.files import DraftFormatError
from eagle3_jax.formats.kinds import AnyTarget, DraftKind, Path, StoredHead
from eagle3_jax.formats.stored import filled, to_tensors
from eagle3_jax.formats.tensors import Tensors
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.checkpoint.table import tensor_problems
from eagle3_jax.models.drafts.gemma4_assistant import AssistantShape, Gemma4Assistant, table
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.families.gemma4 import Gemma4Config, unused
from eagle3_jax.models.target_config import ModelConfig, final_boundary

_ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_ORDER, _ROWS = "masked_embedding.token_ordering", "model.embed_tokens.weight"
_SAME = ("vocab_size", "head_dim", "global_head_dim", "num_key_value_heads", "num_global_key_value_heads")


def read_shape(values: dict[str, Any], target: ModelConfig) -> AssistantShape:
    """Reads the shape of a target's assistant from its config.json. Raises ValueError with every problem."""
    if not isinstance(target, Gemma4Config):
        raise ValueError(f"target: got a {target.architecture}, expected a Gemma4ForCausalLM, whose cache it reads")
    text = values.get("text_config") or {}
    own: Any = Gemma4Config.from_hf(text | {"num_kv_shared_layers": 0})
    own = dataclasses.replace(own, num_kv_shared_layers=own.num_hidden_layers, aux_layers=())
    clusters = values.get("num_centroids", 2048) if values.get("use_ordered_embeddings") else 0
    pairs = [(f"{name} of the target", getattr(own, name), getattr(target, name)) for name in _SAME]
    pairs += [
        ("backbone_hidden_size", values.get("backbone_hidden_size", 1536), target.hidden_size),
        ("hidden_size_per_layer_input", own.hidden_size_per_layer_input, 0),
        ("num_experts", own.num_experts, None),
        ("tie_word_embeddings", values.get("tie_word_embeddings", True), True),
        ("tokens beside whole clusters", own.vocab_size % (clusters or 1), 0),
    ]
    if problems := [f"{name}: got {got}, expected {wanted}" for name, got, wanted in pairs if got != wanted]:
        raise ValueError("no assistant of this target:\n  " + "\n  ".join(problems))
    chosen = values.get("centroid_intermediate_top_k", 32)
    boundaries = (final_boundary(target.num_hidden_layers),)
    return AssistantShape(target, boundaries, own=own, num_centroids=clusters, centroid_intermediate_top_k=chosen)


class _Assistant(DraftKind):
    def read(self, folder: pathlib.Path, target: AnyTarget | None = None) -> StoredHead:
        """See `DraftKind`; its target must be given."""
        if target is None:
            raise DraftFormatError(f"{folder}: got no target, expected the one whose cache {self.label} reads")
        tensors, problems = files.read_tensors(folder, str)
        try:
            shape = read_shape(files.read_config(folder), target.model.config if isinstance(target, Target) else target)
        except ValueError as error:
            raise DraftFormatError(f"{folder}: {error}") from error
        tensors.pop("lm_head.weight", None)  # tied to the embeddings
        ids = np.arange(shape.vocab_size, dtype=np.int64)
        if shape.num_centroids:
            ids = tensors.pop(_ORDER, ids[:0]).astype(np.int64)
            if not np.array_equal(np.sort(ids), np.arange(shape.vocab_size)):
                problems.append(f"{_ORDER}: got {len(ids)} tokens, expected each of {shape.vocab_size} once")
        expected = {name: size for entry in table(shape).values() for name, size in entry.tensors.items()}
        tensors = {name: x for name, x in tensors.items() if not name.startswith(unused(shape.own))}
        problems += tensor_problems(tensors, expected)
        if problems:
            raise DraftFormatError(f"{folder} does not hold a usable assistant:\n  " + "\n  ".join(problems))
        return StoredHead(self, shape, tensors | {_ROWS: tensors[_ROWS][ids]}, ids)

    def load(
        self,
        folder: pathlib.Path | None,
        target: AnyTarget,
        dtype: Any,
        token_map: Path | None = None,
        *,
        clusters: bool = True,
    ) -> Draft:
        """See `DraftKind`; without `clusters` the head drafts all tokens, in the vocabulary's order."""
        assert folder is not None
        stored = self.read(folder, target)
        if not clusters:
            order, config = np.argsort(stored.token_ids), dataclasses.replace(stored.config, num_centroids=0)
            tensors = stored.tensors | {_ROWS: stored.tensors[_ROWS][order]}
            stored = dataclasses.replace(stored, config=config, tensors=tensors, token_ids=stored.token_ids[order])
        entries = table(stored.config)
        rows = jnp.asarray(stored.tensors[next(iter(entries["lm_head"].tensors))])
        head = filled(self.network, stored.config, jnp.dtype(dtype), entries, stored.tensors, rows)
        return Draft(head, jnp.asarray(stored.token_ids, jnp.int32))

    def stored(self, draft: Draft, target: ModelConfig, dtype: str, name: str | None) -> StoredHead:
        """See `DraftKind`; rows are in the order of `token_ids`."""
        problems: list[str] = []
        tensors = to_tensors(draft.head, table(draft.head.config), lambda _: dtype, problems)
        ids = np.asarray(draft.token_ids, np.int64)
        return StoredHead(self, draft.head.config, tensors, ids, problems=tuple(problems))

    def write(self, folder: pathlib.Path, head: StoredHead, form: str) -> None:
        """See `DraftKind`; `form` is the engine that reads it, "sglang" or "vllm"."""
        refused = [] if form in ("sglang", "vllm") else [f"export.format: got {form!r}, expected 'sglang' or 'vllm'"]
        if problems := [*head.problems, *refused]:
            raise DraftFormatError("this assistant cannot be saved:\n  " + "\n  ".join(problems))
        c: AssistantShape = head.config
        text = c.own.to_hf() | {"architectures": None, "vocab_size_per_layer_input": 0}
        values = {
            "architectures": [_ARCHITECTURES[0]],
            "model_type": "gemma4_assistant",
            "text_config": text,
            "backbone_hidden_size": c.hidden_size,
            "use_ordered_embeddings": bool(c.num_centroids),
            "num_centroids": c.num_centroids or 2048,
            "centroid_intermediate_top_k": c.centroid_intermediate_top_k,
            "tie_word_embeddings": True,
            "torch_dtype": str(head.tensors[_ROWS].dtype),
        }
        in_order: Tensors = {_ROWS: head.tensors[_ROWS][np.argsort(head.token_ids)]}
        files.write(folder, values, head.tensors | in_order | ({_ORDER: head.token_ids} if c.num_centroids else {}))
        if not self.read(folder, c.model).same(head):
            raise DraftFormatError(f"{folder}: the assistant does not read back the same; is the disk full?")


ASSISTANT = _Assistant(
    name="assistant",
    label="Gemma 4's assistant",
    network=Gemma4Assistant,
    method="mtp",
    algorithm="FROZEN_KV_MTP",
    is_mine=lambda folder, values: fields.architecture(values) in _ARCHITECTURES,
)
