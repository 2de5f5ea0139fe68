"""Components in `contrib/`: what shipped recipes use is not among them, and recipes reach them by kind all the same."""

from pathlib import Path

import pytest

import eigengraft.preconditioners
from eigengraft import load_recipe, shipped_recipes
from eigengraft.component import components_in

CONTRIB = "eigengraft.preconditioners.contrib."
FILES = sorted(Path(eigengraft.preconditioners.__file__).parent.glob("contrib/*.py"))


def test_no_shipped_recipe_uses_a_component_of_contrib() -> None:
    used = {
        f"{name}: {type(part).__name__}"
        for name in shipped_recipes()
        for _, part in components_in(load_recipe(name))
        if type(part).__module__.startswith(CONTRIB)
    }
    assert used == set()


def test_a_recipe_names_components_of_contrib_by_kind() -> None:
    recipe = load_recipe([{"kind": "shampoo", "solver": "newton_db", "refresh": "probability"}, "cautious"])
    used = {type(part) for _, part in components_in(recipe) if type(part).__module__.startswith(CONTRIB)}
    assert {cls.__name__ for cls in used} == {"NewtonDB", "Probability", "Cautious"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_classes_of_contrib_are_exported_by_the_package(path: Path) -> None:
    exported = {
        name
        for name, value in vars(eigengraft.preconditioners).items()
        if getattr(value, "__module__", "") == CONTRIB + path.stem
    }
    assert exported or path.stem == "__init__"
