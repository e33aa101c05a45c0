"""Schema migrations of the config store, run with Alembic from the package."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from headgate.errors import InvalidConfiguration

if TYPE_CHECKING:
    from sqlalchemy import Connection

__all__ = ["VERSION_TABLE", "migrate", "newest_revision"]

VERSION_TABLE: Final = "headgate_schema"


def migrate(connection: Connection, target: str = "head") -> None:
    """Upgrade the tables to a revision, by default the newest, within the current transaction."""
    scripts = _scripts()
    if _is_newest(connection, scripts):
        return

    def steps(revision: Any, _: MigrationContext) -> list[Any]:
        return scripts._upgrade_revs(target, revision)  # noqa: SLF001 - as `alembic upgrade` does

    with EnvironmentContext(Config(), scripts, fn=steps) as environment:
        # Each migration is atomic on SQLite, too.
        environment.configure(connection=connection, version_table=VERSION_TABLE, transactional_ddl=True)
        environment.run_migrations()


def newest_revision() -> str:
    """The newest schema revision."""
    return str(_scripts().get_current_head())


def _is_newest(connection: Connection, scripts: ScriptDirectory) -> bool:
    found = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE}).get_current_revision()
    if found is not None and found not in {script.revision for script in scripts.walk_revisions()}:
        raise InvalidConfiguration(
            f"the config store has schema revision {found} of a newer headgate version; upgrade headgate"
        )
    return found == scripts.get_current_head()


@cache
def _scripts() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", "headgate.control.config:migrations")
    config.set_main_option("path_separator", "os")
    return ScriptDirectory.from_config(config)
