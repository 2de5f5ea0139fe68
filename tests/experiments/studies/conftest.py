"""Databases in which the workers of a study meet."""

import os
import shutil
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server of this machine, whose `new()` is the URL of a new database.

    It listens on a socket in a folder of its own, whose path is short as sockets' must be, and has no other
    users. PostgreSQL does not run as root: there its own user starts it.
    """
    psycopg = pytest.importorskip("psycopg", reason="no driver of PostgreSQL is installed")
    if not (shutil.which("initdb") and shutil.which("postgres")):
        pytest.skip("no PostgreSQL is installed")
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="pg", dir="/tmp"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        quiet = {"user": user, "cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        data = folder / "data"
        subprocess.run(["initdb", "--no-sync", "-A", "trust", "-U", "eigengraft", "-D", data], check=True, **quiet)
        server = subprocess.Popen(["postgres", "-D", data, "-k", folder, "-c", "listen_addresses=", "-F"], **quiet)
        try:
            yield _Server(psycopg, folder)
        finally:
            server.terminate()
            server.wait(30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Server:
    def __init__(self, psycopg, folder):
        self.psycopg, self.folder = psycopg, folder
        self._execute("SELECT 1", patience=30.0)

    def new(self):
        name = f"study_{uuid.uuid4().hex}"
        self._execute(f"CREATE DATABASE {name}")
        return f"postgresql+psycopg://eigengraft@/{name}?host={self.folder}"

    def _execute(self, statement, patience=0.0):
        end = time.monotonic() + patience
        while True:
            try:
                with self.psycopg.connect(
                    f"host={self.folder} user=eigengraft dbname=postgres", autocommit=True
                ) as one:
                    one.execute(statement)
                return
            except self.psycopg.OperationalError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def storage(request, tmp_path):
    """The URL of an empty database."""
    if request.param == "postgresql":
        return request.getfixturevalue("postgres").new()
    return f"sqlite:///{tmp_path / 'study.db'}"
