"""Real vLLM accepts as many drafts as this engine behind targets of other families, in float32.

Of Mistral, Granite and Gemma 4; vLLM 0.32.0 gives no head the states of GLM-4.5's layers.
"""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from test_check_recurrent import write_as
from test_check_vllm import VLLM, counted, train

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600), pytest.mark.usefixtures("plain_answers_once")]
LLAMA = tiny.CONFIG | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LOCAL, FULL = "sliding_attention", "full_attention"
TARGETS: dict[str, dict[str, Any]] = {
    "Mistral": LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "Gemma 4": {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "layer_types": [LOCAL, LOCAL, LOCAL, FULL],
        "sliding_window": 24,
        "global_head_dim": 64,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            LOCAL: {"rope_type": "default", "rope_theta": 1e4},
            FULL: {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
        },
    },
}

TARGETS["Granite"] = LLAMA | {
    "architectures": ["GraniteForCausalLM"],
    "model_type": "granite",
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}

# vLLM gives a head without a window that of a target whose layers all have one: such a head trains with it.
TARGETS["Mistral with a window"] = TARGETS["Mistral"] | {"sliding_window": 24}
FLAGS = {"Mistral with a window": ("--draft.sliding-window", "24", "--export.format", "speculators")}


@pytest.mark.parametrize("name", TARGETS)
def test_both_engines_accept_the_same_drafts(vllm, tmp_path, name):
    folder = tmp_path / "run"
    folder.mkdir()
    config = tiny.write_run(folder, prompts=96, regenerate={"max_tokens": 96, "max_length": 192})
    write_as(folder / "target", TARGETS[name])
    for verb in ("prepare", "regenerate"):
        tiny.verb_in(config, verb)
    head = train(folder, name, *FLAGS.get(name, VLLM))
    counted(head, head.folder("export"), vllm, depths=2)


def test_vllm_gives_no_head_the_states_of_glm(vllm):
    (classes,) = vllm.parents[1].glob("lib/python3*/site-packages/vllm/model_executor/models")
    assert "SupportsEagle3" not in (classes / "glm4_moe.py").read_text()
