"""The recipe of every published paper, `reference.yaml` in its folder."""

from pathlib import Path

import pytest
import torch
from torch import nn

from eigengraft import compose, load_recipe

from .scripts import PAPERS

FOLDERS = sorted(path for path in PAPERS.iterdir() if path.name[-4:].isdigit())
"""Of published papers: their names end with a year."""


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_the_recipe_of_a_paper_names_it_and_trains(folder: Path) -> None:
    recipe = load_recipe(folder / "reference.yaml")
    assert recipe.about is not None and folder.name[-4:] in recipe.about
    assert "`reference.yaml`" in (folder / "README.md").read_text()
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    optimizer = compose(recipe, model)
    inputs = torch.randn(64, 16)
    targets = inputs.roll(1, 1)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
