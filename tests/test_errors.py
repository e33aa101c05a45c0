"""The exception hierarchy."""

from __future__ import annotations

import headgate
from headgate import HeadgateError, InvalidInput


def test_invalid_input_errors_are_value_errors() -> None:
    errors = [made for name in headgate.__all__ if isinstance(made := getattr(headgate, name), type)]
    errors = [made for made in errors if issubclass(made, Exception)]
    assert len(errors) == 12
    assert all(issubclass(made, HeadgateError) for made in errors)
    assert all(issubclass(made, ValueError) == issubclass(made, InvalidInput) for made in errors)
    assert all(made.__doc__ for made in errors)
