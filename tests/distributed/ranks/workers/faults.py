"""Things that go wrong on one rank of several; each fault is a function of the place where parameters are."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, distribute_module

import eigengraft
from eigengraft import Optimizer, load_recipe
from eigengraft.distributed.checks import CheckedSums
from eigengraft.distributed.comm_step import CommStep

from .models import divided, lay_out, model
from .snapshots import restore
from .trajectories import give, values

BAD = 1
"""The rank on which something goes wrong."""
RECIPE = ["blocking.size=8", "blocking.merge=8", "update.eigenbasis.refresh.steps=2"]
GROUPED = "distribution.group_size=2"
Result = dict[str, Any]


def run(job: dict[str, Any]) -> Result | None:
    """job: fault, place, and what else the fault takes. store: a file for a process group of no named backend."""
    job = dict(job)
    if "store" in job:
        forget_backend(Path(job.pop("store")))
    return FAULTS[job.pop("fault")](**job)


def start(
    place: str, overrides: Sequence[str] = (), steps: int = 2, recipe: str = "soap_fitted"
) -> tuple[nn.Module, Optimizer]:
    """A model and its optimizer after two good steps."""
    module = lay_out(model(), place)
    overrides = [*RECIPE, *overrides] if recipe == "soap_fitted" else overrides
    optimizer = eigengraft.compose(load_recipe(recipe, list(overrides)), module)
    for step in range(steps):
        advance(module, optimizer, step)
    return module, optimizer


def advance(module: nn.Module, optimizer: Optimizer, step: int) -> None:
    """A good step."""
    give(module, step, gaps=False)
    optimizer.step()


def bad() -> bool:
    """Whether this is the rank on which something goes wrong."""
    return dist.get_rank() == BAD


def survive(module: nn.Module, optimizer: Optimizer, mend: Callable[[], object] = lambda: None) -> Result:
    """What is said when a step fails, what it changed, and whether the next ones go well; mend: what is done before."""
    before, said = values(module), ""
    try:
        optimizer.step()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    after = values(module)
    changed = [name for name, value in after.items() if not torch.equal(value, before[name])]
    mend()
    for step in (4, 5):
        advance(module, optimizer, step)
    return {"said": said, "changed": changed, "skipped": dict(optimizer.skipped), "parameters": values(module)}


def raises_in_backward(place: str) -> None:
    """One rank fails outside of the optimizer, and ends."""
    module, optimizer = start(place)

    def fail(gradient: Tensor) -> Tensor:
        if bad():
            raise RuntimeError("no such luck")
        return gradient

    module.scale.register_hook(fail)  # type: ignore[union-attr,operator]
    optimizer.zero_grad()
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in module.parameters() if p.requires_grad]
    torch.stack([part.square().sum() for part in parts]).sum().backward()
    optimizer.step()


def killed_in_step(place: str) -> None:
    """One rank is killed in the middle of a step, between gradients and updates."""
    module, optimizer = start(place)
    if bad():
        CommStep.close = lambda self: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    advance(module, optimizer, 2)


def killed_after_save(place: str, folder: str, kill: bool) -> Result:
    """State is in files, and refreshes are under way when it is saved at step 6 and when one rank is killed at step 8.

    Ranks go on from the saved state if there is one. kill: whether to save and kill.
    """
    offload = {"kind": "offload", "to": "disk", "directory": folder, "min_elements": 1}
    stored = dict.fromkeys(("statistic", "basis", "first_moment", "second_moment"), offload)
    late = ("steps=4", "delay=3", "min_wave_work=1")
    overrides = [f"update.eigenbasis.refresh.{field}" for field in late]
    module, optimizer = start(place, [*overrides, f"storage={json.dumps(stored)}"], steps=0)
    saved, first = Path(folder) / "saved.pt", 0
    if saved.exists():
        restore(module, optimizer, torch.load(saved, weights_only=True))
        first = 6
    for step in range(first, 12):
        if kill and step in (6, 8):
            jobs = sum(len(own.refreshes._jobs) for own in optimizer.stack_states() if own.refreshes is not None)
            assert jobs, f"no refresh is under way at step {step}"
        if kill and step == 6:
            whole = {"optimizer": optimizer.full_state_dict(), "parameters": values(module)}
            if not bad():
                torch.save(whole, saved)
        if kill and step == 8 and bad():
            os.kill(os.getpid(), signal.SIGKILL)
        advance(module, optimizer, step)
    return {"resumed": first, "parameters": values(module)}


def raises_in_step(place: str) -> None:
    """One rank runs out of memory while it computes its updates."""
    module, optimizer = start(place)
    if bad():
        CommStep.deliver = _fail  # type: ignore[method-assign]
    advance(module, optimizer, 2)


def _fail(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("no memory left")


def nan(place: str, policy: str, recipe: str = "soap_fitted") -> Result:
    """One rank's copy or part of one gradient has a number that is not finite, in a row that it does not update."""
    module, optimizer = start(place, [f"failure.nonfinite={policy}"], recipe=recipe)
    give(module, 2, gaps=False)
    gradient = module.down.weight.grad  # type: ignore[union-attr]
    part = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    if bad():
        part[0, 0] = float("nan")
    return survive(module, optimizer)


def large(place: str, recipe: str) -> Result:
    """All gradients are finite, and too large to be squared in float32."""
    module = lay_out(model(), place)
    optimizer = eigengraft.compose(load_recipe(recipe), module, lr=0.5)
    give(module, 2, gaps=False)
    for parameter in module.parameters():
        if parameter.grad is not None:
            part = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            part.mul_(1e25)
    return survive(module, optimizer)


def one_sided(place: str) -> Result:
    """One rank has no gradient where the others have one."""
    module, optimizer = start(place)
    give(module, 2, gaps=False)
    if bad():
        module.up.weight.grad = None  # type: ignore[union-attr,assignment]
    return survive(module, optimizer)


def changed(place: str, key: str, tensor: bool = False) -> Result:
    """One rank has another value in its param group after a few steps."""
    module, optimizer = start(place)
    give(module, 2, gaps=False)
    group = optimizer.param_groups[0]
    kept, other = group[key], torch.tensor(0.5, dtype=torch.float64) if tensor else 0.5
    group[key] = other if bad() else kept
    return survive(module, optimizer, lambda: group.update({key: kept}))


def changed_on_device(place: str) -> Result:
    """One rank has another lr in one step, and ranks read what they told each other one step later."""
    module, optimizer = start(place)
    group = optimizer.param_groups[0]
    with patch.object(CheckedSums, "reads_at_once", lambda *_: False):
        group["lr"], kept = 0.5 if bad() else group["lr"], group["lr"]
        advance(module, optimizer, 2)
        group["lr"] = kept
        give(module, 3, gaps=False)
        return survive(module, optimizer)


def twice(place: str) -> Result:
    """One rank calls step twice after one backward."""
    module, optimizer = start(place)
    advance(module, optimizer, 2)
    if not bad():
        give(module, 3, gaps=False)
    return survive(module, optimizer)


def ahead(place: str) -> Result:
    """One rank has loaded a state that is a step older, say."""
    module, optimizer = start(place)
    give(module, 2, gaps=False)
    steps = [state["step"] for state in optimizer.state.values()]
    torch._foreach_sub_(steps, int(bad()))
    return survive(module, optimizer, lambda: torch._foreach_add_(steps, int(bad())))


def one_sided_sum(place: str) -> Result:
    """One rank has no gradient where the others have a partial sum."""
    mesh = init_device_mesh("cpu", (2,))
    module = distribute_module(model(), mesh)
    module.head.weight = module.emb.weight  # type: ignore[union-attr,assignment]  # it makes two parameters of one memory
    optimizer = eigengraft.compose("soap_fitted", module, overrides=RECIPE)
    for parameter in filter(lambda parameter: parameter.requires_grad, module.parameters()):
        parameter.grad = DTensor.from_local(torch.ones(parameter.shape), mesh, [Partial()])
    if bad():
        module.up.weight.grad = None  # type: ignore[union-attr,assignment]
    return survive(module, optimizer)


def not_averaged(place: str, outside: bool = False) -> Result:
    """Every rank has gradients of its own data, of all parameters or of one that is outside of DDP."""
    module, optimizer = start(place, steps=0)
    give(module, 2, gaps=False)
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and (name == "scale" or not outside):
            parameter.grad.mul_(1 + dist.get_rank())
    return survive(module, optimizer)


def not_averaged_on_device(place: str) -> Result:
    """Every rank has gradients of its own data once, and ranks read what they told each other one step later."""
    module, optimizer = start(place, steps=1)
    with patch.object(CheckedSums, "reads_at_once", lambda *_: False):
        give(module, 2, gaps=False)
        module.up.weight.grad.mul_(1 + dist.get_rank())  # type: ignore[union-attr,operator]
        optimizer.step()
        give(module, 3, gaps=False)
        return survive(module, optimizer)


def groups_apart(place: str) -> Result:
    """Two groups of two ranks have other gradients than each other; what is said of other values, too, and of groups
    that cannot be made."""
    module, optimizer = start(place, [GROUPED], steps=0)
    give(module, 2, gaps=False)
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1 + dist.get_rank() // 2)
    found = survive(module, optimizer)
    for name, where, overrides in (
        ("values", "plain", [GROUPED]),
        ("size", "plain", ["distribution.group_size=3"]),
        ("kind", "fsdp", [GROUPED]),
    ):
        other = lay_out(model(), where)
        with torch.no_grad():
            other.up.weight.add_(dist.get_rank() // 2)  # type: ignore[union-attr,operator,arg-type]
        try:
            eigengraft.compose(load_recipe("soap_fitted", overrides), other)
        except ValueError as error:
            found[name] = str(error)
    return found


def rounded_apart(place: str) -> Result:
    """Every rank has computed one gradient itself, in another order of summation."""
    module, optimizer = start(place, steps=0)
    give(module, 2, gaps=False)
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1 + 1e-6 * dist.get_rank())
    return survive(module, optimizer)


def refused(place: str, faults: Sequence[str]) -> dict[str, str]:
    """What this rank says of faults that all ranks notice at once, one after the other."""
    said = {}
    for fault in faults:
        try:
            FAULTS[fault](place)
            said[fault] = ""
        except Exception as error:
            said[fault] = f"{type(error).__name__}: {error}"
    return said


def sparse(place: str) -> None:
    """A gradient is not dense, on one rank."""
    module, optimizer = start(place)
    give(module, 2, gaps=False)
    if bad():
        module.up.weight.grad = module.up.weight.grad.to_sparse()  # type: ignore[union-attr,operator,assignment]
    optimizer.step()


def other_recipe(place: str) -> None:
    """One rank has another hyper-parameter."""
    start(place, ["update.eigenbasis.inner.momentum.beta=0.9"] if bad() else [])


def other_shapes(place: str) -> None:
    """One rank has another model."""
    module = lay_out(model(10, 17 if bad() else 16), place)
    eigengraft.compose("soap_fitted", module)


def other_order(place: str) -> None:
    """One rank names its parameters in another order."""
    module = lay_out(model(), place)
    found = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    Optimizer(found[::-1] if bad() else found, "soap_fitted")


def fewer(place: str) -> None:
    """One rank has left a parameter out."""
    module = lay_out(model(), place)
    found = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    Optimizer(found[1:] if bad() else found, "soap_fitted")


def other_frozen(place: str) -> None:
    """One rank has frozen a parameter that the others train."""
    module = lay_out(model(), place)
    module.up.requires_grad_(not bad())  # type: ignore[union-attr]
    optimizer = Optimizer(module.named_parameters(), "soap_fitted")
    advance(module, optimizer, 0)


def other_values(place: str) -> None:
    """One rank has other values of two parameters."""
    module = lay_out(model(), place)
    for weight in (module.emb.weight, module.up.weight):  # type: ignore[union-attr]
        (weight.to_local() if place == "hsdp" else weight).data += bad()  # type: ignore[union-attr,operator]
    eigengraft.compose("soap_fitted", module)


def experts(place: str) -> None:
    """Every rank has experts of its own, of equal names and shapes."""
    torch.manual_seed(dist.get_rank())
    eigengraft.compose("soap_fitted", nn.ModuleDict({"experts": nn.Linear(6, 4)}))


def stages(place: str) -> None:
    """Every rank has layers of its own, of other names and shapes."""
    eigengraft.compose("soap_fitted", nn.ModuleDict({f"layer{dist.get_rank()}": nn.Linear(6, 4 + dist.get_rank())}))


def flat(place: str) -> None:
    """Parameters are flat ones of FSDP1."""
    eigengraft.compose("soap_fitted", FullyShardedDataParallel(nn.Linear(6, 4), device_id=torch.device("cpu")))


def flat_original(place: str) -> None:
    """Parameters are views of flat ones of FSDP1, by their own names."""
    inner = nn.Linear(6, 4)
    module = FullyShardedDataParallel(inner, use_orig_params=True, device_id=torch.device("cpu"))
    eigengraft.compose("soap_fitted", module)


def another_group(place: str) -> None:
    """One rank has a param group more, the last one."""
    module = lay_out(model(), place)
    groups: list[dict[str, Any]] = [{"params": [("scale", module.scale)]}, {"params": [("up", module.up.weight)]}]  # type: ignore[union-attr]
    Optimizer(groups if bad() else groups[:1], "soap_fitted")


def thawed(place: str) -> None:
    """One rank has a gradient of a parameter that is frozen."""
    module = lay_out(model(), place)
    optimizer = Optimizer(module.named_parameters(), "soap_fitted", overrides=RECIPE)
    advance(module, optimizer, 0)
    give(module, 1, gaps=False)
    if bad():
        frozen = module.frozen.weight  # type: ignore[union-attr]
        frozen.grad = divided(torch.ones(frozen.shape), frozen)  # type: ignore[union-attr,arg-type]
    optimizer.step()


def unprovided(place: str) -> None:
    """One rank is not provided with the signal of the first step."""
    module = lay_out(model(), place)
    optimizer = eigengraft.compose("sophia", module)
    give(module, 0, gaps=False)
    if not bad():
        optimizer.provide("hessian_diagonal", {p: torch.ones_like(p) for p in module.parameters() if p.requires_grad})
    optimizer.step()


def added(place: str) -> None:
    """One rank adds a param group, and the others take a step."""
    module, optimizer = start(place)
    if bad():
        optimizer.add_param_group({"params": [("more", nn.Parameter(torch.ones(3, 3)))]})
    advance(module, optimizer, 2)


def other_lr(place: str) -> None:
    """One rank has another learning rate, which is not part of a recipe."""
    module = lay_out(model(), place)
    eigengraft.compose("soap_fitted", module, lr=0.1 if bad() else 0.2)


def alone(place: str) -> None:
    """One rank does not take part, and ends."""
    module = lay_out(model(), place)
    optimizer = eigengraft.compose(load_recipe("soap_fitted", ["distribution.mode=local"] if bad() else []), module)
    advance(module, optimizer, 0)


def forget_backend(store: Path) -> None:
    """Make the process group anew without naming a backend, as most scripts do."""
    dist.barrier()  # else a rank that still connects finds the others gone
    dist.destroy_process_group()
    dist.init_process_group(
        init_method=f"file://{store}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=20),
    )


def saves_alone(place: str, timeout: float) -> None:
    """One rank asks for the state dict while the others go on with the next step."""
    module, optimizer = start(place, [f"distribution.timeout={timeout}"])
    if bad():
        optimizer.state_dict()
    advance(module, optimizer, 2)


def stalls(place: str, folder: str, timeout: float) -> float:
    """One rank never comes to the step. Returns how long the others waited for it."""
    module, optimizer = start(place, [f"distribution.timeout={timeout}"])
    note = Path(folder) / f"waited-{place}-{dist.get_backend()}"
    if bad():
        deadline = time.monotonic() + 60
        while not note.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        return 0.0
    begin = time.monotonic()
    try:
        advance(module, optimizer, 2)
    finally:
        note.write_text(str(time.monotonic() - begin))
    return time.monotonic() - begin


def roots(place: str) -> Result:
    """Eigendecompositions fail on one rank."""
    recipe = {
        "update": {"kind": "shampoo", "solver": "eigh", "refresh": {"kind": "every", "steps": 1, "stagger": "none"}},
        "failure": {"roots": 1},
        "routes": [],
        "blocking": {"size": 8},
    }
    module = lay_out(model(), place)
    optimizer = eigengraft.compose(load_recipe(recipe), module, lr=1e-3)
    advance(module, optimizer, 0)
    said, count = "", 0
    with patch.object(torch.linalg, "eigh", _broken if bad() else torch.linalg.eigh):
        for count in range(1, 6):
            try:
                advance(module, optimizer, count)
            except ArithmeticError as error:
                said = str(error)
                break
    return {"said": said, "count": count}


def _broken(*_: Any, **__: Any) -> Any:
    raise torch.linalg.LinAlgError("did not converge")


FAULTS: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        raises_in_backward,
        killed_in_step,
        killed_after_save,
        raises_in_step,
        nan,
        large,
        one_sided,
        changed,
        changed_on_device,
        twice,
        ahead,
        one_sided_sum,
        not_averaged,
        not_averaged_on_device,
        groups_apart,
        rounded_apart,
        refused,
        sparse,
        other_recipe,
        other_shapes,
        other_order,
        fewer,
        other_frozen,
        other_values,
        experts,
        stages,
        flat,
        flat_original,
        another_group,
        thawed,
        unprovided,
        added,
        other_lr,
        alone,
        saves_alone,
        stalls,
        roots,
    )
}
