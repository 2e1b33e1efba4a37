"""`StoredKind`, a kind of head whose folder is a config.json and tensors: read into a `StoredHead`, written from it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from eagle3_jax.formats import files
from eagle3_jax.formats.compatibility import Engines
from eagle3_jax.formats.engines import TPU_INFERENCE
from eagle3_jax.formats.files import DraftFormatError
from eagle3_jax.formats.forms import EAGLE3_JAX, FORMS, LLAMA_CPP
from eagle3_jax.formats.kinds import BLOCKS, AnyTarget, DraftKind, Path, StoredHead
from eagle3_jax.formats.llama_cpp.writer import write as write_gguf
from eagle3_jax.formats.tensors import EMBEDDINGS, LM_HEAD, Tensors, head_problems, ids_problems, vocabulary_tensors
from eagle3_jax.kernels.linear.layouts import dense
from eagle3_jax.mesh import fetch, parameter_path
from eagle3_jax.models.checkpoint.fetch import Target, read_config
from eagle3_jax.models.checkpoint.fetch import fetch as fetch_target
from eagle3_jax.models.checkpoint.table import Entry, plain
from eagle3_jax.models.drafts.head import Draft, Head
from eagle3_jax.models.shapes import shapes_of
from eagle3_jax.models.target_config import ModelConfig, default_aux_layers, without_aux_layers
from eagle3_jax.runs import disk

_ROWS = 8192  # rows of embeddings compared at a time: the whole table may fill most of a device


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredKind(DraftKind):
    """See `DraftKind`.

    Attributes:
        described: (folder, config.json, tensors, problems) -> the fields of `StoredHead` that config.json tells,
            `config` among them; None, with the reasons appended to `problems`, if that fails.
        table: config -> the tensors of each parameter path; `lm_head` may be left out.
        values: (a head, a form) -> config.json.
        canonical: a tensor's name in a folder -> the one in the table. spelled: (that, a form) -> its name there.
        arranged: (tensors under the table's names, config.json) -> the same, with their rows in the table's order.
        on_disk: (config, target) -> the config as it is written down.
        contradictions: lists the fields of a config that contradict each other.
        drafts: config -> see `block`.
        shares_lm_head: whether the LM head of the whole vocabulary is the target's, and not stored.
    """

    described: Callable[[pathlib.Path, dict[str, Any], Tensors, list[str]], dict[str, Any] | None]
    table: Callable[[Any], dict[str, Entry]]
    values: Callable[[StoredHead, str], dict[str, Any]]
    engines: Engines
    canonical: Callable[[str], str] = str
    spelled: Callable[[str, str], str] = lambda name, form: name
    arranged: Callable[[Tensors, dict[str, Any]], Tensors] = lambda tensors, values: tensors
    on_disk: Callable[[Any, ModelConfig], Any] = lambda config, target: config
    contradictions: Callable[[Any], list[str]] = lambda config: []
    drafts: Callable[[Any], int] | None = None
    shares_lm_head: bool = True

    def misfits(self, config: Any, target: ModelConfig) -> list[str]:
        """Lists why a head cannot draft for a target, a line for each field; empty when it can."""
        if not self.own_layers and not target.aux_layers:
            return [without_aux_layers(target)]
        aux_layers = config.aux_layers or default_aux_layers(target.num_hidden_layers)
        pairs = [
            ("vocab_size", config.vocab_size, target.vocab_size),
            ("target_hidden_size", config.target_hidden_size, target.hidden_size),
            ("hidden_size", config.hidden_size, target.hidden_size),  # the head reads the target's embeddings
        ]
        pairs += [] if self.own_layers else [("aux layers (boundaries)", aux_layers, target.aux_layers)]
        problems = [f"{field}: got {got}, expected {its}, the target's" for field, got, its in pairs if got != its]
        for shift, hint in ((1, "less, as SGLang counts: layers, by their outputs"), (-1, "more, as if counted twice")):
            if not self.own_layers and tuple(boundary + shift for boundary in aux_layers) == target.aux_layers:
                problems[-1] += f"; each is one {hint}"
        if self.own_layers and aux_layers[-1] > target.num_hidden_layers:
            expected = f"boundaries up to {target.num_hidden_layers}, the target's last"
            problems.append(f"aux layers (boundaries): got {aux_layers}, expected {expected}")
        if config.draft_vocab_size > target.vocab_size:
            problems.append(f"draft_vocab_size: got {config.draft_vocab_size}, expected at most {target.vocab_size}")
        return problems

    def read(self, folder: pathlib.Path, target: AnyTarget | None = None) -> StoredHead:
        tensors, problems = files.read_tensors(folder, self.canonical)
        values = files.read_config(folder)
        found = self.described(folder, values, tensors, problems)
        if found is not None:
            config = found["config"]
            problems += head_problems(tensors, self.table(config), config)
            shape = target.model.config if isinstance(target, Target) else target
            if shape is not None:
                problems += self.misfits(config, shape)
                layers = shape.num_hidden_layers
                if (depth := found.get("target_layers")) not in (None, layers):
                    problems.append(f"num_target_layers: got {depth!r}, expected {layers}, the target's")
            if isinstance(target, Target):
                problems += stale(tensors, EMBEDDINGS, target.model.embed[...], "the target's embeddings")
                if self._shares(config):
                    problems += stale(tensors, LM_HEAD, target.model.output_rows, "the target's LM head")
        if problems or found is None:
            raise DraftFormatError(f"{folder} does not hold a usable {self.label} head:\n  " + "\n  ".join(problems))
        dropped = {"d2t", "t2d"} | ({EMBEDDINGS} if config.target_hidden_size == config.hidden_size else set())
        held = {name: x for name, x in self.arranged(tensors, values).items() if name not in dropped}
        ids = np.arange(config.draft_vocab_size, dtype=np.int64) + tensors.get("d2t", 0)
        return StoredHead(self, tensors=held, token_ids=ids, **found)

    def load(self, folder: pathlib.Path | None, target: AnyTarget, dtype: Any, token_map: Path | None = None) -> Draft:
        assert folder is not None
        return self.draft(self.read(folder, target), target, dtype)

    def draft(self, stored: StoredHead, target: AnyTarget, dtype: Any) -> Draft:
        """Loads a stored head into memory. Raises DraftFormatError if its LM head is the target's, and not loaded."""
        config, shape = stored.config, target.model.config if isinstance(target, Target) else target
        if config.aux_layers is None:
            config = dataclasses.replace(config, aux_layers=default_aux_layers(shape.num_hidden_layers))
        rows = stored.tensors.get(LM_HEAD)
        if stored.tied or (self._shares(config) and isinstance(target, Target)):
            rows = dense(target.model.output_rows) if isinstance(target, Target) else None
            if not isinstance(rows, jax.Array) or not rows.is_fully_addressable:
                raise DraftFormatError(
                    f"missing tensor {LM_HEAD} {[config.draft_vocab_size, config.hidden_size]}: to use the target's "
                    "rows, expected a target that is loaded, with its LM head on this process"
                )
            rows = rows if config.draft_vocab_size == config.vocab_size else rows[stored.token_ids]
        head = filled(self.network, config, dtype, self.table(config), stored.tensors, jnp.asarray(rows))
        return Draft(head, jnp.asarray(stored.token_ids, jnp.int32))

    def stored(self, draft: Draft, target: ModelConfig, dtype: str, name: str | None) -> StoredHead:
        config = self.on_disk(draft.head.config, target)
        ids = np.asarray(draft.token_ids).astype(np.int64)
        problems = self.misfits(config, target) + ids_problems(ids, config) + self.contradictions(config)
        table = self.table(config) | {"lm_head": plain(LM_HEAD, config.draft_vocab_size, config.hidden_size)}
        blocks = dtype if dtype in BLOCKS else None
        tensors = to_tensors(draft.head, table, lambda name: "float32" if blocks else dtype, problems)
        if self._shares(config):
            tensors.pop(LM_HEAD, None)
        eos = target.eos_token_ids
        return StoredHead(
            self,
            config,
            tensors,
            ids,
            bos_token_id=target.bos_token_id,
            eos_token_id=eos[0] if len(eos) == 1 else list(eos) or None,
            target_layers=target.num_hidden_layers,
            verifier=verifier(name, target.architecture),
            blocks=blocks,
            problems=tuple(problems),
        )

    def write(self, folder: pathlib.Path, head: StoredHead, form: str) -> None:
        if refused := self.refusals(head, form):
            able = [other for other in FORMS if not self.refusals(head, other)]
            refused.append(f"export.format: got {form!r}, expected {' or '.join(able) or 'another head'}")
        if head.blocks and form != LLAMA_CPP.name:
            refused.append(f"export.dtype: got {head.blocks!r}, expected a dtype of floats in the form {form!r}")
        if problems := [*head.problems, *refused]:
            raise DraftFormatError("this draft cannot be saved:\n  " + "\n  ".join(problems))
        if form == LLAMA_CPP.name:
            head = self._write_gguf(folder, head)
        else:
            tensors = {self.spelled(name, form): np.ascontiguousarray(tensor) for name, tensor in head.tensors.items()}
            vocabulary = vocabulary_tensors(head.token_ids, head.config.vocab_size)
            files.write(folder, self.values(head, form), tensors | vocabulary)
        if not self.read(folder).same(head):
            raise DraftFormatError(f"{folder}: the head does not read back the same; is the disk full?")

    def _write_gguf(self, folder: pathlib.Path, head: StoredHead) -> StoredHead:
        """Writes a folder with a GGUF file, and returns the head as it holds it."""
        if (name := (head.verifier or {}).get("name_or_path")) is None:
            raise DraftFormatError("target: unknown, expected the name of the target, whose tokenizer the file holds")
        target = disk.local(fetch_target(name, whole=False), without=".safetensors")
        shape = read_config(target, None if self.own_layers else head.config.aux_layers)
        if problems := self.misfits(head.config, shape):
            raise DraftFormatError(f"this draft does not fit {name}:\n  " + "\n  ".join(problems))
        folder.mkdir(parents=True)
        values, parts = self.values(head, LLAMA_CPP.name), (head.config, head.tensors, head.token_ids)
        of_target: dict[str, Any] = {"target": target, "depth": shape.num_hidden_layers}
        held = write_gguf(folder / files.HEAD, values, *parts, blocks=head.blocks, **of_target)
        return dataclasses.replace(head, tensors=held)

    def refusals(self, head: StoredHead, form: str) -> list[str]:
        """Lists the properties that the form's own engine cannot run, each as field, got, expected, engine and version.

        A target that the engine cannot draft for is no refusal: the head still drafts in this package.
        """
        if form == EAGLE3_JAX.name:
            return []
        if readers := self.engines.readers.get(form):
            return self.engines.cannot_run(readers[0], head, form)
        engine = FORMS[form].engines[0]
        return [f"head: got a {self.label} head, expected an EAGLE-3 head; {engine} has no {self.label} heads"]

    def served_by(self, head: StoredHead, form: str) -> str:
        return f"served by {form}" if form == EAGLE3_JAX.name else self.engines.served_by(head, form)

    def warning(self, head: StoredHead, form: str) -> str:
        rows = self.engines.ignored(TPU_INFERENCE, head, form, "RoPE")
        if not rows:
            return ""
        remedy = "tools/serve_tpu_inference.sh prints the overrides that set a block head right, where there are any"
        return f"{TPU_INFERENCE} rotates by another RoPE, without an error ({'; '.join(rows)}): {remedy}"

    def block(self, folder: pathlib.Path) -> int | None:
        """See `DraftKind`. Raises DraftFormatError: config.json does not describe such a head."""
        if self.drafts is None:
            return None
        problems: list[str] = []
        found = self.described(folder, files.read_config(folder), {}, problems)
        if found is None:
            raise DraftFormatError(f"{folder} does not describe a {self.label} head:\n  " + "\n  ".join(problems))
        return self.drafts(found["config"])

    def _shares(self, config: Any) -> bool:
        return self.shares_lm_head and config.draft_vocab_size == config.vocab_size


def filled(
    network: Callable[..., Any],
    config: Any,
    dtype: Any,
    table: Mapping[str, Entry],
    tensors: Mapping[str, Any],
    rows: Array,
) -> Head:
    """Makes a head of its tensors, arrays or what is read when indexed, on the default device; `rows`: its LM head."""
    lm_head = rows if rows.dtype == dtype else rows.astype(dtype)

    def value(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if (name := parameter_path(path)) == "lm_head":
            return lm_head
        parameter = table[name].whole(*(tensors[tensor] for tensor in table[name].tensors))
        return jnp.asarray(np.ascontiguousarray(parameter).astype(leaf.dtype))

    head = jax.tree_util.tree_map_with_path(value, shapes_of(lambda rngs: network(config, dtype=dtype, rngs=rngs)))
    head.lm_head = nnx.Param(lm_head)
    return head


def stale(tensors: Tensors, name: str, original: Any, words: str) -> list[str]:
    """Lists a copy of a target's tensor, with which vLLM drafts, that differs by more than the rounding of both dtypes.

    Either side may have been rounded to the other's dtype, or its own.
    """
    copy = tensors.get(name)
    if copy is None or not isinstance(original, jax.Array):
        return []
    if copy.shape != original.shape or not jnp.issubdtype(copy.dtype, np.floating):
        return []  # reported by `head_problems`
    kinds = [jnp.finfo(dtype) for dtype in (copy.dtype, original.dtype)]
    relative = sum(float(kind.eps) / 2 for kind in kinds)
    absolute = sum(float(kind.smallest_subnormal) / 2 for kind in kinds)
    differs, largest = False, 0.0
    for start in range(0, len(copy), _ROWS):
        got = copy[start : start + _ROWS].astype(np.float32)
        expected = np.asarray(fetch(original[start : start + _ROWS])).astype(np.float32)
        difference = np.abs(got - expected)
        differs |= not (difference <= relative * np.maximum(np.abs(got), np.abs(expected)) + absolute).all()
        largest = float(np.maximum(largest, difference.max()))  # keeps NaN
    problem = (
        f"{name}: got other values than {words} (largest difference {largest:.3g}), expected equal ones or none; "
        "without the tensor the target's are used"
    )
    return [problem] if differs else []


def verifier(name: str | None, architecture: str) -> dict[str, Any]:
    """Names a target as speculators does."""
    return {"name_or_path": name, "architectures": [architecture]}


def to_tensors(
    head: nnx.Module, table: Mapping[str, Entry], dtype_of: Callable[[str], Any], problems: list[str]
) -> Tensors:
    """Converts a head's parameters, by path, to its tensors. Appends to `problems` by parameter."""
    tensors: Tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(head):
        name = parameter_path(path)
        entry, value = table[name], np.asarray(leaf).astype(jnp.dtype(dtype_of(name)))
        if not np.isfinite(value).all():
            problems.append(f"{name}: got NaN or infinity; did the training diverge?")
        tensors |= dict(zip(entry.tensors, map(np.ascontiguousarray, entry.split(value)), strict=True))
    return tensors
