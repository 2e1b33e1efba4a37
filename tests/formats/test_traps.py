"""Every way in which an export is known to be wrong, most of them silent in an engine, and what catches it here.

Measured in vLLM 0.32.0 and SGLang 0.5.23: of these heads either engine loads most, writes the target's text all the
same, and drafts nonsense. A reader that looks at names, shapes and values refuses what can be seen in the files; what
cannot, the counters of `export --check numbers` tell beside an earlier report.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tiny
import tiny_heads
from tiny_heads import AUX_KEY, IDS, TARGET, alter, assert_same, make_draft

from eagle3_jax.config import RunConfig, run_file
from eagle3_jax.export import check
from eagle3_jax.formats import heads
from eagle3_jax.formats.eagle3 import EAGLE3
from eagle3_jax.formats.heads import load_draft, save_draft
from eagle3_jax.formats.stored import DraftFormatError
from eagle3_jax.models.checkpoint.fetch import Target

EMBEDDINGS = "embed_tokens.weight"
RISING, OFFSETS = np.array([0, 3, 4, 7, 10, 12]), np.array(IDS) - np.arange(6)
NORM, FC = "midlayer.hidden_norm.weight", np.zeros((16, 48), np.float32)
AUX = r"got \({}\), expected \(2, 6, 9\), the target's; each is one {}"
OTHER = np.isin(np.arange(50), [0, 3, 4, 17, 20, 48])


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.make_target(TARGET)


def embeddings(target: Target) -> np.ndarray:
    return np.array(target.model.embed[...], np.float32)


def stale(target: Target, change: float = 0.25) -> np.ndarray:
    """One row was trained on."""
    changed = embeddings(target)
    changed[17, 3] += change
    return changed


# Name -> form, tensors, config, and what the reader says. A tensor may be a function of the target; None removes.
REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "d2t absent": ("sglang", {"d2t": None}, {}, r"missing tensor d2t \[6\]"),
    "d2t absolute": ("sglang", {"d2t": np.array(IDS)}, {}, "d2t: got absolute target ids, expected offsets"),
    "d2t absolute, no t2d": ("vllm", {"d2t": np.array(IDS), "t2d": None}, {}, r"d2t: as offsets .*within 0\.\.49"),
    "d2t absolute, neighbours apart": ("sglang", {"d2t": RISING, "t2d": None}, {}, "as absolute ids do"),
    "d2t not ascending": ("sglang", {"d2t": np.array([0, 2, 2, 14, 16, -3]), "t2d": None}, {}, "ascending, distinct"),
    "d2t of floats": ("sglang", {"d2t": OFFSETS.astype(np.float32)}, {}, "d2t: got dtype float32"),
    "t2d of other tokens": ("sglang", {"t2d": OTHER}, {}, "t2d: got other tokens"),
    "t2d too short": ("sglang", {"t2d": OTHER[:-1]}, {}, r"t2d: got shape \[49\], expected \[50\]"),
    "hidden_norm absent": ("sglang", {NORM: None}, {}, r"missing tensor midlayer\.hidden_norm\.weight \[16\]"),
    "fc misspelt": ("sglang", {"fc.weight": None, "fcs.weight": FC}, {}, r"tensor fc\.weight[\s\S]*surplus .*fcs"),
    "stale embeddings": ("sglang", {EMBEDDINGS: stale}, {}, r"embed_tokens.*target.s .*difference 0\.25\)"),
    "NaN in the embeddings": ("vllm", {EMBEDDINGS: lambda target: stale(target, np.nan)}, {}, "difference nan"),
    "another architecture": (
        "sglang",
        {},
        {"architectures": ["LlamaForCausalLMEagle"]},
        r"architectures: got \['LlamaF",
    ),
    "aux layers as SGLang counts, for vLLM": ("vllm", {}, {AUX_KEY: [1, 5, 8]}, AUX.format("1, 5, 8", "less")),
    "aux layers counted twice": ("vllm", {}, {AUX_KEY: [3, 7, 10]}, AUX.format("3, 7, 10", "more")),
    "aux layers as vLLM counts, for SGLang": (
        "sglang",
        {},
        {"eagle_config": {AUX_KEY: [2, 6, 9]}},
        AUX.format("3, 7, 10", "more"),
    ),
    "aux layers counted alike for both": (
        "sglang",
        {},
        {AUX_KEY: [2, 6, 9], "eagle_config": {AUX_KEY: [2, 6, 9]}},
        r"eagle_config.*got \[2, 6, 9\], expected \[1, 5, 8\]",
    ),
    "RoPE theta in one spelling": ("sglang", {}, {"rope_theta": 5e5}, r"rope_theta: got"),
}


@pytest.mark.parametrize("trap", REFUSED)
def test_a_spoiled_export_is_refused_for_what_it_is(tmp_path: pathlib.Path, target: Target, trap: str) -> None:
    form, tensors, config, message = REFUSED[trap]
    save_draft(tmp_path / "head", make_draft(), target=TARGET, dtype="float32", form=form)
    alter(tmp_path / "head", {k: x(target) if callable(x) else x for k, x in tensors.items()}, **config)
    with pytest.raises(DraftFormatError, match=message):
        load_draft(tmp_path / "head", target=target)


@pytest.mark.parametrize(
    ("prefix", "architecture"),
    [
        ("midlayer.", "Eagle3LlamaForCausalLM"),  # SGLang refuses it
        ("layers.0.", "LlamaForCausalLMEagle3"),
        ("model.midlayer.", "LlamaForCausalLMEagle3"),  # vLLM takes no prefix
        ("model.layers.0.", "LlamaForCausalLMEagle3"),
    ],
)
def test_what_an_engine_takes_is_taken(tmp_path: pathlib.Path, target: Target, prefix: str, architecture: str) -> None:
    """No `t2d`, embeddings that are the target's, no RoPE base: 10000."""
    draft = make_draft()
    save_draft(tmp_path / "head", draft, target=TARGET, dtype="float32")
    held, _ = tiny_heads.read(tmp_path / "head")
    renamed = {name.replace("midlayer.", prefix): x for name, x in held.items() if name != "t2d"}
    safetensors.numpy.save_file(renamed | {EMBEDDINGS: embeddings(target)}, tmp_path / "head/model.safetensors")
    alter(tmp_path / "head", architectures=[architecture], rope_theta=None, rope_parameters=None)
    assert_same(load_draft(tmp_path / "head", target=target), draft)


@pytest.mark.parametrize(
    ("stored", "loaded"), [(np.float32, np.float32), (ml_dtypes.bfloat16, np.float32), (np.float16, ml_dtypes.bfloat16)]
)
def test_a_copy_of_the_embeddings_may_be_rounded_to_its_dtype_and_no_more(
    tmp_path: pathlib.Path, target: Target, stored: Any, loaded: Any
) -> None:
    """Rounded by whoever stored it, by whoever loads the target, or by both."""
    save_draft(tmp_path / "head", make_draft(), target=TARGET, dtype="float32")
    copy = embeddings(target).astype(stored)
    rounded = dataclasses.replace(target, model=jax.tree.map(lambda leaf: leaf.astype(loaded), target.model))
    alter(tmp_path / "head", {EMBEDDINGS: copy})
    load_draft(tmp_path / "head", target=rounded)
    apart = copy.astype(np.float32)
    place = np.unravel_index(np.abs(apart).argmax(), apart.shape)
    apart[place] *= 1 + 8 * max(float(ml_dtypes.finfo(dtype).eps) for dtype in (stored, loaded))
    alter(tmp_path / "head", {EMBEDDINGS: apart.astype(stored)})
    with pytest.raises(DraftFormatError, match=EMBEDDINGS):
        load_draft(tmp_path / "head", target=rounded)


# What no reader can see: fields of a config that fit each other, and a mapping that could be one.
THETA = {"rope_theta": 500.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
UNSEEN: dict[str, dict[str, Any]] = {
    "RoPE theta in both spellings": {"fields": THETA},
    "aux layers counted twice, by the run too": {"aux_layers": (2, 3, 4)},
    "d2t of zeros, no t2d": {"tensors": {"d2t": np.zeros(48, np.int64), "t2d": None}},
    "norm_output of a head without": {"fields": {"norm_output": True}},
}


@pytest.fixture(scope="module")
def trained(whole_run: tiny.Run, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run with an exported head, and beside it what `numbers` says of that."""
    run = whole_run.copy(tmp_path_factory.mktemp("traps") / "copy")
    paths = ["--run-dir", str(run.folder), "--target.name", str(run.config.with_name("target"))]
    config = run_file.load(run.config, [*paths, "--evaluate.limit", "4", "--evaluate.max-tokens", "48"])
    check.run(config, config.folder("prepare") / "held_out.jsonl", "numbers")
    return config


def foreign(config: RunConfig, folder: pathlib.Path, tensors: Any = None, **fields: Any) -> RunConfig:
    """The run with its head as one from elsewhere, with other tensors and fields."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((config.folder("export") / name).read_bytes())
    alter(folder, tensors, **fields)
    return dataclasses.replace(config, evaluate=dataclasses.replace(config.evaluate, draft=str(folder)))


@pytest.mark.long
@pytest.mark.parametrize("trap", UNSEEN)
def test_what_no_reader_sees_the_counters_tell(trained: RunConfig, tmp_path: pathlib.Path, trap: str) -> None:
    spoiled: Any = UNSEEN[trap]
    config = foreign(trained, tmp_path / "head", spoiled.get("tensors"), **spoiled.get("fields", {}))
    if layers := spoiled.get("aux_layers"):
        outputs = {AUX_KEY: [layer - 1 for layer in layers], "use_aux_hidden_state": True}
        own: dict[str, Any] = {AUX_KEY: list(layers), "eagle_config": outputs}
        alter(tmp_path / "head", **own)
        config = dataclasses.replace(config, target=dataclasses.replace(config.target, aux_layers=layers))
    reference = pathlib.Path(config.run_dir, "check/numbers.json")
    with pytest.raises(check.CheckError, match=r"numbers\.json: rounds: got \d+, expected \d+\n.*accepted: got"):
        check.run(config, config.folder("prepare") / "held_out.jsonl", "numbers", expect=reference)


@pytest.mark.long
def test_the_same_head_from_elsewhere_counts_the_same(trained: RunConfig, tmp_path: pathlib.Path) -> None:
    EAGLE3.write(tmp_path / "head", heads.read(trained.folder("export")), "vllm")
    config = dataclasses.replace(trained, evaluate=dataclasses.replace(trained.evaluate, draft=str(tmp_path / "head")))
    reference = pathlib.Path(config.run_dir, "check/numbers.json")
    kept = reference.read_bytes()
    report = check.run(config, config.folder("prepare") / "held_out.jsonl", "numbers", expect=reference)
    assert report["differences"] == [] and reference.read_bytes() == kept
