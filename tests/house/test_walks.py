"""The walks of the architecture page: the files it lists are those that run, and few run that it does not list.

`pytest tests/house/test_walks.py -s` prints every file of the package that a walk enters, in the order of first entry.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import eigengraft
from eigengraft.optimizers.recipe.loading import load_recipe

from .pages import ROOT, text

WALK = re.compile(r"^\| `([\w./]+\.py)` \| (`[^|]+`) \|", flags=re.MULTILINE)

BUDGET = {"adamw step": 13, "soap step": 26, "yaml to optimizer": 40}
"""Files that each walk may enter: as many as it enters today. A change that needs more says why; one that needs fewer
lowers the number. A refresh of SOAP enters `roots/base.py`, where a `Basis` gets its defaults. All
ways in which a stack runs, and their choice, are in `step/execution.py`, which a step enters to look up the way."""


PACKAGES = [path.resolve() for path in [ROOT / "src" / "eigengraft", *(ROOT / "src" / "eigengraft").iterdir()]]
"""Folders of the package: at the root of the repository, linked from `src`."""


def rows_of(title: str) -> list[tuple[str, str]]:
    """Return the rows (file, names) of tables under a heading, or from a sentence on, up to the next heading."""
    return WALK.findall(text("docs/architecture.md").partition(title)[2].partition("\n## ")[0])


LISTED = {
    "adamw step": rows_of("## A gradient")[: -len(rows_of("The recipe `soap_fitted`"))],
    "soap step": rows_of("The recipe `soap_fitted`"),
    "yaml to optimizer": rows_of("## A recipe"),
}


Calls = Counter[tuple[str, str]]
"""Number of calls of each function, by (file, qualified name), in the order of the first calls."""


@cache
def calls_of(walk: str) -> Calls:
    """Return the calls of a walk.

    Imports and first calls come before, so that nothing is counted that happens once in a process.
    """
    return WALKS[walk]()


def entered(walk: str) -> Counter[str]:
    """Return the number of calls in each file of the package that a walk enters, in the order of first entry."""
    files = Counter[str]()
    for (path, _), calls in calls_of(walk).items():
        files[path] += calls
    return files


def trace(call: Callable[[], Any]) -> Calls:
    """Call a function, and count the calls of Python functions in the files of the repository."""
    found = Calls()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found[frame.f_code.co_filename, frame.f_code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    inside = Calls()
    for (file, name), calls in found.items():
        path = Path(file).resolve()
        if any(path.is_relative_to(package) for package in PACKAGES):
            inside[path.relative_to(ROOT).as_posix(), name] += calls
    return inside


def layers(count: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def two_layers() -> nn.Module:
    return layers(2)


def steps(recipe: Any, count: int = 2) -> Calls:
    """The fourth step of a recipe, after its first gradients and whatever is done once."""
    model = layers(count)
    optimizer = eigengraft.compose(recipe, model)

    def backward() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).square().sum().backward()

    for _ in range(3):
        backward()
        optimizer.step()
    backward()
    return trace(optimizer.step)


def composition() -> Calls:
    """A recipe of YAML becomes an optimizer."""
    source, model = ROOT / "optimizers" / "recipe" / "shipped" / "soap_fitted.yaml", two_layers()
    eigengraft.compose(source, two_layers())
    return trace(lambda: eigengraft.compose(source, model))


WALKS: dict[str, Callable[[], Calls]] = {
    "adamw step": lambda: steps("adamw"),
    "soap step": lambda: steps(load_recipe("soap_fitted", {"update.eigenbasis.refresh.steps": 1})),
    "yaml to optimizer": composition,
}


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_enters_few_files(walk: str) -> None:
    found = entered(walk)
    rows = "\n".join(f"{calls:6} {path}" for path, calls in found.items())
    sys.stdout.write(f"\n{walk}: {len(found)} files, {found.total()} calls\n{rows}\n")
    assert len(found) <= BUDGET[walk]


@pytest.mark.parametrize("recipe", ["adamw", "muon", "soap_fitted", "shampoo", "adafactor"])
def test_a_steady_step_calls_no_function_for_each_small_parameter(recipe: str) -> None:
    refreshes = load_recipe(recipe).cadences()
    steady = load_recipe(recipe, {f"{path}.refresh.steps": 10_000 for path in refreshes})
    few, many = steps(steady, 3), steps(steady, 12)
    assert many.total() <= few.total(), {path: (few[path], many[path]) for path in many if few[path] != many[path]}


def test_the_page_names_all_functions_with_reasons_why_a_way_of_running_is_left_out() -> None:
    source = (ROOT / "optimizers/step/reasons.py").read_text(encoding="utf-8")
    functions = re.findall(r"^def (\w+)", source, flags=re.MULTILINE)
    named = re.findall(r"`(not_\w+)`", text("docs/architecture.md"))
    assert len(functions) > 3 and {*functions} == {*named}


@pytest.mark.parametrize("walk", WALKS)
def test_the_page_lists_files_in_the_order_in_which_they_are_entered(walk: str) -> None:
    listed = [path for path, _ in LISTED[walk]]
    assert [path for path in entered(walk) if path in listed] == list(dict.fromkeys(listed))


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_calls_the_functions_that_the_page_names(walk: str) -> None:
    listed = [(path, name) for path, names in LISTED[walk] for name in re.findall(r"`([\w.]+)`", names)]
    functions = [(path, name) for path, name in listed if name.rpartition(".")[2][0].islower()]  # others are classes
    assert functions and [one for one in functions if one not in calls_of(walk)] == []


@pytest.mark.parametrize(("path", "names"), WALK.findall(text("docs/architecture.md")))
def test_the_walks_name_what_is_in_the_files(path: str, names: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    for name in re.findall(r"`([\w.]+)`", names):
        owner, _, member = name.rpartition(".")
        assert not owner or re.search(rf"^class {owner}\b", source, flags=re.MULTILINE), f"{path}: {owner}"
        assert re.search(rf"^\s*(def|class) {member}\b", source, flags=re.MULTILINE), f"{path}: {name}"
