"""The admin server: API, pages and access tokens, on a port of its own."""

from headgate.errors import InvalidConfiguration

try:
    from headgate.control.admin.app import create_app
    from headgate.control.admin.serve import AdminServer
    from headgate.control.admin.tokens import Token, Tokens
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.partition(".")[0] == "headgate":
        raise
    raise InvalidConfiguration(
        f"the admin server needs the package {missing.name!r}: pip install 'headgate[admin]'"
    ) from None

__all__ = ["AdminServer", "Token", "Tokens", "create_app"]
