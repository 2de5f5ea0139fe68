"""What a user of an installed wheel does first: import everything, compose, train, save, resume, with torch alone."""

import importlib
import io
import pkgutil
import sys

import torch

import eigengraft
from eigengraft.testing.accelerator import accelerator, missing_names

RECIPES = (
    "adamw",
    "adafactor",
    "lion",
    "muon",
    "shampoo",
    "shampoo_4bit",
    "soap_fitted",
    "soap_int8",
    "psgd_kron",
    "schedule_free_adamw",
    "prodigy",
    "scion",
)
EXTRAS = ("eigengraft.experiments", "eigengraft.hosts", "eigengraft.__main__")


def trained(recipe: str) -> tuple[torch.nn.Module, eigengraft.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
    return model, eigengraft.Optimizer(model.named_parameters(), recipe=recipe, lr=1e-2)


def steps(model: torch.nn.Module, optimizer: eigengraft.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def check(recipe: str) -> None:
    """Six steps, and three that are saved, read with `weights_only` and continued: every bit has to be the same."""
    model, optimizer = trained(recipe)
    steps(model, optimizer, 0, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    steps(model, optimizer, 3, 6)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, other = trained(recipe)
    start = [parameter.detach().clone() for parameter in resumed.parameters()]
    resumed.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    steps(resumed, other, 3, 6)
    for before, one, two in zip(start, model.parameters(), resumed.parameters(), strict=True):
        assert torch.isfinite(one).all(), f"{recipe}: finite parameters are required"
        assert torch.equal(one, two), f"{recipe}: a resumed run has to continue exactly"
        assert not torch.equal(before, one), f"{recipe}: steps have to move every parameter"


def on_an_accelerator() -> str:
    """Whether the simulated accelerator of `eigengraft.testing`, which needs private names of torch, runs a step."""
    if missing := missing_names():
        return f"not with this torch, which has no {', '.join(missing)}"
    values = [torch.ones(4, 4), torch.ones(4, 4)]
    try:
        with accelerator("cuda") as run:
            values[1] = values[1].to(run.device)
            for value in values:
                parameter = torch.nn.Parameter(value)
                parameter.grad = torch.full_like(parameter, 0.5)
                eigengraft.Optimizer([("w", parameter)], recipe="adamw", lr=0.1).step()
            same = torch.equal(values[0], values[1].cpu())
            return f"{run.kernels} kernels, {'the same bits' if same else 'OTHER BITS'}"
    except Exception as error:
        return f"not with this torch: {type(error).__name__}: {error}"


for module in pkgutil.walk_packages(eigengraft.__path__, "eigengraft."):
    if not module.name.startswith(EXTRAS):
        importlib.import_module(module.name)
for name in RECIPES:
    check(name)
sys.stdout.write(f"torch {torch.__version__}: {len(RECIPES)} recipes; simulated accelerator: {on_an_accelerator()}\n")
