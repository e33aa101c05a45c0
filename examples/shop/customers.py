"""The customers of the shop by their API keys, and the accounts of their plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

from examples.shop.simulated_clients import CLIENTS

if TYPE_CHECKING:
    from headgate.adapters import RequestInfo

__all__ = ["CUSTOMERS", "account_of", "customer_of"]

CUSTOMERS = {
    "demo-free-key": "pocket-zine",
    "demo-pro-key": "tea-house",
    "demo-enterprise-key": "acme",
    "demo-launch-key": "launch-day",
    **{client.key: client.label.lower().replace(" ", "-") for client in CLIENTS},
}
"""In production, in a database, by the hashes of the keys."""


def customer_of(request: RequestInfo) -> str | None:
    """The customer who sends a request, for limits `by: customer`."""
    return CUSTOMERS.get("".join(request.header("x-api-key")))


def account_of(customer: str) -> str:
    """The account that the quota `exports` of the policy charges."""
    return f"exports/{customer}"
