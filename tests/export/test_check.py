"""An exported head beside what an engine does with it: counters that agree, and every way in which they may not."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
import types
from typing import Any

import fake_sglang
import numpy as np
import pytest
import tiny
import tiny_heads

from eagle3_jax import Engine, SamplingParams
from eagle3_jax.acceptance import AcceptanceCounts
from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.export import __main__ as export
from eagle3_jax.export import check, engine_process
from eagle3_jax.formats import heads
from eagle3_jax.models import chat_template
from eagle3_jax.models.checkpoint.fetch import load_target, read_config
from eagle3_jax.runs import disk


@pytest.fixture
def config(whole_run: tiny.Run, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    copy = whole_run.copy(tmp_path / "copy")
    monkeypatch.chdir(copy.config.parent)
    return run_file.load(copy.config)


def held_out(config: RunConfig) -> pathlib.Path:
    return config.folder("prepare") / "held_out.jsonl"


def fake_python(folder: pathlib.Path, plain: dict[str, Any], fast: dict[str, Any], status: int = 0) -> pathlib.Path:
    """A "Python" that answers a request with what is given: without a draft, with one."""
    script = folder / "python"
    script.write_text(
        f"#!{sys.executable}\nimport json, sys\nrequest = json.load(sys.stdin)\nprint('a line of its log')\n"
        f"print(json.dumps({plain!r} if request['draft'] is None else {fast!r}))\n"
        f"sys.stderr.write('out of memory')\nsys.exit({status})\n"
    )
    script.chmod(0o755)
    return script


@pytest.mark.long
def test_the_prediction_is_what_rounds_of_one_request_count(config):
    report = check.run(config, held_out(config), "numbers")
    counted = report["engines"]["numbers"]
    target, tree = load_target(config.target), config.evaluate.tree
    engine = Engine.load(target, config.folder("export"), tree, batch_size=1, max_length=512)
    params = SamplingParams(max_tokens=config.evaluate.max_tokens, ignore_eos=True)
    messages = [json.loads(line)["messages"] for line in held_out(config).read_text().splitlines()]
    stats = [
        x.stats for m in messages for x in engine.generate([chat_template.prompt_ids(target.tokenizer, m)], params)
    ]
    rounds, accepted = sum(x.rounds for x in stats), [sum(x.accepted_per_position) for x in stats]
    assert (counted["rounds"], sum(counted["accepted_per_position"])) == (rounds, sum(accepted))
    assert counted["tau"] == pytest.approx(1 + sum(accepted) / rounds)
    assert json.loads(pathlib.Path(config.run_dir, "check/numbers.json").read_text())["engines"] == report["engines"]
    assert f"rounds {rounds}" in " ".join(check.table(report).split())


@pytest.fixture
def untrained(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run in which no verb has been: what an engine counts is made up."""
    path = tiny.write_run(tmp_path)
    tiny.write_prompts(tmp_path / "held_out.jsonl", 6)
    (tmp_path / "head").mkdir()
    (tmp_path / "head/config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return run_file.load(path, ["--evaluate.draft", "head"])


OF_EACH = [[9, 3], [9, 4], [9, 2], [9, 2], [9, 2], [6, 1]]  # drafts that were verified, and accepted


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> check.Counted:
    """Stands in for every prediction."""
    answers = [[3, i, 5, 6] for i in range(6)]
    made_up = check.Counted(answers, [list(ids) for ids in answers], AcceptanceCounts(20, [9, 4, 1]), 1.0, 2.0)
    of_each = dataclasses.replace(made_up, drafts=OF_EACH)
    monkeypatch.setattr(check, "predict", lambda *_, within_limit: of_each if within_limit else made_up)
    return made_up


def test_a_token_map_cuts_the_drafts_and_is_part_of_what_was_asked(untrained, monkeypatch, tmp_path):
    (tmp_path / "map.json").write_text("[60, 61, 62]")
    config = dataclasses.replace(untrained, evaluate=dataclasses.replace(untrained.evaluate, token_map="map.json"))
    answered = types.SimpleNamespace(token_ids=[1], stats=types.SimpleNamespace(counts=AcceptanceCounts()))
    asked = []

    def load(target, draft, *_, token_map, **__):
        asked.append((draft, token_map))
        return types.SimpleNamespace(generate=lambda prompts, _: [answered] * len(prompts))

    monkeypatch.setattr(check.Engine, "load", load)
    report = check.run(config, "held_out.jsonl", "numbers")
    assert report["engines"]["numbers"]["accepted_per_position"] == [0, 0, 0]  # answers of one token take no round
    assert "accepted at 3 0" in " ".join(check.table(report).split())
    assert asked == [(None, None), ("head", "map.json")]
    assert report["token_map"] == disk.digest(tmp_path / "map.json")
    (tmp_path / "without.json").write_text(json.dumps(report | {"token_map": None}))
    with pytest.raises(ValueError, match=r"something else:\n  token_map: got None, expected [0-9a-f]{64}"):
        check.run(config, "held_out.jsonl", "numbers", expect="without.json")
    for engine in ("vllm", "llama.cpp", "sglang"):
        with pytest.raises(ValueError, match=rf"evaluate.token_map: got map.json, expected null: {engine} would draft"):
            check.run(config, "held_out.jsonl", engine, "nowhere")


@pytest.mark.slow
def test_an_engine_that_parts_is_told_where(untrained, tmp_path, predicted):
    plain: dict[str, Any] = {"answers": predicted.plain, "seconds": [1.0], "rounds": 0, "accepted": [], "version": "0"}
    fast: dict[str, Any] = plain | {
        "answers": predicted.answers,
        "rounds": predicted.counts.rounds,
        "accepted": predicted.counts.accepted,
    }
    report = check.run(untrained, "held_out.jsonl", "vllm", fake_python(tmp_path, plain, fast))
    assert report["engines"]["vllm"]["rounds"] == report["engines"]["numbers"]["rounds"]
    other = [[*predicted.answers[0][:-1], 7], *predicted.answers[1:]]
    count, rounds = len(predicted.plain), predicted.counts.rounds
    for changed, sentence in (
        ({"rounds": rounds + 1}, f"vllm: rounds: got {rounds + 1}, expected {rounds}"),
        ({"accepted": [1, 0, 0]}, r"vllm: accepted: got \[1, 0, 0\], expected"),
        ({"answers": other}, f"vllm: answers: 1 of {count} are not plain greedy decoding's"),
    ):
        with pytest.raises(check.CheckError, match=sentence):
            check.run(untrained, "held_out.jsonl", "vllm", fake_python(tmp_path, plain, fast | changed))
        assert pathlib.Path(untrained.run_dir, "check/vllm.json").exists()
    bfloat16 = dataclasses.replace(untrained, target=dataclasses.replace(untrained.target, dtype="bfloat16"))
    report = check.run(bfloat16, "held_out.jsonl", "vllm", fake_python(tmp_path, plain, fast | {"rounds": rounds + 1}))
    difference = f"vllm: rounds: got {rounds + 1}, expected {rounds}"
    assert report["differences"] == [difference]
    end = ["bfloat16: only float32 is required to be equal; differences: 1", f"  {difference}"]
    assert check.table(report).splitlines()[-2:] == end
    with pytest.raises(check.CheckError, match="plain greedy answers are others than this package's"):
        check.run(untrained, "held_out.jsonl", "vllm", fake_python(tmp_path, plain | {"answers": other}, fast))
    with pytest.raises(check.CheckError, match="exit status 3: out of memory"):
        check.run(untrained, "held_out.jsonl", "vllm", fake_python(tmp_path, plain, fast, status=3))
    several = dataclasses.replace(untrained, evaluate=dataclasses.replace(untrained.evaluate, batch_size=2))
    with pytest.raises(ValueError, match=r"evaluate.batch_size: got 2, expected 1"):
        check.run(several, "held_out.jsonl", "vllm", tmp_path / "python")
    with pytest.raises(SystemExit, match=r"--vllm nowhere: not found; `bash tools/install_vllm_cpu.sh` makes it"):
        export.main(["--config", "run.yaml", "--check", "vllm", "--vllm", "nowhere", "--prompts", "held_out.jsonl"])


@pytest.mark.parametrize(
    ("depths", "drafted", "rounds", "accepted"),
    [
        ([0], 0, 0, [0, 0, 0]),
        ([0, 0], 0, 0, [0, 0, 0]),  # the only round left takes the target's token
        ([0, 0, 0, 0], 2 + 1, 2, [0, 0, 0]),
        ([0, 1, 2, 3, 0], 3, 1, [1, 1, 1]),
        ([0, 1, 2, 3], 2, 1, [1, 1, 0]),  # the third draft is the token of the target there
        ([0, 1, 0, 0, 1, 2, 0, 1], 3 + 3 + 3, 3, [2, 1, 0]),
    ],
)
def test_within_its_limit_an_answer_drafts_what_it_has_room_for(depths, drafted, rounds, accepted):
    assert check.limited(depths, 3) == (drafted, AcceptanceCounts(rounds, accepted))


@pytest.fixture
def in_gguf(untrained: RunConfig) -> RunConfig:
    """The same run with heads for llama.cpp, in float32 and in 8 bits."""
    shape: Any = read_config(pathlib.Path("target"), (1, 2, 3))
    head = tiny_heads.make_draft(target=shape)
    for dtype in ("float32", "q8_0"):
        heads.save_draft(dtype, head, target=shape, dtype=dtype, form="llama.cpp", target_name="target")
    return with_head(untrained, "float32")


def with_head(config: RunConfig, folder: str) -> RunConfig:
    return dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, draft=folder))


@pytest.mark.slow
def test_llama_cpp_is_compared_answer_by_answer(in_gguf, predicted, tmp_path):
    plain: dict[str, Any] = {"answers": predicted.plain, "seconds": [1.0], "rounds": 0, "accepted": [], "version": "0"}
    counted = {"rounds": predicted.counts.rounds, "accepted": predicted.counts.accepted, "drafts": OF_EACH}
    report = check.run(in_gguf, "held_out.jsonl", "llama.cpp", fake_python(tmp_path, plain, plain | counted))
    assert report["engines"]["llama.cpp"]["drafts"] == report["engines"]["numbers"]["drafts"] == OF_EACH
    with pytest.raises(ValueError, match="something else:\n  within_limit: got True, expected False"):
        check.run(in_gguf, "held_out.jsonl", "numbers", expect=pathlib.Path(in_gguf.run_dir, "check/llama.cpp.json"))
    other = plain | counted | {"drafts": [*OF_EACH[:5], [6, 0]]}
    difference = r"llama.cpp: answer 5: verified and accepted drafts: got [6, 0], expected [6, 1]"
    with pytest.raises(check.CheckError, match=re.escape(difference)):
        check.run(in_gguf, "held_out.jsonl", "llama.cpp", fake_python(tmp_path, plain, other))
    report = check.run(with_head(in_gguf, "q8_0"), "held_out.jsonl", "llama.cpp", fake_python(tmp_path, plain, other))
    rounded = "float32 beside a head in Q8_0: only float32 is required to be equal; differences: 1"
    assert check.table(report).splitlines()[-2:] == [rounded, f"  {difference}"]


@pytest.mark.slow
def test_what_llama_cpp_cannot_compare_is_refused(in_gguf):
    with pytest.raises(ValueError, match=r"evaluate.draft: got head, expected a head in the form llama.cpp; `"):
        check.run(with_head(in_gguf, "head"), "held_out.jsonl", "llama.cpp")
    rounded = dataclasses.replace(in_gguf, target=dataclasses.replace(in_gguf.target, dtype="bfloat16"))
    with pytest.raises(ValueError, match="target.dtype: got bfloat16, expected float32, in which llama.cpp gets"):
        check.run(rounded, "held_out.jsonl", "llama.cpp")
    asked = ["--config", "run.yaml", "--check", "llama.cpp", "--llama-cpp", "nowhere", "--prompts", "held_out.jsonl"]
    with pytest.raises(SystemExit, match=r"--llama-cpp nowhere: not found; `bash tools/install_llama_cpp.sh` makes it"):
        export.main(asked)


def test_llama_cpp_is_set_up_as_the_request_says(monkeypatch):
    def made() -> Any:
        draft = types.SimpleNamespace(cpuparams=types.SimpleNamespace(), cpuparams_batch=types.SimpleNamespace())
        draft.mparams = types.SimpleNamespace()
        speculative = types.SimpleNamespace(draft=draft)
        same = types.SimpleNamespace(model=types.SimpleNamespace(), speculative=speculative)
        same.cpuparams, same.cpuparams_batch = types.SimpleNamespace(), types.SimpleNamespace()
        return same

    drafting = types.SimpleNamespace(COMMON_SPECULATIVE_TYPE_DRAFT_DFLASH="a block head")
    fake = types.SimpleNamespace(CommonParams=made, common_speculative_type=drafting)
    fake.ggml_type = types.SimpleNamespace(GGML_TYPE_F32="f32")
    fake.llama_flash_attn_type = types.SimpleNamespace(LLAMA_FLASH_ATTN_TYPE_DISABLED="off")
    monkeypatch.setitem(sys.modules, "xllamacpp", fake)
    request = {"target": "t.gguf", "draft": "d.gguf", "method": "dflash", "num_speculative_tokens": 7, "threads": 2}
    request |= {"max_model_len": 100, "batch_size": 4, "exact": True}
    exact = engine_process.llama_cpp_options(request)
    draft = exact.speculative.draft
    assert (exact.model.path, draft.mparams.path, exact.n_ctx, exact.n_parallel) == ("t.gguf", "d.gguf", 400, 4)
    assert (exact.speculative.types, draft.n_max, draft.p_min) == (["a block head"], 7, 0.0)
    assert exact.flash_attn_type == "off" and {exact.cache_type_k, exact.cache_type_v, draft.cache_type_k} == {"f32"}
    assert exact.cpuparams.n_threads == draft.cpuparams_batch.n_threads == 2
    fast = engine_process.llama_cpp_options(request | {"exact": False, "draft": None})
    assert not {"types", "flash_attn_type"} & (vars(fast).keys() | vars(fast.speculative).keys())


def test_llama_cpp_tells_its_rounds_by_position():
    metrics = (
        "# TYPE llamacpp:spec_decode_num_drafts_total counter\nllamacpp:spec_decode_num_drafts_total 12\n"
        'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 7\n'
        'llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="1"} 3\n'
    )
    assert engine_process.of_llama_cpp(metrics, 3) == (12, [7, 3, 0])


@pytest.mark.slow
def test_a_running_sglang_server_has_a_column(untrained, predicted, capsys):
    asked = check._request(untrained, "held_out.jsonl", load_target(untrained.target), pathlib.Path("head"))
    prompts = asked["prompts"]
    by_round = [0] * 11 + [1] * 5 + [2] * 3 + [3]  # 20 rounds; 9, 4 and 1 of them reach positions 1, 2 and 3
    metas = [fake_sglang.meta(by_round[i :: len(prompts)]) for i in range(len(prompts))]
    answers = [{"output_ids": ids, "meta_info": x} for ids, x in zip(predicted.answers, metas, strict=True)]
    arguments = ["--config", "run.yaml", "--evaluate.draft", "head", "--check", "sglang", "--prompts", "held_out.jsonl"]
    with fake_sglang.serve(answers, prompts) as (url, _):
        export.main([*arguments, "--sglang", url])
        rows = {line.split("  ")[0]: line.split()[-2:] for line in capsys.readouterr().out.splitlines()}
        assert rows["rounds"] == [str(predicted.counts.rounds)] * 2 and rows["vanilla, tokens/s"][1] == "-"
        answers[0] = answers[0] | {"output_ids": [*answers[0]["output_ids"][:-1], 7]}
        with pytest.raises(SystemExit, match=r"sglang: answers: 1 of \d+ are not plain greedy decoding's"):
            export.main([*arguments, "--sglang", url])
    with pytest.raises(SystemExit, match=r"--sglang: got none, expected the URL of a running server"):
        export.main(arguments)


@pytest.mark.slow
def test_an_earlier_report_must_be_of_the_same_work(untrained, predicted, tmp_path):
    reference = tmp_path / "reference.json"
    report = check.run(untrained, "held_out.jsonl", "numbers")
    for changed, message in (
        ({"max_tokens": 7}, r"reference.json: a report of something else:\n  max_tokens: got 7, expected 32"),
        ({"dtype": "bfloat16"}, "dtype: got bfloat16, expected float32"),
        ({"prompts": report["prompts"] | {"tokens": "0"}}, "prompts' tokens: got 0, expected"),
        ({"target": report["target"] | {"weights": "0"}}, "target: got 0, expected"),
        ({"engines": {}}, "got no 'numbers', expected a report of `export --check`"),
    ):
        reference.write_text(json.dumps(report | changed))
        with pytest.raises(ValueError, match=message):
            check.run(untrained, "held_out.jsonl", "numbers", expect=reference)
    column = report["engines"]["numbers"] | {"rounds": predicted.counts.rounds - 1}
    reference.write_text(json.dumps(report | {"engines": {"numbers": column}}))
    asked = ["--config", "run.yaml", "--check", "numbers", "--evaluate.draft", "head", "--prompts", "held_out.jsonl"]
    expected = rf"reference.json: rounds: got {predicted.counts.rounds}, expected {predicted.counts.rounds - 1}"
    with pytest.raises(SystemExit, match=expected):
        export.main([*asked, "--expect", str(reference)])


def test_vllm_is_asked_for_what_the_request_says_and_counts_one_turn(monkeypatch):
    made: dict[str, Any] = {}

    class LLM:
        def __init__(self, target, **options):
            made.update(options, target=target, calls=0)

        def get_metrics(self):
            made["calls"] += 1
            counted = made["calls"] - 1
            return [
                types.SimpleNamespace(name="vllm:spec_decode_num_drafts", value=10 * counted),
                types.SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[counted, 0]),
            ]

        def generate(self, prompts, params, use_tqdm):
            return [types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=(1, 2))]) for _ in prompts]

    fake = types.SimpleNamespace(LLM=LLM, SamplingParams=lambda **options: options, __version__="0")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    on_gpu = types.SimpleNamespace(current_platform=types.SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.setitem(sys.modules, "vllm.platforms", on_gpu)
    sizes = {"max_tokens": 2, "max_model_len": 9, "batch_size": 4, "num_speculative_tokens": 2, "turns": 1}
    request = {"target": "t", "draft": "d", "prompts": [[1], [2]], "ignore_eos": False, "dtype": "float32", **sizes}
    request |= {"method": "dflash", "refused_on_cpu": []}
    answer = engine_process.in_vllm(request)
    assert made["speculative_config"] == {"method": "dflash", "model": "d", "num_speculative_tokens": 2}
    assert (made["target"], made["max_num_seqs"], made["max_model_len"]) == ("t", 4, 9)
    assert (answer["rounds"], answer["accepted"], answer["answers"]) == (10, [1, 0], [[1, 2], [1, 2]])
    assert answer["repaired"] is None
    assert engine_process.in_vllm(request | {"draft": None}) and made["speculative_config"] is None
    on_gpu.current_platform.is_cpu = lambda: True
    with pytest.raises(SystemExit, match=r"vLLM's CPU build cannot run this head:\n  a reason"):
        engine_process.in_vllm(request | {"refused_on_cpu": ["a reason"]})


def test_on_a_cpu_each_layer_norms_its_own_context_keys(monkeypatch):
    """In vLLM's place a model whose own function takes the first layer's norm for all, as its CPU build does."""

    class DFlashQwen3Model:
        def __init__(self):
            norms = [lambda keys, scale=scale: scale * keys for scale in (2.0, 3.0)]
            self.layers = [types.SimpleNamespace(self_attn=types.SimpleNamespace(k_norm=norm)) for norm in norms]

        def _normalize_context_k(self, keys):
            return self.layers[0].self_attn.k_norm(keys)

    module = types.SimpleNamespace(DFlashQwen3Model=DFlashQwen3Model)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.models.qwen3_dflash", module)
    keys = np.ones((2, 5, 1, 4), np.float32)
    assert engine_process.norm_keys_by_layer() == engine_process.KEYS_BY_LAYER
    np.testing.assert_array_equal(DFlashQwen3Model()._normalize_context_k(keys)[:, 0, 0, 0], [2.0, 3.0])
