"""The shop: a FastAPI app with Headgate's middleware. The limits are in policy.yaml."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from secrets import compare_digest, token_hex
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.responses import HTMLResponse, StreamingResponse
from fastapi.security import HTTPBasic, HTTPBasicCredentials

from examples.shop.customers import CUSTOMERS, account_of
from examples.shop.gate import gate, ledger, log
from examples.shop.start_page import welcome
from headgate.adapters import current_admission
from headgate.adapters.asgi import HeadgateMiddleware

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PASSWORDS = {"ada": "analytical"}  # in production, hashed
CREDIT_PACK = 10
"""Exports that an order of credits pays for."""
EXPORTS: dict[str, dict[str, Any]] = {}
"""The responses to exports by the ids of their charges, for retries. In production, in a database."""
WORDS = ["Warm", "the", "pot.", "Steep", "the", "tea", "for", "three", "minutes,", "and", "not", "for", "one", "more."]


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    yield
    if log is not None:
        await asyncio.to_thread(log.close)  # writes the last decisions
    ledger.close()


app = FastAPI(title="Shop", lifespan=lifespan)

app.add_middleware(HeadgateMiddleware, gate=gate)


@app.get("/", response_class=HTMLResponse)
async def index(request: Request) -> str:
    host, port = request.scope["server"]
    return welcome(f"http://{host}:{port}")


@app.get("/health")
async def health() -> str:
    return "fine"


@app.post("/login")
async def login(who: Annotated[HTTPBasicCredentials, Depends(HTTPBasic())]) -> dict[str, str]:
    password = PASSWORDS.get(who.username)
    if password is None or not compare_digest(password.encode(), who.password.encode()):
        raise HTTPException(401, "wrong name or password")
    return {"hello": who.username}


@app.get("/search")
async def search(q: str) -> list[str]:
    return [word for word in WORDS if q in word]


@app.get("/posts")
async def posts() -> list[str]:
    return ["We have a new teapot."]


@app.post("/posts", status_code=201)
async def write(post: dict[str, Any]) -> dict[str, Any]:
    return post


@app.post("/complete")
async def complete() -> StreamingResponse:
    """Stream words as a language model does. The cost is only known at the end."""

    async def words() -> AsyncIterator[str]:
        spoken = 0
        try:
            for word in WORDS:
                spoken += 1
                yield f"{word} "
                await asyncio.sleep(0.02)
        finally:  # also if the client disconnects: sent words are charged
            admission.commit(spoken)

    admission = current_admission()
    return StreamingResponse(words(), media_type="text/plain")


def customer(x_api_key: Annotated[str, Header()] = "") -> str:
    """The customer, by the API key."""
    if x_api_key not in CUSTOMERS:
        raise HTTPException(401, "exports need the API key of a customer")
    return CUSTOMERS[x_api_key]


@app.post("/exports", status_code=201)
async def export(_: Annotated[str, Depends(customer)]) -> dict[str, Any]:
    """One unit of the plan. A request and its retries, which have the same Idempotency-Key, are one export."""
    (charge,) = current_admission().quotas
    made = {"export": charge.id[-12:], "paid_by": [source for source, _ in charge.paid_by]}
    return EXPORTS.setdefault(charge.id, made)


@app.post("/credits", status_code=201)
def buy_credits(
    customer: Annotated[str, Depends(customer)], idempotency_key: Annotated[str | None, Header(max_length=100)] = None
) -> dict[str, Any]:
    """Add credits to the plan, once per order, however often it is sent."""
    order = f"order/{customer}/{idempotency_key or token_hex(8)}"
    entry = ledger.grant(account_of(customer), CREDIT_PACK, id=order, source="credits", reference="POST /credits")
    return {"order": entry.id, "credits": entry.amount}


@app.get("/plan")
def plan(customer: Annotated[str, Depends(customer)]) -> dict[str, Any]:
    """What is left. Leases of running processes are spent in advance, and count as held."""
    found = ledger.summary(account_of(customer))
    left = {grant.source: grant.remaining + grant.held for grant in found.grants}
    return {"account": found.account, "left": left, "charged": found.charged}


@app.post("/pay", status_code=202)
async def pay() -> dict[str, str]:
    return {"status": "accepted"}


@app.post("/webhooks/{source}", status_code=202)
async def webhook(source: str) -> dict[str, str]:
    return {"received_from": source}
