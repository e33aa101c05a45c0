"""Tells a URL of step changes: signed, tried again until somebody takes them, and kept over restarts.

A receiver checks that a request is ours, and new, with `verify`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import logging
import random
import time
import urllib.error
import urllib.request
from datetime import UTC, datetime
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from sqlalchemy import select, update

from headgate._fork import at_work
from headgate.control.anomalies.model import step_of_row
from headgate.control.anomalies.tables import STEPS
from headgate.control.config.engine import ConfigUnavailable, read_transaction, write_transaction
from headgate.errors import InvalidConfiguration
from headgate.telemetry.fleet.rollups import MINUTE_US

if TYPE_CHECKING:
    import threading

    from sqlalchemy import Engine

    from headgate.clock import Clock
    from headgate.control.anomalies.model import Anomaly

__all__ = ["SIGNATURE", "Webhook", "sign", "verify"]

logger = logging.getLogger("headgate")

SIGNATURE: Final = "Headgate-Signature"
EVENT_ID: Final = "Headgate-Event-Id"
FIRST_PAUSE: Final = 2.0
LONGEST_PAUSE: Final = 3600.0
"""Seconds between two attempts; they double from the one to the other."""
GIVEN_UP_US: Final = 86_400_000_000
"""After a day nobody wants to know any more."""
MOST_WAITING: Final = 1_000
"""Of those that were not taken: the oldest are given up."""
AT_ONCE: Final = 10
LOOK_EVERY: Final = 1.0
LEAST_SECRET: Final = 16
GONE: Final = 410


def sign(body: bytes, secret: str | bytes, *, at: int) -> str:
    """What stands in the header: when it was signed, and the keyed hash of that and the body.

    >>> sign(b"{}", "a secret of 16 bytes or more", at=1700000000)[:30]
    't=1700000000,v1=00a0525359907c'
    """
    return f"t={at},v1={_hash(body, secret, at)}"


def verify(body: bytes, header: str, secret: str | bytes, *, tolerance: float = 300, now: float | None = None) -> bool:
    """Whether a request is from whoever has the secret, and at most `tolerance` seconds old.

    `body` are the bytes as they came, `header` is the value of Headgate-Signature. Answer 400 if it is not, and do
    nothing. A request that was sent twice has the same Headgate-Event-Id.
    """
    fields: dict[str, list[str]] = {}
    for part in header.split(",")[:10]:
        name, _, value = part.strip().partition("=")
        fields.setdefault(name, []).append(value)
    stamp = fields.get("t", [""])[0]
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 12):
        return False
    # There may be two, while a secret is changed.
    wanted = _hash(body, secret, int(stamp)).encode()
    is_ours = any(hmac.compare_digest(wanted, value.encode("utf-8", "replace")) for value in fields.get("v1", ()))
    age = (time.time() if now is None else now) - int(stamp)
    return is_ours and abs(age) <= tolerance


def _hash(body: bytes, secret: str | bytes, at: int) -> str:
    key = secret.encode() if isinstance(secret, str) else secret
    return hmac.new(key, b"%d.%b" % (at, body), hashlib.sha256).hexdigest()


class Webhook:
    """Where step changes are told: give it to a `Watcher`."""

    def __init__(self, url: str, secret: str | bytes, *, timeout: float = 10.0) -> None:
        """`secret` is what requests are signed with: 16 bytes or more, which the receiver has, too."""
        parts = urlsplit(url)
        try:
            is_url = (
                parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
            )
        except ValueError:
            is_url = False
        if not is_url or not url.isascii() or not url.isprintable() or " " in url:
            raise InvalidConfiguration("a webhook is an address that starts with http:// or https://")
        if parts.username is not None or parts.password is not None:
            raise InvalidConfiguration("a webhook's address bears no password: what is sent there is signed")
        given = secret.encode() if isinstance(secret, str) else secret
        if len(given) < LEAST_SECRET:
            raise InvalidConfiguration(f"the webhook's secret is too short: give {LEAST_SECRET} random bytes or more")
        self._url = url
        self._secret = given
        self._timeout = timeout
        self._opener = _opener(parts.hostname or "")
        self._is_failing = False

    def __repr__(self) -> str:
        return f"Webhook({urlsplit(self._url).hostname!r})"

    def send(self, step: Anomaly, *, now_us: int) -> None:
        """Tell of one, now. Raises OSError, with what was wrong, if nobody took it."""
        body = json.dumps(
            {
                "type": "step-change",
                "id": step.id,
                "at": datetime.fromtimestamp(step.at_us / 1_000_000, UTC).isoformat(),
                "step": step.as_dict(),
            }
        ).encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "headgate",
            "Headgate-Event": "step-change",
            EVENT_ID: step.id,
            SIGNATURE: sign(body, self._secret, at=now_us // 1_000_000),
        }
        request = urllib.request.Request(self._url, body, headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                response.read(1024)  # what it says is nobody's business; that it was taken is
        except urllib.error.HTTPError as error:
            with error:
                raise WebhookRejected(error.code) from None

    def deliver(self, engine: Engine, clock: Clock) -> int:
        """Send what is due; how many were taken."""
        taken = 0
        for row in self._due(engine, clock.now_us()):
            step = step_of_row(row, row.minute)
            try:
                self.send(step, now_us=clock.now_us())
            except (OSError, HTTPException, ValueError) as error:
                self._failed(engine, row, error, clock.now_us())
            else:
                taken += 1
                _note(engine, row.id, delivered_us=clock.now_us(), next_us=None, error=None)
                if self._is_failing:
                    logger.warning("the webhook is answered again")
                self._is_failing = False
        return taken

    def deliver_forever(self, engine: Engine, clock: Clock, stop: threading.Event) -> None:
        """Until told to stop."""
        while not stop.wait(LOOK_EVERY):
            try:
                self.deliver(engine, clock)
            except ConfigUnavailable:
                pass  # whoever looks for step changes says so, and these stay where they are
            except Exception:  # a bug of ours must not end it
                logger.exception("step changes could not be told to the webhook")

    # ------------------------------------------------------------------ within

    def _due(self, engine: Engine, now_us: int) -> list[Any]:
        """What is to be sent now. Nobody else sends the same while this one waits for an answer."""
        is_due = STEPS.c.next_us <= now_us
        with (
            at_work(),
            read_transaction(engine) as connection,
        ):  # mostly there is nothing, and nobody is kept waiting for that
            if connection.execute(select(STEPS.c.id).where(is_due).limit(1)).scalar() is None:
                return []
        with at_work(), write_transaction(engine) as connection:
            newest = select(STEPS.c.minute).where(STEPS.c.next_us.is_not(None)).order_by(STEPS.c.minute.desc())
            beyond = connection.execute(newest.offset(MOST_WAITING).limit(1)).scalar()
            oldest = max((now_us - GIVEN_UP_US) // MINUTE_US, -1 if beyond is None else beyond)
            connection.execute(update(STEPS).where(STEPS.c.minute <= oldest).values(next_us=None))
            due = connection.execute(select(STEPS).where(is_due).order_by(STEPS.c.next_us).limit(AT_ONCE)).all()
            taken = STEPS.c.id.in_([row.id for row in due])
            # All of them in turn, should each take as long as it may.
            held_us = now_us + round((self._timeout + 1) * 1_000_000 * len(due))
            connection.execute(update(STEPS).where(taken).values(next_us=held_us, attempts=STEPS.c.attempts + 1))
            return list(due)

    def _failed(self, engine: Engine, row: Any, error: Exception, now_us: int) -> None:
        # What a receiver answers may be among the words: it must not write lines of its own into a log.
        reason = ascii(str(error) or type(error).__name__)[1:-1][:200]
        if not self._is_failing:
            logger.warning("the webhook did not take a step change: %s; it is tried again for a day", reason)
        self._is_failing = True
        is_over = isinstance(error, WebhookRejected) and error.status == GONE
        next_us = None if is_over else now_us + round(pause(row.attempts) * 1_000_000)
        _note(engine, row.id, error=reason, next_us=next_us)


def pause(attempts: int) -> float:
    """Seconds until the next attempt, after one more than so many; spread, so that not all come at the same moment."""
    longest: float = min(FIRST_PAUSE * 2 ** min(attempts, 30), LONGEST_PAUSE)
    return longest * random.uniform(0.5, 1.0)


class WebhookRejected(OSError):
    """The receiver has answered, but not that it took it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it answered {status}")
        self.status = status


class _WithoutRedirects(urllib.request.HTTPRedirectHandler):
    """Whoever is told is the one who was named: a redirect is no answer."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener(host: str) -> urllib.request.OpenerDirector:
    handlers: list[Any] = [_WithoutRedirects()]
    try:
        is_here = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = False
    if is_here:  # no proxy leads there
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


def _note(engine: Engine, id: str, **values: Any) -> None:
    with at_work(), write_transaction(engine) as connection:
        connection.execute(update(STEPS).where(STEPS.c.id == id).values(values))
