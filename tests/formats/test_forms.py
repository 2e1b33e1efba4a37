"""Golden: every tensor name, every key and every value that each form writes, and what a key's absence means there."""

import dataclasses
import pathlib
import re
from typing import Any

import pytest
import tiny_heads
from tiny_heads import AUX_KEY, SHAPES, TARGET, alter, assert_same, make_draft

from eagle3_jax.formats.forms import FORMS
from eagle3_jax.formats.heads import load_draft, read, save_draft
from eagle3_jax.formats.stored import DraftFormatError
from eagle3_jax.models.drafts.dflash import SLIDING
from eagle3_jax.models.layers import LinearScaling, RopeScaling

LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "max_position_embeddings": 64,
    "vocab_size": 50,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "sglang": {"architectures": ["LlamaForCausalLMEagle3"], **LLAMA, "draft_vocab_size": 6},
    "vllm": {"architectures": ["Eagle3LlamaForCausalLM"], **LLAMA, "draft_vocab_size": 6},
    "speculators": {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 6,
        "fc_norm": False,
        "norm_output": False,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": LLAMA,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
    },
    "eagle": {
        "architectures": ["LlamaForCausalLM"],
        **{key: value for key, value in LLAMA.items() if key not in ("head_dim", "rope_parameters")},
        "draft_vocab_size": 6,
    },
}
CONFIGS["eagle3_jax"] = CONFIGS["vllm"]
LAYERS = {name: "layers.0." if name == "speculators" else "midlayer." for name in CONFIGS}


def save(folder: pathlib.Path, form: str, target: Any = TARGET, **changes: Any) -> tuple[Any, dict[str, Any]]:
    draft = make_draft(target=target, **changes)
    save_draft(folder, draft, target=target, dtype="float32", form=form, target_name="org/target")
    return tiny_heads.read(folder)


@pytest.mark.parametrize("form", CONFIGS)
def test_names_shapes_and_config_on_disk(tmp_path: pathlib.Path, form: str) -> None:
    tensors, config = save(tmp_path / "head", form, head_dim=4)
    assert config == CONFIGS[form] and CONFIGS.keys() | {"llama.cpp"} == FORMS.keys()
    shapes = SHAPES | {f"midlayer.self_attn.{x}_proj.weight": (n, 32) for x, n in (("q", 16), ("k", 8), ("v", 8))}
    shapes |= {"midlayer.self_attn.o_proj.weight": (16, 16)}
    expected = {name.replace("midlayer.", LAYERS[form]): shape for name, shape in shapes.items()}
    assert {name: x.shape for name, x in tensors.items()} == expected
    assert (str(tensors["d2t"].dtype), str(tensors["t2d"].dtype)) == ("int64", "bool")
    assert tensors["d2t"].tolist() == [0, 2, 2, 14, 16, 44]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("sglang", {AUX_KEY: [1, 5, 8, 11], "eagle_config": {AUX_KEY: [0, 4, 7, 10], "use_aux_hidden_state": True}}),
        ("vllm", {AUX_KEY: [1, 5, 8, 11], "num_aux_hidden_states": 4}),
        ("speculators", {AUX_KEY: [1, 5, 8, 11]}),
    ],
)
def test_aux_layers_are_written_in_the_engines_counting(tmp_path: pathlib.Path, form: str, expected: Any) -> None:
    target = dataclasses.replace(TARGET, aux_layers=(1, 5, 8, 11))
    _, config = save(tmp_path / "head", form, target)
    found = {key: config[key] for key in (AUX_KEY, "eagle_config", "num_aux_hidden_states") if key in config}
    assert found == expected
    if form == "speculators":  # vLLM counts three where it is not told, and looks in here
        assert config["transformer_layer_config"]["num_aux_hidden_states"] == 4
    assert load_draft(tmp_path / "head", target=target).head.config.aux_layers == (1, 5, 8, 11)


def test_vllm_takes_eagle_config_as_boundaries_where_nothing_stands_at_top_level(tmp_path: pathlib.Path) -> None:
    save(tmp_path / "head", "vllm")
    alter(tmp_path / "head", eagle_config={AUX_KEY: [1, 5, 8]})
    assert read(tmp_path / "head").config.aux_layers == (1, 5, 8)
    alter(tmp_path / "head", architectures=["LlamaForCausalLMEagle3"])
    assert read(tmp_path / "head").config.aux_layers == (2, 6, 9), "outputs of layers, to SGLang"
    alter(tmp_path / "head", architectures=["LlamaForCausalLM"])
    with pytest.raises(
        DraftFormatError, match=rf"eagle_config.{AUX_KEY}: got .*, expected none: EAGLE takes the default"
    ):
        read(tmp_path / "head")


SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("form", ["sglang", "vllm", "speculators"])
def test_scaled_rope_is_written_in_both_spellings(tmp_path: pathlib.Path, form: str) -> None:
    _, config = save(tmp_path / "head", form, rope_theta=5e5, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 16))
    layer = config.get("transformer_layer_config", config)
    assert layer["rope_theta"] == 5e5
    assert layer["rope_scaling"] == SCALED | {"rope_type": "llama3"}
    assert layer["rope_parameters"] == SCALED | {"rope_type": "llama3", "rope_theta": 5e5}


def test_eagle_takes_linear_rope_in_its_own_words_and_no_other(tmp_path: pathlib.Path) -> None:
    _, config = save(tmp_path / "head", "eagle", head_dim=4, rope_scaling=LinearScaling(2.0))
    assert config["rope_scaling"] == {"type": "linear", "factor": 2.0} and "rope_theta" not in config
    with pytest.raises(DraftFormatError, match=r"rope_theta: got 500000.0, expected 10000.0 where it is scaled; EAGLE"):
        save(tmp_path / "other", "eagle", head_dim=4, rope_scaling=LinearScaling(2.0), rope_theta=5e5)


def test_heads_as_their_own_trainers_write_them(tmp_path: pathlib.Path) -> None:
    """SafeAILab has no rope_theta and nothing of ours; speculators leaves out what is off, and had another name."""
    save(tmp_path / "eagle", "eagle", head_dim=4)
    keys = ("architectures", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads")
    keys += ("num_key_value_heads", "num_hidden_layers", "rms_norm_eps", "vocab_size", "draft_vocab_size", "hidden_act")
    alter(tmp_path / "eagle", **{key: None for key in CONFIGS["eagle"] if key not in keys}, rope_scaling=None)
    assert read(tmp_path / "eagle").config.rope_theta == 10000.0
    save(tmp_path / "speculators", "speculators", norm_before_residual=True)
    off = ("fc_norm", "norm_output", "norm_before_fc", "embed_requires_grad", "tie_word_embeddings")
    alter(tmp_path / "speculators", **dict.fromkeys(off), architectures=["Eagle3Speculator"])
    again = read(tmp_path / "speculators")
    assert again.config.norm_before_residual and again.verifier == {
        "name_or_path": "org/target",
        "architectures": ["LlamaForCausalLM"],
    }


@pytest.mark.parametrize("form", CONFIGS)
def test_what_a_head_says_of_its_norm_its_layers_and_its_lm_head(tmp_path: pathlib.Path, form: str) -> None:
    """AngelSlim's for Qwen3-4B says what its target does, as EAGLE3-Vicuna1.3-13B does of its 40 layers."""
    save(tmp_path / "head", form, head_dim=4)
    assert read(tmp_path / "head").config.norm_before_residual is False
    alter(tmp_path / "head", norm_before_residual=None)  # to vLLM it is on in the form of speculators, and only there
    assert read(tmp_path / "head").config.norm_before_residual is (form == "speculators")
    alter(tmp_path / "head", num_hidden_layers=40)
    if form == "eagle":  # its code makes one layer
        assert read(tmp_path / "head").config.num_aux_layers == 3
    else:
        with pytest.raises(DraftFormatError, match="num_hidden_layers: got 40, expected 1"):
            read(tmp_path / "head")
        alter(tmp_path / "head", num_hidden_layers=1)
    alter(tmp_path / "head", tie_word_embeddings=True)
    assert not read(tmp_path / "head").tied
    alter(tmp_path / "head", {"lm_head.weight": None})
    with pytest.raises(DraftFormatError, match=r"tie_word_embeddings: got True, expected False, or a tensor lm_head"):
        read(tmp_path / "head")


def test_transformers_reads_the_config_of_the_sglang_form(tmp_path: pathlib.Path) -> None:
    from transformers import LlamaConfig as HFConfig

    save(tmp_path / "head", "sglang")
    config = HFConfig.from_pretrained(tmp_path / "head")
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert (config.head_dim, config.draft_vocab_size) == (6, 6)


def test_sglang_s_part_of_the_aux_layers_counts_alone_and_must_agree(tmp_path: pathlib.Path) -> None:
    target = dataclasses.replace(TARGET, aux_layers=(1, 5, 8, 11))
    save(tmp_path / "head", "sglang", target)
    alter(tmp_path / "head", {}, **{AUX_KEY: None})
    assert load_draft(tmp_path / "head", target=target).head.config.aux_layers == (1, 5, 8, 11)
    with pytest.raises(DraftFormatError, match=r"aux layers.*got \(1, 5, 8, 11\), expected \(2, 6, 9\)"):
        load_draft(tmp_path / "head", target=TARGET)
    alter(tmp_path / "head", {}, **{AUX_KEY: [1, 5, 8, 10]})
    with pytest.raises(DraftFormatError, match=r"eagle_config.*got \[0, 4, 7, 10\], expected \[0, 4, 7, 9\]"):
        load_draft(tmp_path / "head", target=target)
    shallow = dataclasses.replace(TARGET, num_hidden_layers=4, aux_layers=(1, 2))  # where the default collides
    _, config = save(tmp_path / "shallow", "sglang", shallow)
    assert config[AUX_KEY] == [1, 2]


def test_the_first_names_of_the_aux_norms_are_taken(tmp_path: pathlib.Path) -> None:
    """SGLang still reads heads of `use_aux_norm`."""
    held, _ = save(tmp_path / "head", "sglang", fc_norm=True)
    first = {f"aux_norm_{place}.weight": held[f"fc_norm.{i}.weight"] for i, place in enumerate(("low", "mid", "high"))}
    alter(tmp_path / "head", {f"fc_norm.{i}.weight": None for i in range(3)} | first, fc_norm=None, use_aux_norm=True)
    assert_same(load_draft(tmp_path / "head", target=TARGET), make_draft(fc_norm=True))


def test_a_layer_of_qwen_3_and_its_window_are_told_in_vllm_s_words(tmp_path: pathlib.Path) -> None:
    """`Qwen3Config` drops a window unless `use_sliding_window` is true; `LlamaConfig` has no such key."""
    window = {"layer_types": [SLIDING], "sliding_window": 8, "use_sliding_window": True}
    for form in ("vllm", "speculators"):
        held, config = save(tmp_path / form, form, qk_norm=True, sliding_window=8)
        layer, prefix = config.get("transformer_layer_config", config), LAYERS[form]
        assert {name: layer[name] for name in window} == window and layer["model_type"] == "qwen3"
        assert [held[f"{prefix}self_attn.{name}_norm.weight"].shape for name in "qk"] == [(6,), (6,)]
        assert_same(load_draft(tmp_path / form, target=TARGET), make_draft(qk_norm=True, sliding_window=8))
    assert tiny_heads.read(tmp_path / "vllm")[1]["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    alter(tmp_path / "vllm", use_sliding_window=False)
    assert read(tmp_path / "vllm").config.sliding_window is None
    save(tmp_path / "llama", "vllm", sliding_window=8)
    alter(tmp_path / "llama", use_sliding_window=None)
    assert read(tmp_path / "llama").config.sliding_window == 8
    alter(tmp_path / "llama", layer_types=["full_attention"])
    assert read(tmp_path / "llama").config.sliding_window is None


@pytest.mark.parametrize("form", ["sglang", "eagle"])
@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"sliding_window": 8}])
def test_norms_of_queries_and_a_window_are_refused_where_the_engine_ignores_them(
    tmp_path: pathlib.Path, form: str, changes: dict[str, Any]
) -> None:
    (field,) = changes
    able = "expected vllm or speculators or eagle3_jax"
    with pytest.raises(DraftFormatError, match=rf"(?s){field}: got .*; {FORMS[form].engines[0]} .*: ignored.*{able}"):
        save(tmp_path / "head", form, head_dim=4, **changes)


@pytest.mark.parametrize("form", ["sglang", "vllm"])
def test_a_norm_before_fc_is_read_in_eagle_config_too(tmp_path: pathlib.Path, form: str) -> None:
    """Where NVIDIA's heads have it; there it counts more than at top level."""
    held, config = save(tmp_path / "head", form, norm_before_fc=True)
    assert held["input_norm.weight"].shape == (48,) and config["norm_before_fc"] is True
    inner = config.get("eagle_config", {})
    alter(tmp_path / "head", norm_before_fc=False, eagle_config=inner | {"norm_before_fc": True})
    assert_same(load_draft(tmp_path / "head", target=TARGET), make_draft(norm_before_fc=True))
    alter(tmp_path / "head", norm_before_fc=True, eagle_config=inner | {"norm_before_fc": False})
    with pytest.raises(DraftFormatError, match="surplus tensor input_norm.weight"):
        load_draft(tmp_path / "head", target=TARGET)


SPECULATORS = [
    ({"speculators_model_type": "peagle"}, "speculators_model_type: got 'peagle', expected 'eagle3'"),
    ({"embed_requires_grad": True}, "embed_requires_grad: got True, expected False"),
    ({"transformer_layer_config": LLAMA | {"model_type": "qwen2"}}, "model_type: got 'qwen2', expected 'llama' or"),
    ({"transformer_layer_config": LLAMA | {"model_type": "qwen3"}}, "missing tensor midlayer.self_attn.q_norm.weight"),
    ({"transformer_layer_config": LLAMA | {"layer_types": [SLIDING]}}, "sliding_window: missing, expected the window"),
    (
        {"transformer_layer_config": LLAMA | {"layer_types": [SLIDING] * 2}},
        "layer_types: got ['sliding_attention', 'sliding_attention'], expected one, of the one layer",
    ),
    ({"transformer_layer_config": None}, "hidden_size: missing"),
]
SGLANG = [
    ({"draft_vocab_size": None}, "draft_vocab_size: missing"),
    ({"norm_before_residual": True}, "norm_before_residual: got True, expected False"),
    ({"fc_norm": 1}, "fc_norm: got 1, expected true or false"),
    (
        {"layer_types": [SLIDING], "sliding_window": 8},
        "layer_types: got ['sliding_attention'], expected full attention: SGLang reads no window",
    ),
    ({AUX_KEY: ["1"]}, f"{AUX_KEY}: got ['1'], expected a list of integers"),
]


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [("speculators", *row) for row in SPECULATORS] + [("sglang", *row) for row in SGLANG],
)
def test_what_the_form_s_engine_would_misread_is_refused(
    tmp_path: pathlib.Path, form: str, changes: dict[str, Any], message: str
) -> None:
    save(tmp_path / "head", form, head_dim=4)
    alter(tmp_path / "head", **changes)
    with pytest.raises(DraftFormatError, match=re.escape(message)):
        read(tmp_path / "head")
