"""Route templates of policies, and a matcher that finds all templates for a path at once.

Paths are read as frameworks route them, so that the limit applies to the handler that runs. Repeated and trailing
slashes are ignored, as some frameworks ignore them. Dot segments are not resolved, as no framework resolves them:
"/files/../health" runs the handler of "/files/{path}" and must not count as "/health". A newline after the path is
ignored, as by the `$` in Starlette's patterns: "/login\\n" runs the handler of "/login".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote

from headgate.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "LONGEST_TEMPLATE", "Matcher", "Template", "decode_path", "normalize_method", "normalize_path", "resolve_dots",
]  # fmt: skip

LONGEST_TEMPLATE: Final = 1000
"""In characters; bounds the states of a matcher."""

MOST_STATES: Final = 20_000
"""Cached states of a matcher. A policy of a thousand routes needs about as many; a hostile one could need more."""

LONGEST_RESOLVED: Final = 8192

LONGEST_METHOD: Final = 20

_SLASHES: Final = re.compile("//+")

METHODS: Final = {
    method: "GET" if method == "HEAD" else method
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE")
}


@dataclass(frozen=True, slots=True)
class Template:
    """The paths of a route: "/users/{id}", "/static/*". Templates that match the same paths are equal.

    >>> Template.parse("/users/{id}") == Template.parse("/users/{name}/")
    True
    """

    text: str = field(compare=False)
    segments: tuple[str | None, ...]
    """None for a parameter, which matches any one segment."""
    open_ended: bool
    """True if all paths below match, too."""

    @classmethod
    def parse(cls, text: str) -> Template:
        """Parse a template; raise InvalidInput with the remedy if it is not one.

        >>> Template.parse("/files/{path:path}").text, Template.parse("*").text
        ('/files/*', '/*')
        """
        if not isinstance(text, str):
            raise InvalidInput(f"{text!r} is not a path; write it as text, as in '/users/{{id}}'")
        if len(text) > LONGEST_TEMPLATE:
            length = f"path {text[:40]!r}... has {len(text)} characters; the longest has {LONGEST_TEMPLATE}"
            raise InvalidInput(f"{length}, and '/prefix/*' covers all below a prefix")
        if text != "*" and (objection := _objection(text)) is not None:
            raise InvalidInput(f"path {text!r} {objection}")
        words = [word for word in text.split("/") if word]
        open_ended = bool(words) and (words[-1] == "*" or _is_rest(words[-1]))
        if open_ended:
            words.pop()
        for word in words:
            if (objection := _segment_objection(word, text)) is not None:
                raise InvalidInput(f"path {text!r}{objection}")
        segments = tuple([None if word[0] == "{" else word for word in words])
        return cls("/" + "/".join([*words, "*"] if open_ended else words), segments, open_ended)

    def __str__(self) -> str:
        return self.text


class Matcher:
    """Finds all templates that match a path, at a cost that does not depend on their number.

    The templates form a trie, and the matcher is a deterministic automaton over it that is built lazily. A state is the
    set of trie nodes that the segments so far may have led to. Segments that no template names share one state, so the
    number of states depends on the templates alone and not on the paths of clients.
    """

    __slots__ = ("_depth", "_ranks", "_results", "_start", "_states")

    def __init__(self, templates: Sequence[Template]) -> None:
        self._depth = max((len(template.segments) for template in templates), default=0)
        specificities = [(*[part is None for part in each.segments], *[2] * each.open_ended) for each in templates]
        ranked = sorted(range(len(templates)), key=specificities.__getitem__)
        self._ranks = {index: rank for rank, index in enumerate(ranked)}
        self._results: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._states: dict[frozenset[_TrieNode], _PathState] = {}
        self._start = self._state(frozenset([_build_trie(templates)]))

    def match(self, path: str, mounted_path: str | None = None) -> tuple[int, ...]:
        """The indices of all matching templates, the most specific first; equal results are the same object.

        In a mounted app, templates may match the path or the `mounted_path` below the mount.

        Segment by segment from the left, a word is more specific than a parameter, and a parameter than `*`.

        >>> Matcher([Template.parse(text) for text in ("*", "/users/{id}", "/users/me")]).match("/users/me")
        (2, 1, 0)
        """
        if mounted_path is not None:
            matches = tuple(sorted({*self.match(path), *self.match(mounted_path)}, key=self._ranks.__getitem__))
            return self._results.setdefault(matches, matches)
        state, spelled = self._start, normalize_path(path.removesuffix("\n"))
        if spelled != "/":
            # Segments below the deepest template need not be distinguished.
            for segment in spelled[1:].split("/", self._depth):
                state = state[segment]
        return state.matches

    def _state(self, nodes: frozenset[_TrieNode]) -> _PathState:
        """The state for a set of nodes; a temporary one if the cache is full."""
        state = self._states.get(nodes)
        if state is None:
            indices = {index for node in nodes for index in node.template_indices()}
            matches = tuple(sorted(indices, key=self._ranks.__getitem__))
            if len(self._states) >= MOST_STATES:
                return _PathState(self._state, nodes, matches, is_cached=False)
            matches = self._results.setdefault(matches, matches)
            state = self._states.setdefault(nodes, _PathState(self._state, nodes, matches, is_cached=True))
        return state


def normalize_path(path: str) -> str:
    """The canonical spelling of a decoded path: no repeated slashes, none at the end. The length is not limited.

    >>> normalize_path("/users//7/"), normalize_path(""), normalize_path("/a/../b")
    ('/users/7', '/', '/a/../b')
    """
    if "//" in path:
        path = _SLASHES.sub("/", path)
    if path[:1] != "/":
        path = "/" + path
    return path if path[-1] != "/" or path == "/" else path[:-1]


def resolve_dots(path: str) -> str:
    """The normalized path with "." and ".." resolved, never above the root; unchanged if longer than 8 KB.

    >>> resolve_dots("/a/./b/../../../c")
    '/c'
    """
    path = normalize_path(path)
    if "/." not in path or len(path) > LONGEST_RESOLVED:
        return path
    segments: list[str] = []
    for segment in path[1:].split("/"):
        if segment == "..":
            del segments[-1:]
        elif segment != ".":
            segments.append(segment)
    return "/" + "/".join(segments)


def decode_path(target: str) -> str:
    """The path of a raw request target, percent-decoded once; invalid escapes are left as they are.

    >>> decode_path("/caf%C3%A9/100%?q=1"), decode_path("http://example.com/a%2520b")
    ('/café/100%', '/a%20b')
    """
    if target[:1] != "/" and "://" in target:
        target = "/" + target.partition("://")[2].partition("/")[2]
    return unquote(target.partition("?")[0].partition("#")[0])


def normalize_method(method: str) -> str:
    """The method that a request counts as: upper case, HEAD as GET, and "UNKNOWN" for an invalid one."""
    known = METHODS.get(method)
    if known is not None:
        return known
    if len(method) > LONGEST_METHOD or not method.isascii() or not method.replace("-", "").replace("_", "").isalnum():
        return "UNKNOWN"
    upper = method.upper()
    return METHODS.get(upper, upper)


class _TrieNode:
    __slots__ = ("ends", "parameter", "rest", "words")

    def __init__(self) -> None:
        self.words: dict[str, _TrieNode] = {}
        self.parameter: _TrieNode | None = None
        self.rest: _TrieNode | None = None
        """The node of `*`, which leads to itself."""
        self.ends: list[int] = []
        """The templates that end here."""

    def template_indices(self) -> list[int]:
        return self.ends if self.rest is None else self.ends + self.rest.ends

    def next_nodes(self, segment: str) -> Iterable[_TrieNode]:
        return [node for node in (self.words.get(segment), self.parameter, self.rest) if node is not None]


class _PathState(dict[str, "_PathState"]):
    """A state of the matcher: maps the next segment to the next state."""

    __slots__ = ("_nodes", "_other", "_state", "is_cached", "matches")

    def __init__(
        self,
        state: Callable[[frozenset[_TrieNode]], _PathState],
        nodes: frozenset[_TrieNode],
        matches: tuple[int, ...],
        *,
        is_cached: bool,
    ) -> None:
        super().__init__()
        self._state = state
        self._nodes = nodes
        self._other: _PathState | None = None
        """The next state for all segments that no template names here."""
        self.matches = matches
        self.is_cached = is_cached

    def __missing__(self, segment: str) -> _PathState:
        is_named = any(segment in node.words for node in self._nodes)
        if not is_named and self._other is not None:
            return self._other
        following = self._state(frozenset([each for node in self._nodes for each in node.next_nodes(segment)]))
        if following.is_cached:
            if is_named:
                self[segment] = following
            else:
                self._other = following
        return following


def _build_trie(templates: Sequence[Template]) -> _TrieNode:
    root = _TrieNode()
    for index, template in enumerate(templates):
        node = root
        for segment in template.segments:
            if segment is not None:
                node = node.words.setdefault(segment, _TrieNode())
            else:
                node.parameter = node = node.parameter or _TrieNode()
        if template.open_ended:
            if node.rest is None:
                node.rest = _TrieNode()
                node.rest.rest = node.rest
            node = node.rest
        node.ends.append(index)
    return root


def _objection(text: str) -> str | None:
    """The mistake in a template as a whole, and the remedy; None if there is none."""
    if text[:1] == "^" or text[-1:] == "$" or any(sign in text for sign in ("\\", "(?", ".*", ".+", "[", "]", "|")):
        remedy = "write '{id}' for one segment, and '/*' at the end for everything below"
        return f"looks like a regular expression; {remedy}"
    for sign, what in (("?", "a query string"), ("#", "a fragment")):
        if sign in text:
            return f"has {what}, which routes ignore; write {text[: text.index(sign)] or '/'!r}"
    if " " in text or not text.isprintable():
        remedy = "write '{name}' for a segment that may hold one, and methods apart from the path"
        return f"has a space or a control character; {remedy}"
    if text[:1] != "/":
        path = text.partition("://")[2].partition("/")[2] if "://" in text else text
        return f"does not start with a slash; write {'/' + path!r}"
    if "//" in text:
        return f"has an empty segment; write {normalize_path(text)!r}"
    if (plain := unquote(text)) != text:
        remedy = f"write {plain!r}" if plain.isprintable() and " " not in plain else "write '{name}' for that segment"
        return f"is percent-encoded, but paths are compared decoded; {remedy}"
    if resolve_dots(text) != normalize_path(text):
        return f"has dot segments, which clients resolve; write {resolve_dots(text)!r}"
    return None


def _segment_objection(word: str, text: str) -> str | None:
    """The mistake in a segment that is neither a word nor a parameter, and the remedy; None if there is none."""
    if word == "*" or _is_rest(word):
        rule = "which matches everything below and must come last"
        return f" goes on after {word!r}, {rule}; write '{{name}}' for one segment"
    inner, is_braced = word[1:-1], word[0] == "{" and word[-1] == "}"
    name, separator, _ = inner.partition(":")
    if is_braced and inner.isidentifier():
        return None
    if is_braced and separator and name.isidentifier():
        return f": {word!r} has a type, but parameters match any segment; write '{{{name}}}'"
    if word[0] == "<" and word[-1] == ">":
        kind, _, name = inner.rpartition(":")
        remedy = "'*', as the last segment" if kind == "path" else f"'{{{name if name.isidentifier() else 'name'}}}'"
        return f": {word!r} is another framework's spelling; write {remedy}"
    if word[0] == ":" and word[1:].isidentifier():
        return f": {word!r} is another framework's spelling; write '{{{word[1:]}}}'"
    if word.strip("*") == "":
        remedy = f"write '{text[: text.index(word)]}*'" if text.endswith(word) else "write '{name}' for one segment"
        return f": '*' already matches everything below; {remedy}"
    if any(sign in word for sign in "{}<>*"):
        remedy = "write '{name}' for the whole segment, with letters, digits and _ in its name"
        return f": {word!r} is not one whole word or parameter; {remedy}"
    return None


def _is_rest(word: str) -> bool:
    """True for "{name:path}", Starlette's spelling of `*`."""
    return word[0] == "{" and word.endswith(":path}") and word[1:-6].isidentifier()
