"""`DraftKind`, the record of a kind of draft; the registry of them (`config.kinds.KINDS`); and `StoredHead`, a draft
head on disk independent of its form.
"""

from __future__ import annotations

import dataclasses
import pathlib
import pkgutil
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64

from eagle3_jax.config import DraftConfig
from eagle3_jax.config.kinds import KINDS
from eagle3_jax.formats import files
from eagle3_jax.formats.files import DraftFormatError
from eagle3_jax.formats.tensors import LM_HEAD, Tensors
from eagle3_jax.models.checkpoint.fetch import Target
from eagle3_jax.models.drafts.head import Draft, Head
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.runs import disk

Path = str | pathlib.Path
AnyTarget = Target | ModelConfig
BLOCKS = ("q8_0", "q4_0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftKind:
    """A kind of draft: its names, how its folders are recognised and read, and how heads are written.

    Attributes:
        name: its row in `config.kinds.KINDS`.
        label: the method's name, in tables, errors and model cards.
        network: class of its heads.
        method: vLLM's `method`. algorithm: SGLang's `--speculative-algorithm`.
        is_mine: (folder, its config.json, {} without one) -> whether it holds such a draft.
        shape: (draft config, target) -> config of a head to train (ValueError: sizes that the target does not fit).
        own_layers: whether a draft says which boundaries it reads, so that the target is observed there.
        needs_weights: whether a draft is loaded for a loaded target alone, not for an architecture.
        any_target: whether it drafts for every target of its vocabulary.
        token_map: returns the file of a token map, local or fetched (ValueError: there is none); None: it takes none.
    """

    name: str
    label: str
    network: type[Any]
    method: str
    algorithm: str
    is_mine: Callable[[pathlib.Path, dict[str, Any]], bool]
    shape: Callable[[DraftConfig, Any], Any] | None = None
    own_layers: bool = True
    needs_weights: bool = False
    any_target: bool = False
    token_map: Callable[[Path], pathlib.Path] | None = None

    def load(self, folder: pathlib.Path | None, target: Any, dtype: Any, token_map: Path | None = None) -> Draft:
        """Loads a draft, see `heads.load_draft`; without a folder the one in the target's own checkpoint."""
        raise NotImplementedError

    def read(self, folder: pathlib.Path, target: AnyTarget | None = None) -> StoredHead:
        """Reads a head, see `heads.read`. Raises DraftFormatError for a kind without other forms."""
        raise DraftFormatError(f"{folder}: got a draft of {self.label}, expected a head that has several forms")

    def stored(self, draft: Draft, target: ModelConfig, dtype: str, name: str | None) -> StoredHead:
        """Prepares a head in memory to be written; `name` is the target's. Raises DraftFormatError: it has no form."""
        raise DraftFormatError(f"draft: got a draft of {self.label}, which is not written")

    def write(self, folder: pathlib.Path, head: StoredHead, form: str) -> None:
        """Writes a head to `folder`, reads it back and compares every bit.

        Raises DraftFormatError: the head has problems, the form's engine could not run it, or it does not read back.
        """
        raise NotImplementedError

    def served_by(self, head: StoredHead, form: str) -> str:
        """Names the engines that run the head as trained, with their first version, then those that read it only."""
        return ""

    def warning(self, head: StoredHead, form: str) -> str:
        """Warns of an engine that reads the form and rotates otherwise than its config.json says, without an error."""
        return ""

    def block(self, folder: pathlib.Path) -> int | None:
        """Returns how many tokens the head in a folder drafts at once; None: its chains are as long as asked for."""
        return None


@dataclasses.dataclass(frozen=True)
class StoredHead:
    """A draft head on disk.

    Attributes:
        config: its shape, as the kind writes it down.
        tensors: those of the kind's table, in the stored dtype. Without `lm_head.weight` the LM head is the target's,
            at the rows of the draft vocabulary. `embed_tokens.weight` is kept only if the head is not as wide as its
            target.
        token_ids: target ids of the draft tokens, ascending.
        target_layers: number of the target's layers, if known.
        verifier: the target by name, as in speculators: `name_or_path`, `architectures`.
        blocks: how a GGUF file holds its matrices, `q8_0` or `q4_0`; None: in their dtype.
        problems: why it cannot be written.
    """

    kind: Any
    config: Any
    tensors: Tensors
    token_ids: Int64[np.ndarray, " dv"]
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    target_layers: int | None = None
    verifier: dict[str, Any] | None = None
    blocks: str | None = None
    problems: tuple[str, ...] = ()

    @property
    def tied(self) -> bool:
        return LM_HEAD not in self.tensors

    def in_dtype(self, dtype: str) -> StoredHead:
        """Returns the head with its floats in another dtype, or with `blocks` of that name."""
        if dtype in BLOCKS:
            return dataclasses.replace(self, blocks=dtype)
        return dataclasses.replace(self, tensors={name: x.astype(jnp.dtype(dtype)) for name, x in self.tensors.items()})

    def same(self, other: StoredHead) -> bool:
        """Tells whether two heads draft alike: equal kind, shape, token ids and tensors, to the bit."""
        pairs = ((x, other.tensors[name]) for name, x in self.tensors.items())
        return (
            (self.kind, self.config) == (other.kind, other.config)
            and np.array_equal(self.token_ids, other.token_ids)
            and self.tensors.keys() == other.tensors.keys()
            and all((x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes()) for x, y in pairs)
        )


def named(name: str) -> DraftKind:
    """Returns the record of a kind."""
    return pkgutil.resolve_name(KINDS[name].record)


def every() -> list[DraftKind]:
    """Lists the records of all kinds."""
    return [named(name) for name in KINDS]


def of_folder(folder: pathlib.Path) -> DraftKind:
    """Tells what kind of draft a folder holds. Raises DraftFormatError: its config.json cannot be read."""
    values = files.read_config(folder) if files.gguf_file(folder) or (folder / files.CONFIG).exists() else {}
    return next(kind for kind in reversed(every()) if kind.is_mine(folder, values))


def of_head(head: Head) -> DraftKind:
    """Tells the kind of a head in memory."""
    kinds = {kind.network: kind for kind in every()}
    return next(kinds[network] for network in type(head).__mro__ if network in kinds)


def token_map_digest(token_map: str) -> str:
    """Returns the sha256 of a token map, in hex. Raises ValueError: there is none."""
    return disk.digest(next(kind.token_map for kind in every() if kind.token_map)(token_map))
