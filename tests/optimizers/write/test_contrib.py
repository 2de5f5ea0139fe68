"""Constraints and averagings in `contrib/`: one record and its variant use them, and recipes reach them by kind."""

from pathlib import Path

import pytest

import eigengraft.optimizers.write
from eigengraft import load_recipe, shipped_recipes
from eigengraft.component import Component

CONTRIB = "eigengraft.optimizers.write.contrib."
FILES = sorted(Path(eigengraft.optimizers.write.__file__).parent.glob("contrib/[!_]*.py"))


def contributed(name: str) -> set[str]:
    """Return the names of the classes in contrib/ that the constraints and the averaging of a recipe are of."""
    recipe = load_recipe(name)
    parts: list[Component | None] = [part for rule in recipe.rules().values() for part in rule.constraints]
    averaging: Component | None = recipe.averaging
    while averaging is not None:
        parts.append(averaging)
        averaging = getattr(averaging, "inner", None)
    return {type(part).__name__ for part in parts if type(part).__module__.startswith(CONTRIB)}


def test_one_record_and_its_variant_use_components_of_contrib() -> None:
    found = {name: contributed(name) for name in shipped_recipes() if contributed(name)}
    record = {"Anchored", "EMANesterov", "LateDecay", "RadialBrake", "RadiusPin", "RowFloor"}
    assert found == {"track3": record, "track3_kfac": record}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_classes_of_contrib_are_exported_by_the_package(path: Path) -> None:
    exported = vars(eigengraft.optimizers.write).values()
    assert any(getattr(value, "__module__", "") == CONTRIB + path.stem for value in exported)
