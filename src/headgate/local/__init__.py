"""What stands between a limiter and its store, so that a flood stays cool and an outage stays short: denials that are
remembered, tokens that were paid for in advance, accounts of what was let through while the store was away. Nothing in
here waits, and nothing knows which store it is."""

from __future__ import annotations

__all__: list[str] = []
