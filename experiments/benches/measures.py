"""Distances and angles between matrices, and their inverse powers."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def relative_error(x: Tensor, reference: Tensor) -> Tensor:
    """Return ||X - Y||_F / ||Y||_F of stacks `[N, m, n]`, in float64."""
    x = x.double()
    error: Tensor = torch.linalg.matrix_norm(x - reference) / torch.linalg.matrix_norm(reference)
    return error


def angle(x: Tensor, reference: Tensor) -> Tensor:
    """Return the angle between X and Y as vectors in degrees: 2 asin(|x/|x| - y/|y|| / 2), exact also if it is tiny."""
    x = x.double()
    x = x / torch.linalg.matrix_norm(x, keepdim=True)
    reference = reference / torch.linalg.matrix_norm(reference, keepdim=True)
    found: Tensor = 2 * (torch.linalg.matrix_norm(x - reference) / 2).clamp_max(1).asin() * (180 / math.pi)
    return found


def inverse_power(a: Tensor, exponent: float) -> Tensor:
    """Return A^(-e) in float64 for positive definite A `[N, d, d]`."""
    values, q = torch.linalg.eigh(a.double())
    root: Tensor = (q * values.unsqueeze(1).pow(-exponent)) @ q.mT
    return root


def worst_of(values: Tensor) -> float:
    """Return the largest of `values`; NaN if `values` is empty or has a NaN."""
    return float(values.max()) if values.numel() else math.nan
