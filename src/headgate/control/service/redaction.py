"""Redaction: keeps API keys, which people paste into all kinds of fields, out of stored texts and error messages."""

from __future__ import annotations

import re
from contextlib import contextmanager
from ipaddress import ip_network
from typing import TYPE_CHECKING, Final

from headgate.errors import InvalidInput, InvalidLimit, InvalidPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "LOOKS_SECRET", "MIN_SECRET_LENGTH", "is_network_text", "looks_secret", "may_be_key", "redact_errors",
    "words_like_keys",
]  # fmt: skip

MIN_KEY_LENGTH: Final = 8
"""Characters of the shortest word that is compared with the known API keys."""
MIN_SECRET_LENGTH: Final = 16
"""Characters of the shortest word that is hidden although it is not a known key; shorter ones may be names."""
MAX_WORDS: Final = 500
REDACTED: Final = "***"

LOOKS_SECRET: Final = "the text contains what looks like an API key or a token; leave it out"

_WORD: Final = re.compile(r"[!-+\--~]+")
_EDGES: Final = "\"'`()[]{}<>.;:!?"
_SEPARATORS: Final = re.compile(r"[^\w.-]+|(?<=\w)[.-]+(?!\w)", re.ASCII)
"""The characters between words that are written as one: api=KEY, search/KEY, (KEY)."""
_FILE_EXTENSION: Final = re.compile(r"\.(?:ya?ml|toml|json|txt)$")
_SECRET: Final = re.compile(
    r"hg_[0-9a-z]{10}_\w+|(?:sk|pk|rk)_(?:live|test)_\w{8,}|sk-[\w-]{20,}|gh[opsu]_\w{20,}|glpat-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}"
)
"""Headgate's tokens, and the well-known formats of API keys. Keys of clients are recognized by their hashes."""


def looks_secret(text: str) -> bool:
    """True if a text contains an API key or a token in a well-known format.

    >>> looks_secret("contract 4711, agreed with ada"), looks_secret("his key is sk_live_51H8xkTt")
    (False, True)
    """
    return _SECRET.search(text) is not None


def may_be_key(text: str, *, shortest: int = MIN_KEY_LENGTH) -> bool:
    """True if a text could be an API key: one word, long enough, and neither a hash nor a network."""
    is_word = _WORD.fullmatch(text) is not None and len(text) >= shortest
    return is_word and not text.startswith("hmac:") and not is_network_text(text)


def words_like_keys(texts: Iterable[str | None], *, shortest: int = MIN_KEY_LENGTH) -> list[str]:
    """The first words of texts that could be API keys."""
    found: dict[str, None] = {}
    for text in texts:
        for word in _WORD.findall(text or ""):
            ends = [word[separator.end() :] for separator in _SEPARATORS.finditer(word)]
            for part in (word, word.strip(_EDGES), _FILE_EXTENSION.sub("", word), *_SEPARATORS.split(word), *ends):
                if may_be_key(part, shortest=shortest):
                    found[part] = None
    return list(found)[:MAX_WORDS]


@contextmanager
def redact_errors(*texts: str | None) -> Iterator[None]:
    """Replace those of the texts that could be API keys in InvalidInput errors raised by the block."""
    try:
        yield
    except InvalidInput as error:
        secrets = sorted(
            {text for text in texts if text and may_be_key(text, shortest=MIN_SECRET_LENGTH)}, key=len, reverse=True
        )
        if not any(text in str(error) or repr(text)[1:-1] in str(error) for text in secrets):
            raise
        if isinstance(error, InvalidPolicy):
            raise InvalidPolicy([_redact(problem, secrets) for problem in error.problems]) from None
        kind = InvalidLimit if isinstance(error, InvalidLimit) else InvalidInput
        raise kind(_redact(str(error), secrets)) from None


def is_network_text(text: str, *, strict: bool = True) -> bool:
    """True for an address or a network; with `strict` false, also for a network written with one of its addresses."""
    try:
        ip_network(text, strict=strict)
    except ValueError:
        return False
    return True


def _redact(text: str, secrets: Iterable[str]) -> str:
    for each in secrets:
        text = text.replace(each, REDACTED).replace(repr(each)[1:-1], REDACTED)
    return text
