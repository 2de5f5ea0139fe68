"""Draw the figures of docs/tutorial.md into docs/assets/tutorial: `python docs/figures/tutorial.py`.

The recipes and the problem are taken from the code blocks of the page, so that figures and text cannot differ.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure

import eigengraft

DOCS = Path(__file__).parents[1]
OUT = DOCS / "assets" / "tutorial"
COLORS = {"gradient descent": "#7f7f7f", "momentum": "#1f77b4", "Adam": "#ff7f0e", "eigenbasis (SOAP)": "#2ca02c"}
MORE = {"Shampoo grafted onto Adam": "#9467bd", "SOAP in 8 bits": "#d62728"}


def page() -> dict[str, Any]:
    """Run the Python blocks of the page and return their names."""
    text = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec("\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)), names)
    return names


def descend(recipe: Any, lr: float, hessian: torch.Tensor, steps: int = 60) -> list[list[float]]:
    """Return the points that a recipe visits on the loss 1/2 w^T H w of two numbers."""
    w = torch.nn.Parameter(torch.tensor([[1.0], [1.6]]))
    optimizer = eigengraft.Optimizer([("w", w)], recipe, lr=lr, weight_decay=0.0)
    points = []
    for step in range(steps):
        points.append(w.detach().flatten().tolist())
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        loss = (w.T @ hessian @ w).sum() / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return points


def draw_paths(recipes: Sequence[tuple[Any, float]]) -> None:
    """Draw the paths of recipes, each with its learning rate, beside the contours of the loss."""
    c, s = math.cos(0.6), math.sin(0.6)
    basis = torch.tensor([[c, -s], [s, c]])
    hessian = basis @ torch.diag(torch.tensor([1.0, 0.03])) @ basis.T
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    x, y = torch.meshgrid(torch.linspace(-1.0, 1.6, 200), torch.linspace(-0.7, 1.8, 200), indexing="xy")
    points = torch.stack([x, y], -1)
    height = torch.einsum("...i,ij,...j->...", points, hessian, points) / 2
    axes.contour(x, y, height, levels=torch.logspace(-3, 0.3, 12), colors="#c8c8c8", linewidths=0.8)
    for (name, color), (recipe, lr) in zip(COLORS.items(), recipes, strict=True):
        path = torch.tensor(descend(recipe, lr, hessian))
        axes.plot(path[:, 0], path[:, 1], "-o", color=color, label=name, markersize=2.5, linewidth=1.2)
    axes.plot(0, 0, "k*", markersize=10)
    axes.set(xlabel="first entry", ylabel="second entry", aspect="equal", xlim=(-1.0, 1.6), ylim=(-0.7, 1.8))
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.savefig(OUT / "paths.svg")


def draw_losses(losses: Mapping[str, list[float]]) -> None:
    """Draw the loss of each recipe over steps."""
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for name, values in losses.items():
        axes.semilogy(values, color=(COLORS | MORE)[name], label=name, linewidth=1.4)
    axes.set(xlabel="step", ylabel="loss", xlim=(0, 300))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(OUT / "losses.svg")


def main() -> None:
    """Draw both figures."""
    mpl.rcParams["svg.hashsalt"] = "tutorial"  # equal figures have equal bytes
    mpl.rcParams["svg.fonttype"] = "none"
    OUT.mkdir(parents=True, exist_ok=True)
    names = page()
    train, adam, soap = names["train"], names["adam"], names["soap"]
    draw_paths([(names["descent"], 1.0), ([{"kind": "heavy_ball", "beta": 0.8}], 0.15), (adam, 0.12), (soap, 0.12)])
    draw_losses(
        {
            "gradient descent": train(names["descent"], lr=1.9),
            "momentum": train(names["momentum"], lr=2.0),
            "Adam": train(adam, lr=0.22),
            "eigenbasis (SOAP)": train(soap, lr=0.46),
            "Shampoo grafted onto Adam": train(names["grafted"], lr=0.22),
            "SOAP in 8 bits": train(names["small"], lr=0.46),
        }
    )


if __name__ == "__main__":
    main()
