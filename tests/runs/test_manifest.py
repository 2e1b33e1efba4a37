"""Manifests: finished work is recognised, other work is refused, half-written files never appear."""

import os
import socket

import pytest

from eagle3_jax.runs import disk, manifest
from eagle3_jax.runs.manifest import ManifestError

IDENTITY = {"verb": "extract", "config": {"max_length": 8}, "inputs": ["a", "b"]}


def test_begin_and_finish(tmp_path):
    folder = tmp_path / "deep" / "features"
    assert manifest.begin(folder, IDENTITY | {"aux_layers": (2, 8)}) is False
    same = IDENTITY | {"aux_layers": [2, 8]}  # as JSON
    assert manifest.begin(folder, same) is False  # killed before the end: the work goes on
    manifest.finish(folder, tokens=12)
    assert manifest.begin(folder, same) is True
    found = manifest.read(folder, "extract")
    assert (found["identity"], found["results"]) == (same, {"tokens": 12})
    assert found["versions"]["jax"]


def test_other_work_is_refused_field_by_field(tmp_path):
    manifest.begin(tmp_path, IDENTITY)
    other = {"verb": "extract", "config": {"max_length": 16}, "inputs": ["a", "c"], "seed": 1}
    with pytest.raises(ManifestError) as refused:
        manifest.begin(tmp_path, other)
    message = str(refused.value)
    assert "config.max_length: found 8, expected 16" in message
    assert "inputs: found ['a', 'b'], expected ['a', 'c']" in message
    assert "seed: found None, expected 1" in message
    assert "verb" not in message


def test_unfinished_and_missing_inputs_are_refused(tmp_path):
    with pytest.raises(ManifestError, match=r"not found, expected the output of `python -m eagle3_jax\.extract`"):
        manifest.read(tmp_path, "extract")
    manifest.begin(tmp_path, IDENTITY)
    with pytest.raises(ManifestError, match=r"unfinished, run `python -m eagle3_jax\.extract`"):
        manifest.read(tmp_path, "extract")


def test_altered_and_missing_files_are_refused_by_name(tmp_path):
    manifest.begin(tmp_path, IDENTITY)
    (tmp_path / "train.jsonl").write_text("a")
    manifest.finish(tmp_path, files=["train.jsonl"])
    manifest.read(tmp_path, "prepare")
    (tmp_path / "train.jsonl").write_text("b")
    with pytest.raises(ManifestError, match=r"train\.jsonl: altered since .*run `python -m eagle3_jax\.prepare` again"):
        manifest.read(tmp_path, "prepare")
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(ManifestError, match=r"train\.jsonl: not found"):
        manifest.read(tmp_path, "prepare")
    manifest.read(tmp_path, "prepare", verify=False)


def test_a_folder_of_another_version_is_refused(tmp_path):
    other = manifest.FORMAT + 1
    disk.write_json(tmp_path / manifest.NAME, {"format": other, "identity": {}, "finished": True, "results": {}})
    for look in (lambda: manifest.read(tmp_path, "extract"), lambda: manifest.begin(tmp_path, {})):
        with pytest.raises(ManifestError, match=f"got format {other}, expected {manifest.FORMAT}; another version"):
            look()


def test_a_log_forgets_a_torn_line_and_refuses_an_altered_one(tmp_path):
    path = tmp_path / "train.jsonl.partial"
    assert disk.read_log(path) == []
    with disk.Log(path) as log:
        log.append({"text": "één\u2028"})
        log.append(["a", 2])
        log.write("0123abcd {")
    assert disk.read_log(path) == [{"text": "één\u2028"}, ["a", 2]]
    with disk.Log(path) as log:
        log.append(3)
        log.write("0123abcd {")
    assert disk.read_log(path)[2:] == [3]
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(disk.JsonError, match=r"partial, line 2: altered"):
        disk.read_log(path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", "\udcff"])
def test_a_damaged_manifest_is_refused(tmp_path, content):
    (tmp_path / manifest.NAME).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ManifestError, match="expected a manifest"):
        manifest.begin(tmp_path, IDENTITY)


def test_the_fingerprint_follows_identity_files_and_results_and_no_clock():
    def fingerprint(identity=IDENTITY, digest="d", tokens=1, rate=3.0, seconds=1):
        results = {"train": {"tokens": tokens, "tokens_per_second": rate}, "seconds": seconds}
        return manifest.fingerprint({"identity": identity, "files": {"x": digest}, "results": results})

    assert fingerprint(dict(reversed(IDENTITY.items())), rate=4.0, seconds=2) == fingerprint()
    others = fingerprint(IDENTITY | {"seed": 1}), fingerprint(digest="e"), fingerprint(tokens=2)
    assert len({fingerprint(), *others}) == 4


def test_a_lock_names_a_file_and_leaves_its_neighbours_alone(tmp_path):
    chain, tree = tmp_path / "chain.json", tmp_path / "tree.json"
    with disk.lock(chain), disk.lock(tree), disk.atomic(tree) as partial:
        partial.write_text("{}")
        with pytest.raises(disk.LockError, match=f"chain.json: in use by process {os.getpid()} "), disk.lock(chain):
            pass
    for name in (".chain.json.host.1.abc.partial", ".tree.json.host.1.abc.partial"):
        (tmp_path / name).write_text("of a run that was killed")
    with disk.lock(chain):
        assert [path.name for path in tmp_path.glob(".*.partial")] == [".tree.json.host.1.abc.partial"]


def test_temporary_names_are_never_shared(tmp_path, monkeypatch):
    """Two containers on one volume have equal process ids, and equal host names where an image sets them."""
    with disk.atomic(tmp_path / "x") as one, disk.atomic(tmp_path / "x") as other:
        assert one != other
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        with disk.atomic(tmp_path / "x") as third:
            assert ".elsewhere." in third.name
            for path in (one, other, third):
                path.write_text("")
