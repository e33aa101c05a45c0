"""One file per migration. Released migrations never change."""

__all__: list[str] = []
