"""Notifies customers of their own anomalies, after raising their limits where the policy allows it."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any, ClassVar, Final

from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError

from headgate._fork import block_forks
from headgate.clock import MINUTE_US, SystemClock
from headgate.control.anomalies.detector import anomaly_from_row
from headgate.control.anomalies.tables import ANOMALIES, NOTICES
from headgate.control.background import BackgroundThreads
from headgate.control.config.engine import ConfigUnavailable, read_transaction, write_transaction
from headgate.control.customers.channels import TIMEOUT_S, send_email, send_to_slack
from headgate.control.service.request_links import LIFETIME_US, Link
from headgate.control.webhooks import EventSender, Webhook, WebhookEvent, WebhookQueue
from headgate.errors import HeadgateError
from headgate.telemetry.pseudonyms import Pseudonymizer

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence
    from typing import Self

    from headgate.clock import Clock
    from headgate.control.anomalies.detector import Anomaly
    from headgate.control.config import ConfigStore
    from headgate.control.customers.settings import Customer, CustomerSettings
    from headgate.control.service.service import AdminService

__all__ = ["CustomerNotifier"]

logger = logging.getLogger("headgate")

CHECK_INTERVAL_S: Final = 2.0
MAX_AGE_MINUTES: Final = 60
"""Older anomalies are not reported to customers: an admin server was down, and they have seen it themselves."""
BATCH_SIZE: Final = 20


class CustomerNotifier(EventSender):
    """Watches for new anomalies of customers, raises their limits, and sends them a message on each of their channels.

    Several may share a config store: each anomaly is handled by one of them.
    """

    _timeout = TIMEOUT_S
    _receiver: ClassVar[str] = "a customer's channel"

    def __init__(
        self,
        settings: CustomerSettings,
        config: ConfigStore,
        service: AdminService,
        *,
        secret: str | bytes | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`secret` is that of the gates, by default HEADGATE_SECRET."""
        self._settings = settings
        self._engine = config.engine
        self._service = service
        self._clock = clock or SystemClock()
        pseudonyms = Pseudonymizer(secret)
        self._by_hash = {
            f"{kind} {pseudonyms.hash_of(kind, value)}": each
            for each in settings.customers
            for kind, value in [each.client]
        }
        """The customers by kind and keyed hash, as anomalies name them."""
        self._threads = BackgroundThreads("headgate-customers")

    def start(self) -> Self:
        """Run in background threads until `stop`."""
        deliver = self.deliver_forever, QUEUE, self._engine, self._clock
        self._threads.start(self, (self._check_forever,), deliver)
        return self

    def stop(self) -> None:
        self._threads.stop()

    close = stop

    def check(self) -> int:
        """Handle new anomalies. Returns how many there were."""
        now_us = self._clock.now_us()
        handled = select(NOTICES.c.anomaly).where(NOTICES.c.channel == "")
        is_recent = ANOMALIES.c.minute >= now_us // MINUTE_US - MAX_AGE_MINUTES
        query = select(ANOMALIES).where(is_recent, ANOMALIES.c.id.not_in(handled)).limit(BATCH_SIZE)
        with block_forks(), read_transaction(self._engine) as connection:
            found = [anomaly_from_row(row, now_us // MINUTE_US) for row in connection.execute(query)]
        for anomaly in found:
            self._handle(anomaly, now_us)
        return len(found)

    def send(self, event: WebhookEvent, *, now_us: int) -> None:
        """Send one message. The channel may have been removed from the settings: then it is dropped."""
        customer = self._by_hash.get(event.content["customer"])
        channel, step = event.content["channel"], self._anomaly(event.content["anomaly"])
        if customer is None or step is None or channel not in _channels(customer):
            return
        raised, link = event.content["raised"], self._link(customer, step, event.at_us)
        kind, _, address = channel.partition(" ")
        subject, text = _words(customer, step, raised, link)
        if kind == "email":
            assert self._settings.smtp is not None, "checked with the settings"
            send_email(self._settings.smtp, address, subject, text, id=event.id, now_us=now_us)
        elif kind == "slack":
            send_to_slack(customer.slack, text)
        else:
            public = {name: value for name, value in step.as_dict().items() if name not in ("key", "text")}
            content = {"step": public, "raised": raised, "link": link or None, "text": text}
            message = WebhookEvent("traffic-growth", event.id, event.at_us, content)
            Webhook(customer.webhook, customer.webhook_secret).send(message, now_us=now_us)

    def _handle(self, anomaly: Anomaly, now_us: int) -> None:
        customer = self._by_hash.get(f"{anomaly.kind} {anomaly.key}")
        raised: list[str] = []
        if customer is not None:
            try:
                raised = self._service.growth.raise_limits(anomaly, customer.client)
            except ConfigUnavailable:
                raise
            except HeadgateError as error:
                logger.warning("the limits of %s were not raised: %s", anomaly.label, error)
        common = {"anomaly": anomaly.id, "customer": f"{anomaly.kind} {anomaly.key}", "raised": json.dumps(raised)}
        rows: list[dict[str, Any]] = [{"id": anomaly.id, "channel": "", "next_us": None}]
        channels = () if customer is None else _channels(customer)
        rows += [
            {"id": f"{anomaly.id}/{number}", "channel": channel, "next_us": now_us}
            for number, channel in enumerate(channels, 1)
        ]
        try:
            with block_forks(), write_transaction(self._engine) as connection:
                for row in rows:
                    connection.execute(insert(NOTICES).values({**common, "at_us": anomaly.at_us, "attempts": 0, **row}))
        except IntegrityError:
            pass  # another admin server has handled it

    def _link(self, customer: Customer, step: Anomaly, at_us: int) -> str:
        signer = self._service.growth.signer
        if not self._settings.link or signer is None:
            return ""
        token = signer.sign(Link(customer.client, customer.name, step.id, at_us + LIFETIME_US))
        return f"{self._settings.link}/limit-request/{token}"

    def _anomaly(self, id: str) -> Anomaly | None:
        with block_forks(), read_transaction(self._engine) as connection:
            row = connection.execute(select(ANOMALIES).where(ANOMALIES.c.id == id)).one_or_none()
        return None if row is None else anomaly_from_row(row, row.minute)

    def _check_forever(self, stop: threading.Event) -> None:
        while not stop.wait(CHECK_INTERVAL_S):
            try:
                self.check()
            except ConfigUnavailable:
                pass  # logged by the detector, which writes to the same store
            except Exception:  # keep running
                logger.exception("customers could not be notified")


def _channels(customer: Customer) -> Sequence[str]:
    found = [f"email {address}" for address in customer.email]
    found += [name for name in ("slack", "webhook") if getattr(customer, name)]
    return found


def _words(customer: Customer, step: Anomaly, raised: Sequence[str], link: str) -> tuple[str, str]:
    """The subject and the text of a message."""
    return f"Traffic of {customer.name}: {step.times:,.0f} times the usual", "\n\n".join(
        _paragraphs(customer, step, raised, link)
    )


def _paragraphs(customer: Customer, step: Anomaly, raised: Sequence[str], link: str) -> Iterator[str]:
    yield (
        f"{customer.name} sent {step.count:,} requests in a minute and {step.before:,} in the minute before. "
        f"Usually it is {step.usual:,} at most."
    )
    if step.verdict == "people":
        yield "The requests come from many programs and addresses, as if more people use your service."
    else:
        yield "The requests look like those of one program. If you do not expect that, check who uses your API key."
    if raised:
        yield "\n".join(["We have raised your limits for now:", *raised])
    if link:
        yield f"See your limits, or request higher ones, within a week:\n{link}"


def _event(row: Any) -> WebhookEvent:
    content = {"customer": row.customer, "channel": row.channel, "raised": json.loads(row.raised)}
    content["anomaly"] = row.anomaly
    return WebhookEvent("traffic-growth", row.id, row.at_us, content)


QUEUE: Final = WebhookQueue(NOTICES, "at_us", 1, _event)
"""The messages to customers."""
