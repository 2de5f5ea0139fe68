"""Every shipped recipe that takes gradients alone runs on a device as on a CPU, wherever its state comes from.

One run is composed on the CPU and moved, one composed on the device under `set_default_device`; each goes through a
checkpoint on the host halfway, in one direction each. On the simulated accelerator bits are those of a CPU, or a
tolerance has its reason; a real device rounds otherwise in every kernel.
"""

from __future__ import annotations

import pytest

from eigengraft.optimizers.step.execution import Fused

from ..recipes import ALONE
from .models import Run, SquareRun, gradients, largest_difference, rounding
from .places import MANY, PLACES, on_device

DIAGONAL = "diag(Q^T A Q) comes from the triangle of a QR on a CPU, from products on a device"
REGISTERS = "a CPU computes the last entries of a function once more, in full registers"
PLACE = "a CPU decomposes matrix by matrix, at aligned addresses"
CHOLESKY = "a device orthonormalizes bases by Cholesky QR, a CPU by Householder's"
MIXING = "averages are mixed with numbers of the host on a CPU, with a tensor on a device"
ROUNDING: dict[str, tuple[float, str]] = {
    "adam_atan2": (1e-6, REGISTERS),
    "caspr": (1e-6, CHOLESKY),
    "cosmos": (1e-5, CHOLESKY),
    "dalle_mini_quantized": (2e-5, PLACE),
    "dalle_mini_quantized_but_diagonal": (2e-5, PLACE),
    "dion": (1e-6, CHOLESKY),
    "eshampoo": (1e-6, PLACE),
    "reference/distributed_shampoo": (2e-5, PLACE),
    "reference/distributed_shampoo_jax": (2e-5, PLACE),
    "reference/eigenvalue_corrected_shampoo": (1e-6, PLACE),
    "reference/soap": (1e-6, PLACE),
    "schedule_free_adamw": (1e-6, MIXING),
    "shampoo_kl": (1e-6, CHOLESKY),
    "soap": (1e-6, CHOLESKY),
    "soap_4bit": (1e-6, CHOLESKY),
    "soap_factorized": (1e-5, DIAGONAL),
    "soap_fitted": (1e-5, DIAGONAL),
    "soap_h": (1e-5, DIAGONAL),
    "soap_int8": (1e-5, DIAGONAL),
    "soap_kl": (1e-5, DIAGONAL),
    "soap_kl_h": (1e-5, DIAGONAL),
    "soap_muon": (1e-6, CHOLESKY),
    "soap_schedule_free": (1e-6, MIXING),
    "track3": (1e-6, CHOLESKY),
}
FUSED = (1e-6, "a CPU's fused kernel rounds the ends of tensors otherwise, which are updated in a buffer there alone")
"""Of recipes with Adam's chain."""
SQUARE = ("cosmos", "reference/eigenvalue_corrected_shampoo", "reference/soap", "soap")
"""Recipes whose model has square matrices alone. Of other matrices the statistic of the first gradient is singular, and
the choice of a basis of its null space, by rounding, changes parameters by as much as the steps do."""
CHANGES = {
    "cosmos": ("update.split.rank=4",),  # of 8, so that both parts of the split are at work
    "reference/muon": ("update.spectral.solver.precision=input",),  # some processors round bfloat16 by address
}
"""Changes of recipes for this test."""
STEPS, HALF = 4, 2
QUICK = ("adamw", "muon", "psgd_kron", "soap_fitted", "shampoo_4bit")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALONE]
)
def test_a_recipe_runs_on_a_device_as_on_a_cpu(name: str, place: str) -> None:
    made, changes = SquareRun if name in SQUARE else Run, CHANGES.get(name, ())
    given = gradients(STEPS, made.square)
    reference, to_host = made(name, changes=changes), made(name, changes=changes)
    sets = reference.optimizer.param_sets
    fused = any(isinstance(each.execution(own), Fused) for each in sets for own in each.stack_states)
    tolerance = max(ROUNDING.get(name, (0.0, ""))[0], FUSED[0] if fused else 0.0)
    reference.step(*given[:HALF])
    if place == "real":
        whole = made(name, changes=changes)
        whole.step(*given)
        tolerance = 1e-6 + MANY * rounding(given, whole, name, changes=changes)
    with on_device(place) as device:
        moved = made(name, device, moved=True, changes=changes)
        moved.step(*given[:HALF])
        to_host.adopt(moved)
        with device:  # as after `set_default_device`
            resumed = made(name, device, changes=changes)
            resumed.adopt(reference)
            resumed.step(*given[HALF:])
        to_host.step(*given[HALF:])
        reference.step(*given[HALF:])
        assert largest_difference(reference, resumed) <= tolerance
        assert largest_difference(reference, to_host) <= tolerance
        assert resumed.optimizer.skipped == reference.optimizer.skipped
