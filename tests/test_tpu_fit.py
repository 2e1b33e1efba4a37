"""tools/tpu_fit.py: what fits, what does not and by how much, without a TPU."""

import importlib
import json
import pathlib
import re
import sys

import jaxtyping
import pytest

pytest.importorskip("libtpu")

ROOT = pathlib.Path(__file__).parents[1]
TARGETS = ROOT / "configs/targets"
LONG_ROWS = ("--train.row-length", "8192", "--train.loss-block", "8192")

CONFIG = """
run_dir: unused
target: {{name: {target}, dtype: bfloat16, aux_layers: [0, 1, 2]}}
draft: {{vocab_size: 512}}
mesh: {{model: 2}}
regenerate: {{max_length: 256, max_tokens: 64}}
extract: {{max_length: 128, batch_tokens: 256}}
train: {{ttt_steps: 1, batch_size: 2, row_length: 128, loss_block: 128}}
evaluate: {{tree: {{num_steps: 2, topk: 2, num_draft_tokens: 4}}, max_tokens: 64, batch_size: 2}}
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A run's config, of a target of two small layers."""
    folder = tmp_path_factory.mktemp("small")
    values = json.loads((TARGETS / "llama31_8b/config.json").read_text())
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    values |= sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "run.yaml").write_text(CONFIG.format(target=folder))
    return folder / "run.yaml"


@pytest.fixture
def tpu_fit(monkeypatch):
    """The tool. Shapes stand for arrays in it, which checked annotations refuse."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.chdir(ROOT)
    jaxtyping.config.update("jaxtyping_disable", True)
    yield importlib.import_module("tpu_fit")
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def fit(tpu_fit, monkeypatch, capsys):
    """Runs the tool: its exit status and what it printed."""

    def run(config, *arguments):
        monkeypatch.setattr(sys, "argv", ["tpu_fit.py", "--config", str(config), *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            tpu_fit.main()
        return int(ended.value.code or 0), capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    "message",
    [
        "the total memory required for HLO temporaries (32.00G) exceeds available HBM (31.50G)",
        "E1000: CompileTimeHbmOom: Ran out of memory in memory space hbm. Used 32.00G of 31.50G hbm. Exceeded hbm",
        "RESOURCE_EXHAUSTED: Allocation (size=34359738368) would exceed memory (size=33822867456) :: %s0 = inlined",
    ],
)
def test_a_refusal_is_understood_as_each_compiler_words_it(message, tpu_fit):
    assert tpu_fit.needed_and_available(RuntimeError(message)) == (32 * 2**30, 31.5 * 2**30)
    with pytest.raises(RuntimeError, match="else"):
        tpu_fit.needed_and_available(RuntimeError("something else"))


@pytest.mark.smoke
def test_a_chip_s_memory_is_what_its_compiler_leaves(tpu_fit):
    assert tpu_fit.hbm(tpu_fit.topology_devices("v5e:1x1")) == 15.75 * 2**30


@pytest.mark.long
def test_a_small_run_fits(small, tmp_path, fit):
    rows = tmp_path / "rows.json"
    status, text = fit(small, "--topology", "v5e:1x2", "--verbs", "evaluate,extract,train", "--json", rows)
    assert status == 0, text
    rows = {row["program"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert list(rows) == ["evaluate: prefill", "evaluate: rounds", "extract", "train: step"]
    for row in rows.values():
        assert row["fits"]
        assert row["hbm"] == 15.75 * 2**30
        held = sum(row[part] for part in ("arguments", "results", "temporaries", "code", "beside"))
        assert row["total"] == held
    for name in ("evaluate: rounds", "train: step"):  # what goes in comes out in its place
        assert rows[name]["results"] < 0.1 * rows[name]["arguments"]
    # Its arguments are what the tool says they are, but for the tiles that the compiler pads them to.
    rounds = rows["evaluate: rounds"]
    parts = sum(rounds["parts"].values()) - rounds["beside"]
    assert parts <= rounds["arguments"] <= 1.1 * parts


@pytest.mark.long
def test_a_server_whose_head_learns_on_two_chips(small, tmp_path, fit):
    ring = ("--serve.adapt.ring-tokens", "512", "--serve.adapt.row-length", "128")
    sizes = ("--serve.batch-size", "2", "--serve.max-length", "256", *ring)
    status, text = fit(small, "--topology", "v5e:1x2", "--verbs", "adapt", "--json", tmp_path / "rows.json", *sizes)
    assert status == 0, text
    rows = {row["program"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert list(rows) == [f"adapt: {name}" for name in ("prefill", "rounds", "step", "vocabulary", "swap")]
    step, swap, rounds = (rows[f"adapt: {name}"] for name in ("step", "swap", "rounds"))
    assert step["results"] < 0.1 * step["arguments"], "weights and moments in place"
    assert swap["results"] <= 1.1 * rounds["parts"]["draft"], "the new head alone"
    assert rounds["parts"]["ring"] >= (512 + 2 * 128) * 4 * 256 * 2


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1024, 65536])  # temporaries are too many; the arguments alone are
def test_what_does_not_fit_is_reported_with_the_amount(small, rows, fit):
    status, text = fit(small, "--topology", "v5e:1x2", "--verbs", "train", "--train.batch-size", str(rows), *LONG_ROWS)
    assert status == 1
    assert "does not fit" in text
    assert "GiB too much" in text


@pytest.mark.slow
def test_what_a_kernel_cannot_hold_is_reported_with_the_amount(small, fit):
    status, text = fit(small, "--topology", "v5e:1x2", "--verbs", "extract", "--extract.batch-tokens", "100000000")
    assert status == 1
    assert re.search(r"^extract .*\n    refused: SMEM: got 11.9 MiB", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--topology", "v5e:3"), "--topology: got 'v5e:3', expected a TPU topology such as"),
        (("--topology", "v5e:1x1"), "mesh.model: got 2, expected a divisor of the number of devices, 1"),
        (("--topology", "v5e:1x2", "--verbs", "sing"), "--verbs: got sing, expected some of evaluate, regenerate"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(small, arguments, message, monkeypatch, capsys, tpu_fit):
    monkeypatch.setattr(sys, "argv", ["tpu_fit.py", "--config", str(small), *arguments])
    with pytest.raises(SystemExit, match="2"):
        tpu_fit.main()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "target", "draft", "head"),
    [
        ("llama2_7b_eagle2", "llama2_7b", "configs/heads/llama2_7b_eagle2", "Eagle2Head"),
        ("mimo_7b", "mimo_7b", "mtp", "MimoMtp"),
        ("mimo_7b", "deepseek_v3", "mtp", "DeepseekMtp"),
        ("mimo_7b", "glm_5", "mtp", "DeepseekV32Mtp"),
        ("mimo_7b", "mimo_7b", None, "DraftHead"),
        ("qwen3_8b_dflash", "qwen3_8b", None, "DFlash"),
        ("llama31_8b_dspark", "llama31_8b", None, "DSpark"),
    ],
)
def test_the_draft_is_the_one_that_the_config_names(run, target, draft, head, tpu_fit):
    flags = ["--mesh.model", "4", *(["--evaluate.draft", draft] if draft else [])]
    config = tpu_fit.run_file.load(f"configs/{run}.yaml", flags)
    shape = tpu_fit.read_config(TARGETS / target, config.target.aux_layers)
    assert type(tpu_fit.drafting_head(config, shape)).__name__ == head
    unknown = tpu_fit.run_file.load(f"configs/{run}.yaml", ["--evaluate.draft", "auto"])
    with pytest.raises(ValueError, match="evaluate.draft: got 'auto', expected none for a head of this config"):
        tpu_fit.drafting_head(unknown, shape)


@pytest.mark.slow
def test_beside_an_evaluation_s_programs_lie_the_caches_of_vanilla_decoding(small, tpu_fit):
    """`evaluate` keeps both of its engines; `regenerate` has one."""
    # Two layers' keys and values; three pages of a request, and one; pages of 128 rows of 128 numbers a device.
    caches = 2 * 2 * (3 * 5 + 1) * 128 * 128 * 2
    devices = tpu_fit.topology_devices("v5e:1x2")
    for draft in [], ["--evaluate.draft", "lookup"]:
        config = tpu_fit.run_file.load(small, ["--evaluate.batch-size", "5", *draft])
        target = tpu_fit.read_config(pathlib.Path(config.target.name), config.target.aux_layers)
        prefill, rounds = tpu_fit.evaluate(config, target, devices)
        for program in prefill, rounds:
            ((name, state),) = program.beside.items()
            assert (name, tpu_fit.share(state.cache), state.draft_cache) == ("vanilla state", caches, None)
            assert tpu_fit.share(state) > caches
        assert not any(program.beside for program in tpu_fit.regenerate(config, target, devices))


@pytest.mark.long
def test_a_row_of_32_thousand_tokens_is_split_over_two_chips(small, tmp_path, fit):
    """The target's forward pass and the step, whose kernel takes the row's keys in two blocks."""
    mesh = "--train.mesh.data", "2", "--train.mesh.model", "1", "--train.sequence", "2", "--train.features", "online"
    size = "--train.batch-size", "1", "--train.row-length", "32768", "--train.ttt-steps", "3", "--train.remat"
    rows = tmp_path / "rows.json"
    status, text = fit(small, "--topology", "v6e:1x2", "--verbs", "train", *mesh, *size, "--json", rows)
    assert status == 0, text
    assert [row["program"] for row in json.loads(rows.read_text())] == ["train: states", "train: step"]


@pytest.mark.long
@pytest.mark.parametrize("weights", [(), ("--target.weights", "int8", "--target.quantise-vocabulary")])
def test_decoding_takes_little_beside_weights_and_caches(tmp_path, fit, weights):
    """No weights in another layout or in more bits, nothing kept of each layer: Llama-3.1-8B with 4 of its layers."""
    values = json.loads((TARGETS / "llama31_8b/config.json").read_text()) | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(values))
    layers = "--target.aux-layers", "1", "2", "3"
    run = ROOT / "configs/llama31_8b.yaml", "--target.name", tmp_path, *layers, "--mesh.model", "4"
    command = *run, *weights, "--topology", "v5e:2x2", "--verbs", "evaluate"
    status, text = fit(*command, "--json", tmp_path / "rows.json")
    assert status == 0, text
    prefill, rounds = json.loads((tmp_path / "rows.json").read_text())
    assert prefill["temporaries"] < 2**30 / 4
    assert rounds["temporaries"] < 2**30 / 8


@pytest.mark.slow
def test_quantised_weights_are_counted_in_their_bits(small, tpu_fit):
    """Of the target's own bytes the matrices are most: 8 bits are half of bfloat16, on each of two devices."""
    devices = tpu_fit.topology_devices("v5e:1x2")
    mesh = tpu_fit.replicas(tpu_fit.make_mesh(tpu_fit.run_file.load(small).mesh, devices))[0].rows[0]
    shares = {}
    for weights in (None, "int8", "int4"):
        options = [] if weights is None else ["--target.weights", weights, "--target.quantise-vocabulary"]
        config = tpu_fit.run_file.load(small, options)
        target = tpu_fit.read_config(pathlib.Path(config.target.name), config.target.aux_layers)
        shares[weights] = tpu_fit.share(tpu_fit.abstract_target(config, target, mesh))
    assert 0.5 < shares["int8"] / shares[None] < 0.52
    assert shares["int4"] < shares["int8"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("run", "topology", "model"), [("llama31_8b", "v5e:1x1", "1"), ("llama33_70b", "v6e:2x2", "4")]
)
def test_a_quantised_target_fits_where_its_floats_do_not(run, topology, model, fit):
    """With a cache of 8192 tokens, drafts included."""
    sizes = "--evaluate.batch-size", "1", "--regenerate.max-length", "8192"
    where = "--target.name", f"configs/targets/{run}", "--topology", topology, "--mesh.model", model
    command = ROOT / f"configs/{run}.yaml", *where, *sizes, "--verbs", "evaluate"
    status, text = fit(*command, "--target.weights", "int8")
    assert status == 0, text
    status, text = fit(*command)
    assert status == 1 and "does not fit" in text


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["mistral_7b", "ministral3_8b", "phi3_mini", "smollm3_3b"])
def test_rounds_and_a_training_step_compile_for_families(name, tmp_path, fit):
    """Three layers of the published widths on two chips, of every kind that the family has."""
    values = json.loads((TARGETS / name / "config.json").read_text())
    layers = values.get("text_config", values)
    layers |= {"num_hidden_layers": 3, "num_kv_shared_layers": min(layers.get("num_kv_shared_layers", 0), 1)}
    if kinds := layers.get("layer_types"):
        layers["layer_types"] = [kinds[0], *[kinds[-1]] * 2]
    less = {"no_rope_layer_interval": 2, "sliding_window_pattern": "LG"}
    layers |= {key: value for key, value in less.items() if key in layers}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "run.yaml").write_text(CONFIG.format(target=tmp_path))
    rows = tmp_path / "rows.json"
    status, text = fit(tmp_path / "run.yaml", "--topology", "v6e:1x2", "--verbs", "evaluate,train", "--json", rows)
    assert status == 0, text
    programs = [row["program"] for row in json.loads(rows.read_text())]
    assert programs == ["evaluate: prefill", "evaluate: rounds", "train: step"]
