"""Gemma 4's assistant: against transformers, as drafts that change no token, and on disk."""

import json
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle3_jax.config import DraftTree
from eagle3_jax.decoding.engine import Engine, SamplingParams
from eagle3_jax.formats import heads, kinds
from eagle3_jax.formats.files import DraftFormatError
from eagle3_jax.models.cache import Pass
from eagle3_jax.models.checkpoint import fetch
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.checkpoint.load import load_model
from eagle3_jax.models.drafts.gemma4_assistant import Gemma4Assistant

VOCABULARY, WINDOW = 12, 9  # so few tokens that drafts are right now and then
TYPES = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "eos_token_id": None,
}
BOTH = pytest.mark.parametrize("clusters", [0, 4])


class Tokenizer:
    chat_template = None

    def convert_tokens_to_ids(self, _: str) -> None:
        return None

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join(map(str, ids))


@pytest.fixture(autouse=True)
def layers_that_all_share(monkeypatch):
    """transformers 5.24 refuses its own assistants, whose layers all share: none of them makes what they share."""
    transformers = pytest.importorskip("transformers")
    modes = transformers.Gemma4TextConfig.kv_sharing_modes

    def of(config: Any) -> list[str | None]:
        every = config.num_kv_shared_layers == config.num_hidden_layers
        return ["reuse"] * config.num_hidden_layers if every else modes.fget(config)

    monkeypatch.setattr(transformers.Gemma4TextConfig, "kv_sharing_modes", property(of))


def reference(folder: pathlib.Path, clusters: int, window: int, few: int = VOCABULARY) -> tuple[Any, Any, Target]:
    """A random target and its assistant, as transformers has them and in folders."""
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(3)
    of_target: dict[str, Any] = {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 4,
        "vocab_size_per_layer_input": VOCABULARY,
    }
    of_target |= {"hidden_size": 32, "num_hidden_layers": 4, "layer_types": TYPES, "sliding_window": window}
    target = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**TEXT | of_target))
    own: dict[str, Any] = {"hidden_size": 24, "num_hidden_layers": 3, "sliding_window": window}
    own |= {"layer_types": TYPES[:1] * 2 + TYPES[1:2], "hidden_size_per_layer_input": 0}
    own |= {"vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3}
    config = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**TEXT | own),
        backbone_hidden_size=32,
        use_ordered_embeddings=clusters > 0,
        num_centroids=clusters or 2048,
        centroid_intermediate_top_k=2,
    )
    assistant: Any = transformers.Gemma4AssistantForCausalLM(config)
    with torch.no_grad():
        for model in (target, assistant):
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if tensor.ndim == 1 and name.endswith(("norm.weight", "layernorm.weight", "layer_scalar")):
                    tensor.copy_(1 + 0.3 * torch.randn_like(tensor))
            parts: list[Any] = [model.get_input_embeddings(), getattr(model, "lm_head", None)]
            for part in parts:
                if part is not None and few < VOCABULARY:  # few tokens come, so that both often think of the same
                    part.weight[few:] *= 0.01
        if clusters:
            assistant.masked_embedding.token_ordering.copy_(torch.randperm(VOCABULARY))
    target.eval().save_pretrained(folder / "target")
    assistant.eval().save_pretrained(folder / "assistant")
    model = load_model(folder / "target", fetch.read_config(folder / "target", (0, 1, 2)), jnp.float32)
    return target, assistant, Target(model, Tokenizer(), {"name": "target"}, folder / "target")


@pytest.mark.slow
@BOTH
def test_its_passes_are_those_of_transformers(tmp_path, clusters):
    """Behind a text that is longer than a window, of which it sees as much as the target's last token does."""
    theirs, assistant, target = reference(tmp_path, clusters, WINDOW)
    import torch

    draft = heads.load_draft(tmp_path / "assistant", target=target)
    head = draft.head
    assert isinstance(head, Gemma4Assistant)
    assert kinds.of_head(head).name == "assistant"
    length, rng = 20, np.random.default_rng(0)
    text = rng.integers(0, VOCABULARY, (1, length + 1))
    with torch.no_grad():
        found = theirs(torch.tensor(text[:, :-1]), output_hidden_states=True, return_shared_kv_states=True)
    seen = {
        kind: tuple(x[:, :, -WINDOW:] if kind.startswith("sliding") else x for x in held)
        for kind, held in found.shared_kv_states.items()
    }
    model = target.model.observed_at(head.config.aux_layers)
    cache = model.empty_cache(1, 32)
    at = jnp.arange(length)[None]
    _, aux, cache = model(
        jnp.asarray(text[:, :-1]), Pass(at, jnp.zeros(1, jnp.int32), counts=jnp.full(1, length)), cache
    )
    state, expected = head.fuse(aux)[:, -1:], found.hidden_states[-1][:, -1:]
    tokens = jnp.asarray(text[:, -1:])
    this = Pass(at, jnp.full(1, length, jnp.int32))
    for _ in range(3):
        embedded = theirs.get_input_embeddings()(torch.tensor(np.asarray(tokens)))
        with torch.no_grad():
            out = assistant(
                inputs_embeds=torch.cat([embedded, expected], dim=-1),
                position_ids=torch.tensor([[length]]),
                shared_kv_states=seen,
            )
        expected = out.last_hidden_state
        state, cache = head.run(model.embed[...], tokens, state, this, cache)
        np.testing.assert_allclose(state[..., :32], expected.numpy(), atol=1e-4, rtol=1e-4)
        drafted = np.zeros(VOCABULARY)
        drafted[np.asarray(draft.token_ids)] = head.logits(state)[0, 0]
        possible = drafted > -1e29
        assert possible.sum() == (VOCABULARY // 2 if clusters else VOCABULARY)
        np.testing.assert_allclose(drafted[possible], out.logits.numpy()[0, 0, possible], atol=1e-4, rtol=1e-4)
        _, best = head.top_k(state, 1)
        tokens = draft.token_ids[best[:, 0]]
        assert tokens.item() == int(out.logits.argmax())


def engine(target: Target, folder: pathlib.Path, tree: DraftTree, batch: int) -> Engine:
    draft = heads.load_draft(folder, target=target)
    model = target.model.observed_at(draft.head.config.aux_layers)
    return Engine(model, Tokenizer(), draft, tree, batch_size=batch, max_length=96, page_size=16)


@pytest.mark.slow
def test_it_drafts_as_in_transformers_own_loop(tmp_path, monkeypatch):
    """Whose loop leaves the keys of a refused draft in view (transformers 5.24): they are cut off here."""
    theirs, assistant, target = reference(tmp_path, 0, 64, few=4)
    import torch
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator

    forward, calls, candidates = assistant.forward, [], Generator.get_candidates

    def seeing(*arguments: Any, shared_kv_states: Any, position_ids: Any, **others: Any) -> Any:
        seen = {kind: tuple(x[:, :, : int(position_ids)] for x in held) for kind, held in shared_kv_states.items()}
        return forward(*arguments, shared_kv_states=seen, position_ids=position_ids, **others)

    def counted(self: Any, input_ids: Any, *arguments: Any, **others: Any) -> Any:
        calls.append(input_ids.shape[1])
        return candidates(self, input_ids, *arguments, **others)

    monkeypatch.setattr(assistant, "forward", seeing)
    monkeypatch.setattr(Generator, "get_candidates", counted)
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    prompt, answer = np.random.default_rng(1).integers(0, VOCABULARY, 7), 48
    expected = theirs.generate(
        torch.tensor(prompt)[None], assistant_model=assistant, max_new_tokens=answer, do_sample=False
    )[0, 7:].tolist()
    drafting = engine(target, tmp_path / "assistant", DraftTree(num_steps=3, num_draft_tokens=4), 1)
    (got,) = drafting.generate([prompt.tolist()], SamplingParams(max_tokens=answer, ignore_eos=True))
    assert got.token_ids == expected
    steps = np.diff(calls[1:])[:-1]  # rounds but the last ones, which the limit cuts
    accepted = [int((steps > 1 + position).sum()) for position in range(3)]
    whole = got.stats.accepted_per_position
    assert got.stats.rounds - len(steps) in (1, 2) and min(accepted[:2]) > 0
    assert all(0 <= mine - other <= 2 for mine, other in zip(whole, accepted, strict=True))


@pytest.mark.slow
@BOTH
def test_its_trees_change_no_token(tmp_path, clusters):
    """Beyond a window, in a batch, greedy and drawn by its own distribution."""
    _, _, target = reference(tmp_path, clusters, WINDOW)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, VOCABULARY, size).tolist() for size in (3, 21, 12)]
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    size: dict[str, Any] = {"batch_size": 3, "max_length": 96, "page_size": 16}
    expected = [
        answer.token_ids for answer in Engine(target.model, Tokenizer(), None, **size).generate(prompts, greedy)
    ]
    tree = DraftTree(num_steps=3, topk=2, num_draft_tokens=6, lookup_tokens=2)
    drafting = engine(target, tmp_path / "assistant", tree, 3)
    answers = drafting.generate(prompts, greedy)
    assert [answer.token_ids for answer in answers] == expected
    assert sum(sum(answer.stats.accepted_per_position) for answer in answers) > 0
    drawn = drafting.generate(prompts, SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True))
    assert all(len(answer.token_ids) == 24 for answer in drawn)


@BOTH
def test_it_is_written_as_it_was_read_and_fits_one_target(tmp_path, clusters):
    _, _, target = reference(tmp_path, clusters, WINDOW)
    draft = heads.load_draft(tmp_path / "assistant", target=target)
    shape = target.model.config
    heads.save_draft(tmp_path / "again", draft, target=shape, dtype="float32", form="vllm")
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("assistant", "again"))
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        np.testing.assert_array_equal(again[name], tensor)
    import transformers

    transformers.AutoConfig.from_pretrained(tmp_path / "again")
    with pytest.raises(DraftFormatError, match="export.format: got 'eagle'"):
        heads.save_draft(tmp_path / "other", draft, target=shape, dtype="float32", form="eagle")
    path = tmp_path / "again/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"backbone_hidden_size": 64}))
    with pytest.raises(DraftFormatError, match="backbone_hidden_size: got 64, expected 32"):
        heads.load_draft(tmp_path / "again", target=target)
    del first["pre_projection.weight"]
    save_file(first, tmp_path / "assistant/model.safetensors")
    with pytest.raises(DraftFormatError, match="missing tensor pre_projection.weight"):
        heads.load_draft(tmp_path / "assistant", target=target)
