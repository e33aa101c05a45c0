"""The name of this node, under which it reports and canaries select it."""

from __future__ import annotations

import os
import socket
from typing import Final

__all__ = ["node_name"]

NODE_VARIABLE: Final = "HEADGATE_NODE"


def node_name(node: str | None = None) -> str:
    """The given name, else the value of HEADGATE_NODE, else the host name."""
    return node if node is not None else os.environ.get(NODE_VARIABLE) or socket.gethostname()
