"""timm creates recipes by name, with groups by layer, and its schedulers drive them."""

from pathlib import Path
from typing import Any

import pytest
import torch

timm = pytest.importorskip("timm")
pytest.importorskip("timm.scheduler")

from eigengraft import compose  # noqa: E402
from eigengraft.hosts.timm import register  # noqa: E402

from ..refusals import refused  # noqa: E402
from .models import same, values  # noqa: E402


def model() -> Any:
    torch.manual_seed(0)
    return timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=5
    )


def start(recipe: str, **options: Any) -> tuple[Any, Any, Any]:
    net = model()
    optimizer = timm.optim.create_optimizer_v2(net, register(recipe, net), lr=1e-2, weight_decay=0.05, **options)
    return net, optimizer, timm.scheduler.CosineLRScheduler(optimizer, t_initial=10, warmup_t=2, warmup_lr_init=1e-3)


def train(net: Any, optimizer: Any, scheduler: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(step))
        torch.nn.functional.cross_entropy(net(images), torch.arange(4)).backward()
        timm.utils.dispatch_clip_grad(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step(step + 1)


@pytest.mark.parametrize("recipe", ["soap_fitted", "muon"])
def test_a_run_with_layer_decay_resumes_bit_for_bit(recipe: str, tmp_path: Path) -> None:
    whole, again = start(recipe, layer_decay=0.5), start(recipe, layer_decay=0.5)
    assert len(whole[1].param_groups) > 6 and whole[1].param_groups[0]["lr_scale"] < 0.2
    train(*whole, range(4))
    torch.save([whole[0].state_dict(), whole[1].state_dict()], tmp_path / "saved.pt")
    train(*whole, range(4, 8))
    weights, state = torch.load(tmp_path / "saved.pt")
    again[0].load_state_dict(weights)
    again[1].load_state_dict(state)
    train(*again, range(4, 8))
    assert same(values(whole[0]), values(again[0])) and not same(values(whole[0]), values(model()))
    rates = {group["lr"] / group["lr_scale"] for group in whole[1].param_groups}
    assert max(rates) - min(rates) < 1e-9 * max(rates)


def test_routes_know_the_model() -> None:
    net, optimizer, _ = start("soap_fitted")
    routes = {row.name: row.route for row in optimizer.routing_table()}
    assert routes == {row.name: row.route for row in compose("soap_fitted", net).routing_table()}
    assert routes["head.weight"] == "routes.adam" and "eigengraft.soap_fitted" in timm.optim.list_optimizers()


def test_a_recipe_without_a_name_needs_one() -> None:
    net = model()
    with refused(ValueError, "register"):
        register({"update": "sign"}, net)
    chosen = register({"update": "sign"}, net, "mine")
    assert type(timm.optim.create_optimizer_v2(net, chosen, lr=0.1)).__name__ == "Optimizer"
