"""Abuse defence: scenarios that detect attacks in the requests of all clients. See docs/abuse.md."""

__all__: list[str] = []
