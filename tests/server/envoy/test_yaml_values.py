"""YAML as Go's yaml.v2 reads it."""

from __future__ import annotations

import pytest

from headgate.server.envoy.yaml_values import YamlError, load, plain


def read(text: str) -> object:
    root = load(text)
    return None if root is None else plain(root)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("yes", True),
        ("Off", False),
        ("y", True),
        ("'yes'", "yes"),
        ("~", None),
        ("", None),
        ("8080", 8080),
        ("1_000", 1000),
        ("010", 8),
        ("0x1F", 31),
        ("0o17", 15),
        ("0b101", 5),
        ("-5", -5),
        ("08", 8.0),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1.2.3", "1.2.3"),
        ("12:30", "12:30"),
        ("2026-11-18", "2026-11-18"),
        ("99999999999999999999", 1e20),
        ("-.inf", float("-inf")),
        ("a b", "a b"),
        ("[1, a]", [1, "a"]),
    ],
)
def test_scalars_are_typed_as_in_yaml_v2(text: str, value: object) -> None:
    result = read(f"x: {text}")
    assert result == {"x": value}
    assert isinstance(result, dict)
    assert type(result["x"]) is type(value)


def test_the_last_of_equal_keys_wins() -> None:
    assert read("a: 1\na: 2") == {"a": 2}


@pytest.mark.parametrize(
    ("mapping", "value"),
    [
        ("{<<: *u, a: 3}", {"a": 3, "x": 1}),
        ("{a: 3, <<: *u}", {"a": 1, "x": 1}),  # unlike in YAML 1.1, the merge replaces the keys before it
        ("{<<: [*u, *v]}", {"a": 1, "x": 1, "b": 2}),
        ("{<<: *u, b: 5, <<: *v}", {"a": 2, "x": 1, "b": 2}),
    ],
)
def test_merged_keys_count_where_they_are(mapping: str, value: dict[str, int]) -> None:
    result = read(f"u: &u {{a: 1, x: 1}}\nv: &v {{a: 2, b: 2}}\nw: {mapping}")
    assert isinstance(result, dict)
    assert result["w"] == value


def test_an_anchor_can_be_used_again() -> None:
    assert read("a: &x 1\nb: *x\nc: &x 2\nd: *x") == {"a": 1, "b": 1, "c": 2, "d": 2}


def test_only_the_first_document_is_read() -> None:
    assert read("a: 1\n---\nb: 2") == {"a": 1}
    assert read("") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "yaml: line 1: did not find expected node content"),
        ("a: 1\n b: c", "yaml: line 2: mapping values are not allowed in this context"),
        ("a: &x [*x]", "yaml: an anchor contains itself"),
        ("a: {<<: 5}", "yaml: map merge requires map or sequence of maps as the value"),
        ("[" * 200 + "]" * 200, "yaml: line 1: nested more than 100 levels deep"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(YamlError) as caught:
        read(text)
    assert str(caught.value) == message


def test_exponential_aliases_are_rejected() -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(YamlError, match="excessive aliasing"):
        load("\n".join(levels))
