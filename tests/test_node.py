"""The name of this node."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from headgate._node import node_name

if TYPE_CHECKING:
    import pytest


def test_given_name_precedes_the_variable_and_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADGATE_NODE", raising=False)
    assert node_name() == socket.gethostname()
    monkeypatch.setenv("HEADGATE_NODE", "web-1")
    assert (node_name(), node_name("web-2")) == ("web-1", "web-2")
