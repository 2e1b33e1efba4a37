"""Loss and gradients equal SpecForge's and speculators' own code, for each kind of head; a mistake is seen in each."""

import contextlib
import hashlib
import os
import pathlib
import subprocess
import sys

import compilation_cache
import pytest
import tiny

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def peers(tmp_path):
    """Both packages in a folder of their own, without their dependencies; installed once for each pair of versions."""
    pytest.importorskip("torch")
    digest = hashlib.sha256((ROOT / "tools/peers.txt").read_bytes()).hexdigest()[:12]
    kept = compilation_cache.folder() / f"peers-{sys.version_info[0]}.{sys.version_info[1]}-{digest}"
    if kept.exists():
        return kept
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    folder = tmp_path / "peers"
    installed = subprocess.run(
        [*command, "--requirement", str(ROOT / "tools/peers.txt"), "--target", str(folder)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    if installed.returncode and "No matching distribution found for specforge" in installed.stderr:
        pytest.skip("no network")
    assert installed.returncode == 0, installed.stderr
    kept.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # another disk, or another process was first
        os.rename(folder, kept)
    return kept if kept.exists() else folder


@pytest.mark.long
def test_training_is_specforge_s_and_speculators_(peers):
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tools/parity.py"), str(peers), "--seeds", "1"],
        env=tiny.environment(PYTHONPATH=str(ROOT)),  # a process of its own: the peers' imports stay there; with PyTorch
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [line for line in ended.stdout.splitlines() if line.startswith(("specforge", "speculators"))]
    assert len(rows) == 2 + 3 + 4  # EAGLE-3, SpecForge's blocks, speculators'
