"""Config sections that verbs share: the models, the shape of a draft, and the devices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from eagle3_jax.config.checks import Count, Positive, require, section
from eagle3_jax.config.kinds import trained

Dtype = Literal["float32", "bfloat16"]
FewBits = Literal["int8", "fp8", "int4"]
Weights = Literal["int8", "fp8", "int4", "stored"]


@section()
class DraftTree:
    """Size of the draft, in SGLang's terms.

    Attributes:
        num_steps: depth of the tree; at most this many drafted tokens can be accepted in one round.
        topk: children kept per expanded node; 1 is a chain.
        num_draft_tokens: nodes verified per round, the root included.
        sample_drafts: draws the drafts of requests with a temperature from the head's distribution, and verifies them
            by multi-candidate rejection sampling. Otherwise these requests get the head's best tokens, each accepted
            with the target's probability of it, and a seed gives vanilla decoding's answer. The answers' distribution
            is the target's either way.
        lookup_tokens: tokens copied from the text so far that compete with the head's candidates; 0 is none.
    """

    num_steps: Count = 4
    topk: Count = 1
    num_draft_tokens: int = 5
    sample_drafts: bool = True
    lookup_tokens: Annotated[int, Field(ge=0)] = 0

    def __post_init__(self) -> None:
        s, k, n, copied = self.num_steps, self.topk, self.num_draft_tokens, self.lookup_tokens
        if k == 1 and not copied:
            require(n == s + 1, "num_draft_tokens", n, f"num_steps + 1 = {s + 1} for a chain (topk=1)")
        pool = k + (s - 1) * k * k + copied
        require(s < n <= pool + 1, "num_draft_tokens", n, f"num_steps + 1 = {s + 1} to {pool + 1} (root + candidates)")

    @property
    def depth(self) -> int:
        """Most drafts that one round accepts."""
        return max(self.num_steps, self.lookup_tokens)


# "auto": the engine chooses the size of every dispatch, vanilla decoding included.
TreeOrAuto = Annotated[
    Annotated[DraftTree, Tag("DraftTree")] | Annotated[Literal["auto"], Tag("auto")],
    Discriminator(lambda value: "auto" if isinstance(value, str) else "DraftTree"),
]


@section("target")
class TargetConfig:
    """The model that is made faster.

    Attributes:
        name: a registered name ("smollm2-135m-instruct": 4-bit weights from a Python package), a hub id ("org/model",
            "org/model@revision"), or a Hugging Face folder.
        dtype: dtype of weights and activations; float32 is the exact mode.
        aux_layers: boundaries b (the residual stream entering block b) whose states feed the draft head;
            None is (2, n // 2, n - 3).
        weights: quantises the matrices at load, experts' included; activations keep `dtype`. `int8` and `fp8` (e4m3)
            have a scale for each output channel, `int4` a scale and an offset for each 32 inputs of one. `stored` keeps
            the few bits of a checkpoint that comes quantised. None is `dtype`.
        quantise_vocabulary: quantises embeddings and LM head too, row by row; in 8 bits where `weights` is `int4`.
    """

    name: str = "smollm2-135m-instruct"
    dtype: Dtype = "float32"
    aux_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    weights: Weights | None = None
    quantise_vocabulary: bool = False

    def __post_init__(self) -> None:
        named = self.weights is not None or not self.quantise_vocabulary
        require(named, "weights", self.weights, "a kind of weights, as target.quantise_vocabulary is true")
        layers = self.aux_layers
        ascending = layers is None or (len(layers) > 0 and sorted(set(layers)) == list(layers))
        require(ascending, "aux_layers", layers, "ascending, distinct boundaries")


@section("draft")
class DraftConfig:
    """Kind and shape of the draft head; None takes the target's value.

    Attributes:
        kind: `eagle3`; `mtp`, the target's own layer for a further token (MiMo, DeepSeek-V3, GLM-4.5, Qwen 3.5), whose
            sizes and vocabulary are the target's; `assistant`, Gemma 4's, as `train.warm_start` has it; or a head that
            drafts a block at once: `dflash`, `dspark`, `dflash2`.
        vocab_size: size of the draft vocabulary, the most frequent tokens of the training conversations.
        intermediate_size: width of the MLP.
        num_attention_heads: heads of queries.
        num_key_value_heads: heads of keys and values.
        head_dim: size of one head.
        rope_theta: RoPE base of the head (its own: not inherited from the target).
        max_position_embeddings: longest context that the head declares. An engine with a longer context needs an
            override to serve it (SGLang), so choose less than the target's only where drafting must end there.
        fc_norm: norm each hidden state before `fc`; with `norm_output` the head is EAGLE-3.1 (as vLLM and SGLang name
            it).
        norm_output: the normed output recurs, not the raw one; with `fc_norm` the head is EAGLE-3.1.
        norm_before_residual: the residual of an EAGLE-3 head is the normed feature (vLLM and llama.cpp serve it).
        qk_norm: norm each query and key head before RoPE, in an EAGLE-3 head (vLLM alone serves it; block heads always
            do).
        num_layers: decoder layers of a block head.
        block_size: rows of a block head's block; DFlash and DFlash2 draft one token fewer.
        mask_token_id: the target's token, one without another use, at the positions that a block head drafts.
        layer_types: attention of each layer of a block head; None is `full_attention` in all.
        sliding_window: window of its `sliding_attention` layers, or of an EAGLE-3 head, in tokens.
        is_causal: whether all its layers are causal within a block; None: the sliding ones alone.
        selector_rank: rank of DFlash2's selector, whose two codebooks are most of a small target's head.
    """

    kind: str = "eagle3"
    vocab_size: Count = 32000
    intermediate_size: Count | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    rope_theta: Positive = 10000.0
    max_position_embeddings: Count | None = None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    qk_norm: bool = False
    num_layers: Count = 5
    block_size: Annotated[int, Field(ge=2)] = 8
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    sliding_window: Count | None = None
    is_causal: bool | None = None
    selector_rank: Count = 256

    def __post_init__(self) -> None:
        *others, last = map(repr, trained())
        require(self.kind in trained(), "kind", self.kind, f"{', '.join(others)} or {last}")
        types, window = self.layer_types, self.sliding_window
        fits = types is None or len(types) == self.num_layers
        require(fits, "layer_types", types, f"draft.num_layers = {self.num_layers} of them")
        sliding = types is not None and "sliding_attention" in types
        expected = "the window of the sliding layers" if sliding else "null: draft.layer_types has no sliding_attention"
        one_layer = self.kind == "eagle3"
        require(one_layer or (window is not None) == sliding, "sliding_window", window, expected)


@section("mesh")
class MeshConfig:
    """Devices as data x model axes.

    Attributes:
        data: replicas, among which the batch is divided; 0 takes every device that `model` leaves over.
        model: devices over which each replica's weights are split (tensor parallelism).
    """

    data: Annotated[int, Field(ge=0)] = 0
    model: Count = 1
