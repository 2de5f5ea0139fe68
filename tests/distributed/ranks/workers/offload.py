"""Checkpoints of `snapshots` in many exchanges, as large offloaded state has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from eigengraft.optimizers.checkpoint import sharded_state

from . import snapshots


def _in_pieces(function: Callable[[dict[str, Any]], dict[str, Any]], job: dict[str, Any]) -> dict[str, Any]:
    with mock.patch.object(sharded_state, "PIECE", 2000):
        return function(job)


def save(job: dict[str, Any]) -> dict[str, Any]:
    return _in_pieces(snapshots.save, job)


def load(job: dict[str, Any]) -> dict[str, Any]:
    return _in_pieces(snapshots.load, job)
