"""What a request leaves out is the checkpoint's, unless the server was told otherwise."""

import json
from typing import Any

import pytest

from eagle3_jax.config import ConfigError, from_dict
from eagle3_jax.decoding.defaults import sampling_defaults
from eagle3_jax.serve import __main__ as serve
from eagle3_jax.serve.protocol import Chat, Completion

QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def write(folder, **fields: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(fields))


def test_they_are_the_target_s_or_another_folder_s_or_none(tmp_path):
    target, other, bare = tmp_path / "target", tmp_path / "other", tmp_path / "bare"
    write(target, **QWEN, do_sample=True, eos_token_id=[2, 0], min_p=None, max_new_tokens=64)
    write(other, min_p=0.1)
    bare.mkdir()
    assert sampling_defaults("auto", str(target)) == QWEN | {"max_tokens": 64}
    assert sampling_defaults(str(other), str(target)) == {"min_p": 0.1}
    assert sampling_defaults("vllm", str(target)) == {}
    assert sampling_defaults("auto", str(bare)) == {}
    with pytest.raises(ValueError, match="serve.generation_config: got .*bare, expected .* a folder with"):
        sampling_defaults(str(bare), str(target))
    write(other, top_p=1.5)
    with pytest.raises(ValueError, match=r"generation_config.json: top_p: got 1.5, expected a number in \(0, 1\]"):
        sampling_defaults("auto", str(other))
    assert serve.configure(["--target", "a", "--generation-config", "vllm"]).serve.generation_config == "vllm"
    with pytest.raises(ConfigError, match="serve.generation_config"):
        from_dict({"run_dir": "x", "serve": {"generation_config": 1}})


def test_a_request_s_own_fields_go_first_and_its_answer_has_the_limit():
    messages = [{"role": "user", "content": "apple"}]
    limited = QWEN | {"max_tokens": 64}
    left_open = Chat.model_validate({"messages": messages}).params(100, limited)
    assert {name: getattr(left_open, name) for name in limited} == limited
    asked = QWEN | {"temperature": 0.0, "top_k": -1, "max_tokens": 80}
    own = Chat.model_validate({"messages": messages, **asked}).params(100, limited)
    assert (own.temperature, own.top_k, own.max_tokens) == (0.0, 0, 64)
    assert Completion.model_validate({"prompt": "apple"}).params(100, limited).max_tokens == 16
    alone = Chat.model_validate({"messages": messages}).params(100, {})
    assert (alone.temperature, alone.top_p, alone.max_tokens) == (1.0, 1.0, 100)
