"""The tokenizer that a GGUF file's metadata describe, as llama.cpp reads them, written as a Hugging Face folder has it.

Source: llama.cpp's src/llama-vocab.cpp, which names the expressions by which each tokenizer splits a text.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_KEY = "tokenizer.ggml."
# Texts of tokens that end an answer, beside those that the file names.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
    *("<|end_of_text|>", "[EOS]", "[e~["),
)
_ENDINGS, _SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD, _SIGNS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_LLAMA3 = rf"{_ENDINGS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n]*|{_SPACES}"
_QWEN2 = rf"{_ENDINGS}|{_WORD}|\p{{N}}|{_SIGNS}[\r\n]*|{_SPACES}"
_GPT_4O = rf"{_CASES % ((f'{_ENDINGS}?',) * 2)}|\p{{N}}{{1,3}}|{_SIGNS}[\r\n/]*|{_SPACES}"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _SPACES,
)
# tokenizer.ggml.pre -> the expressions that split a text, one after the other; in place of none GPT-2's own do.
SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "exaone4"), ()),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe", "glm4"), (_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (_QWEN2,)),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), (_GPT_4O,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "tekken": (rf"{_CASES % ('', '')}|\p{{N}}|{_SIGNS}[\r\n/]*|{_SPACES}",),
    "seed-coder": (rf"{_ENDINGS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
}
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "exaone")  # each digit alone, then GPT-2's own
_BEGUN = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken")  # `bos` begins a text
_WHOLE = (*_BEGUN, "glm4")  # a word that is a token needs no merges
_NOT_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")


def save_tokenizer(fields: dict[str, Any], folder: pathlib.Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json. Raises ValueError: a tokenizer of an unknown kind, by key."""
    tokens, pre = needed(fields, f"{_KEY}tokens"), fields.get(f"{_KEY}pre")
    kinds = needed(fields, f"{_KEY}token_type")
    if pieces := one_of(fields, f"{_KEY}model", ("gpt2", "llama")) == "llama":
        tokenizer = _of_pieces(fields, tokens, kinds)
    else:
        one_of(fields, f"{_KEY}pre", (*SPLITS, *_DIGITS))
        tokenizer = _of_bytes(fields, tokens)
    stripped = pieces and fields["general.architecture"] == "phi3"  # what follows loses its spaces
    for kind, special in ((TokenType.CONTROL, True), (TokenType.UNKNOWN, True), (TokenType.USER_DEFINED, False)):
        texts = [token for token, other in zip(tokens, kinds, strict=True) if other == kind]
        strip = {text: stripped and special and text not in _NOT_STRIPPED for text in texts}
        added = [AddedToken(text, special=special, normalized=False, rstrip=strip[text]) for text in texts]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    defaults = {"bos": 1, "eos": 2, "unknown": 0} if pieces else {}
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {ours: fields.get(f"{_KEY}{theirs}_token_id", defaults.get(theirs)) for ours, theirs in names.items()}
    if ids["bos"] is not None and fields.get(f"{_KEY}add_bos_token", pieces or pre in _BEGUN):
        first = tokens[ids["bos"]]
        begun = processors.TemplateProcessing(single=[first, "$A"], special_tokens=[(first, ids["bos"])])
        tokenizer.post_processor = begun  # pyrefly: ignore
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields[f"{fields['general.architecture']}.context_length"],
        "chat_template": fields.get("tokenizer.chat_template"),
        **{f"{name}_token": tokens[i] for name, i in ids.items() if i is not None},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def ends(fields: dict[str, Any]) -> list[int]:
    """Returns the ids of all tokens that end an answer."""
    keys = [f"{_KEY}{name}_token_id" for name in ("eos", "eot", "eom")]
    by_text = {i for i, token in enumerate(fields[f"{_KEY}tokens"]) if token in _ENDS}
    return sorted(by_text | {fields[key] for key in keys if key in fields})


def needed(fields: dict[str, Any], key: str) -> Any:
    """Returns the value of a key. Raises ValueError: there is none."""
    if key not in fields:
        raise ValueError(f"{key}: missing")
    return fields[key]


def one_of(fields: dict[str, Any], key: str, known: Any) -> str:
    """Returns the value of a key. Raises ValueError: it is not among those that are known."""
    got: Any = fields.get(key)
    if got not in known:
        raise ValueError(f"{key}: got {got!r}, expected {' or '.join(map(repr, known))}")
    return got


def _of_bytes(fields: dict[str, Any], tokens: list[str]) -> Tokenizer:
    """Makes a tokenizer of bytes and merges."""
    pre = fields[f"{_KEY}pre"]
    merges: Any = [tuple(merge.split(" ", 1)) for merge in needed(fields, f"{_KEY}merges")]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE))
    splits: list[Any] = [pre_tokenizers.Split(Regex(x), "isolated") for x in SPLITS.get(pre, ())]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits)
    splits += [pre_tokenizers.Digits(individual_digits=True)] if pre in _DIGITS else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_pieces(fields: dict[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    """Makes a tokenizer of sentencepiece's scores: two neighbours merge where their piece has the best score."""
    scores = needed(fields, f"{_KEY}scores")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pairs = [
        (-scores[i], token[:cut], token[cut:])
        for i, token in enumerate(tokens)
        if kinds[i] == TokenType.NORMAL
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges: Any = [pair[1:] for pair in sorted(pairs, key=lambda pair: pair[0])]
    unknown = tokens[fields.get(f"{_KEY}unknown_token_id", 0)]
    made = models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer: Any = Tokenizer(made)
    space, prefixed = "▁", fields.get(f"{_KEY}add_space_prefix", True)
    first = [normalizers.Prepend(space)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", space)])
    parts = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])
    return tokenizer
