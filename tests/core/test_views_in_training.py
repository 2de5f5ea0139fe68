"""Views in an optimizer: heads, sections and experts are updated as separate parameters would be."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

import eigengraft
from eigengraft import Optimizer, compose
from eigengraft.blocking import Matrices, module_facts
from eigengraft.errors import RecipeError

from ..refusals import refused
from ..views import matrices_by_hand

AT_ONCE = "update.eigenbasis.refresh.stagger=none"
"""Refreshes are spread by names, and separate parameters have others."""
RECIPES = {
    "muon": ["update.scale.rule=aspect"],
    "soap_fitted": [AT_ONCE, "update.eigenbasis.refresh.steps=3", "blocking.size=20"],
    "normuon": [],
}
VIEWS = {
    "experts": (Matrices(batch=1), (3, 24, 36)),
    "experts, inputs first": (Matrices(batch=1, outputs="last", sections=(12, 24)), (2, 24, 36)),
    "heads": (Matrices(heads=8), (32, 24)),
    "Conv1D": (Matrices(outputs="last", sections=(24, 24, 24), heads=8), (24, 72)),
    "grouped queries": (Matrices(sections=(32, 16, 16), heads=8), (64, 24)),
    "interleaved": (Matrices(groups=3, sections=(16, 8, 8), heads=(8, 8, 0)), (96, 24)),
    "sections of groups": (Matrices(groups=3, sections=(16, 8)), (72, 24)),
    "inputs": (Matrices(side="inputs", heads=12), (24, 36)),
}


def gradients(shape: Sequence[int], steps: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(tuple(shape), generator=generator) for _ in range(steps)]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", VIEWS)
def test_matrices_are_updated_as_separate_parameters(name: str, recipe: str) -> None:
    """Bit for bit: also scale rules, which take m and n of the matrix, blocks and their merging."""
    view, shape = VIEWS[name]
    start = gradients(shape, 1)[0]
    parameter = nn.Parameter(start.clone())
    separate = [nn.Parameter(matrix.clone()) for matrix in matrices_by_hand(start, view)]
    asked: dict[str, Any] = {"base": recipe, "view": view.model_dump(mode="json")}
    ours = Optimizer([("w", parameter)], asked, lr=0.02, overrides=RECIPES[recipe])
    theirs = Optimizer([(f"w{k}", p) for k, p in enumerate(separate)], recipe, lr=0.02, overrides=RECIPES[recipe])
    for gradient in gradients(shape):
        parameter.grad = gradient.clone()
        for p, own in zip(separate, matrices_by_hand(gradient, view), strict=True):
            p.grad = own
        ours.step()
        theirs.step()
    found = matrices_by_hand(parameter.detach(), view)
    assert all(torch.equal(a, b) for a, b in zip(found, separate, strict=True))
    assert not torch.equal(parameter, start)


class Experts(nn.Module):
    """A weight for each expert, in one parameter."""

    def __init__(self, shape: tuple[int, ...] = (5, 12, 20)) -> None:
        super().__init__()
        self.weight = nn.Parameter(gradients(shape, 1)[0])


@pytest.mark.parametrize("recipe", ["muon", "soap_fitted", "shampoo"])
def test_permuting_experts_commutes_with_training(recipe: str) -> None:
    order = torch.tensor([3, 0, 4, 1, 2])
    overrides = {"soap_fitted": [AT_ONCE], "shampoo": ["update.graft.direction.shampoo.refresh.stagger=none"]}.get(
        recipe, []
    )
    first, second = Experts(), Experts()
    second.weight.data = first.weight.data[order].clone()
    for module, chosen in ((first, torch.arange(5)), (second, order)):
        optimizer = compose(recipe, module, overrides=overrides)
        for gradient in gradients((5, 12, 20)):
            module.weight.grad = gradient[chosen].clone()
            optimizer.step()
    assert torch.equal(second.weight, first.weight[order])


def test_an_expert_is_orthogonalized_alone() -> None:
    """Each has the singular values of a polar factor: across experts, all but one expert's worth would be 0."""
    module = Experts((8, 24, 36))
    before = module.weight.detach().clone()
    optimizer = compose("muon", module, lr=1.0, weight_decay=0.0)
    module.weight.grad = gradients((8, 24, 36), 1)[0]
    optimizer.step()
    values = torch.linalg.svdvals(before - module.weight.detach()) / (0.2 * 36**0.5)
    assert values.min() > 0.6 and values.max() < 1.2  # Newton-Schulz ends in [0.68, 1.14], in bfloat16
    assert optimizer.routing_table()[0].blocks == ((24, 36),) * 8


def test_square_experts_take_24_bytes_an_entry_with_soap() -> None:
    """Two moments, two statistics and two bases of each expert's size; as one matrix of all they would be 73."""
    module = Experts((8, 64, 64))
    module.weight = nn.Parameter(module.weight.detach().float())
    state = compose("soap_fitted", module).state[module.weight]
    held = sum(x.numel() * x.element_size() for key, x in state.items() if x.ndim >= 2 and "failures" not in key)
    assert held == 24 * module.weight.numel()


class Attention(nn.Module):
    """Attention with the attributes that a library of models gives it."""

    def __init__(self, layers: dict[str, nn.Module], **numbers: Any) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        for name, number in numbers.items():
            setattr(self, name, number)


class Config:
    """Numbers of a model."""

    num_attention_heads, num_key_value_heads, head_dim = 4, 2, 8


class Conv1D(nn.Module):
    """A layer that stores [inputs, outputs], as GPT-2's in Hugging Face."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf, self.weight = outputs, nn.Parameter(torch.zeros(inputs, outputs))


class FusedExperts(nn.Module):
    """Experts with fused gates and values, stored [inputs, outputs] or [outputs, inputs]."""

    def __init__(self, inputs_first: bool) -> None:
        super().__init__()
        up, down = ((4, 12, 40), (4, 20, 12)) if inputs_first else ((4, 40, 12), (4, 12, 20))
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.zeros(up)), nn.Parameter(torch.zeros(down))


class AlternatingExperts(FusedExperts):
    """Experts whose gates and values alternate, with the biases and the limit of gpt-oss."""

    def __init__(self) -> None:
        super().__init__(inputs_first=True)
        self.gate_up_proj_bias, self.limit = nn.Parameter(torch.zeros(4, 40)), 7.0


def linear(rows: int, columns: int = 32) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


def projections(*rows: int) -> dict[str, nn.Module]:
    """Onto queries, keys and values."""
    return {f"{name}_proj": linear(n) for name, n in zip("qkv", rows, strict=True)}


KINDS: dict[str, tuple[nn.Module, dict[str, Matrices]]] = {
    "torch": (
        nn.MultiheadAttention(32, 4, bias=False),
        {"in_proj_weight": Matrices(sections=(32, 32, 32), heads=8)},
    ),
    "torch, keys of another width": (
        nn.MultiheadAttention(32, 4, bias=False, kdim=16),
        {f"{name}_proj_weight": Matrices(heads=8) for name in "qkv"},
    ),
    "Llama": (
        Attention({**projections(32, 16, 16), "o_proj": linear(32)}, config=Config()),
        {f"{name}_proj.weight": Matrices(heads=8) for name in "qkv"},
    ),
    "BERT": (
        Attention({"query": linear(32), "key": linear(32), "value": linear(32)}, num_attention_heads=4),
        {f"{name}.weight": Matrices(heads=8) for name in ("query", "key", "value")},
    ),
    "gated queries": (
        Attention(projections(64, 16, 16), config=Config()),
        {
            "q_proj.weight": Matrices(groups=4, sections=(8, 8), heads=8),
            "k_proj.weight": Matrices(heads=8),
            "v_proj.weight": Matrices(heads=8),
        },
    ),
    "GPT-2": (
        Attention({"c_attn": Conv1D(96, 32), "c_proj": Conv1D(32, 32)}, num_heads=4, head_dim=8),
        {"c_attn.weight": Matrices(outputs="last", sections=(32, 32, 32), heads=8)},
    ),
    "nanoGPT": (
        Attention({"c_attn": linear(96), "c_proj": linear(32)}, n_head=4),
        {"c_attn.weight": Matrices(sections=(32, 32, 32), heads=8)},
    ),
    "Phi 3": (
        Attention({"qkv_proj": linear(64)}, config=Config()),
        {"qkv_proj.weight": Matrices(sections=(32, 16, 16), heads=8)},
    ),
    "GPT-NeoX": (
        Attention({"query_key_value": linear(96)}, num_attention_heads=4, head_size=8),
        {"query_key_value.weight": Matrices(groups=4, sections=(8, 8, 8), heads=8)},
    ),
    "Falcon": (
        Attention(
            {"query_key_value": linear(64)}, num_heads=4, num_kv_heads=2, head_dim=8, new_decoder_architecture=True
        ),
        {"query_key_value.weight": Matrices(groups=2, sections=(16, 8, 8), heads=8)},
    ),
    "Falcon 7B": (
        Attention({"query_key_value": linear(48)}, num_heads=4, head_dim=8, multi_query=True),
        {"query_key_value.weight": Matrices(sections=(32, 8, 8), heads=8)},
    ),
    "DeepSeek": (
        Attention(
            {"q_b_proj": linear(48), "kv_b_proj": linear(56), "kv_a_proj_with_mqa": linear(20), "o_proj": linear(24)},
            num_heads=4,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=6,
            kv_lora_rank=16,
        ),
        {
            "q_b_proj.weight": Matrices(heads=12),
            "kv_b_proj.weight": Matrices(groups=4, sections=(8, 6), heads=(8, 6)),
            "kv_a_proj_with_mqa.weight": Matrices(sections=(16, 4)),
        },
    ),
    "gated layer": (
        Attention({"gate_up_proj": linear(40), "down_proj": linear(32, 20)}),
        {"gate_up_proj.weight": Matrices(sections=(20, 20))},
    ),
    "Mixtral": (
        FusedExperts(inputs_first=False),
        {"gate_up_proj": Matrices(batch=1, sections=(20, 20)), "down_proj": Matrices(batch=1)},
    ),
    "Llama 4": (
        FusedExperts(inputs_first=True),
        {
            "gate_up_proj": Matrices(batch=1, outputs="last", sections=(20, 20)),
            "down_proj": Matrices(batch=1, outputs="last"),
        },
    ),
    "gpt-oss": (
        AlternatingExperts(),
        {
            "gate_up_proj": Matrices(batch=1, outputs="last", groups=20, sections=(1, 1)),
            "down_proj": Matrices(batch=1, outputs="last"),
        },
    ),
    "neither": (Attention(projections(32, 32, 30), num_heads=4), {}),
}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "neither"])
def test_modules_are_recognized(kind: str) -> None:
    """Queries, keys and values have heads, the projection of the output is one matrix."""
    module, expected = KINDS[kind]
    model = nn.ModuleDict({"layer": module})
    facts = module_facts(model)
    found = {name.removeprefix("layer."): facts[id(p)].matrices for name, p in model.named_parameters()}
    assert {name: matrices for name, matrices in found.items() if matrices is not None} == expected
    for name, matrices in expected.items():
        matrices.require_fit(tuple(model.get_parameter(f"layer.{name}").shape))


def test_what_does_not_fit_is_not_recognized() -> None:
    facts = module_facts(KINDS["neither"][0])
    assert [own.matrices for own in facts.values()] == [Matrices(heads=8), Matrices(heads=8), None]
    numberless = Attention(projections(32, 32, 32))
    assert all(own.matrices is None for own in module_facts(numberless).values())


def test_convolutions_are_told_by_their_modules() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(20, 24, 3)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Conv1d(20, 24, 3))
            self.experts = Experts((3, 20, 24))

    model = Net()
    facts = module_facts(model)
    told = {name: facts[id(p)].convolution for name, p in model.named_parameters() if p.ndim == 3}
    assert {name for name, convolution in told.items() if not convolution} == {"experts.weight"} and len(told) == 4
    views = {row.name: row.view for row in compose("muon", model).routing_table()}
    assert views["conv.weight"] == "one tensor: convolution"
    assert views["experts.weight"] == "3 of 20x24: 3-d, not a convolution"


class ConversationExperts(Experts):
    """Experts in a class with "conv" in its name."""


class Blur(nn.Module):
    """A convolution of a user's, with the attributes of torch's."""

    def __init__(self, outputs: int, inputs: int, *kernel: int) -> None:
        super().__init__()
        self.kernel_size, self.weight = kernel, nn.Parameter(torch.zeros(outputs, inputs, *kernel))


class Bare(nn.Module):
    """Tensors without any attribute that says what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.matrices = nn.Parameter(torch.zeros(8, 4, 5, 5)), nn.Parameter(torch.zeros(2, 3, 20, 24))


FOUND: dict[str, tuple[nn.Module, str, str]] = {
    "experts": (ConversationExperts((3, 20, 24)), "weight", "3 of 20x24"),
    "by attributes": (Blur(20, 24, 3), "weight", "one tensor"),
    "parametrized": (spectral_norm(Blur(20, 24, 3, 3)), "parametrizations.weight.original", "one tensor"),
    "by shape": (Bare(), "filters", "one tensor"),
    "batches": (Bare(), "matrices", "6 of 20x24"),
}


@pytest.mark.parametrize("kind", FOUND)
def test_convolutions_are_found_by_type_attributes_and_shape(kind: str) -> None:
    """Never by the name of a class."""
    model, name, view = FOUND[kind]
    rows = {row.name: row.view for row in compose("muon", model, overrides={"routes": []}).routing_table()}
    assert rows[name].startswith(view)


def test_a_kernel_size_that_does_not_fit_makes_no_convolution() -> None:
    wrong = Blur(20, 24, 3)
    wrong.kernel_size = (5,)
    assert compose("muon", wrong, overrides={"routes": []}).routing_table()[0].view.startswith("20 of 24x3")


class Published(nn.Module):
    """A module that says what its parameters are made of."""

    def __init__(self, views: Any) -> None:
        super().__init__()
        self.views, self.fused, self.other = views, linear(24, 12), linear(12, 12)

    def parameter_views(self) -> Any:
        return self.views


def test_a_module_publishes_its_views_and_show_says_so() -> None:
    model = nn.Sequential(Published({"fused.weight": {"sections": [8, 16], "heads": [0, 4]}}))
    rows = {row.name: row for row in compose("muon", model, overrides=["view=modules"]).routing_table()}
    assert rows["0.fused.weight"].view == "1 of 8x12 + 4 of 4x12: parameter_views of Published"
    assert rows["0.fused.weight"].blocks == ((8, 12), *((4, 12),) * 4)
    assert rows["0.other.weight"].view == ""
    assert compose("muon", model).routing_table()[0].blocks == ((24, 12),)  # heads are asked for, never given


@pytest.mark.parametrize(
    ("views", "says"),
    [
        ([], ("0.parameter_views", "[]")),
        ({"fuse": {"heads": 4}}, ("0.parameter_views", "fuse")),
        ({"fused": {"heads": 4}}, ("0.parameter_views", "fused")),
        ({"fused.weight": {"head": 4}}, ("0.parameter_views.fused.weight.head", "heads")),
        ({"fused.weight": {"heads": 5}}, ("0.parameter_views.fused.weight", "view", 24)),
    ],
)
def test_views_that_a_module_cannot_mean_are_refused(views: Any, says: tuple[object, ...]) -> None:
    with refused(ValueError, *says):
        compose("muon", nn.Sequential(Published(views)))


@pytest.mark.parametrize(
    ("shape", "override", "says"),
    [
        (
            (24, 20, 3),
            [],
            ("w", "update.spectral", "shape", "(24, 20, 3)"),
        ),
        ((2, 3, 24, 20), [], ("w", "view: whole", "view: {kind: matrices, batch: 2}")),
        ((24, 20), ["view=modules"], ("w", "modules")),
        ((24, 20), ["view.kind=matrices", "view.heads=7"], ("w", "view", 24)),
    ],
)
def test_matrices_that_no_view_decides_are_refused_by_name(
    shape: tuple[int, ...], override: list[str], says: tuple[object, ...]
) -> None:
    with refused(ValueError, *says):
        Optimizer([("w", nn.Parameter(torch.ones(shape)))], "muon", overrides=override)
    if not override:
        for decided in (["view=whole"], ["view.kind=matrices", f"view.batch={len(shape) - 2}"]):
            Optimizer([("w", nn.Parameter(torch.ones(shape)))], "muon", overrides=decided)
        Optimizer([("w", nn.Parameter(torch.ones(shape)))], "soap_fitted")  # needs no matrices


def test_a_view_of_an_update_of_single_entries_is_refused() -> None:
    with refused(RecipeError, "view", "Modules"):
        eigengraft.load_recipe("adamw", ["view=modules"])
    module = Experts()
    assert compose("adamw", module).routing_table()[0].blocks == ((5, 12, 20),)


def test_a_checkpoint_of_heads_goes_on_bit_for_bit_and_no_other_view_takes_it() -> None:
    model = KINDS["Falcon"][0]
    module, other = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = compose("soap_fitted", module, overrides=["view=modules", "update.eigenbasis.refresh.steps=2"])
    steps = gradients((64, 32))

    def drive(chosen: Optimizer, net: Any, some: Sequence[Tensor]) -> None:
        for gradient in some:
            net.query_key_value.weight.grad = gradient.clone()
            chosen.step()

    drive(optimizer, module, steps[:3])
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(module.state_dict())
    drive(optimizer, module, steps[3:])
    resumed = compose("soap_fitted", other, overrides=["view=modules", "update.eigenbasis.refresh.steps=2"])
    other.load_state_dict(weights)
    resumed.load_state_dict(saved)
    drive(resumed, other, steps[3:])
    assert torch.equal(other.query_key_value.weight, module.query_key_value.weight)  # type: ignore[union-attr,arg-type]
    with refused(ValueError, "view.kind"):
        compose("soap_fitted", other, overrides=["update.eigenbasis.refresh.steps=2"]).load_state_dict(saved)
