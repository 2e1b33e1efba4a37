"""Token maps: as others save them, from a file or a hub, or refused by name; no pickle is ever run."""

import io
import json
import pathlib
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import save_file

from eagle3_jax.decoding.engine import Engine
from eagle3_jax.formats.eagle2 import token_maps
from eagle3_jax.models.drafts.head import Draft

IDS = [70000, 3, 12, 255, 256, 65536]


def archive(path: pathlib.Path, value: object, **members: bytes) -> pathlib.Path:
    """As torch.save writes it: a pickle inside an archive."""
    held = io.BytesIO()
    pickle.dump(value, held, protocol=2)
    with zipfile.ZipFile(path, "w") as written:
        written.writestr("freq/data.pkl", held.getvalue())
        for name, content in members.items():
            written.writestr(f"freq/{name}", content)
    return path


SAVED: dict[str, Callable[[Any], Any]] = {
    "list": lambda torch: IDS,
    "tensor": lambda torch: torch.tensor(IDS),
    "int32": lambda torch: torch.tensor(IDS, dtype=torch.int32),
    "part of a tensor": lambda torch: torch.arange(100)[7:40],
}


def test_token_maps_in_every_form(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps([*IDS, IDS[0]]))  # an id may be there twice
    save_file({"token_map": np.asarray(IDS)}, tmp_path / "b.safetensors")
    archive(tmp_path / "c.pt", IDS)
    for path in sorted(tmp_path.iterdir()):
        assert token_maps.read(path, 100_000).tolist() == sorted(IDS)
    for name, text in (("map.txt", "1 2"), ("map.json", "{"), ("map.pt", "no archive"), ("map.safetensors", "x")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match="token_map"):
            token_maps.read(tmp_path / name, 10)


@pytest.mark.parametrize("kind", SAVED)
def test_what_torch_saves_is_read(tmp_path, kind):
    """thunlp/FR-Spec saves a list (fr/fr.py, 9d40eea); SGLang takes a tensor too (`load_token_map`)."""
    torch = pytest.importorskip("torch")
    value = SAVED[kind](torch)
    torch.save(value, tmp_path / "freq.pt")
    assert token_maps.read(tmp_path / "freq.pt", 100_000).tolist() == sorted(int(x) for x in value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda torch: torch.tensor([1.5, 2.0]), "a tensor in torch FloatStorage, expected torch LongStorage or torch"),
        (lambda torch: torch.arange(6).reshape(2, 3), "got a pickle with GLOBAL, expected a list or a vector"),
        (lambda torch: torch.arange(9)[::2], "with stride 2"),
    ],
    ids=["floats", "matrix", "strided"],
)
def test_other_tensors_are_refused(tmp_path, make, message):
    torch = pytest.importorskip("torch")
    torch.save(make(torch), tmp_path / "freq.pt")
    with pytest.raises(ValueError, match=message):
        token_maps.read(tmp_path / "freq.pt", 100)


def test_a_storage_that_is_shorter_than_its_tensor_is_refused(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(torch.arange(6), tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as whole, zipfile.ZipFile(tmp_path / "cut.pt", "w") as cut:
        for name in whole.namelist():
            content = whole.read(name)
            cut.writestr(name, content[:16] if name.endswith("data/0") else content)
    with pytest.raises(ValueError, match="6 of 6 numbers from 0 on, in a storage of 2"):
        token_maps.read(tmp_path / "cut.pt", 100)


class Evil:
    def __reduce__(self):
        return (pathlib.Path.touch, (pathlib.Path("/nowhere"),))


class Tensor:
    """Pickled with the operations of a tensor, in their order, but another call."""

    def __reduce__(self):
        return (print, (Storage(), 0, (3,), (1,), False, Hooks()))


class Storage:
    pass


class Hooks:
    def __reduce__(self):
        return (set, ())


@pytest.mark.parametrize("value", [[1, 2, Evil()], {"a": 1}, ["1", 2], [1, True], [[1], [3]], 1])
def test_a_pickle_of_anything_else_is_refused_and_not_run(tmp_path, value):
    with pytest.raises(ValueError, match="got a pickle with"):
        token_maps.read(archive(tmp_path / "x.pt", value), 100)


def test_a_pickle_that_only_looks_like_a_tensor_is_refused_and_not_run(tmp_path, capsys):
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            return ("storage", dict, "0", "cpu", 3) if isinstance(obj, Storage) else None

    held = io.BytesIO()
    Pickler(held, protocol=2).dump(Tensor())
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as written:
        written.writestr("freq/data.pkl", held.getvalue())
    with pytest.raises(ValueError, match=r"a pickle that calls \S+ print"):
        token_maps.read(tmp_path / "x.pt", 100)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, 100], "got 100, expected ids from 0 to 99"),
        ([], "expected a list of integers"),
        ([1, True], "got True, expected a list of integers"),
        ([1, [2]], r"got \[2\], expected a list of integers"),
    ],
)
def test_ids_that_make_no_map_are_refused(tmp_path, ids, message):
    (tmp_path / "map.json").write_text(json.dumps(ids))
    with pytest.raises(ValueError, match=message):
        token_maps.read(tmp_path / "map.json", 100)


@pytest.mark.parametrize(("suffix", "revision"), [("", None), ("@0123abc", "0123abc")])
def test_a_name_on_a_hub_is_fetched_at_its_revision(tmp_path, monkeypatch, suffix, revision):
    asked = []

    def download(repository: str, file: str, *, revision: str | None) -> str:
        asked.append((repository, file, revision))
        return str(archive(tmp_path / "freq.pt", [4, 2]))

    monkeypatch.setattr(token_maps, "hf_hub_download", download)
    found = token_maps.read(f"thunlp/LLaMA3-Instruct-8B-FR-Spec/freq_32768.pt{suffix}", 10)
    assert found.tolist() == [2, 4]
    assert asked == [("thunlp/LLaMA3-Instruct-8B-FR-Spec", "freq_32768.pt", revision)]


def test_what_is_nowhere_is_refused_by_name(tmp_path, monkeypatch):
    def download(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(token_maps, "hf_hub_download", download)
    expected = r"expected a file, or organisation/repository/file\[@revision\] on a hub that answers"
    with pytest.raises(ValueError, match=rf"token_map: got a/b/c\.pt, {expected} \(LocalEntryNotFoundError\)"):
        token_maps.read("a/b/c.pt", 10)
    for path in (tmp_path / "none.json", "none.json"):
        with pytest.raises(ValueError, match=rf"{expected}$"):
            token_maps.read(path, 10)


@pytest.mark.parametrize(
    ("draft", "name"), [("auto", "'auto'"), ("mtp", "'mtp'"), (None, "None"), (object.__new__(Draft), "Draft")]
)
def test_beside_a_draft_that_it_does_not_cut_it_is_refused_before_anything_is_loaded(draft, name):
    with pytest.raises(ValueError, match=rf"token_map: got map\.json, expected None beside draft {name}"):
        Engine.load("no/such/target", draft, token_map="map.json")
