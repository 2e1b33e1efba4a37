"""Writes requirements/: exact versions with the sha256 of all their files, for every supported Python and platform.

    python tools/lock.py                                 # after a change of pyproject.toml; fitting versions stay
    python tools/lock.py --upgrade                       # the newest of everything
    python tools/lock.py --upgrade-package transformers  # any option of `uv pip compile`

Requires uv on the PATH (`pip install uv`) and a network. Each file holds a role's additions to the previous role;
tpu.txt holds the additions to train.txt, docs.txt those to decode.txt. tpu.txt and test.txt have the same libtpu.
tpu-inference.txt replaces what of decode.txt that engine pins to other versions, for a test of both in one environment.
"""

import fnmatch
import pathlib
import re
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
# Each role with its extras, which contain those of the previous role.
ROLES = {"decode": [], "train": ["prepare", "train", "report"], "test": ["test", "reference"]}
# Not locked: the package index chooses the wheel of torch, and so its hash and its CUDA libraries.
UNLOCKED = ("torch", "triton", "cuda-*", "nvidia-*")
# Python 3.11's newest jax computes on CPUs without YNNPACK, and slower: eagle3_jax/__init__.py.
LINES = ["jax==0.10.1; python_version < '3.12'", "jaxlib==0.10.1; python_version < '3.12'"]


def entries(text: str) -> list[str]:
    """Splits a lock file into requirements, each with its hashes."""
    return re.findall(r"^\S+==(?:.*\\\n)+.*\n", text, re.MULTILINE)


def resolve(extras: list[str], options: list[str], pinned: str, *beside: str) -> str:
    """Runs `uv pip compile` for the package with `extras`, its build and what is `beside` it; prefers `pinned`."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    with tempfile.TemporaryDirectory() as scratch:
        output = pathlib.Path(scratch, "lock.txt")
        output.write_text(pinned)
        command = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes"]
        command += ["--no-header", "--no-annotate", "--output-file", str(output), "pyproject.toml", "-", *options]
        for extra in extras:
            command += ["--extra", extra]
        lines = "\n".join([*build, *LINES, *beside])
        subprocess.run(command, check=True, cwd=ROOT, input=lines, text=True, stdout=subprocess.DEVNULL)
        return output.read_text()


def main() -> None:
    locks = {role: FOLDER / f"{role}.txt" for role in (*ROLES, "docs")}
    whole = "".join(entry for path in locks.values() if path.exists() for entry in entries(path.read_text()))
    whole = resolve([*(extra for extras in ROLES.values() for extra in extras), "docs"], sys.argv[1:], whole)
    held: dict[str, list[str]] = {}
    for role, base, extras in [
        *zip(ROLES, [None, *ROLES], ROLES.values(), strict=False),
        ("tpu", "train", [*ROLES["train"], "tpu", "serve", "gcs"]),
        ("docs", "decode", ["docs"]),
    ]:
        found = entries(resolve(extras, [], whole))  # a role alone has the versions of the whole
        held[role] = [x for x in found if not any(fnmatch.fnmatch(x.split("==")[0], name) for name in UNLOCKED)]
        added = [entry for entry in held[role] if base is None or entry not in held[base]]
        (FOLDER / f"{role}.txt").write_text((f"-r {base}.txt\n" if base else "") + "".join(added))
    versions = {entry.split()[0] for entry in held["decode"]}
    names = {version.split("==")[0] for version in versions}
    beside = entries(resolve([], [], whole, "tpu-inference; python_version >= '3.12'"))
    others = [x for x in beside if x.split("==")[0] in names and x.split()[0] not in versions]
    (FOLDER / "tpu-inference.txt").write_text("".join(others))


if __name__ == "__main__":
    main()
