"""Calls of the command `eigengraft` in the process of a test."""

from collections.abc import Sequence
from functools import cache
from unittest import mock

from typer.main import get_command
from typer.testing import CliRunner, Result

from eigengraft.experiments.cli.main import app

_command = cache(get_command)
"""The command of an app. Typer's runner makes it anew in each call, which takes longer than most calls themselves."""


def invoke(arguments: Sequence[str]) -> Result:
    """Call `eigengraft` with arguments, and return its exit code and output."""
    with mock.patch("typer.testing._get_command", _command):
        return CliRunner().invoke(app, arguments)
