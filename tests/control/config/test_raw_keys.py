"""API keys in policy documents: each becomes its fingerprint where it stands, and nothing else changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate import InvalidConfiguration, InvalidPolicy
from headgate.control.config import ConfigStore
from headgate.control.config.raw_keys import hash_raw_keys
from headgate.control.config.rows import PolicyDocument
from headgate.policy.api_keys import ApiKeyHasher
from headgate.policy.formats import FORMATS
from headgate.policy.loader import read

if TYPE_CHECKING:
    from pathlib import Path

SECRET = b"a secret of thirty-two bytes ..."
KEYS = ApiKeyHasher(SECRET)
KEY = "sk_live_4eC39HqLyjWDarjtT1zdp7dc"
HASH = KEYS.fingerprint(KEY)
LIMITS = "limits: [{name: requests, by: client, bucket: 10/minute, tiers: {pro: 99/minute}}]\n"
BY: dict[str, Any] = {"author": "ada@example.com", "reason": "contract 4711"}


def hashed(text: str, format: str = "yaml") -> str:
    return hash_raw_keys(PolicyDocument(text, format, f"policy.{format}"), KEYS.fingerprint).text


# ------------------------------------------------------------------ where it stands


@pytest.mark.parametrize(
    "written",
    [
        f"clients:\n  - {{api_key: {KEY}, tier: pro}}  # of Ädäm\n",
        f"clients:\n  - api_key:   {KEY}   # a comment\n    tier: pro\n",
        f'clients: [{{api_key: \'{KEY}\'}}, {{tier: pro, "api_key" : "{KEY[::-1]}"}}]\n',
        f"overrides:\r\n- api_key: {KEY}\r\n  bucket: 9/hour\r\nblocked:\r\n- {{api_key: 4711}}\r\n",
        f"# so\u2028# some editors break lines so\nclients:\n- label: 'Käthe''s'\n  api_key: {KEY}\n",
        f"blocked: [{{api_key: {KEY}}}]\nclients:\n- {{api_key: another-key}}\n- {{tier: pro, api_key: third}}\n",
        f"clients: [{{api_key:\n    {KEY}}}]",
        "blocked:\n  - {api_key: it's, reason: quotes}\n  - {api_key: 'it''s-one'}\n  - api_key: a}b\n",
    ],
)
def test_keys_in_yaml_become_fingerprints(written: str) -> None:
    check("yaml", written)


@pytest.mark.parametrize(
    "written",
    [
        f'[[clients]]\napi_key = "{KEY}"  # hers\ntier = "pro"\n\n[[clients]]\napi_key = 4711\n',
        f"clients = [\n  {{api_key = '{KEY}', label = \"Ädäm\"}},\n]\n",
        f'[[blocked]]\r\n"api_key" = """{KEY}"""\r\nreason = "x"\r\n',
        f"[[blocked]]\napi_key='''{KEY}'''\n",
    ],
)
def test_keys_in_toml_become_fingerprints(written: str) -> None:
    check("toml", written)


@pytest.mark.parametrize(
    "written",
    [
        f'{{"clients": [{{"api_key" :"{KEY}","tier":"pro"}}, {{"api_key": 4711}}]}}',
        '{"blocked":\n\t[{"api\\u005fkey": "quote\\"d\\u0041"}]}',
    ],
)
def test_keys_in_json_become_fingerprints(written: str) -> None:
    check("json", written)


def check(format: str, written: str) -> None:
    """The values are as before but for the keys, and so is every character of the text but for theirs."""
    made = hashed(written, format)
    before, after = (FORMATS[format](text).value for text in (written, made))
    count = 0
    for section in ("clients", "overrides", "blocked"):
        for entry in before.get(section, []):  # type: ignore[attr-defined]
            entry["api_key"] = KEYS.fingerprint(str(entry["api_key"]))
            count += 1
    assert after == before
    assert made.count('"hmac:') == count
    pieces = []
    for number, piece in enumerate(made.split('"hmac:')):
        pieces.append(piece[33:] if number else piece)  # 32 digits and the quote
    at = 0
    for piece in pieces:
        at = written.index(piece, at) + len(piece)
    assert at == len(written)
    assert hashed(made, format) == made, "a fingerprint stays"


@given(
    st.lists(
        st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=","), min_size=1, max_size=7)
    )
)
def test_any_key_that_a_client_can_send_is_found_in_quotes(keys: list[str]) -> None:
    keys = [key for key in keys if not key.startswith("hmac:")]
    entries = [f"  - {{api_key: '{key.replace(chr(39), chr(39) * 2)}', label: ä}}\n" for key in keys]
    made = hashed("".join(["clients:\n", *entries, "  - {tenant: acme}\n"]))
    *found, last = FORMATS["yaml"](made).value["clients"]  # type: ignore[index]
    assert [each["api_key"] for each in found] == [KEYS.fingerprint(key) for key in keys]
    assert last == {"tenant": "acme"}


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (
            f"# {KEY} is hers\nclients: [{{api_key: {KEY}}}]\n",
            "policy.yaml:1:3: the API key of clients[0] appears here too; remove it",
        ),
        (
            f"clients:\n  - api_key: >-\n      {KEY}\n",
            f"policy.yaml: clients[0].api_key: API keys are stored as hashes; write {HASH}",
        ),
        (
            "clients: {api_key: ]",
            "policy.yaml:1:20: not YAML: while parsing a flow node did not find expected node content",
        ),
    ],
    ids=["in a comment", "in a block of text", "no YAML"],
)
def test_what_cannot_be_replaced_is_refused(written: str, told: str) -> None:
    with pytest.raises(InvalidPolicy) as refused:
        hashed(written)
    assert str(refused.value) == told
    assert KEY not in str(refused.value)


def test_document_that_would_say_something_else_is_refused() -> None:
    with pytest.raises(InvalidPolicy, match="API keys are stored as hashes"):
        hash_raw_keys(PolicyDocument(f"clients: [{{api_key: {KEY}}}]", "yaml", "p.yaml"), lambda _: 'hmac:"')


def test_short_keys_may_be_words_of_a_comment() -> None:
    assert "# tea, and" in hashed("# tea, and\nclients: [{api_key: tea}]\n")


# ------------------------------------------------------------------ in the store


def test_store_keeps_fingerprints_and_all_else(tmp_path: Path) -> None:
    text = f"{LIMITS}clients:  # ours\n  - {{api_key: {KEY}, tier: pro, label: Acme}}\n"
    store = ConfigStore(f"sqlite:///{tmp_path}/config.db", secret=SECRET)
    with pytest.raises(InvalidPolicy, match="API keys are stored as hashes; write hmac:"):
        store.put_policy(text, **BY)
    unknowing = ConfigStore(f"sqlite:///{tmp_path}/config.db")
    with pytest.raises(InvalidPolicy, match="write its hmac: hash, which `headgate hash-key` prints"):
        unknowing.put_policy(text, **BY)
    assert store.put_policy(text, hash_keys=True, **BY) is not None
    assert store.put_policy(text, hash_keys=True, **BY) is None, "it is the same again"
    document = store.document()
    assert document is not None
    assert document.text == text.replace(KEY, f'"{HASH}"')
    assert store.policy().clients == read(document.text).clients
    store.close()
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.iterdir())


@pytest.mark.parametrize("entry", ["{api_key: two words}", "{api_key: true}", '{api_key: "hmac:12"}'])
def test_invalid_key_is_reported_with_its_position(tmp_path: Path, entry: str) -> None:
    store = ConfigStore(f"sqlite:///{tmp_path}/config.db", secret=SECRET)
    with pytest.raises(InvalidPolicy, match=r"policy\.yaml:2:21: "):
        store.put_policy(f"{LIMITS}clients: [{entry}]\n", hash_keys=True, **BY)
    assert store.version == 0
    store.close()


def test_without_a_secret_there_is_nothing_to_hash_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADGATE_SECRET", raising=False)
    store = ConfigStore(f"sqlite:///{tmp_path}/config.db")
    with pytest.raises(InvalidConfiguration, match="there is no secret to hash with"):
        store.put_policy(f"{LIMITS}clients: [{{api_key: {KEY}}}]\n", hash_keys=True, **BY)
    store.close()


# ------------------------------------------------------------------ passwords of regions


@pytest.mark.parametrize("url", ["redis://:open-sesame@eu", "redis://ada:open-sesame@eu", "redis://eu?password=sesame"])
def test_passwords_of_regions_are_not_stored(tmp_path: Path, url: str) -> None:
    store = ConfigStore(f"sqlite:///{tmp_path}/config.db", secret=SECRET)
    try:
        with pytest.raises(InvalidPolicy) as raised:
            store.put_policy(f"regions: {{home: eu, stores: {{eu: '{url}'}}}}\n{LIMITS}", file="p.yaml", **BY)
        expected = "p.yaml: regions.stores.eu: passwords are not stored; write one like ${EU_PASSWORD}, and set this"
        assert str(raised.value).startswith(expected)
        assert "sesame" not in str(raised.value)
        text = f"regions: {{home: eu, stores: {{eu: 'redis://ada:${{EU_PASSWORD}}@eu'}}}}\n{LIMITS}"
        store.put_policy(text, file="p.yaml", **BY)
        regions = store.policy().regions
        assert regions is not None
        assert regions.stores == {"eu": "redis://ada:${EU_PASSWORD}@eu"}
    finally:
        store.close()
