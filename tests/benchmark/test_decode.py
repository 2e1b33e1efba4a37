"""The verb on a tiny target with the real engine: its records, its picture, and that it measures once."""

import dataclasses
import json
import pathlib

import pytest
from matplotlib import image

from eagle3_jax.benchmark import __main__ as benchmark
from eagle3_jax.benchmark import decode
from eagle3_jax.config import ConfigError, RunConfig, run_file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch_sizes", "peer"), [((2,), None), pytest.param((1, 2), "transformers", marks=pytest.mark.long)]
)
def test_every_way_answers_alike_and_is_recorded_as_sglang_does(
    config, target, prompts, monkeypatch, capsys, tmp_path, batch_sizes, peer
):
    if peer:
        pytest.importorskip("torch")
    monkeypatch.setattr(decode, "load_target", lambda *_: target)
    benchmark_config = dataclasses.replace(config.benchmark, batch_sizes=batch_sizes)
    config = dataclasses.replace(config, benchmark=benchmark_config, run_dir=str(tmp_path))
    report = decode.run(config, prompts, peer)
    assert report["mesh"] == {"model": 1} and report["hardware"]["cores"] and report["versions"]["jax"]
    ways = ["vanilla", "chain 2", "tree 2, 2, 4", "auto"]
    folder = config.folder("benchmark")
    for batch, size in zip(report["batches"], batch_sizes, strict=True):
        assert (batch["batch_size"], batch["requests"], batch["bandwidth"] > 1e8) == (size, 3, True)
        by_name = {way["name"]: way for way in batch["ways"]}
        assert list(by_name)[:4] == ways
        for name, way in by_name.items():
            assert way["identical"] == 3 or name.startswith("transformers"), name
            assert way["tokens_per_second"] > 0 and way["completion_tokens"] == 18
        for name in ways[:3]:
            stages = by_name[name]["stages"]
            assert set(stages) == {"draft", "verify", "extend", "host"}
            assert min(stages.values()) >= 0 and stages["verify"] > 0
        assert set(by_name["chain 2"]["tiers"]) == {"chain 2"}, "it is pinned"
        if peer:
            assert by_name["transformers"]["identical"] == 3
            assert ("transformers, prompt lookup" in by_name) == (size == 1)
    rows = [json.loads(line) for line in (folder / "decode.jsonl").read_text().splitlines()]
    assert [(row["batch_size"], row["steps"], row["topk"], row["num_draft_tokens"]) for row in rows] == [
        (size, *tree) for size in batch_sizes for tree in ((0, 0, 0), (2, 1, 3), (2, 2, 4))
    ]
    for row in rows:
        assert {"acc_length", "step_time", "speed", "completion_tokens"} < set(row)
        assert row["speed"] == pytest.approx(row["acc_length"] / row["step_time"])
    assert rows[0]["acc_length"] == 1 <= rows[1]["acc_length"] <= 3
    assert image.imread(folder / "decode.png").shape[0] > 400
    table = decode.table(report)
    assert "batch 2: " in table.split("best:")[1] and "tree 2, 2, 4" in table

    def never(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr(decode, "measure_batch", never)
    compare = ["--compare", peer] if peer else []
    benchmark.main(["decode", *compare, "--config", str(written(config)), "--prompts", str(prompts)])
    assert capsys.readouterr().out.startswith(table.splitlines()[0])
    other = dataclasses.replace(config, benchmark=dataclasses.replace(config.benchmark, max_tokens=7))
    with pytest.raises(AssertionError, match="measured again"):
        decode.run(other, prompts)


@pytest.mark.long
def test_acceptance_can_be_simulated(config, target, prompts, tmp_path):
    """A head that knows nothing, all of whose drafts are taken: times without training one."""
    settings = dataclasses.replace(config.benchmark, simulated_acceptance=1.0, batch_sizes=(2,), max_tokens=13)
    report = decode.run(dataclasses.replace(config, run_dir=str(tmp_path), benchmark=settings), prompts, None, target)
    ways = {way["name"]: way for way in report["batches"][0]["ways"]}
    assert ways["vanilla"]["acc_length"] == 1 and ways["chain 2"]["acc_length"] == 3
    assert ways["tree 2, 2, 4"]["acc_length"] == 3 and ways["chain 2"]["identical"] is None


@pytest.mark.slow
def test_what_cannot_be_measured_is_refused(config, target, prompts, tmp_path, monkeypatch):
    for field, value in (("batch_sizes", []), ("batch_sizes", [0]), ("turns", 0), ("simulated_acceptance", 1.5)):
        with pytest.raises(ConfigError, match=f"benchmark.{field}: got"):
            run_file.from_dict({"run_dir": "x", "benchmark": {field: value}})
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "x" * 5000}))
    with pytest.raises(ValueError, match=r"--prompts .*long.jsonl: got no prompt within"):
        decode.run(config, long, None, target)
    sampled = dataclasses.replace(config, benchmark=dataclasses.replace(config.benchmark, temperature=0.5))
    monkeypatch.setattr(decode.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match=r"--compare transformers: got benchmark.temperature 0.5"):
        decode.run(sampled, prompts, "transformers", target)
    monkeypatch.setattr(decode.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--compare transformers: got no PyTorch"):
        decode.run(config, prompts, "transformers", target)
    with pytest.raises(SystemExit):
        benchmark.main(["encode", "--config", "x", "--prompts", str(prompts)])


def written(config: RunConfig) -> pathlib.Path:
    path = pathlib.Path(config.run_dir) / "run.yaml"
    path.write_text(json.dumps(run_file.to_dict(config)))
    return path
