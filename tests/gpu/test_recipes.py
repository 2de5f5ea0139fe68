"""Every shipped recipe that takes gradients alone runs on a device as on a CPU, wherever its state comes from.

One run is composed on the CPU and moved, one composed on the device under `set_default_device`; each goes through a
checkpoint on the host halfway, in one direction each. On the simulated accelerator bits are those of a CPU, or a
tolerance has its reason; a real device rounds otherwise in every kernel.
"""

from __future__ import annotations

import pytest

from eigengraft.optimizers.step.execution import Fused

from ..recipes import ALONE
from .models import Run, gradients, largest_difference, rounding
from .places import MANY, PLACES, on_device

DIAGONAL = "diag(Q^T A Q) comes from the triangle of a QR on a CPU, from products on a device"
REGISTERS = "a CPU computes the last entries of a function once more, in full registers"
# After one gradient the statistic of the longer axis is singular, and the first steps are as long along its null space.
PLACE = "a CPU decomposes matrix by matrix, at aligned addresses, so that a null space has other rounding"
PRODUCTS = "products in bfloat16 have 8 bits, and on some processors round by where their operands are in memory"
CHOLESKY = "a device orthonormalizes bases by Cholesky QR, a CPU by Householder's"
BEYOND = "columns of a basis beyond the rank of the first gradients are completed otherwise than by Householder's"
MIXING = "averages are mixed with numbers of the host on a CPU, with a tensor on a device"
ROUNDING: dict[str, tuple[float, str]] = {
    "adam_atan2": (1e-6, REGISTERS),
    "caspr": (1e-6, CHOLESKY),
    "cosmos": (5e-2, BEYOND),
    "dalle_mini_quantized": (2e-5, PLACE),
    "dalle_mini_quantized_but_diagonal": (2e-5, PLACE),
    "dion": (1e-6, CHOLESKY),
    "eshampoo": (1e-6, PLACE),
    "reference/distributed_shampoo": (2e-5, PLACE),
    "reference/distributed_shampoo_jax": (2e-5, PLACE),
    "reference/eigenvalue_corrected_shampoo": (5e-2, PLACE),
    "reference/muon": (2e-3, PRODUCTS),
    "reference/soap": (5e-2, PLACE),
    "schedule_free_adamw": (1e-6, MIXING),
    "shampoo_kl": (1e-6, CHOLESKY),
    "soap": (5e-2, PLACE),
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
STEPS, HALF = 4, 2
QUICK = ("adamw", "muon", "psgd_kron", "soap_fitted", "shampoo_4bit")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ALONE]
)
def test_a_recipe_runs_on_a_device_as_on_a_cpu(name: str, place: str) -> None:
    given, reference, to_host = gradients(STEPS), Run(name), Run(name)
    sets = reference.optimizer.param_sets
    fused = any(isinstance(each.execution(own), Fused) for each in sets for own in each.stack_states)
    tolerance = max(ROUNDING.get(name, (0.0, ""))[0], FUSED[0] if fused else 0.0)
    reference.step(*given[:HALF])
    if place == "real":
        whole = Run(name)
        whole.step(*given)
        tolerance = 1e-6 + MANY * rounding(given, whole, name)
    with on_device(place) as device:
        moved = Run(name, device, moved=True)
        moved.step(*given[:HALF])
        to_host.adopt(moved)
        with device:  # as after `set_default_device`
            resumed = Run(name, device)
            resumed.adopt(reference)
            resumed.step(*given[HALF:])
        to_host.step(*given[HALF:])
        reference.step(*given[HALF:])
        assert largest_difference(reference, resumed) <= tolerance
        assert largest_difference(reference, to_host) <= tolerance
        assert resumed.optimizer.skipped == reference.optimizer.skipped
