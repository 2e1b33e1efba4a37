"""tools/tpu_cost.py: a program's row, what is refused, and the command from a config to money."""

import importlib
import json
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

pytest.importorskip("libtpu")

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = """
run_dir: unused
target: {{name: {target}, dtype: bfloat16}}
draft: {{vocab_size: 512}}
mesh: {{model: 2}}
train: {{features: online, ttt_steps: 1, batch_size: 2, row_length: 128, loss_block: 128, epochs: 3}}
"""


@pytest.fixture
def small(tmp_path):
    """A run's config, of a target of eight small layers."""
    values = json.loads((ROOT / "configs/targets/llama31_8b/config.json").read_text())
    sizes = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    values |= sizes | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "run.yaml").write_text(CONFIG.format(target=tmp_path))
    return tmp_path / "run.yaml"


@pytest.fixture
def tpu_cost(monkeypatch):
    """The tool. Shapes stand for arrays in it, which checked annotations refuse."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    monkeypatch.setenv("EAGLE3_CPU_KERNELS", "0")
    jaxtyping.config.update("jaxtyping_disable", True)
    yield importlib.import_module("tpu_cost")
    jaxtyping.config.update("jaxtyping_disable", False)


def table(said):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if "|" in line]


# A layer's pass over 4 MB, and a sum of them over two devices.
HLO = """
ENTRY %main (x: bf16[2097152]) -> bf16[2097152] {
  %x = bf16[2097152]{0} parameter(0)
  %y = bf16[2097152]{0} exponential(%x), metadata={op_name="jit(f)/jit(_decoder_layer)/exp"}
  ROOT %a = bf16[2097152]{0} all-reduce(%y), replica_groups=[1,2]<=[2], metadata={op_name="jit(_decoder_layer)/sum"}
}
"""


@pytest.mark.parametrize(("topology", "link"), [("v6e:1x2", 180e9), ("tpu7x:2x2x1", 180e9)])
def test_a_program_s_row_is_of_chips_whose_devices_may_be_two(small, topology, link, monkeypatch, capsys, tpu_cost):
    """On two devices of the slice, and the same on its others; two of eight layers are compiled."""
    square = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    chip = tpu_cost.CHIPS[topology.split(":")[0]]
    devices = tpu_cost.topology_devices(topology)

    def program(job, layers=None):
        assert layers in (None, 2)
        mesh = jax.sharding.Mesh(np.array(devices[:2]).reshape(1, 2), ("data", "model"))
        arguments = {"tokens": jax.ShapeDtypeStruct((4, 250), jnp.int32)}
        return tpu_cost.tpu_fit.Program("extract", mesh, arguments, {}, lambda: jax.jit(lambda x: x @ x).trace(square))

    monkeypatch.setattr(tpu_cost.Job, "program", program)
    monkeypatch.setattr(tpu_cost.Job, "text", lambda job, folder: HLO)
    arguments = ["--topology", topology, "--verbs", "extract", "--layers", "2", "--tokens", "1e9", "--price", "10"]
    monkeypatch.setattr(sys, "argv", ["tpu_cost.py", "--config", str(small), *arguments])
    tpu_cost.main()
    _, _, row = table(capsys.readouterr().out)
    passes, summed = 4 * 2 * 2**22 / chip.gigabytes / 1e9, 4 * (2e-6 + 2**22 / link)
    floor = 2 * 1024**3 / (chip.teraflops * 1e12) / 2
    seconds, copies = passes + summed, len(devices) / 2
    hours = 1e9 * seconds / (1000 * copies) / 3600
    assert row == [
        *("extract", "1x2", "0.00", f"{1e3 * passes:.2f}", f"{1e3 * summed:.2f} (4 + 0)", f"{1e3 * seconds:.2f}"),
        *(f"{1e3 * floor:.2f}", "", f"{1000 * copies / seconds:,.0f}", f"{floor / seconds:.0%}", f"{hours:,.2f}"),
        f"{hours * len(devices) / chip.devices * 10:,.0f}",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--topology", "v5e:3"), "--topology: got 'v5e:3', expected a TPU topology such as"),
        (("--topology", "v5e:1x1"), "mesh.model: got 2, expected a divisor of the number of devices, 1"),
        (("--topology", "v5e:1x2", "--layers", "0"), "--layers: got 0, expected more than 0"),
        (("--topology", "v5e:1x2", "--tokens", "-1"), "--tokens: got -1.0, expected more than 0"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(small, arguments, message, monkeypatch, capsys, tpu_cost):
    monkeypatch.setattr(sys, "argv", ["tpu_cost.py", "--config", str(small), *arguments])
    with pytest.raises(SystemExit, match="2"):
        tpu_cost.main()
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_a_small_run_is_priced_from_its_programs(small, tmp_path, monkeypatch, capsys, tpu_cost):
    """Training and rounds; the HLO that lies in the folder is not made again."""
    command = ["--topology", "v5e:1x2", "--trees", "2,1,3", "--context", "256", "--layers", "2", "--price", "1"]
    command += ["--hlo", str(tmp_path / "hlo"), "--config", str(small)]
    monkeypatch.setattr(sys, "argv", ["tpu_cost.py", *command])
    tpu_cost.main()
    first = capsys.readouterr().out
    rows = {row[0]: row for row in table(first)[2:]}
    assert list(rows) == ["train: states", "train: step", "vanilla, batch 1", "chain 2, batch 1", "train"]
    for name, row in rows.items():
        *parts, total, floor = (float(cell.split(" ")[0]) for cell in row[2:7])
        assert total == pytest.approx(sum(parts), abs=0.02) and total >= floor, name
        assert row[1] == "1x2"
    states, step, vanilla, chain, train = (row[5:9] for row in rows.values())
    assert float(train[0]) == pytest.approx(float(states[0]) + float(step[0]), abs=0.02)
    assert vanilla[2] == "1.00" and float(chain[2]) > 1 and chain[3] == ""
    counts = {name: tuple(map(int, re.findall(r"\d+(?= |\))", row[4].partition("(")[2]))) for name, row in rows.items()}
    assert 16 <= counts["vanilla, batch 1"][0] < counts["chain 2, batch 1"][0]  # two of each of eight layers, and more
    monkeypatch.setattr(tpu_cost, "optimised_alone", lambda _: pytest.fail("compiled again"))
    tpu_cost.main()
    assert capsys.readouterr().out == first


def test_layers_that_are_not_compiled_leave_the_rest_of_the_target(small, tpu_cost):
    config = tpu_cost.run_file.load(small)
    job = tpu_cost.Job(config, "v5e:1x2", "train: states", layers=4)
    assert job.shape().num_hidden_layers == 8
    few, whole, most = (job.program(layers).arguments["target"].config for layers in (4, None, 9))
    assert (few.num_hidden_layers, whole.num_hidden_layers, most.num_hidden_layers) == (4, 8, 8)
    assert few.aux_layers == (0, 1, 2) and whole.aux_layers == most.aux_layers == (2, 4, 5)
