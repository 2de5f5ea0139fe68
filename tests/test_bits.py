"""The hashes of `bits.py` are repeatable, and differ if a learning rate differs in its last bit."""

import math

import pytest
import torch

import eigengraft

from . import bits


def test_hashes_are_repeated_and_show_one_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = bits.parameter_hash("sgd", torch.float64)
    assert bits.parameter_hash("sgd", torch.float64) == found
    compose = eigengraft.compose

    def nearby(name: str, model: torch.nn.Module, lr: float, steps: int) -> eigengraft.Optimizer:
        return compose(name, model, lr=math.nextafter(lr, 1), steps=steps)

    monkeypatch.setattr(eigengraft, "compose", nearby)
    assert len(bits.parameter_hash("sgd", torch.float64)) == 12 and bits.parameter_hash("sgd", torch.float64) != found


def test_a_recipe_without_its_signals_prints_the_error() -> None:
    assert bits.parameter_hash("sophia", torch.float64) == "ValueError"
