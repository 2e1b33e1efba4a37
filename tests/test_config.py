"""Configuration: the three ways in (YAML, overrides, command line) and every refusal by field name."""

import functools
import math
import pathlib
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.config import ConfigError, DraftTree, JsonlSource, RunConfig, TargetConfig, flags, run_file
from eagle3_jax.runs import command_line


@pytest.fixture
def example(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "run_dir: runs/x\n"
        "train: {learning_rate: 1e-4, max_steps: 5}\n"
        "prepare: {sources: [{kind: packaged}, {kind: jsonl, path: a.jsonl, limit: 3}]}\n"
    )
    return path


def test_yaml_becomes_typed_values(example):
    run = run_file.load(example)
    assert run.train.learning_rate == 1e-4  # YAML itself reads 1e-4 as a string
    assert run.prepare.sources[1] == JsonlSource(kind="jsonl", path="a.jsonl", limit=3)
    assert run.folder("extract") == pathlib.Path("runs/x/features")


def test_overrides_change_only_what_they_name(example):
    plain = run_file.load(example)
    changed = run_file.load(example, ["--train.learning_rate", "3e-4", "--target.aux-layers", "2", "8", "20"])
    assert changed.train.learning_rate == 3e-4
    assert changed.target.aux_layers == (2, 8, 20)
    assert changed.train.max_steps == 5
    assert changed.prepare == plain.prepare


def test_overrides_of_one_section_are_checked_together(example):
    tree = ["--evaluate.tree.num-steps", "4", "--evaluate.tree.topk", "3", "--evaluate.tree.num-draft-tokens", "10"]
    assert run_file.load(example, tree).evaluate.tree == DraftTree(num_steps=4, topk=3, num_draft_tokens=10)


def test_auto_and_a_tree_replace_each_other_on_the_command_line(example):
    plain, tree = example.read_text(), ["--evaluate.tree.num-steps", "3", "--evaluate.tree.num-draft-tokens=4"]
    example.write_text(plain + "evaluate: {limit: 5, tree: {num_steps: 2, num_draft_tokens: 3}}\n")
    for words in (["--evaluate.tree", "auto"], ["--evaluate.tree=auto"]):
        changed = run_file.load(example, [*words, "--evaluate.max-tokens", "7"]).evaluate
        assert (changed.tree, changed.limit, changed.max_tokens) == ("auto", 5, 7)
    with pytest.raises(ConfigError, match=r"evaluate\.tree"):
        run_file.load(example, ["--evaluate.tree", "autos"])
    example.write_text(plain + "evaluate: {limit: 5, tree: auto}\n")
    changed = run_file.load(example, tree).evaluate
    assert (changed.tree, changed.limit) == (DraftTree(num_steps=3, num_draft_tokens=4), 5)


def test_a_mapping_may_be_merged_into_others(example):
    """Into one that is merged itself, too; what stands beside `<<` takes precedence and stands there once."""
    example.write_text(
        "run_dir: x\n"
        "evaluate: {tree: &small {num_steps: 2, num_draft_tokens: 3}}\n"
        "benchmark: {trees: [&large {<<: *small, num_steps: 4, num_draft_tokens: 5}]}\n"
        "serve: {trees: [{<<: *large, lookup_tokens: 2}]}\n"
    )
    run = run_file.load(example)
    (large,), (copying,) = run.benchmark.trees, run.serve.trees
    assert (large.num_steps, copying.num_steps, copying.lookup_tokens) == (4, 4, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"run_dir: .*required"),
        ({"run_dir": "s3://bucket/run"}, r"run_dir: got 's3://bucket/run', expected a folder, or a bucket's gs://"),
        ({"run_dir": "x", "seed": -1}, r"seed: got -1, expected at least 0"),
        ({"run_dir": "x", "trian": {}}, "trian"),
        ({"run_dir": "x", "train": {"learning_rat": 1}}, r"train\.learning_rat"),
        ({"run_dir": "x", "train": {"ttt_steps": "many"}}, r"train\.ttt_steps.*got 'many'"),
        ({"run_dir": "x", "prepare": {"sources": [{"kind": "web"}]}}, r"prepare\.sources\.0.*'web'"),
        ({"run_dir": "x", "prepare": {"sources": []}}, r"prepare\.sources.*at least one source"),
        ({"run_dir": "x", "extract": {"max_length": 9999}}, r"extract\.batch_tokens: got 4096, expected at least"),
        ({"run_dir": "x", "evaluate": {"limit": 0}}, r"evaluate\.limit: got 0, expected at least 1"),
        ({"run_dir": "x", "train": {"max_steps": True}}, r"train\.max_steps: got True, expected a number"),
        ({"run_dir": "x", "benchmark": {"batch_sizes": [1, True]}}, r"benchmark\.batch_sizes\.1: got True, expected a"),
        ({"run_dir": "x", "draft": {"fc_norm": 1}}, r"draft\.fc_norm: got 1, expected true or false"),
        (
            {"run_dir": "x", "draft": {"kind": "dflash", "sliding_window": 8}},
            r"draft\.sliding_window: got 8, expected null: draft\.layer_types has no sliding_attention",
        ),
        ({"run_dir": "x", "train": {"epochs": math.inf}}, r"train\.epochs: .*finite number"),
        ({"run_dir": "x", "draft": {"head_dim": 0}}, r"draft\.head_dim: got 0, expected at least 1"),
        (
            {"run_dir": "x", "prepare": {"sources": [{"kind": "self", "count": 0}]}},
            r"prepare\.sources\.0\.count: got 0, expected at least 1",
        ),
    ],
)
def test_wrong_values_are_refused_by_field(values, message):
    with pytest.raises(ConfigError, match=message):
        run_file.from_dict(values)


def test_every_field_is_refused_in_one_line_by_its_own_name():
    """A union of types has one line too, not one for each member under pydantic's name for it."""
    for field in flags.fields(RunConfig):
        values: Any = functools.reduce(lambda inner, name: {name: inner}, reversed(field.place.split(".")), object())
        with pytest.raises(ConfigError) as found:
            run_file.from_dict({"run_dir": "x"} | values)
        _, *lines = str(found.value).split("\n  ")
        assert [line.partition(":")[0] for line in lines] == [field.place]
    with pytest.raises(ConfigError) as found:
        TargetConfig(weights="int3")  # pyrefly: ignore[bad-argument-type]
    assert str(found.value) == "target.weights: got 'int3', expected 'int8', 'fp8', 'int4' or 'stored'"


@pytest.mark.parametrize("section", ["evaluate", "benchmark", "serve"])
def test_a_token_map_needs_the_folder_of_a_head(section):
    for draft in (None, "auto", "lookup", "mtp", "none"):
        with pytest.raises(ConfigError, match=rf"{section}\.token_map: got 'm\.json', expected null, or the folder"):
            run_file.from_dict({"run_dir": "x", section: {"draft": draft, "token_map": "m.json"}})
    run = run_file.from_dict({"run_dir": "x", section: {"draft": "heads/eagle2", "token_map": "m.json"}})
    assert getattr(run, section).token_map == "m.json"


@pytest.mark.parametrize("layers", [(), (8, 2, 20), (2, 2, 20), (-1, 2, 3)])
def test_aux_layers_ascend_and_differ(layers):
    with pytest.raises(ValueError, match="target.aux_layers"):
        TargetConfig(aux_layers=layers)
    assert TargetConfig(aux_layers=(2, 8, 20)).aux_layers == (2, 8, 20)


@given(steps=st.integers(1, 8), topk=st.integers(1, 8), tokens=st.integers(1, 200), copied=st.integers(0, 9))
@examples(200)
def test_a_tree_is_accepted_exactly_when_its_candidates_suffice(steps, topk, tokens, copied):
    # Level 1 offers topk nodes, every later level topk children of topk nodes; a chain is used whole.
    # Copied tokens are further candidates.
    candidates = topk + sum(topk * topk for _ in range(steps - 1)) + copied
    possible = tokens - 1 == steps if topk == 1 and not copied else steps <= tokens - 1 <= candidates
    tree = functools.partial(DraftTree, num_steps=steps, topk=topk, num_draft_tokens=tokens, lookup_tokens=copied)
    if possible:
        assert tree().depth == max(steps, copied)
    else:
        with pytest.raises(ValueError, match="num_draft_tokens"):
            tree()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "not valid YAML"),
        (b"- 1", "got list, expected a mapping"),
        (b"", "got NoneType"),
        ("run_dir: caf\u00e9".encode("latin-1"), "codec can't decode"),
        (b"run_dir: x\nseed: 1\nseed: 2", r"(?s)'seed' stands twice.*line 3"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, content, message):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        run_file.load(path)


@pytest.mark.parametrize("override", ["--train.nope", "--nope", "--prepare.sources"])
def test_unknown_overrides_are_refused_by_name(example, override):
    with pytest.raises(ConfigError, match=f"{override}: not a field"):
        run_file.load(example, [override, "1"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--evaluate.max-tokens", "0"], r"evaluate\.max_tokens: got '0', expected at least 1"),
        (["--evaluate.max-tokens", "1.5"], r"evaluate\.max_tokens: got '1\.5', expected an integer"),
        (["--evaluate.max-tokens"], r"--evaluate\.max-tokens.*: expected one argument"),
        (["--evaluate.tree.topk", "0"], r"evaluate\.tree\.topk: got '0', expected at least 1"),
        (["--evaluate.tree.num-steps", "2"], r"evaluate\.tree\.num_draft_tokens: got 5, expected num_steps \+ 1 = 3"),
    ],
)
def test_overrides_out_of_range_are_refused_by_name(example, words, message):
    with pytest.raises(ConfigError, match=message):
        run_file.load(example, words)


def test_overrides_take_every_kind_of_value(example):
    """Both spellings, lists of one and of none, None, and truth values."""
    words = "--train.warm_start heads/mine --train.max_steps None --draft.fc-norm --draft.no-norm-output --seed=3"
    words += " --target.aux-layers 2 --regenerate.temperature 0.5 1 --serve.model-name 7 --prepare.benchmarks"
    changed = run_file.load(example, words.split())
    assert (changed.train.warm_start, changed.train.max_steps, changed.seed) == ("heads/mine", None, 3)
    assert (changed.draft.fc_norm, changed.draft.norm_output, changed.serve.model_name) == (True, False, "7")
    assert (changed.target.aux_layers, changed.regenerate.temperatures) == ((2,), (0.5, 1.0))
    assert changed.prepare.benchmarks == ()
    assert run_file.load(example, ["--regenerate.temperature", "0.5"]).regenerate.temperature == 0.5


@pytest.mark.parametrize("verb", ["evaluate", "benchmark decode", "benchmark tune", "benchmark serve"])
def test_a_target_is_measured_without_a_config(verb, example, capsys):
    """With the drafts of the package's head; a config takes the name too."""
    words = ["--prompts", "p.jsonl", *["--output", "o.json"] * (verb == "evaluate")]
    for named in (["--target", "org/model"], ["--target.name=org/model"]):
        run, _ = command_line.read(verb, [*words, *named, "--mesh.model", "1"])
        assert (run.target.name, run.run_dir, run.mesh.model) == ("org/model", ".", 1)
        assert run.evaluate.draft == run.benchmark.draft == run.serve.draft == "auto"
    run, _ = command_line.read(verb, [*words, "--config", str(example), "--target", "org/model"])
    assert run.target.name == "org/model" and run.run_dir != "."
    for refused in (lambda: command_line.read(verb, words), lambda: command_line.read("train", ["--target.name", "x"])):
        with pytest.raises(SystemExit, match="2"):
            refused()
    printed = capsys.readouterr().err
    assert f"eagle3_jax.{verb}: --config, --target: got neither, expected one of them" in printed
    assert "the following arguments are required: --config" in printed
