"""One file for each step. What has been released is never changed: another step is added."""

__all__: list[str] = []
