"""Keeps API keys out of what is kept and said: they are pasted into all sorts of fields."""

from __future__ import annotations

import re
from contextlib import contextmanager
from ipaddress import ip_network
from typing import TYPE_CHECKING, Final

from headgate.errors import InvalidInput, InvalidLimit, InvalidPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["LOOKS_SECRET", "SHORTEST_HIDDEN", "discreetly", "looks_secret", "may_be_key", "words_like_keys"]

SHORTEST: Final = 8
"""Characters of a word that is looked at: a shorter key is none that is worth much."""
SHORTEST_HIDDEN: Final = 16
"""Characters of a word that is hidden though nobody knows it as a key: a shorter one may as well be a name."""
MOST_WORDS: Final = 500
HIDDEN: Final = "***"

LOOKS_SECRET: Final = "there is what looks like an API key or a token among the words; leave it out"

_WORD: Final = re.compile(r"[!-+\--~]+")
_EDGES: Final = "\"'`()[]{}<>.;:!?"
_JOINTS: Final = re.compile(r"[^\w.-]+|(?<=\w)[.-]+(?!\w)", re.ASCII)
"""What stands between words that are written as one: api=KEY, search/KEY, (KEY)."""
_ENDING: Final = re.compile(r"\.(?:ya?ml|toml|json|txt)$")
_SECRET: Final = re.compile(
    r"hg_[0-9a-z]{10}_\w+|(?:sk|pk|rk)_(?:live|test)_\w{8,}|sk-[\w-]{20,}|gh[opsu]_\w{20,}|glpat-[\w-]{20,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[0-9A-Z]{16}|eyJ[\w-]{10,}\.[\w-]{10,}"
)
"""Tokens of ours, and keys in the shapes that everybody knows. The desk knows those of its clients by their hashes."""


def looks_secret(text: str) -> bool:
    """Whether a text seems to hold an API key or a token: by the shapes that such things are commonly given.

    >>> looks_secret("contract 4711, agreed with ada"), looks_secret("his key is sk_live_51H8xkTt")
    (False, True)
    """
    return _SECRET.search(text) is not None


def may_be_key(text: str, *, shortest: int = SHORTEST) -> bool:
    """Whether a text could be an API key: one word, long enough, and neither a hash nor a network."""
    is_word = _WORD.fullmatch(text) is not None and len(text) >= shortest
    return is_word and not text.startswith("hmac:") and not _is_network(text)


def words_like_keys(texts: Iterable[str | None], *, shortest: int = SHORTEST, most: int = MOST_WORDS) -> list[str]:
    """The words of texts that could be API keys, the first few of them."""
    found: dict[str, None] = {}
    for text in texts:
        for word in _WORD.findall(text or ""):
            ends = [word[place.end() :] for place in _JOINTS.finditer(word)]
            for spelled in (word, word.strip(_EDGES), _ENDING.sub("", word), *_JOINTS.split(word), *ends):
                if may_be_key(spelled, shortest=shortest):
                    found[spelled] = None
    return list(found)[:most]


@contextmanager
def discreetly(*texts: str | None) -> Iterator[None]:
    """Refusals in the block show none of these texts that could be an API key."""
    try:
        yield
    except InvalidInput as error:
        hidden = sorted(
            {text for text in texts if text and may_be_key(text, shortest=SHORTEST_HIDDEN)}, key=len, reverse=True
        )
        if not any(text in str(error) or repr(text)[1:-1] in str(error) for text in hidden):
            raise
        if isinstance(error, InvalidPolicy):
            raise InvalidPolicy([_without(problem, hidden) for problem in error.problems]) from None
        kind = InvalidLimit if isinstance(error, InvalidLimit) else InvalidInput
        raise kind(_without(str(error), hidden)) from None


def _without(text: str, hidden: Iterable[str]) -> str:
    for each in hidden:
        text = text.replace(each, HIDDEN).replace(repr(each)[1:-1], HIDDEN)
    return text


def _is_network(text: str) -> bool:
    try:
        ip_network(text)
    except ValueError:
        return False
    return True
