"""The control plane: what people change while the API runs, and how the change reaches every node."""

__all__: list[str] = []
