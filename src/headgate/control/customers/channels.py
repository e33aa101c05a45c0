"""Channels to customers: email by SMTP, and webhooks that take Slack's messages."""

from __future__ import annotations

import json
import smtplib
import ssl
import urllib.error
import urllib.request
from email.message import EmailMessage
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from headgate.control.webhooks import WebhookRejected, opener

if TYPE_CHECKING:
    from headgate.control.customers.settings import SmtpSettings

__all__ = ["send_email", "send_to_slack"]

TIMEOUT_S: Final = 10.0
_SLACK_ESCAPES: Final = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


def send_email(smtp: SmtpSettings, to: str, subject: str, text: str, *, id: str, now_us: int) -> None:
    """Send a plain text message. Raises OSError if the server does not accept it."""
    message = EmailMessage()
    # Labels of clients are part of it: a line break would begin another header.
    message["Subject"] = " ".join(subject.split())[:200]
    message["From"], message["To"] = smtp.sender, to
    message["Date"] = formatdate(now_us / 1_000_000)
    message["Message-ID"] = f"<{id.replace('/', '.')}@{smtp.sender.rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(text)
    context = ssl.create_default_context()
    kind: Any = smtplib.SMTP_SSL if smtp.security == "tls" else smtplib.SMTP
    options = {"context": context} if smtp.security == "tls" else {}
    with kind(smtp.host, smtp.port, timeout=TIMEOUT_S, **options) as server:
        if smtp.security == "starttls":
            server.starttls(context=context)
        if smtp.user:
            server.login(smtp.user, smtp.password)
        server.send_message(message)


def send_to_slack(url: str, text: str) -> None:
    """Post a message to an incoming webhook. Raises OSError if it is not accepted."""
    body = json.dumps({"text": text.translate(_SLACK_ESCAPES)}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "headgate"})
    try:
        with opener(urlsplit(url).hostname or "").open(request, timeout=TIMEOUT_S) as response:
            response.read(1024)
    except urllib.error.HTTPError as error:
        with error:
            raise WebhookRejected(error.code) from None
