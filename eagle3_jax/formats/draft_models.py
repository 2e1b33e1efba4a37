"""Whole models on disk that draft for larger ones: tells them from draft heads, and checks them against the target."""

from __future__ import annotations

import pathlib
from typing import Any

import jax.numpy as jnp

from eagle3_jax.formats import fields, files
from eagle3_jax.formats.files import DraftFormatError
from eagle3_jax.formats.kinds import DraftKind, Path
from eagle3_jax.formats.tensors import canonical
from eagle3_jax.models.checkpoint.fetch import REGISTERED, Target, TargetError, fetch, load_tokenizer, read_config
from eagle3_jax.models.checkpoint.gguf_file import GGUF
from eagle3_jax.models.checkpoint.identity import tokenizer_digest
from eagle3_jax.models.checkpoint.load import WeightsError, load_model, locate
from eagle3_jax.models.drafts.head import Draft
from eagle3_jax.models.drafts.model import DraftModel
from eagle3_jax.models.families import FAMILIES
from eagle3_jax.models.families.vision import TEXT_OF, text_name
from eagle3_jax.runs import disk, manifest
from eagle3_jax.runs.disk import JsonError

_EXPECTED = (
    "the folder or GGUF file of a head, the name or folder of a smaller model, 'lookup', 'mtp', 'auto', or None for no "
    "drafts"
)
HEADS = pathlib.Path(__file__).parents[1] / "heads"
_ARCHITECTURES = {family.config.architecture for family in FAMILIES} | TEXT_OF.keys()


def packaged_heads() -> list[str]:
    """Lists the names of the heads in this package."""
    return sorted(path.parent.name for path in HEADS.glob(f"*/{manifest.NAME}"))


def resolve(draft: str | pathlib.Path, field: str = "draft", expected: str = _EXPECTED) -> pathlib.Path:
    """Returns a draft's folder: the given one, or that of the packaged head or model with this name; or a GGUF file.

    Raises TargetError, which names `field` and `expected`.
    """
    if (path := pathlib.Path(draft)).suffix == GGUF and path.is_file():
        return path
    if isinstance(draft, str):
        if draft in packaged_heads() and draft not in REGISTERED:  # a model comes before a head of its name
            return HEADS / draft
        return disk.local(fetch(draft, field=field, expected=expected))
    if not draft.is_dir():
        raise TargetError(f"{field}: got {str(draft)!r}, no such folder; expected {expected}")
    return draft


def is_model(folder: pathlib.Path) -> bool:
    """Tells whether a folder holds a whole model, by config.json and the names of its tensors.

    Heads of EAGLE and EAGLE-2 are called LlamaForCausalLM too, but have an `fc` and no final norm.
    """
    try:
        values = files.read_config(folder)
        if fields.architecture(values) not in _ARCHITECTURES or "draft_vocab_size" in values:
            return False
        names = {text_name(name) for name in locate(folder)}
    except (DraftFormatError, WeightsError, JsonError):
        return False  # damaged: the reader of heads reports the error
    return "model.norm.weight" in names and "fc.weight" not in map(canonical, names)


class _SmallerModel(DraftKind):
    def load(self, folder: pathlib.Path | None, target: Target, dtype: Any, token_map: Path | None = None) -> Draft:
        """See `DraftKind`; its vocabulary and tokenizer must be the target's. Raises also as `load_target` does."""
        assert folder is not None
        shape, size = read_config(folder), target.model.config.vocab_size
        got = {"vocab_size": shape.vocab_size, "tokenizer": tokenizer_digest(load_tokenizer(folder))}
        expected = {"vocab_size": size, "tokenizer": target.identity["tokenizer"]}
        problems = [
            f"{field}: got {got[field]}, expected {expected[field]}, the target's"
            for field in got
            if got[field] != expected[field]
        ]
        if shape.recurrent:
            problems.append(f"architectures: got {shape.architecture}, whose layers keep a state; expected one without")
        if problems:
            raise DraftFormatError(f"{folder} cannot draft for this target:\n  " + "\n  ".join(problems))
        return Draft(DraftModel(load_model(folder, shape, jnp.dtype(dtype))), jnp.arange(size, dtype=jnp.int32))


MODEL = _SmallerModel(
    name="model",
    label="a smaller model",
    network=DraftModel,
    method="draft_model",
    algorithm="STANDALONE",
    is_mine=lambda folder, values: is_model(folder),
    needs_weights=True,
    any_target=True,
)
