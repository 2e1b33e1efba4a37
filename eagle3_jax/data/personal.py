"""Redacts personal data: Presidio's pattern recognisers find it, and the name of its kind replaces it.

Only patterns and checksums are used: no language model, no download, no data leaves the machine. So names and postal
addresses are not found; `prepare.cloud_dlp` finds them, elsewhere. Extra checks avoid false positives in mathematics
and code.
"""

from __future__ import annotations

import collections
import functools
import ipaddress
import logging
import re
from collections.abc import Callable, Iterable
from typing import Any

# Presidio's scores range from 0 to 1; patterns below this score have too many false positives.
_MIN_SCORE = 0.4
_CREDENTIALS = r"(?<=\w://)[^\s/?#:@\"'<>]*:[^\s/?#\"'<>]+(?=@)"
# Presidio's recognisers of accounts, and of national ids with letters, separators or strong checksums; plain ones of
# nine digits are left out.
_NUMBERS = ("Iban", "CreditCard", "UsSsn", "UsItin", "UkNino", "EsNif", "EsNie", "ItFiscalCode")
_NUMBERS += ("FiPersonalIdentityCode", "PlPesel", "InAadhaar", "KrRrn", "SgFin")
_SEVEN_DIGITS = re.compile(r"(?:\d[\s().\-/]{0,3}){7}")
_DIGIT_OR_COLON = re.compile(r"\d|::")
_ANNOUNCED = re.compile(
    r"(?i)(?:phone|mobile|\bcell\b|\bcall\b|\btel\b|\bfax\b|whatsapp|contact|\bsms\b|my number)[^\n]{0,30}$"
)
_THOUSANDS = re.compile(r"\d{1,3}(?:\.\d{3})+")

Span = tuple[int, int, str]  # start, end in characters, kind
Redact = Callable[[str], tuple[str, collections.Counter[str]]]


def redact(text: str) -> tuple[str, collections.Counter[str]]:
    """Replaces personal data by its kind, such as "<EMAIL_ADDRESS>". Returns the text, and the count of each kind."""
    asked = {"at": "@" in text, "digit": _DIGIT_OR_COLON.search(text), "phone": _SEVEN_DIGITS.search(text)}
    found = collections.Counter[str]()
    for recogniser in [each for kind in asked if asked[kind] for each in _recognisers()[kind]]:
        spans = recogniser.analyze(text, recogniser.supported_entities, None)
        likely = [(span.start, span.end, span.entity_type) for span in spans if span.score >= _MIN_SCORE]
        text, kinds = replace(text, likely)
        found += kinds
    return text, found


def replace(text: str, spans: Iterable[Span]) -> tuple[str, collections.Counter[str]]:
    """Replaces spans by their kinds, as `redact` does. Those that overlap become one, of the longest's kind."""
    merged: list[Span] = []
    for start, end, kind in sorted(spans):
        if merged and start < merged[-1][1]:
            first, last, other = merged[-1]
            merged[-1] = first, max(last, end), kind if end - start > last - first else other
        else:
            merged.append((start, end, kind))
    for start, end, kind in reversed(merged):  # positions in front of a replacement stay valid
        text = f"{text[:start]}<{kind}>{text[end:]}"
    return text, collections.Counter(kind for _, _, kind in merged)


@functools.cache
def _recognisers() -> dict[str, list[Any]]:
    """Makes the recognisers on first use, since importing Presidio takes seconds."""
    import presidio_analyzer
    import tldextract
    from presidio_analyzer import predefined_recognizers as predefined

    # Presidio logs the value itself when a checksum fails.
    logging.getLogger("presidio-analyzer").disabled = True
    top_level_domains = tldextract.TLDExtract(suffix_list_urls=(), cache_dir=None)

    class Email(predefined.EmailRecognizer):
        def validate_result(self, pattern_text: str) -> bool:
            """Validates the domain by the installed list, where the parent downloads one."""
            return top_level_domains(pattern_text).fqdn != ""

    class Ip(predefined.IpRecognizer):
        def invalidate_result(self, pattern_text: str) -> bool:
            """Ignores addresses common in code too: loopback, 0.0.0.0, and slices and paths such as `[::2]`."""
            if super().invalidate_result(pattern_text):
                return True
            address = ipaddress.ip_interface(pattern_text).ip
            groups = [group for group in re.split("[:.]", pattern_text) if group]
            return address.is_loopback or address.is_unspecified or (address.version == 6 and len(groups) < 3)

    class Phone(predefined.PhoneRecognizer):
        """Numbers of many countries; `announced_only` also accepts numbers that no operator has assigned."""

        def __init__(self, announced_only: bool) -> None:
            super().__init__(leniency=0 if announced_only else 1)
            self.announced_only = announced_only

        def analyze(self, text: str, entities: list[str], nlp_artifacts: Any = None) -> list[Any]:
            spans = super().analyze(text, entities, nlp_artifacts)
            return [span for span in spans if _looks_like_phone(text, span.start, span.end, self.announced_only)]

    in_url = [presidio_analyzer.Pattern("user and password in a URL", _CREDENTIALS, 0.9)]
    credentials = presidio_analyzer.PatternRecognizer(supported_entity="URL_CREDENTIALS", patterns=in_url)
    numbers = [getattr(predefined, f"{name}Recognizer")() for name in _NUMBERS]
    phones = [Phone(announced_only=announced) for announced in (False, True)]
    return {"at": [credentials, Email()], "digit": [Ip(), *numbers], "phone": phones}


def _looks_like_phone(text: str, start: int, end: int, announced_only: bool) -> bool:
    """Tells a phone number from a sum, a sequence or a large number with the same digits."""
    number = text[start:end]
    if number.startswith("+") or _ANNOUNCED.search(text[max(0, start - 40) : start]):
        return True
    if announced_only:
        return False
    if number.startswith("("):
        return True
    groups, separators = re.findall(r"\d+", number), re.findall(r"\D+", number)
    if not separators or max(map(len, separators)) > 1 or _THOUSANDS.fullmatch(number):
        return False
    if number.startswith("0"):
        return len(groups[0]) > 1
    return len(groups) >= 3 and len(set(separators)) == 1 and separators[0] != " " and max(map(len, groups)) >= 3
