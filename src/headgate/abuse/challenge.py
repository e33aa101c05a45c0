"""Challenges: clients prove by a cookie that they have solved a puzzle, or that the app has let them pass.

The cookie is a token that was signed by a gate: it names its end and is bound to one client, so that gates keep no
state. A token of the built-in page is worthless without its solution, a number with which its SHA-256 begins with
enough zero bits.
"""

from __future__ import annotations

import re
from base64 import b64encode
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b, sha256
from hmac import compare_digest
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Final

from headgate.clock import SECOND_US

if TYPE_CHECKING:
    from headgate.local.restrictions import Restriction

__all__ = [
    "BY_APP",
    "COOKIE",
    "COOKIE_LIFETIME_S",
    "Challenge",
    "ChallengeSigner",
    "challenge_page",
    "is_solved",
    "page_policy",
]

COOKIE: Final = "headgate_challenge"
COOKIE_LIFETIME_S: Final = 3600
"""The longest time that a solution is good for."""
BY_APP: Final = 0
"""The difficulty of tokens that the app has issued: they need no solution."""
MAX_COOKIES: Final = 8
"""Cookies of the name in one request that are looked at; a browser sends one for each path."""
_COOKIE: Final = re.compile(
    rf"(?:^|;)[ \t]*{COOKIE}=([0-9a-f]{{1,13}})\.([0-9]{{1,2}})\.([0-9a-f]{{32}})(?:\.([0-9]{{1,15}}))?[ \t]*(?=;|$)"
)
"""End (s), difficulty, signature and solution."""
_SCRIPT: Final = re.compile(r"<script>(.*)</script>", re.DOTALL)
_STYLE: Final = re.compile(r"<style>(.*)</style>", re.DOTALL)


class ChallengeSigner:
    """Signs and verifies tokens with a key that is derived from the secret of the gates.

    >>> signer = ChallengeSigner(b"sixteen bytes or more")
    >>> token = signer.token("ip 203.0.113.9", 1_763_251_200, 0)
    >>> signer.is_valid(f"{COOKIE}={token}", "ip 203.0.113.9", 0, now_us=0)
    True
    >>> signer.is_valid(f"{COOKIE}={token}", "ip 203.0.113.10", 0, now_us=0)
    False
    """

    __slots__ = ("_key",)

    def __init__(self, secret: bytes) -> None:
        self._key = blake2b(secret, digest_size=32, person=b"headgate-chal").digest()

    def token(self, client: str, end_s: int, difficulty: int) -> str:
        """The signed text of a challenge for one client."""
        return f"{end_s:x}.{difficulty}.{self._signature(client, end_s, difficulty)}"

    def is_valid(self, cookies: str, client: str, difficulty: int, now_us: int) -> bool:
        """True if a Cookie header has a token of this client that has not ended, with its solution if it needs one.

        A token of the app is valid for every challenge; a solution for those that are not more difficult.
        """
        for number, (end, bits, signature, solution) in enumerate(_COOKIE.findall(cookies)):
            if number == MAX_COOKIES:
                return False
            end_s, solved = int(end, 16), int(bits)
            if end_s * SECOND_US <= now_us:
                continue
            if solved != BY_APP and (difficulty == BY_APP or solved < difficulty):
                continue
            if not compare_digest(signature, self._signature(client, end_s, solved)):
                continue
            if solved == BY_APP or is_solved(f"{end}.{bits}.{signature}", solution, solved):
                return True
        return False

    def _signature(self, client: str, end_s: int, difficulty: int) -> str:
        text = f"{end_s} {difficulty} {client}".encode("utf-8", "surrogatepass")
        return blake2b(text, key=self._key, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Challenge:
    """A challenge that the app has to present, as `current_admission().challenge`."""

    restriction: Restriction
    _token: str
    """Of the app, so that it needs no solution: only for clients that have passed."""

    def pass_cookie(self, *, secure: bool = True) -> str:
        """The value of a Set-Cookie header that lets this client pass for an hour. Send it once the client has proved
        itself.

        `secure` is False for a site that is served without TLS.
        """
        end = "; Secure" if secure else ""
        return f"{COOKIE}={self._token}; Path=/; Max-Age={COOKIE_LIFETIME_S}; HttpOnly; SameSite=Lax{end}"


def is_solved(token: str, solution: str, difficulty: int) -> bool:
    """True if the SHA-256 of token and solution begins with that many zero bits."""
    digest = sha256(f"{token}.{solution}".encode()).digest()
    return int.from_bytes(digest[:8]) >> (64 - difficulty) == 0


def challenge_page(token: str, difficulty: int, *, is_safe: bool) -> bytes:
    """The page that solves a challenge in a browser, and then loads the same URL again.

    Unless the method of the request was safe, it asks before it repeats the request.
    """
    facts = {"token": token, "difficulty": difficulty, "cookie": COOKIE, "lifetime": COOKIE_LIFETIME_S}
    return _page().substitute(facts, safe="yes" if is_safe else "no").encode()


@cache
def page_policy() -> bytes:
    """The Content-Security-Policy of the page: its own script and style, and nothing else."""
    text = _page().template.replace("$$", "$")
    hashes = [_source_hash(pattern, text) for pattern in (_SCRIPT, _STYLE)]
    others = "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return f"default-src 'none'; script-src {hashes[0]}; style-src {hashes[1]}; {others}".encode()


@cache
def _page() -> Template:
    return Template((files("headgate.abuse") / "challenge.html").read_text("utf-8"))


def _source_hash(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    assert found is not None
    return f"'sha256-{b64encode(sha256(found[1].encode()).digest()).decode()}'"
