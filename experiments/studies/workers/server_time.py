"""The time of a database in UTC, whatever the time zone of a session is."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sql
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class ServerTime(FunctionElement[Any]):
    """The present time of the server in UTC, without a zone; of databases not named below, its CURRENT_TIMESTAMP."""

    type = sql.DateTime()
    inherit_cache = True


@compiles(ServerTime)
def _standard(*_: Any, **__: Any) -> str:
    return "CURRENT_TIMESTAMP"  # in UTC in SQLite


@compiles(ServerTime, "postgresql")
def _postgresql(*_: Any, **__: Any) -> str:
    return "TIMEZONE('utc', CURRENT_TIMESTAMP)"


@compiles(ServerTime, "mysql")
@compiles(ServerTime, "mariadb")
def _mysql(*_: Any, **__: Any) -> str:
    return "UTC_TIMESTAMP()"


@compiles(ServerTime, "mssql")
def _mssql(*_: Any, **__: Any) -> str:
    return "SYSUTCDATETIME()"


@compiles(ServerTime, "oracle")
def _oracle(*_: Any, **__: Any) -> str:
    return "SYS_EXTRACT_UTC(SYSTIMESTAMP)"
