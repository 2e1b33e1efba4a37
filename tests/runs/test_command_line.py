"""Each verb's `--help`: without extras, with the fields of the config, their texts and their defaults."""

import re
import sys
import types

import pytest

from eagle3_jax import evaluate, report
from eagle3_jax.benchmark import __main__ as benchmark
from eagle3_jax.config import ConfigError, run_file
from eagle3_jax.export import __main__ as export
from eagle3_jax.extract import __main__ as extract
from eagle3_jax.prepare import __main__ as prepare
from eagle3_jax.regenerate import __main__ as regenerate
from eagle3_jax.runs import command, command_line
from eagle3_jax.serve import __main__ as serve
from eagle3_jax.train import __main__ as train

# verb -> how it is called, words in front of --help, some of what its help says.
HELPS = {
    "prepare": (prepare.main, [], ["--prepare.held-out", "share of prompts", "(default: 0.1)"]),
    "regenerate": (regenerate.main, [], ["--regenerate.temperature"]),
    "extract": (extract.main, [], ["--draft.vocab-size"]),
    "train": (train.main, [], ["--warm-start", "--train.ttt-steps", "--train.learning-rate", "(default: 0.0001)"]),
    "export": (export.main, [], ["--from DIR", "--check", "--upload", "--write-target DIR", "--export.format"]),
    "evaluate": (evaluate.main, [], ["--replace", "--evaluate.tree.num-steps", "--output FILE"]),
    "report": (report.main, [], ["--run-dir"]),
    "benchmark": (benchmark.main, [], ["{decode,tune,serve}", "Times servers under traffic."]),
    "benchmark decode": (benchmark.main, ["decode"], ["--compare {transformers}", "--benchmark.batch-sizes"]),
    "benchmark tune": (benchmark.main, ["tune"], ["--benchmark.tune-turns"]),
    "benchmark serve": (benchmark.main, ["serve"], ["--compare-key NAME=VARIABLE", "--traffic.rates"]),
    "serve": (serve.main, [], ["--max-num-seqs", "--serve.request-timeout", "(default: 600.0)"]),
}


@pytest.mark.parametrize("verb", HELPS)
def test_help_lists_a_verb_s_flags_and_fields(verb, capsys):
    main, words, expected = HELPS[verb]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: python -m eagle3_jax.{verb} " in printed
    assert [part for part in expected if part not in printed] == []
    assert "{fixed}" not in printed


def test_every_field_says_what_it_is():
    sections = [name for name in vars(run_file.from_dict({"run_dir": "x"})) if name not in ("run_dir", "seed")]
    text = command_line.Parser("train", "", sections).format_help()
    fields = re.findall(r"^  --.*?(?:  |\n) +(\S+)", text, re.MULTILINE)
    assert len(fields) > 100
    assert "(default:" not in fields


@pytest.mark.parametrize("verb", HELPS)
def test_help_needs_no_extra(verb, capsys, monkeypatch):
    """As where an extra is missing: `require` is what stops the verb's imports then."""
    module, _, what = verb.partition(" ")
    monkeypatch.setitem(command.EXTRAS, "train", ("nothing_has_this_name",))
    spec = types.SimpleNamespace(name=f"eagle3_jax.{module}")
    monkeypatch.setitem(sys.modules, "__main__", types.SimpleNamespace(__spec__=spec))
    monkeypatch.setattr(sys, "argv", ["python", *what.split(), "--help"])
    with pytest.raises(SystemExit) as ended:
        command.require("train")
    assert ended.value.code in (None, 0)
    if verb != "serve":  # which imports nothing of an extra before it serves
        main, words, _ = HELPS[verb]
        printed = capsys.readouterr().out
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        assert printed == capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--train.ttt_step 3", "train.ttt_steps"),
        ("--train.learning-rat=1", "train.learning_rate"),
        ("--evaluate.tree.num-step 3", "evaluate.tree.num_steps"),
        ("--quite-another 3", None),
    ],
)
def test_a_wrong_name_is_answered_with_the_one_that_was_meant(given, meant):
    with pytest.raises(ConfigError) as refused:
        run_file.with_overrides({"run_dir": "x"}, given.split())
    assert str(refused.value).endswith(f", did you mean {meant}?" if meant else "expected --section.field VALUE")


def test_a_wrong_name_in_the_file_is_answered_so_too():
    with pytest.raises(ConfigError, match=r"did you mean evaluate\.tree\.num_steps\?"):
        run_file.from_dict({"run_dir": "x", "evaluate": {"tree": {"num_step": 3}}})
