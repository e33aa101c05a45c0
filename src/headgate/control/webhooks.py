"""Webhooks: events in tables, delivered signed, retried until accepted, and persistent across restarts.

Receivers authenticate requests with `verify`.
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
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple
from urllib.parse import urlsplit

from sqlalchemy import select, update

from headgate._fork import block_forks
from headgate.control.config.engine import ConfigUnavailable, read_transaction, write_transaction
from headgate.errors import InvalidConfiguration

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from sqlalchemy import Engine, Table

    from headgate.clock import Clock

__all__ = ["SIGNATURE_HEADER", "EventSender", "Webhook", "WebhookEvent", "WebhookQueue", "opener", "sign", "verify"]

logger = logging.getLogger("headgate")

SIGNATURE_HEADER: Final = "Headgate-Signature"
EVENT_ID_HEADER: Final = "Headgate-Event-Id"
MIN_BACKOFF_S: Final = 2.0
MAX_BACKOFF_S: Final = 3600.0
MAX_AGE_US: Final = 86_400_000_000
"""Older events are not delivered."""
MAX_PENDING: Final = 1_000
"""Beyond this, the oldest undelivered events are dropped."""
BATCH_SIZE: Final = 10
CHECK_INTERVAL_S: Final = 1.0
MIN_SECRET_BYTES: Final = 16
HTTP_GONE: Final = 410


def sign(body: bytes, secret: str | bytes, *, at: int) -> str:
    """The value of the Headgate-Signature header: the time, and an HMAC of the time and the body.

    >>> sign(b"{}", "a secret of 16 bytes or more", at=1700000000)[:30]
    't=1700000000,v1=00a0525359907c'
    """
    return f"t={at},v1={_hash(body, secret, at)}"


def verify(body: bytes, header: str, secret: str | bytes, *, tolerance: float = 300, now: float | None = None) -> bool:
    """True if a request was signed with the secret and is at most `tolerance` seconds old.

    `body` is the raw request body, `header` the value of Headgate-Signature. Otherwise respond with 400. A retried
    request has the same Headgate-Event-Id.
    """
    fields: dict[str, list[str]] = {}
    for part in header.split(",")[:10]:
        name, _, value = part.strip().partition("=")
        fields.setdefault(name, []).append(value)
    stamp = fields.get("t", [""])[0]
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) <= 12):
        return False
    # Two signatures are allowed, for rotating the secret.
    expected = _hash(body, secret, int(stamp)).encode()
    signatures = [value.encode("utf-8", "replace") for value in fields.get("v1", ())]
    is_authentic = any(hmac.compare_digest(expected, signature) for signature in signatures)
    age = (time.time() if now is None else now) - int(stamp)
    return is_authentic and abs(age) <= tolerance


def _hash(body: bytes, secret: str | bytes, at: int) -> str:
    key = secret.encode() if isinstance(secret, str) else secret
    return hmac.new(key, b"%d.%b" % (at, body), hashlib.sha256).hexdigest()


class WebhookEvent(NamedTuple):
    """One message."""

    type: str
    id: str
    """Identifies the event: a repeated message has the same one."""
    at_us: int
    content: dict[str, Any]
    """The other fields of the message."""


class WebhookQueue(NamedTuple):
    """A table whose rows are events with the state of their delivery.

    Its columns are `id`; `next_us`, the time of the next attempt, None for a row that is not pending; `attempts`;
    `delivered_us` and `error`, both None at first.
    """

    table: Table
    time: str
    """The column with the time of the event."""
    unit_us: int
    """The unit of that column."""
    event: Callable[[Any], WebhookEvent]
    """The event of a row."""


class EventSender:
    """Delivers the events of a queue, each until it is accepted or too old. A subclass sends one event."""

    _timeout: float
    _receiver: ClassVar[str] = "the webhook"
    """The name of the receiver in the log."""
    _is_failing = False

    def send(self, event: WebhookEvent, *, now_us: int) -> None:
        """Send one event. Raises OSError if it is not accepted."""
        raise NotImplementedError

    def deliver(self, queue: WebhookQueue, engine: Engine, clock: Clock) -> int:
        """Send all due events. Returns how many were accepted."""
        accepted = 0
        for row in self._claim_due(queue, engine, clock.now_us()):
            try:
                self.send(queue.event(row), now_us=clock.now_us())
            except (OSError, HTTPException, ValueError) as error:
                self._reschedule(queue, engine, row, error, clock.now_us())
            else:
                accepted += 1
                _update(queue, engine, row.id, delivered_us=clock.now_us(), next_us=None, error=None)
                if self._is_failing:
                    logger.warning("%s accepts requests again", self._receiver)
                self._is_failing = False
        return accepted

    def deliver_forever(self, queue: WebhookQueue, engine: Engine, clock: Clock, stop: threading.Event) -> None:
        """Deliver until `stop` is set."""
        while not stop.wait(CHECK_INTERVAL_S):
            try:
                self.deliver(queue, engine, clock)
            except ConfigUnavailable:
                pass  # logged by those who write the events; delivery continues later
            except Exception:  # keep running
                logger.exception("the delivery of events failed")

    def _claim_due(self, queue: WebhookQueue, engine: Engine, now_us: int) -> list[Any]:
        """The rows to send now, reserved so that no other process sends them meanwhile."""
        table = queue.table
        time_of, is_due = table.c[queue.time], table.c.next_us <= now_us
        with block_forks(), read_transaction(engine) as connection:
            if connection.execute(select(table.c.id).where(is_due).limit(1)).scalar() is None:
                return []  # as usual, without a lock
        with block_forks(), write_transaction(engine) as connection:
            pending = select(time_of).where(table.c.next_us.is_not(None)).order_by(time_of.desc())
            beyond = connection.execute(pending.offset(MAX_PENDING).limit(1)).scalar()
            oldest = max((now_us - MAX_AGE_US) // queue.unit_us, -1 if beyond is None else beyond)
            is_late = (time_of <= oldest) & table.c.next_us.is_not(None)
            connection.execute(update(table).where(is_late).values(next_us=None))
            query = select(table).where(is_due).order_by(table.c.next_us).limit(BATCH_SIZE)
            due = connection.execute(query).all()
            # Reserved long enough to send all of them one after the other, should each time out.
            next_us = now_us + round((self._timeout + 1) * 1_000_000 * len(due))
            claim = update(table).where(table.c.id.in_([row.id for row in due]))
            connection.execute(claim.values(next_us=next_us, attempts=table.c.attempts + 1))
            return list(due)

    def _reschedule(self, queue: WebhookQueue, engine: Engine, row: Any, error: Exception, now_us: int) -> None:
        # The message may contain the response: escape it, so that it cannot forge log lines.
        reason = ascii(str(error) or type(error).__name__)[1:-1][:200]
        if not self._is_failing:
            logger.warning("%s did not accept an event: %s; retrying for up to a day", self._receiver, reason)
        self._is_failing = True
        is_final = isinstance(error, WebhookRejected) and error.status == HTTP_GONE
        next_us = None if is_final else now_us + round(backoff_s(row.attempts) * 1_000_000)
        _update(queue, engine, row.id, error=reason, next_us=next_us)


class Webhook(EventSender):
    """A URL that receives events, such as those of an `AnomalyDetector`."""

    def __init__(self, url: str, secret: str | bytes, *, timeout: float = 10.0) -> None:
        """`secret` signs the requests: at least 16 bytes, shared with the receiver."""
        parts = urlsplit(url)
        try:
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # of the port
            is_url = False
        if not is_url or not url.isascii() or not url.isprintable() or " " in url:
            raise InvalidConfiguration("invalid webhook URL; it must start with http:// or https://")
        if parts.username is not None or parts.password is not None:
            raise InvalidConfiguration("the webhook URL must not contain a password; requests are signed instead")
        given = secret.encode() if isinstance(secret, str) else secret
        if len(given) < MIN_SECRET_BYTES:
            raise InvalidConfiguration(f"the webhook secret is too short; use at least {MIN_SECRET_BYTES} random bytes")
        self._url = url
        self._secret = given
        self._timeout = timeout
        self._opener = opener(parts.hostname or "")

    def __repr__(self) -> str:
        return f"Webhook({urlsplit(self._url).hostname!r})"

    def send(self, event: WebhookEvent, *, now_us: int) -> None:
        """Send one request. Raises OSError if it is not accepted."""
        at = datetime.fromtimestamp(event.at_us / 1_000_000, UTC).isoformat()
        body = json.dumps({"type": event.type, "id": event.id, "at": at, **event.content}).encode()
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "headgate",
            "Headgate-Event": event.type,
            EVENT_ID_HEADER: event.id,
            SIGNATURE_HEADER: sign(body, self._secret, at=now_us // 1_000_000),
        }
        request = urllib.request.Request(self._url, body, headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                response.read(1024)  # the content does not matter
        except urllib.error.HTTPError as error:
            with error:
                raise WebhookRejected(error.code) from None


def backoff_s(attempts: int) -> float:
    """The delay before the next attempt: exponential, with jitter."""
    longest: float = min(MIN_BACKOFF_S * 2 ** min(attempts, 30), MAX_BACKOFF_S)
    return longest * random.uniform(0.5, 1.0)


class WebhookRejected(OSError):
    """The receiver responded with an error status."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status


def opener(host: str) -> urllib.request.OpenerDirector:
    """An opener for one host that follows no redirects, so that nothing is sent to another one."""
    handlers: list[Any] = [_NoRedirects()]
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if is_local:  # do not use a proxy
        handlers.append(urllib.request.ProxyHandler({}))
    return urllib.request.build_opener(*handlers)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treats redirects as errors, so that nothing is sent to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _update(queue: WebhookQueue, engine: Engine, id: str, **values: Any) -> None:
    with block_forks(), write_transaction(engine) as connection:
        connection.execute(update(queue.table).where(queue.table.c.id == id).values(values))
