"""Routes: what a template fits, which of several comes first, and that no spelling of a path escapes its route."""

from __future__ import annotations

import asyncio
import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
from flask import Flask
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from werkzeug.test import run_wsgi_app

from headgate.errors import InvalidInput
from headgate.policy import routes
from headgate.policy.routes import Matcher, Template, decode_path, normalize_method, normalize_path, resolve_dots

if TYPE_CHECKING:
    from collections.abc import Sequence


def matcher(*texts: str) -> Matcher:
    return Matcher([Template.parse(text) for text in texts])


# Templates


@pytest.mark.parametrize(
    ("text", "canonical", "segments", "open_ended"),
    [
        ("/", "/", (), False),
        ("/users", "/users", ("users",), False),
        ("/users/", "/users", ("users",), False),
        ("/users/{id}", "/users/{id}", ("users", None), False),
        ("/{a}/{b_2}/c", "/{a}/{b_2}/c", (None, None, "c"), False),
        ("*", "/*", (), True),
        ("/*", "/*", (), True),
        ("/static/*", "/static/*", ("static",), True),
        ("/static/*/", "/static/*", ("static",), True),
        ("/{tenant}/*", "/{tenant}/*", (None,), True),
        ("/files/{path:path}", "/files/*", ("files",), True),
        ("/{rest:path}", "/*", (), True),
        ("/café/.well-known/v1.2/x:cancel", "/café/.well-known/v1.2/x:cancel", None, False),
        ("/Products(1)/a+b,c;d=e@f/~g!$&'h/100%", "/Products(1)/a+b,c;d=e@f/~g!$&'h/100%", None, False),
    ],
)
def test_template_says_which_segments_fit(
    text: str, canonical: str, segments: tuple[str | None, ...] | None, open_ended: bool
) -> None:
    template = Template.parse(text)
    assert (str(template), template.open_ended) == (canonical, open_ended)
    assert template.segments == (tuple(text[1:].split("/")) if segments is None else segments)
    assert Template.parse(template.text) == template


def test_longest_template_has_1000_characters() -> None:
    assert Matcher([Template.parse("/" + "a" * 999)]).match("/" + "a" * 999) == (0,)


def test_templates_that_fit_the_same_paths_are_equal() -> None:
    same = {Template.parse(text) for text in ("/users/{id}", "/users/{name}", "/users/{name}/")}
    assert len(same) == 1
    assert len({Template.parse(text) for text in ("/users/{id}", "/users/id", "/users/*", "/users")}) == 4


REGULAR = "looks like a regular expression; write '{id}' for one segment, and '/*' at the end for everything below"
SPACE = (
    "has a space or a control character; write '{name}' for a segment that may hold one, and methods apart from the "
    "path"
)
WHOLE = (
    "is not one whole word or parameter; write '{name}' for the whole segment, with letters, digits and _ in its name"
)
LONG = "has 1001 characters; the longest has 1000, and '/prefix/*' covers all below a prefix"
LAST = "which matches everything below and must come last; write '{name}' for one segment"
SPELLING = "is another framework's spelling; write"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "path '' does not start with a slash; write '/'"),
        ("users/{id}", "path 'users/{id}' does not start with a slash; write '/users/{id}'"),
        ("https://a.example/b", "path 'https://a.example/b' does not start with a slash; write '/b'"),
        ("/a//b", "path '/a//b' has an empty segment; write '/a/b'"),
        ("/search?q=x", "path '/search?q=x' has a query string, which routes ignore; write '/search'"),
        ("?q", "path '?q' has a query string, which routes ignore; write '/'"),
        ("/page#top", "path '/page#top' has a fragment, which routes ignore; write '/page'"),
        ("/my file", f"path '/my file' {SPACE}"),
        ("GET /users", f"path 'GET /users' {SPACE}"),
        ("/a\n", f"path '/a\\n' {SPACE}"),
        ("/a\0", f"path '/a\\x00' {SPACE}"),
        ("/a/../b", "path '/a/../b' has dot segments, which clients resolve; write '/b'"),
        ("/a/.", "path '/a/.' has dot segments, which clients resolve; write '/a'"),
        ("/caf%C3%A9", "path '/caf%C3%A9' is percent-encoded, but paths are compared decoded; write '/café'"),
        (
            "/my%20file",
            "path '/my%20file' is percent-encoded, but paths are compared decoded; write '{name}' for that segment",
        ),
        *[(text, f"path {text!r} {REGULAR}") for text in ("^/users", "/users$", r"/users/\d+", "/users/.*", "/u/.+")],
        *[(text, f"path {text!r} {REGULAR}") for text in ("/users/[0-9]", "/a|b", "/users/(?P<id>x)")],
        ("/a{b}c", f"path '/a{{b}}c': 'a{{b}}c' {WHOLE}"),
        ("/{a}-{b}", f"path '/{{a}}-{{b}}': '{{a}}-{{b}}' {WHOLE}"),
        ("/a*", f"path '/a*': 'a*' {WHOLE}"),
        ("/**", "path '/**': '*' already matches everything below; write '/*'"),
        ("/api/**/x", "path '/api/**/x': '*' already matches everything below; write '{name}' for one segment"),
        ("/{}", f"path '/{{}}': '{{}}' {WHOLE}"),
        ("/{user-id}", f"path '/{{user-id}}': '{{user-id}}' {WHOLE}"),
        ("/{1}", f"path '/{{1}}': '{{1}}' {WHOLE}"),
        ("/{", f"path '/{{': '{{' {WHOLE}"),
        ("/}{", f"path '/}}{{': '}}{{' {WHOLE}"),
        ("/a<b>", f"path '/a<b>': 'a<b>' {WHOLE}"),
        ("/*/a", f"path '/*/a' goes on after '*', {LAST}"),
        ("/{p:path}/a", f"path '/{{p:path}}/a' goes on after '{{p:path}}', {LAST}"),
        ("/{id:int}", "path '/{id:int}': '{id:int}' has a type, but parameters match any segment; write '{id}'"),
        ("/u/<id>", f"path '/u/<id>': '<id>' {SPELLING} '{{id}}'"),
        ("/u/<int:id>", f"path '/u/<int:id>': '<int:id>' {SPELLING} '{{id}}'"),
        ("/u/<>", f"path '/u/<>': '<>' {SPELLING} '{{name}}'"),
        ("/u/<path:p>", f"path '/u/<path:p>': '<path:p>' {SPELLING} '*', as the last segment"),
        ("/users/:id", f"path '/users/:id': ':id' {SPELLING} '{{id}}'"),
        ("/" + "a" * 1000, f"path '/{'a' * 39}'... {LONG}"),
        (None, "None is not a path; write it as text, as in '/users/{id}'"),
        (7, "7 is not a path; write it as text, as in '/users/{id}'"),
    ],
)
def test_what_is_no_template_is_refused_with_the_remedy(text: Any, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        Template.parse(text)
    assert str(refused.value) == message


@given(st.text(max_size=20) | st.text("/{}<>:*ab.%2?#", max_size=20))
def test_any_text_is_a_template_of_its_own_spelling_or_is_refused(text: str) -> None:
    try:
        template = Template.parse(text)
    except InvalidInput:
        return
    assert Template.parse(template.text) == template
    example_path = "/" + "/".join("x" if segment is None else segment for segment in template.segments)
    assert Matcher([template]).match(example_path) == (0,)


# Matching

API = ("/*", "/users/{id}", "/users/me", "/users", "/{kind}/me", "/static/*", "/", "/users/*", "/users/{name}")


@pytest.mark.parametrize(
    ("path", "fitting"),
    [
        ("/", ["/", "/*"]),
        ("/users", ["/users", "/users/*", "/*"]),
        ("/users/me", ["/users/me", "/users/{id}", "/users/{name}", "/users/*", "/{kind}/me", "/*"]),
        ("/users/7", ["/users/{id}", "/users/{name}", "/users/*", "/*"]),
        ("/users/7/posts", ["/users/*", "/*"]),
        ("/teams/me", ["/{kind}/me", "/*"]),
        ("/teams/you", ["/*"]),
        ("/static", ["/static/*", "/*"]),
        ("/static/a/b/c/d/e/f", ["/static/*", "/*"]),
        ("/staticky", ["/*"]),
        ("/Users", ["/*"]),
    ],
)
def test_all_templates_that_fit_are_found_the_most_specific_first(path: str, fitting: list[str]) -> None:
    assert [API[index] for index in matcher(*API).match(path)] == fitting


def test_words_on_the_left_weigh_more_than_words_on_the_right() -> None:
    assert matcher("/{a}/b/c", "/a/*", "/a/{b}/{c}", "/a/{b}/c").match("/a/b/c") == (3, 2, 1, 0)


def test_without_templates_nothing_fits() -> None:
    assert matcher().match("/a/b") == matcher("/a").match("/b") == ()


def slowly(templates: Sequence[Template], path: str) -> tuple[int, ...]:
    """The slow and obvious way: compare each template with each segment."""
    segments = [segment for segment in path.split("/") if segment]

    def fits(template: Template) -> bool:
        wanted = template.segments
        long_enough = len(segments) >= len(wanted) if template.open_ended else len(segments) == len(wanted)
        return long_enough and all(want in (None, got) for want, got in zip(wanted, segments, strict=False))

    def order(index: int) -> tuple[list[int], int]:
        kinds = [1 if segment is None else 0 for segment in templates[index].segments]
        return (kinds + [2] * templates[index].open_ended, index)

    return tuple(sorted((index for index, template in enumerate(templates) if fits(template)), key=order))


words = st.sampled_from(["a", "b", "c"])
templates_of_few_words = st.lists(
    st.tuples(st.lists(words | st.just("{x}"), max_size=4), st.sampled_from(["", "/*"])).map(
        lambda parts: Template.parse("/" + "/".join(parts[0]) + parts[1] if parts[0] else parts[1] or "/")
    ),
    max_size=12,
)
paths_of_few_words = st.lists(words | st.sampled_from(["", ".", "..", "z", "{x}", "*"]), max_size=7).map(
    lambda segments: "/" + "/".join(segments)
)


@given(templates_of_few_words, st.lists(paths_of_few_words, min_size=1, max_size=10))
def test_matching_agrees_with_comparing_each_template(templates: list[Template], paths: list[str]) -> None:
    found = Matcher(templates)
    for path in paths * 2:
        assert found.match(path) == slowly(templates, path)


@given(templates_of_few_words, paths_of_few_words)
def test_matching_agrees_when_there_are_too_many_states_to_keep(templates: list[Template], path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "MOST_STATES", 2)
        few = Matcher(templates)
        assert few.match(path) == few.match(path) == slowly(templates, path)
        assert len(few._states) <= 2


def test_equal_answers_are_one_object() -> None:
    found = matcher("/users/{id}", "/users/*", "*")
    one, other = found.match("/users/1"), found.match("/users/2")
    assert one == (0, 1, 2)
    assert one is other
    assert found.match("/" + "x" * 9000) is found.match("/y")


# Costs that nobody can raise


def test_states_depend_on_the_templates_and_not_on_the_paths() -> None:
    found = matcher(*API)
    alphabet = ["users", "me", "static", "x", "y"]
    for path in itertools.product(alphabet, repeat=4):
        for length in range(5):
            found.match("/" + "/".join(path[:length]))
    states = len(found._states)
    chance = random.Random(7)
    for _ in range(5000):
        segments = [chance.choice([*alphabet[:3], f"{chance.random()}"]) for _ in range(chance.randrange(1, 9))]
        found.match("/" + "/".join(segments))
    assert len(found._states) == states
    assert sum(len(state) for state in found._states.values()) <= states * 3, "made-up segments are kept"


def test_even_a_policy_that_is_made_for_it_has_bounded_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """One template for each place of an `a` among ten segments: 2**10 sets of them can fit."""
    monkeypatch.setattr(routes, "MOST_STATES", 100)
    templates = [
        Template.parse("/" + "/".join("a" if place == index else "{x}" for place in range(10))) for index in range(10)
    ]
    found = Matcher(templates)
    for path in itertools.product("ab", repeat=10):
        text = "/" + "/".join(path)
        assert found.match(text) == tuple(index for index in range(10) if path[index] == "a")
    assert len(found._states) == 100


def test_threads_share_a_matcher() -> None:
    texts = [f"/{a}/{b}/{c}" for a, b, c in itertools.product(("a", "b", "{x}"), repeat=3)]
    templates = [Template.parse(text) for text in texts]
    paths = ["/" + "/".join(path) for path in itertools.product("abc", repeat=3)]
    expected = [slowly(templates, path) for path in paths]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            found = Matcher(templates)
            for answers in pool.map(lambda _, found=found: [found.match(path) for path in paths], range(8)):
                assert answers == expected


# Spellings


@pytest.mark.parametrize(
    ("path", "spelling", "without_dots"),
    [
        ("", "/", "/"),
        ("/", "/", "/"),
        ("///", "/", "/"),
        ("/a", "/a", "/a"),
        ("a/b", "/a/b", "/a/b"),
        ("/a/", "/a", "/a"),
        ("//a///b//", "/a/b", "/a/b"),
        ("/a/./b/.", "/a/./b/.", "/a/b"),
        ("/a/../b", "/a/../b", "/b"),
        ("/..", "/..", "/"),
        ("/../../a/..//../b", "/../../a/../../b", "/b"),
        ("/.well-known/...", "/.well-known/...", "/.well-known/..."),
        ("/a%2Fb/%2e%2e", "/a%2Fb/%2e%2e", "/a%2Fb/%2e%2e"),
        ("*", "/*", "/*"),
    ],
)
def test_path_has_one_spelling(path: str, spelling: str, without_dots: str) -> None:
    assert normalize_path(path) == spelling
    assert resolve_dots(path) == without_dots


slashes = st.integers(1, 3).map("/".__mul__)


@given(templates_of_few_words, st.lists(words, max_size=5), st.data())
def test_slashes_never_change_the_route(templates: list[Template], segments: list[str], data: st.DataObject) -> None:
    plain = "/" + "/".join(segments)
    spelled = "".join(data.draw(slashes) + segment for segment in segments) + data.draw(st.just("") | slashes)
    found = Matcher(templates)
    assert found.match(spelled) is found.match(plain)


@given(templates_of_few_words, st.lists(words, max_size=5), st.data())
@example([Template.parse("/a/*")], ["a"], None)
def test_resolved_dots_never_change_the_route(
    templates: list[Template], segments: list[str], data: st.DataObject | None
) -> None:
    detours = st.sampled_from(["", "/.", "/x/..", "//", "/x/./y//../.."])
    detour = (lambda: "/x/..") if data is None else (lambda: data.draw(detours))
    spelled = "".join(f"{detour()}/{segment}" for segment in segments) + detour()
    found = Matcher(templates)
    assert found.match(resolve_dots(spelled)) is found.match("/" + "/".join(segments))


def test_dots_are_resolved_in_up_to_8_kb() -> None:
    longest = "/../" + "a" * 8188
    assert (resolve_dots(longest), resolve_dots(longest + "a")) == ("/" + "a" * 8188, longest + "a")


@given(st.text("/.ab", max_size=30))
def test_spelling_is_final(path: str) -> None:
    assert normalize_path(normalize_path(path)) == normalize_path(path)
    assert resolve_dots(resolve_dots(path)) == normalize_path(resolve_dots(path)) == resolve_dots(path)


HANDLERS = {"health": "/health", "user": "/users/{id}", "export": "/users/{id}/export", "file": "/files/{path:path}"}


def starlette_handler(path: str) -> str:
    def endpoint(name: str) -> Any:
        async def answer(_: Any) -> PlainTextResponse:
            return PlainTextResponse(name)

        return answer

    app = Starlette(routes=[Route(template, endpoint(name)) for name, template in HANDLERS.items()])
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": [], "root_path": ""}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        await app(scope | {"server": ("test", 80), "scheme": "http"}, None, send)  # type: ignore[arg-type]

    asyncio.run(run())
    return sent[1]["body"].decode() if sent[0]["status"] == 200 else ""


def flask_handler(path: str) -> str:
    app = Flask("app")
    for name, template in HANDLERS.items():
        rule = template.replace("{path:path}", "<path:path>").replace("{id}", "<id>")
        app.add_url_rule(rule, name, lambda name=name, **_: name)
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "SERVER_NAME": "test", "SERVER_PORT": "80"}
    chunks, status, _ = run_wsgi_app(app.wsgi_app, environ | {"wsgi.url_scheme": "http"})
    return b"".join(chunks).decode() if status.startswith("200") else ""


@pytest.mark.parametrize("handler", [starlette_handler, flask_handler])
@pytest.mark.parametrize(
    ("path", "reaches_handler"),
    [
        ("/health", True),
        ("//health", False),
        ("/users/7", True),
        ("/users/.", True),
        ("/users/..", True),
        ("/users/../export", True),
        ("/users/" + "7" * 9000 + "/export", True),
        ("/users/.7/export", True),
        ("/users/7/../../health", False),
        ("/files/../health", True),
        ("/files/x/../../health", True),
        ("/files/./../users/7/export", True),
        ("/files/" + "x" * 9000 + "/../../health", True),
    ],
)
def test_route_is_that_of_the_handler_that_runs(handler: Any, path: str, reaches_handler: bool) -> None:
    """No framework resolves dots. Who did would take an expensive "/files/../health" for "/health"."""
    ran = handler(path)
    assert ran or not reaches_handler
    if ran:
        fitting = matcher(*HANDLERS.values()).match(path)
        assert list(HANDLERS)[fitting[0]] == ran


@pytest.mark.parametrize(
    ("path", "fitting"),
    [
        ("/users/" + "x" * 1_000_000, (1, 3)),
        ("/users/" + "x" * 1_000_000 + "/export", (2, 3)),
        ("/users" + "/x" * 500_000, (3,)),
        ("/" * 1_000_000 + "users/7", (1, 3)),
        ("/files" + "//x" * 300_000, (0, 3)),
        ("/files//" + "../" * 300_000 + "users/7", (0, 3)),
    ],
    ids=range(6),
)
def test_long_paths_still_match(path: str, fitting: tuple[int, ...]) -> None:
    assert matcher("/files/*", "/users/{id}", "/users/{id}/export", "*").match(path) == fitting


# Targets and methods


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/a%20b/c", "/a b/c"),
        ("/caf%C3%A9?q=%20#x", "/café"),
        ("/a%252Fb", "/a%2Fb"),
        ("/a%2Fb", "/a/b"),
        ("/100%/%zz/%4", "/100%/%zz/%4"),
        ("/%ff", "/\ufffd"),
        ("http://example.com/a/b?c", "/a/b"),
        ("http://example.com", "/"),
        ("/go?to=http://example.com/", "/go"),
        ("*", "*"),
        ("", ""),
    ],
)
def test_raw_target_is_decoded_once(target: str, path: str) -> None:
    assert decode_path(target) == path


@pytest.mark.parametrize(
    ("method", "counts_as"),
    [
        ("GET", "GET"),
        ("HEAD", "GET"),
        ("head", "GET"),
        ("post", "POST"),
        ("OPTIONS", "OPTIONS"),
        ("purge", "PURGE"),
        ("M-SEARCH", "M-SEARCH"),
        ("A" * 20, "A" * 20),
        ("A" * 21, "UNKNOWN"),
        ("", "UNKNOWN"),
        ("-", "UNKNOWN"),
        ("GET /", "UNKNOWN"),
        ("G\nT", "UNKNOWN"),
        ("GÉT", "UNKNOWN"),
        ("\ufb00", "UNKNOWN"),
    ],
)
def test_method_counts_as_one_of_few(method: str, counts_as: str) -> None:
    assert normalize_method(method) == counts_as
