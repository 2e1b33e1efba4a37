"""The keys of a target's tokenizer, as llama.cpp's converter writes them: from a GGUF file, or from tokenizer.json."""

from __future__ import annotations

import pathlib

from gguf import GGUFReader, GGUFWriter, SpecialVocab, TokenType

from eagle3_jax.models.checkpoint.fetch import TargetError
from eagle3_jax.models.checkpoint.gguf_file import GGUF
from eagle3_jax.models.checkpoint.gguf_tokenizer import SPLITS
from eagle3_jax.runs import disk

_TOKENS, _PREFIX = "tokenizer.ggml.tokens", "tokenizer."


def add_tokenizer(writer: GGUFWriter, folder: pathlib.Path, vocab_size: int) -> None:
    """Adds the tokenizer of a target's folder, padded to `vocab_size` tokens.

    Raises TargetError: its GGUF file has another number of tokens, or its tokenizer.json is of another kind than BPE.
    """
    if files := sorted(folder.glob(f"*{GGUF}")):
        return _copy(writer, files[0], vocab_size)
    path = folder / "tokenizer.json"
    described = disk.read_json(path)
    model = described["model"]
    if model.get("type") != "BPE":
        raise TargetError(f"{path}: model.type: got {model.get('type')!r}, expected 'BPE'")
    tokens = [f"[PAD{i}]" for i in range(vocab_size)]
    kinds = [TokenType.UNUSED] * vocab_size
    for token, i in model["vocab"].items():
        tokens[i], kinds[i] = token, TokenType.NORMAL
    for token in described["added_tokens"]:
        tokens[token["id"]] = token["content"]
        kinds[token["id"]] = TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
    pieces = bool(model.get("byte_fallback"))  # of sentencepiece, whose merges are in the order of tokens
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre("default" if pieces else _split(described["pre_tokenizer"]))
    writer.add_token_list(tokens)
    if pieces:
        writer.add_token_scores([-float(i) for i in range(vocab_size)])
    writer.add_token_types(kinds)
    SpecialVocab(folder, load_merges=not pieces, n_vocab=vocab_size).add_to_gguf(writer, quiet=True)


def _copy(writer: GGUFWriter, path: pathlib.Path, vocab_size: int) -> None:
    reader = GGUFReader(path)
    for name, field in reader.fields.items():
        if name == _TOKENS and len(field.data) != vocab_size:
            raise TargetError(f"{path}: {_TOKENS}: got {len(field.data)}, expected vocab_size = {vocab_size}")
        if name.startswith(_PREFIX):
            writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if field.types[1:] else None)


def _split(pre_tokenizer: dict) -> str:
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if parts[0] == {"type": "Digits", "individual_digits": True}:
        return "smollm"
    expression = (parts[0].get("pattern") or {}).get("Regex", "")
    # llama.cpp splits no text by a draft's tokenizer, so another one may have the default.
    return next((name for name, splits in SPLITS.items() if splits == (expression,)), "default")
