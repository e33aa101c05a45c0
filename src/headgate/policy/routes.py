"""Which routes a path belongs to: templates as policies write them, and a matcher that finds all that fit at once.

A path is read as frameworks route it, because a limit must meet the handler that will run. Slashes are forgiven, since
some frameworks forgive them. Dot segments are not resolved, since none resolves them: "/files/../health" runs the
handler of "/files/{path}", and must not pass for "/health". A line's end after the path is forgiven, as by the `$`
in Starlette's patterns: "/login\\n" runs the handler of "/login".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["LONGEST_TEMPLATE", "Matcher", "Template", "decoded", "normal", "normal_method", "resolved"]

LONGEST_TEMPLATE: Final = 1000
"""In characters: far beyond any route of an app, and a bound for the states of a matcher."""

MOST_STATES: Final = 20_000
"""A policy of a thousand routes has about as many states; only one that is made for it has more."""

LONGEST_RESOLVED: Final = 8192
"""Dots are followed in paths up to this length."""

LONGEST_METHOD: Final = 20

_SLASHES: Final = re.compile("//+")

METHODS: Final = {
    method: "GET" if method == "HEAD" else method
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE")
}


@dataclass(frozen=True, slots=True)
class Template:
    """The paths of a route: "/users/{id}", "/static/*". Equal to another that fits the same paths.

    >>> Template.parse("/users/{id}") == Template.parse("/users/{name}/")
    True
    """

    text: str = field(compare=False)
    """As policies should spell it."""
    segments: tuple[str | None, ...]
    """None where any one segment fits."""
    open_ended: bool
    """Whether everything below fits, too."""

    @classmethod
    def parse(cls, text: str) -> Template:
        """The template that a text describes; InvalidInput, with the remedy, if it describes none.

        >>> Template.parse("/files/{path:path}").text, Template.parse("*").text
        ('/files/*', '/*')
        """
        if not isinstance(text, str):
            raise InvalidInput(f"{text!r} is no path; write it as text, as in '/users/{{id}}'")
        _check_whole(text)
        words = [word for word in text.split("/") if word]
        open_ended = bool(words) and (words[-1] == "*" or _is_rest(words[-1]))
        if open_ended:
            words.pop()
        segments = tuple([_segment(word, text) for word in words])
        return cls("/" + "/".join([*words, "*"] if open_ended else words), segments, open_ended)

    def __str__(self) -> str:
        return self.text


class Matcher:
    """Finds all templates that fit a path, at a cost that does not grow with their number.

    The templates are one tree. A state is the set of places in it that the segments so far may have led to; states are
    made when a path first gets there, and kept. Segments that no template names all lead to one state, so that the
    states depend on the templates alone, however many different paths are asked for.
    """

    __slots__ = ("_depth", "_ranks", "_results", "_start", "_states")

    def __init__(self, templates: Sequence[Template]) -> None:
        self._depth = max((len(template.segments) for template in templates), default=0)
        ranked = sorted(range(len(templates)), key=lambda index: (_specificity(templates[index]), index))
        self._ranks = {index: rank for rank, index in enumerate(ranked)}
        self._results: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._states: dict[frozenset[_TrieNode], _PathState] = {}
        self._start = self._state(frozenset([_tree(templates)]))

    def match(self, path: str, mounted_path: str | None = None) -> tuple[int, ...]:
        """The indices of all templates that fit, the most specific first; equal answers are one object.

        Where the path has a second name, `mounted_path` the place at which an app is mounted, those that fit either.

        Segment by segment from the left, a word is more specific than a parameter, and a parameter than `*`.

        >>> Matcher([Template.parse(text) for text in ("*", "/users/{id}", "/users/me")]).match("/users/me")
        (2, 1, 0)
        """
        if mounted_path is not None:
            found = tuple(sorted({*self.match(path), *self.match(mounted_path)}, key=self._ranks.__getitem__))
            return self._results.setdefault(found, found)
        state, spelled = self._start, normal(path.removesuffix("\n"))
        if spelled != "/":
            # Below the deepest template all segments are alike: they stay together, however many there are.
            for segment in spelled[1:].split("/", self._depth):
                state = state[segment]
        return state.found

    def _state(self, places: frozenset[_TrieNode]) -> _PathState:
        """The one state for these places, or one of its own when there are too many."""
        state = self._states.get(places)
        if state is None:
            indices = {index for place in places for index in place.indices()}
            found = tuple(sorted(indices, key=self._ranks.__getitem__))
            kept = len(self._states) < MOST_STATES
            if kept:
                found = self._results.setdefault(found, found)
            state = _PathState(self._state, places, found, kept=kept)
            if kept:
                state = self._states.setdefault(places, state)
        return state


def normal(path: str) -> str:
    """The one spelling of a decoded path: without doubled slashes, and without one at the end.

    However long it is: what is cut off could be what the framework routes by.

    >>> normal("/users//7/"), normal(""), normal("/a/../b")
    ('/users/7', '/', '/a/../b')
    """
    if "//" in path:
        path = _SLASHES.sub("/", path)
    if path[:1] != "/":
        path = "/" + path
    return path if path[-1] != "/" or path == "/" else path[:-1]


def resolved(path: str) -> str:
    """The normal path with "." and ".." followed, never above the root: for what stands before a server that does so.

    Paths above 8 KB stay as they are.

    >>> resolved("/a/./b/../../../c")
    '/c'
    """
    path = normal(path)
    if "/." not in path or len(path) > LONGEST_RESOLVED:
        return path
    kept: list[str] = []
    for segment in path[1:].split("/"):
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    return "/" + "/".join(kept)


def decoded(target: str) -> str:
    """The path of a request's raw target, decoded once; an escape that is none stays as it is.

    >>> decoded("/caf%C3%A9/100%?q=1"), decoded("http://example.com/a%2520b")
    ('/café/100%', '/a%20b')
    """
    if target[:1] != "/" and "://" in target:
        target = "/" + target.partition("://")[2].partition("/")[2]
    return unquote(target.partition("?")[0].partition("#")[0])


def normal_method(method: str) -> str:
    """The method that a request counts as: in upper case, HEAD as GET, and what can be none as "UNKNOWN"."""
    known = METHODS.get(method)
    if known is not None:
        return known
    if not _is_method(method):
        return "UNKNOWN"
    upper = method.upper()
    return METHODS.get(upper, upper)


class _TrieNode:
    """One place in the tree of templates, reached by one way of reading the segments before it."""

    __slots__ = ("ends", "parameter", "rest", "words")

    def __init__(self) -> None:
        self.words: dict[str, _TrieNode] = {}
        self.parameter: _TrieNode | None = None
        self.rest: _TrieNode | None = None
        """Where everything below leads, once and for all."""
        self.ends: list[int] = []
        """The templates that end here."""

    def indices(self) -> list[int]:
        return self.ends if self.rest is None else self.ends + self.rest.ends

    def after(self, segment: str) -> Iterable[_TrieNode]:
        return [place for place in (self.words.get(segment), self.parameter, self.rest) if place is not None]


class _PathState(dict[str, "_PathState"]):
    """Where the segments so far have led: a mapping from the next segment to the next state."""

    __slots__ = ("_other", "_places", "_state", "found", "kept")

    def __init__(
        self,
        state: Callable[[frozenset[_TrieNode]], _PathState],
        places: frozenset[_TrieNode],
        found: tuple[int, ...],
        *,
        kept: bool,
    ) -> None:
        super().__init__()
        self._state = state
        self._places = places
        self._other: _PathState | None = None
        """Where all segments lead that no template names here."""
        self.found = found
        self.kept = kept

    def __missing__(self, segment: str) -> _PathState:
        named = False
        for place in self._places:
            if segment in place.words:
                named = True
                break
        if not named and self._other is not None:
            return self._other
        following = self._state(frozenset([after for place in self._places for after in place.after(segment)]))
        if following.kept:
            if named:
                self[segment] = following
            else:
                self._other = following
        return following


def _tree(templates: Sequence[Template]) -> _TrieNode:
    root = _TrieNode()
    for index, template in enumerate(templates):
        place = root
        for segment in template.segments:
            if segment is not None:
                place = place.words.setdefault(segment, _TrieNode())
            else:
                place.parameter = place = place.parameter or _TrieNode()
        if template.open_ended:
            if place.rest is None:
                place.rest = _TrieNode()
                place.rest.rest = place.rest
            place = place.rest
        place.ends.append(index)
    return root


def _specificity(template: Template) -> tuple[int, ...]:
    return (*[segment is None for segment in template.segments], *([2] if template.open_ended else []))


def _check_whole(text: str) -> None:
    """Raise for what is wrong with a template as a whole, whatever its segments are."""
    if len(text) > LONGEST_TEMPLATE:
        raise InvalidInput(
            f"path {text[:40]!r}... has {len(text)} characters; the longest has {LONGEST_TEMPLATE}, "
            "and '/prefix/*' covers all below a prefix"
        )
    if text == "*":
        return
    if text[:1] == "^" or text[-1:] == "$" or any(sign in text for sign in ("\\", "(?", ".*", ".+", "[", "]", "|")):
        raise InvalidInput(
            f"path {text!r} looks like a regular expression; write '{{id}}' for one segment, "
            "and '/*' at the end for everything below"
        )
    for sign, what in (("?", "a query string"), ("#", "a fragment")):
        if sign in text:
            raise InvalidInput(
                f"path {text!r} has {what}, which routes don't look at; write {text[: text.index(sign)] or '/'!r}"
            )
    if " " in text or not text.isprintable():
        raise InvalidInput(
            f"path {text!r} has a space or a control character; write '{{name}}' for a segment that may hold one, "
            "and methods apart from the path"
        )
    if text[:1] != "/":
        path = text.partition("://")[2].partition("/")[2] if "://" in text else text
        raise InvalidInput(f"path {text!r} does not start with a slash; write {'/' + path!r}")
    if "//" in text:
        raise InvalidInput(f"path {text!r} has an empty segment; write {normal(text)!r}")
    if (plain := unquote(text)) != text:
        remedy = f"write {plain!r}" if plain.isprintable() and " " not in plain else "write '{name}' for that segment"
        raise InvalidInput(f"path {text!r} is percent-encoded, but paths are compared decoded; {remedy}")
    if resolved(text) != normal(text):
        raise InvalidInput(f"path {text!r} has dot segments, which clients resolve; write {resolved(text)!r}")


def _segment(word: str, text: str) -> str | None:
    """The word itself, or None for a parameter."""
    if word == "*" or _is_rest(word):
        raise InvalidInput(
            f"path {text!r} goes on after {word!r}, which stands for everything below and comes last; "
            "write '{name}' for one segment"
        )
    inner = word[1:-1]
    if word[0] == "{" and word[-1] == "}" and inner.isidentifier():
        return None
    name, separator, _ = inner.partition(":")
    if word[0] == "{" and word[-1] == "}" and separator and name.isidentifier():
        raise InvalidInput(f"path {text!r}: {word!r} has a type, and any one segment fits; write '{{{name}}}'")
    if word[0] == "<" and word[-1] == ">":
        kind, _, name = inner.rpartition(":")
        remedy = "'*', as the last segment" if kind == "path" else f"'{{{name if name.isidentifier() else 'name'}}}'"
        raise InvalidInput(f"path {text!r}: {word!r} is another framework's spelling; write {remedy}")
    if word[0] == ":" and word[1:].isidentifier():
        raise InvalidInput(f"path {text!r}: {word!r} is another framework's spelling; write '{{{word[1:]}}}'")
    if word.strip("*") == "":
        remedy = f"write '{text[: text.index(word)]}*'" if text.endswith(word) else "write '{name}' for one segment"
        raise InvalidInput(f"path {text!r}: '*' stands for everything below already; {remedy}")
    if any(sign in word for sign in "{}<>*"):
        raise InvalidInput(
            f"path {text!r}: {word!r} is not one whole word or parameter; write '{{name}}' for the whole segment, "
            "with letters, digits and _ in its name"
        )
    return word


def _is_rest(word: str) -> bool:
    """Whether it is Starlette's and FastAPI's spelling of `*`."""
    return word[0] == "{" and word.endswith(":path}") and word[1:-6].isidentifier()


def _is_method(text: str) -> bool:
    return len(text) <= LONGEST_METHOD and text.isascii() and text.replace("-", "").replace("_", "").isalnum()
