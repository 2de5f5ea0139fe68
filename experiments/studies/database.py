"""The exchange between workers that share an SQLite or PostgreSQL database and no directory.

Table `eigengraft_holders` has a row for each lease, with the time of its last heartbeat by the clock of the database.
Table `eigengraft_files` has the text files of every run that has ended or failed. Checkpoints are not copied: they stay
in the directory of the worker that wrote them.

Optuna's RDBStorage is not used, because it stores only trials of a search, and restarts the trial of a dead worker as a
new trial. Here runs outside a search have leases, too, and a run that is started again remains the same run.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import sqlalchemy as sql

from eigengraft.errors import RecipeError

from ..files import make_directory, write_text
from ..reports.records import fault_file
from .rendezvous import STALE, Lease, Leases, Rendezvous

_TABLES = sql.MetaData()
_LEASES = sql.Table(
    "eigengraft_holders",
    _TABLES,
    sql.Column("run_key", sql.String(64), primary_key=True),
    sql.Column("number", sql.Integer, nullable=False),
    sql.Column("token", sql.String(32), nullable=False),
    sql.Column("seen", sql.DateTime, nullable=False),
)
_FILES = sql.Table(
    "eigengraft_files",
    _TABLES,
    sql.Column("run_key", sql.String(64), primary_key=True),
    sql.Column("file", sql.String(64), primary_key=True),
    sql.Column("study", sql.String(255), nullable=False, index=True),
    sql.Column("run", sql.Text, nullable=False),
    sql.Column("content", sql.Text, nullable=False),
)
_CLOCKS = {
    "sqlite": sql.func.current_timestamp(),
    "postgresql": sql.func.timezone("utc", sql.func.current_timestamp(), type_=sql.DateTime()),
}
"""SQL expression of each supported database for its present time in UTC, independent of the session's time zone."""
_RESULT, _FAULT = "result.json", "error.txt"
_COPIED = ("config.json", "env.json", "metrics.jsonl", "diagnostics.jsonl", "fault.json", _RESULT)


@dataclass(frozen=True)
class DatabaseRendezvous(Rendezvous):
    """The exchange through a database. Each worker copies the results of all workers into its own directory.

    url: URL of the database, for instance `sqlite:///study.db` or `postgresql+psycopg://user@host/name`.
    study: name of the study; the database may hold several studies.
    """

    url: str
    study: str

    def leases(self, run: str) -> Leases:
        return DatabaseLeases(self.url, self._key(run))

    def fetch(self, runs: Collection[str] | None = None) -> None:
        wanted = _FILES.c.study == self.study
        if runs is not None:
            wanted = wanted & _FILES.c.run_key.in_([self._key(run) for run in runs])
        with _transaction(self.url) as connection:
            known = sorted(map(str, connection.scalars(sql.select(_FILES.c.run).where(wanted).distinct())))
        missing = [run for run in known if not (self.directory / run / _RESULT).exists()]
        for run in missing:
            rows = sql.select(_FILES.c.file, _FILES.c.content).where(_FILES.c.run_key == self._key(run))
            with _transaction(self.url) as connection:
                contents = {str(row.file): str(row.content) for row in connection.execute(rows)}
            for file, content in sorted(contents.items(), key=lambda item: item[0] == _RESULT):  # the result last
                path = self._path(run, file)
                make_directory(path.parent)
                write_text(path, content)
        for run in runs or ():
            if run not in missing:
                self._path(run, _FAULT).unlink(missing_ok=True)  # the run is being tried again

    def publish(self, run: str) -> None:
        key = self._key(run)
        paths = {file: self._path(run, file) for file in (*_COPIED, _FAULT)}
        ended = paths[_RESULT].exists()
        kept = [file for file, path in paths.items() if path.exists() and (ended or file == _FAULT)]
        rows = [
            {"run_key": key, "file": file, "study": self.study, "run": run, "content": paths[file].read_text("utf-8")}
            for file in kept
        ]
        with _transaction(self.url) as connection:
            stale = _FILES.c.run_key == key if ended else (_FILES.c.run_key == key) & (_FILES.c.file == _FAULT)
            connection.execute(sql.delete(_FILES).where(stale))
            if rows:
                connection.execute(sql.insert(_FILES), rows)

    def _path(self, run: str, file: str) -> Path:
        return fault_file(self.directory / run) if file == _FAULT else self.directory / run / file

    def _key(self, run: str) -> str:
        return hashlib.sha256(f"{self.study}/{run}".encode()).hexdigest()


@dataclass(frozen=True)
class DatabaseLeases(Leases):
    """The lease of one run as a row of a table. A worker counts as alive for `STALE` seconds after its last heartbeat.

    url: URL of the database.
    key: key of the run in the table, a hash of the names of study and run.
    """

    url: str
    key: str

    def present(self) -> Lease | None:
        with _transaction(self.url) as connection:
            own = sql.select(_LEASES.c.number, _LEASES.c.token).where(_LEASES.c.run_key == self.key)
            row = connection.execute(own).first()
        return None if row is None else Lease(int(row.number), str(row.token))

    def alive(self, lease: Lease) -> bool:
        with _transaction(self.url) as connection:
            seen = connection.scalar(sql.select(_LEASES.c.seen).where(self._is(lease)))
            now = connection.scalar(sql.select(_CLOCKS[connection.dialect.name]))
        return seen is not None and now is not None and (now - seen).total_seconds() < STALE

    @contextmanager
    def created(self, number: int) -> Iterator[Lease | None]:
        own, first = Lease(number, uuid.uuid4().hex), True
        try:
            with _transaction(self.url) as connection:
                row = {"run_key": self.key, **own._asdict(), "seen": _CLOCKS[connection.dialect.name]}
                connection.execute(sql.insert(_LEASES).values(row))
        except FileExistsError:
            first = False
        yield own if first else None

    def remove(self, lease: Lease) -> None:
        with _transaction(self.url) as connection:
            connection.execute(sql.delete(_LEASES).where(self._is(lease)))

    def beat(self, lease: Lease) -> bool:
        with _transaction(self.url) as connection:
            now = _CLOCKS[connection.dialect.name]
            return bool(connection.execute(sql.update(_LEASES).where(self._is(lease)).values(seen=now)).rowcount)

    def _is(self, lease: Lease) -> sql.ColumnElement[bool]:
        return (_LEASES.c.run_key == self.key) & (_LEASES.c.token == lease.token)


@contextmanager
def _transaction(url: str) -> Iterator[sql.Connection]:
    """Run the block in a transaction.

    Raises FileExistsError if a row to insert exists already, and OSError if the database does not answer.
    """
    try:
        with _engine(url).begin() as connection:
            yield connection
    except sql.exc.IntegrityError as error:
        raise FileExistsError(f"--storage: the row is already in the database ({error.orig})") from error
    except sql.exc.DBAPIError as error:
        raise _no_answer(url, error) from error


_FORMS = "give a URL of SQLite (sqlite:///study.db) or PostgreSQL (postgresql+psycopg://user@host/name)"
_CHECKS = "check the URL, whether the server runs, and whether this user may create and write tables there"


@lru_cache
def _engine(url: str) -> sql.Engine:
    """Return the engine of the database at `url`. Tables that are missing are created.

    Connections are closed after each transaction, because a forked process must not use connections of its parent.
    """
    try:
        parsed = sql.make_url(url)
        backend = parsed.get_backend_name()
        if backend not in _CLOCKS:
            raise RecipeError(f"--storage: '{backend}' databases are not supported, got '{url}'; {_FORMS}")
        waiting = {"timeout": 60} if backend == "sqlite" else {}
        engine = sql.create_engine(parsed, poolclass=sql.pool.NullPool, connect_args=waiting)
    except (sql.exc.ArgumentError, ImportError) as error:
        raise RecipeError(f"--storage: SQLAlchemy cannot use the URL '{url}' ({error}); {_FORMS}") from None
    for left in reversed(range(len(_TABLES.tables) + 1)):  # another worker may create each table at this moment
        try:
            _TABLES.create_all(engine)
            break
        except sql.exc.DBAPIError as error:
            if not left:
                raise _no_answer(url, error) from error
    return engine


def _no_answer(url: str, error: sql.exc.DBAPIError) -> OSError:
    name = sql.make_url(url).render_as_string(hide_password=True)
    return OSError(f"--storage: the database '{name}' cannot be used ({error.orig}); {_CHECKS}")
