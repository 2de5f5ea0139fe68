"""Components in `contrib/` folders: at most two shipped recipes use them, and recipes reach them by kind all the same.

Outside of `contrib/`, shipped recipes use every component of an optimizer, but for those in `USES`.
"""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

import eigengraft.optimizers.write
import eigengraft.preconditioners
import eigengraft.quantization
from eigengraft import load_recipe, shipped_recipes
from eigengraft.component import Component, components_in, families

PACKAGES = [eigengraft.preconditioners, eigengraft.quantization, eigengraft.optimizers.write]
FILES = [
    (package, path.stem)
    for package in PACKAGES
    for path in sorted(Path(str(package.__file__)).parent.glob("contrib/[!_]*.py"))
]

USES = {
    "basis_solver.cholesky_qr": "replaces power_qr with by_device",
    "constraint.rounding": "stochastic rounding of parameters in 16 bits",
    "polar_solver.svd": "the exact reference of polar solvers",
    "quantizer.float32": "storage in another precision than that of parameters",
    "quantizer.offload": "storage in the memory of the host or in a file",
    "quantizer.split_float": "storage of the low bits of parameters in bfloat16",
    "root_solver.coupled_minimax": "replaces eigh with by_device",
    "stage.chain": "the stages of a list, as one stage",
    "view.matrices": "declares the matrices of a parameter in a route",
    "view.modules": "parameters that contain several matrices",
    "weight_decay.independent": "an option of Distributed Shampoo",
}
"""Components outside of `contrib/` that no shipped recipe uses, as family and kind, with their use."""

RECORD = {"Anchored", "EMANesterov", "LateDecay", "RadialBrake", "RadiusPin", "RowFloor"}
"""Components in `contrib/` of the only two shipped recipes that use such components, a record and its variant."""


def used_by(name: str) -> set[type[Component]]:
    return {type(part) for _, part in components_in(load_recipe(name))}


def in_contrib(cls: type) -> bool:
    return ".contrib." in cls.__module__


@pytest.fixture(scope="module")
def used() -> dict[str, set[type[Component]]]:
    """Classes of the components of each shipped recipe, by its name."""
    return {name: used_by(name) for name in shipped_recipes()}


def test_one_record_and_its_variant_use_components_of_contrib(used: dict[str, set[type[Component]]]) -> None:
    found = {name: {cls.__name__ for cls in classes if in_contrib(cls)} for name, classes in used.items()}
    assert {name: names for name, names in found.items() if names} == {"track3": RECORD, "track3_kfac": RECORD}


def test_components_outside_of_contrib_are_used(used: dict[str, set[type[Component]]]) -> None:
    folders = tuple(f"{package.__name__}." for package in [*PACKAGES, eigengraft.blocking])
    members = {
        f"{family}.{kind}": cls
        for family, base in families().items()
        for kind, cls in base.members.items()
        if cls.__module__.startswith(folders) and not in_contrib(cls)
    }
    unused = {path for path, cls in members.items() if cls not in set().union(*used.values())}
    assert unused == USES.keys()


def test_a_recipe_names_components_of_contrib_by_kind() -> None:
    chain = [{"kind": "shampoo", "solver": "newton_db", "refresh": "probability"}, "cautious"]
    recipe = load_recipe({"update": chain, "averaging": "lawa", "weight_decay": "cautious"})
    found = {type(part).__name__ for _, part in components_in(recipe) if in_contrib(type(part))}
    assert found == {"NewtonDB", "Probability", "Cautious", "LAWA", "CautiousDecay"}


@pytest.mark.parametrize(("package", "name"), FILES, ids=[f"{package.__name__}-{name}" for package, name in FILES])
def test_classes_of_contrib_are_exported_by_the_package(package: ModuleType, name: str) -> None:
    module = importlib.import_module(f"{package.__name__}.contrib.{name}")
    own = {cls for cls in vars(module).values() if isinstance(cls, type) and cls.__module__ == module.__name__}
    components = {cls for cls in own if issubclass(cls, Component)}
    assert components and all(getattr(package, cls.__name__, None) is cls for cls in components)
