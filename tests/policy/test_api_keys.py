"""API keys: which part of a request is one, and that nothing but a keyed hash of it is ever seen."""

from __future__ import annotations

import hmac
import re
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.errors import InvalidConfiguration, InvalidInput
from headgate.gate.identity import IdentityExtractor
from headgate.policy.api_keys import ApiKeyHasher
from headgate.policy.model import IdentitySettings
from headgate.testing import FakeRequest

SECRET = bytes(range(32))
KEY = "sk_live_4f9a"
KEYS = ApiKeyHasher(SECRET)


def read(api_key: str | None, authorization: str | None, settings: IdentitySettings | None = None) -> str | None:
    """The key of such a request, as it is counted by."""
    sent = {"x-api-key": api_key, "authorization": authorization}
    request = FakeRequest(headers={name: value for name, value in sent.items() if value is not None})
    who, _ = IdentityExtractor(settings or IdentitySettings(), KEYS).extract(request, frozenset({"api_key"}))
    return who.get("api_key")


def expected(key: str) -> str:
    """The same hash by the library's one-shot form."""
    return "hmac:" + blake2b(key.encode(), digest_size=16, key=SECRET, person=b"headgate api key").hexdigest()


@pytest.mark.parametrize(
    ("api_key", "authorization", "key"),
    [
        (KEY, None, KEY),
        (f" \t{KEY} ", None, KEY),
        (None, f"Bearer {KEY}", KEY),
        (None, f"bEARER  {KEY} ", KEY),
        (KEY, "Bearer other", KEY),
        ("", f"Bearer {KEY}", KEY),
        ("two words", f"Bearer {KEY}", KEY),
        ("k" * 4096, None, "k" * 4096),
        ("k" * 4097, None, None),
        (None, "Bearer " + "k" * 4097, None),
        (None, None, None),
        ("", "", None),
        (" ", "Bearer  ", None),
        (None, "Bearer", None),
        (None, f"Bearer{KEY}", None),
        (None, f"Bearer {KEY} {KEY}", None),
        (None, f"Basic {KEY}", None),
        (None, KEY, None),
        (f"{KEY}\r\nX: y", None, None),
        (f"{KEY}\0", None, None),
        (f"{KEY}\x7f", None, None),
        ("schlüssel", None, None),
        ("\udcff", None, None),
    ],
)
def test_key_of_a_request(api_key: str | None, authorization: str | None, key: str | None) -> None:
    found = read(api_key, authorization)
    assert found == (None if key is None else expected(key))


@pytest.mark.parametrize(
    ("settings", "api_key", "authorization"),
    [
        (IdentitySettings(api_key_header=None), KEY, None),
        (IdentitySettings(bearer_token=False), None, f"Bearer {KEY}"),
        (IdentitySettings(api_key_header=None, bearer_token=False), KEY, f"Bearer {KEY}"),
    ],
)
def test_source_that_is_switched_off_is_not_read(
    settings: IdentitySettings, api_key: str | None, authorization: str | None
) -> None:
    assert read(api_key, authorization, settings) is None


@given(st.text(max_size=50), st.text(max_size=50))
def test_no_header_raises_and_every_identity_has_one_form(api_key: str, authorization: str) -> None:
    for bearer in (authorization, f"Bearer {authorization}"):
        found = read(api_key, bearer)
        assert found is None or re.fullmatch("hmac:[0-9a-f]{32}", found)


def test_another_secret_gives_another_hash() -> None:
    others = [SECRET[:16], SECRET * 2, SECRET * 3, SECRET * 4]
    assert len({ApiKeyHasher(secret).hashed(KEY) for secret in (SECRET, *others)}) == 5


def test_policy_may_name_a_key_or_its_hash() -> None:
    hashed = read(KEY, None)
    assert hashed is not None
    assert KEYS.fingerprint(KEY) == KEYS.fingerprint(hashed) == KEYS.fingerprint("hmac:" + hashed[5:].upper()) == hashed


def test_sent_hash_does_not_identify_its_owner() -> None:
    hashed = expected(KEY)
    assert read(hashed, None) == read(None, f"Bearer {hashed}") == expected(hashed)
    assert not hmac.compare_digest(expected(hashed), hashed)


HEX = "an API key starts with 'hmac:', but 32 hex digits don't follow"
WORD = "is not valid; it is one word of printable ASCII, without commas, of up to 4096 characters"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("hmac:", HEX),
        ("hmac:" + "0" * 31, HEX),
        ("hmac:" + "0" * 33, HEX),
        ("hmac:" + "0" * 31 + "g", HEX),
        ("", f"an API key of 0 characters {WORD}"),
        ("top secret", f"an API key of 10 characters {WORD}"),
        ("geheimschlüssel", f"an API key of 15 characters {WORD}"),
        ("k" * 4097, f"an API key of 4097 characters {WORD}"),
    ],
)
def test_what_cannot_be_a_key_is_refused_without_being_shown(written: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        KEYS.fingerprint(written)
    assert str(refused.value) == message
    assert refused.value.__context__ is None, "an exception before it could hold the key"


GUESSED = "the secret for API keys has 15 bytes and can be guessed; give at least 16, as from secrets.token_bytes(32)"


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        (b"fifteen bytes..", GUESSED),
        ("a secret that is text", "the secret for API keys is a str; give bytes"),
        (None, "the secret for API keys is a NoneType; give bytes"),
    ],
)
def test_weak_secret_is_refused_without_being_shown(secret: Any, message: str) -> None:
    with pytest.raises(InvalidConfiguration) as refused:
        ApiKeyHasher(secret)
    assert str(refused.value) == message


def test_neither_secret_nor_key_is_kept_where_it_could_be_shown() -> None:
    keys = ApiKeyHasher(b"a secret of some length")
    assert keys.from_header(KEY) == keys.from_bearer(f"Bearer {KEY}") is not None
    shown = repr(keys) + str([getattr(keys, name) for name in ApiKeyHasher.__slots__])
    assert "a secret" not in shown
    assert KEY not in shown
    assert not hasattr(keys, "__dict__")
