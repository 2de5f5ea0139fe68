"""Workers of a study that meet in a database, of any kind that SQLAlchemy knows; checkpoints stay where they are.

Table `eigengraft_claims`: a row a claim, with the time of its last sign of life by the clock of the database. Table
`eigengraft_files`: the text files of every run that has ended or failed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import sqlalchemy as sql
from sqlalchemy.dialects.mysql import LONGTEXT

from eigengraft.errors import RecipeError

from ...files import make_directory, write_text
from ...reports.run import fault_file
from .claims import STALE, Claims
from .rendezvous import Rendezvous
from .server_time import ServerTime

_TABLES = sql.MetaData()
_CLAIMS = sql.Table(
    "eigengraft_claims",
    _TABLES,
    sql.Column("run_key", sql.String(64), primary_key=True),
    sql.Column("number", sql.Integer, primary_key=True, autoincrement=False),
    sql.Column("seen", sql.DateTime, nullable=False),
)
_FILES = sql.Table(
    "eigengraft_files",
    _TABLES,
    sql.Column("run_key", sql.String(64), primary_key=True),
    sql.Column("file", sql.String(64), primary_key=True),
    sql.Column("study", sql.String(255), nullable=False, index=True),
    sql.Column("run", sql.Text, nullable=False),
    sql.Column("content", sql.Text().with_variant(LONGTEXT(), "mysql", "mariadb"), nullable=False),
)
_RESULT, _FAULT = "result.json", "error.txt"
_CARRIED = ("config.json", "env.json", "metrics.jsonl", "diagnostics.jsonl", _RESULT)


@dataclass(frozen=True)
class DatabaseRendezvous(Rendezvous):
    """Workers that share a database and no file system: each has the results of all in its own directory.

    url: of the database, as `sqlite:///study.db` or `postgresql://user@host/name`.
    study: name of the study; the database may hold others.
    """

    url: str
    study: str

    def claims(self, run: str) -> Claims:
        return DatabaseClaims(self.url, self._key(run))

    def fetch(self, runs: Collection[str] | None = None) -> None:
        wanted = _FILES.c.study == self.study
        if runs is not None:
            wanted = wanted & _FILES.c.run_key.in_([self._key(run) for run in runs])
        missing = [run for run in self._known(wanted) if not (self.directory / run / _RESULT).exists()]
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
                self._path(run, _FAULT).unlink(missing_ok=True)  # it is being tried again

    def publish(self, run: str) -> None:
        key = self._key(run)
        paths = {file: self._path(run, file) for file in (*_CARRIED, _FAULT)}
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

    def _known(self, wanted: sql.ColumnElement[bool]) -> list[str]:
        """Runs of which the database has files."""
        with _transaction(self.url) as connection:
            return sorted(map(str, connection.scalars(sql.select(_FILES.c.run).where(wanted).distinct())))

    def _path(self, run: str, file: str) -> Path:
        return fault_file(self.directory / run) if file == _FAULT else self.directory / run / file

    def _key(self, run: str) -> str:
        return hashlib.sha256(f"{self.study}/{run}".encode()).hexdigest()


@dataclass(frozen=True)
class DatabaseClaims(Claims):
    """The claims of one run as rows: a worker lives if it has given a sign of life in the last minute."""

    url: str
    key: str

    def numbers(self) -> list[int]:
        with _transaction(self.url) as connection:
            own = sql.select(_CLAIMS.c.number).where(_CLAIMS.c.run_key == self.key)
            return [int(number) for number in connection.scalars(own)]

    def alive(self, number: int) -> bool:
        with _transaction(self.url) as connection:
            seen = connection.scalar(sql.select(_CLAIMS.c.seen).where(self._is(number)))
            now = connection.scalar(sql.select(ServerTime()))
        return seen is not None and now is not None and (now - seen).total_seconds() < STALE

    @contextmanager
    def made(self, number: int) -> Iterator[bool]:
        own = {"run_key": self.key, "number": number, "seen": ServerTime()}
        try:
            with _transaction(self.url) as connection:
                connection.execute(sql.insert(_CLAIMS).values(own))
            first = True
        except FileExistsError:
            first = False
        yield first

    def remove(self, numbers: Iterable[int]) -> None:
        with _transaction(self.url) as connection:
            connection.execute(
                sql.delete(_CLAIMS).where(_CLAIMS.c.run_key == self.key, _CLAIMS.c.number.in_(list(numbers)))
            )

    def sign(self, number: int) -> None:
        with _transaction(self.url) as connection:
            connection.execute(sql.update(_CLAIMS).where(self._is(number)).values(seen=ServerTime()))

    def _is(self, number: int) -> sql.ColumnElement[bool]:
        return (_CLAIMS.c.run_key == self.key) & (_CLAIMS.c.number == number)


@contextmanager
def _transaction(url: str) -> Iterator[sql.Connection]:
    """A transaction. Raises FileExistsError where a row is there already, OSError where the database fails."""
    try:
        with _engine(url).begin() as connection:
            yield connection
    except sql.exc.IntegrityError as error:
        raise FileExistsError(f"--storage: a row that is there already ({error.orig})") from error
    except sql.exc.DBAPIError as error:
        raise OSError(f"--storage: a database that answers is required ({error.orig})") from error


@lru_cache
def _engine(url: str) -> sql.Engine:
    """The engine of a database that has the tables; connections are not kept, so that processes may be forked."""
    try:
        made = sql.make_url(url)
        waiting = {"timeout": 60} if made.get_backend_name() == "sqlite" else {}
        engine = sql.create_engine(made, poolclass=sql.pool.NullPool, connect_args=waiting)
    except (sql.exc.ArgumentError, ImportError) as error:
        raise RecipeError(f"--storage: a URL that SQLAlchemy knows is required, got '{url}' ({error})") from None
    for left in reversed(range(len(_TABLES.tables) + 1)):  # each table may be made by another worker at this moment
        try:
            _TABLES.create_all(engine)
            break
        except sql.exc.DBAPIError as error:
            if not left:
                raise OSError(f"--storage: a database that answers is required ({error.orig})") from error
    return engine
