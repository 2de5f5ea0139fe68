"""What would go wrong without a word is refused, or said once."""

import copy
import pickle
import warnings
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eigengraft import ContractError, Optimizer, compose
from eigengraft.optimizers import grouped
from eigengraft.preconditioners import Stage
from eigengraft.slots import State
from eigengraft.step_context import StepContext
from eigengraft.testing import accelerator

from ..refusals import check_said, refused, warned


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.hidden, self.last = nn.Linear(4, 5), nn.Linear(5, 3)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.hidden(x).relu())
        return out


def backward(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(2, 4)).square().sum().backward()


def test_a_frozen_parameter_is_trained_once_it_is_thawed() -> None:
    model, whole = Net(), Net()
    model.hidden.requires_grad_(False)
    optimizer, other = compose("soap_fitted", model, lr=0.1), compose("soap_fitted", whole, lr=0.1)
    assert not any(model.hidden.weight is p for p in optimizer.state)
    model.hidden.requires_grad_(True)
    for net, steps in ((model, optimizer), (whole, other)):
        for _ in range(3):
            backward(net)
            steps.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize("names", [("one", "two"), None])
def test_a_parameter_given_twice_is_refused(names: tuple[str, str] | None) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    given: Any = [weight, weight] if names is None else [(name, weight) for name in names]
    what = ("parameter 0", "parameter 1") if names is None else names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns first
        with refused(ValueError, "params", *what):
            Optimizer(given)


def test_a_step_of_a_model_on_the_meta_device_is_refused_by_name() -> None:
    optimizer = compose("soap_fitted", Net().to("meta"))
    for act in (optimizer.step, lambda: optimizer.load_state_dict(optimizer.state_dict())):
        with refused(ValueError, "to_empty"):
            act()


class TestFlatPieces:
    """Marks of tensors as FSDP1 and DeepSpeed set them; neither makes matrices of what it hands to optimizers."""

    REMEDY = "torch.distributed.fsdp.fully_shard"

    def test_flat_parameters_of_fsdp1_are_refused_by_name(self) -> None:
        flat = nn.Parameter(torch.ones(24))
        flat._fsdp_flattened = True  # type: ignore[attr-defined]
        for recipe in ("soap_fitted", "sgd", {"base": "sgd", "distribution": {"mode": "local"}}):
            with refused(ValueError, "_flat_param", "FSDP1", self.REMEDY):
                Optimizer([("_flat_param", flat)], recipe)

    def test_partitioned_parameters_of_zero_3_are_refused_by_name_and_shape(self) -> None:
        model = Net()
        for number, parameter in enumerate(model.parameters()):
            parameter.ds_id, parameter.ds_shape = number, parameter.shape  # type: ignore[attr-defined]
            parameter.data = torch.empty(0)
        with refused(ValueError, "hidden.weight", (5, 4), "ZeRO stage 3", self.REMEDY):
            compose("soap_fitted", model)

    @pytest.mark.parametrize("stage", [1, 3, "marked later"])
    @pytest.mark.parametrize("frozen", [(), ("hidden.bias", "last.weight", "last.bias")], ids=["all", "one"])
    def test_flat_tensors_put_in_place_of_parameters_are_refused_by_name(
        self, stage: int | str, frozen: tuple[str, ...]
    ) -> None:
        model = Net()
        given = [(name, parameter) for name, parameter in model.named_parameters() if name not in frozen]
        optimizer = Optimizer(given, "soap_fitted", overrides={"routes": []})
        (group,) = optimizer.param_groups
        group["params"] = [torch.ones(12, requires_grad=True)]
        if stage == 3:
            group["params"][0].ds_id = "0_3"
        if stage == "marked later":
            group["params"], model.hidden.weight.ds_shape = [], (5, 4)  # type: ignore[assignment]
        with refused(ValueError, "hidden.weight", "ZeRO", self.REMEDY):
            optimizer.step()


class TestReplacedParameters:
    def replace(self, model: Net, attribute: str = "weight") -> None:
        setattr(model.hidden, attribute, nn.Parameter(getattr(model.hidden, attribute).detach().clone()))

    def test_another_parameter_under_a_name_is_an_error_before_anything_moves(self) -> None:
        model = Net()
        optimizer = compose("adamw", model)
        self.replace(model)
        before = copy.deepcopy(model.state_dict())
        backward(model)
        with refused(RuntimeError, "hidden.weight"):
            optimizer.step()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    def test_a_weight_in_place_of_its_parametrization_is_noticed(self) -> None:
        model = Net()
        nn.utils.parametrizations.weight_norm(model.hidden)
        optimizer = compose("adamw", model)
        nn.utils.parametrize.remove_parametrizations(model.hidden, "weight")
        backward(model)
        with refused(RuntimeError, "hidden.weight"):
            optimizer.step()

    def test_a_weight_that_has_another_name_now_is_trained(self) -> None:
        model = Net()
        optimizer = compose("adamw", model)
        nn.utils.parametrizations.spectral_norm(model.hidden)
        before = model.hidden.parametrizations.weight.original.detach().clone()
        backward(model)
        optimizer.step()
        assert not torch.equal(model.hidden.parametrizations.weight.original, before)

    def test_another_layer_may_come_where_one_has_left(self) -> None:
        model = Net()
        optimizer = compose("adamw", model)
        backward(model)
        del model.last
        model.other = nn.Linear(7, 7)
        model.other.weight.grad = torch.ones(7, 7)
        optimizer.zero_grad()
        model.hidden.weight.grad = torch.ones_like(model.hidden.weight)
        optimizer.step()

    def test_a_module_in_place_of_another_is_noticed(self) -> None:
        model = Net()
        optimizer = compose("adamw", model)
        model.last = nn.Linear(5, 2)
        backward(model)
        with refused(RuntimeError, "last.weight"):
            optimizer.step()

    def test_parameters_without_gradients_are_no_error(self) -> None:
        model = Net()
        optimizer = compose("adamw", model)
        backward(model)
        model.last.weight.grad = None
        optimizer.step()
        del model.last  # no other is trained in its place
        optimizer.zero_grad()
        optimizer.step()


def test_a_direction_that_is_not_finite_is_not_written(registry: None) -> None:
    class Broken(Stage):
        """nan  from the second step on."""

        kind: Literal["broken"] = "broken"

        def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
            return direction * (float("nan") if context.steps.min() > 1 else 1.0)

    model = Net()
    optimizer = compose(["momentum", Broken()], model)
    backward(model)
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    backward(model)
    with refused(ContractError, "update", 1, "[5, 4]"):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def lost(optimizer: Optimizer) -> bool:
    return all(param_set.finite_check.lost() for param_set in optimizer.param_sets)


class TestUnusableGradients:
    def steps(self, optimizer: Optimizer, model: nn.Module, bad: list[str], count: int) -> list[str]:
        """The warnings of steps in which the named parameters get gradients with nan."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(count):
                for name, parameter in model.named_parameters():
                    parameter.grad = torch.full_like(parameter, float("nan") if name in bad else 1.0)
                optimizer.step()
        return [str(warning.message) for warning in caught]

    def test_a_run_without_usable_gradients_says_so_once(self) -> None:
        model = Net()
        optimizer, every = compose("adamw", model), [name for name, _ in model.named_parameters()]
        (message,) = self.steps(optimizer, model, every, 9)
        check_said(message, "hidden.weight", f"{len(every)} parameters", "optimizer.skipped")
        assert not lost(optimizer)
        (message,) = self.steps(optimizer, model, every, 20)
        check_said(message, 10, "hidden.weight")
        assert lost(optimizer)

    def test_one_usable_gradient_begins_the_count_again(self) -> None:
        model = Net()
        optimizer, every = compose("adamw", model), [name for name, _ in model.named_parameters()]
        assert len(self.steps(optimizer, model, every, 1)) == 1
        for _ in range(3):
            assert self.steps(optimizer, model, every[1:], 1) == self.steps(optimizer, model, every, 9) == []
        assert not lost(optimizer)


class TestRounding:
    def warned(self, dtype: torch.dtype, lr: float, trained: float = 1.0, warm_up: int = 0) -> list[str]:
        """The warnings of 20 steps of a matrix of ones; trained: share of the rows that have a gradient."""
        weight = nn.Parameter(torch.ones(100, 8, dtype=dtype))
        optimizer = Optimizer([("w", weight)], lr=lr)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(20):
                weight.grad = torch.zeros_like(weight)
                weight.grad[: int(100 * trained)] = 1
                optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / (warm_up + 1))
                optimizer.step()
        return [str(warning.message) for warning in caught]

    def test_parameters_that_stand_still_are_told_once(self) -> None:
        (message,) = self.warned(torch.bfloat16, 1e-4)  # bfloat16 has steps of 2^-8 below 1
        check_said(message, "w", "0.0%", 5, 0.0001)

    @pytest.mark.parametrize(
        "run",
        [
            {"dtype": torch.float32, "lr": 1e-4},
            {"dtype": torch.bfloat16, "lr": 1e-2},
            {"dtype": torch.bfloat16, "lr": 1e-2, "trained": 0.1},
            {"dtype": torch.bfloat16, "lr": 1e-2, "warm_up": 14},
        ],
        ids=["float32", "large steps", "few rows have gradients", "warm-up"],
    )
    def test_parameters_that_move_are_no_cause(self, run: dict[str, Any]) -> None:
        assert self.warned(**run) == []

    @pytest.mark.parametrize("warm_up", [0, 14])
    def test_a_rate_on_a_device_is_read_without_a_wait(self, warm_up: int) -> None:
        """Only the comparison of samples waits, once."""
        waits = []
        with accelerator("cuda") as run, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            weight = nn.Parameter(torch.ones(100, 8, dtype=torch.bfloat16).to(run.device))
            optimizer = Optimizer([("w", weight)], {"base": "lion", "failure": {"detect": "device"}}, lr=torch.ones(()))
            for step in range(24):
                weight.grad = torch.ones_like(weight)
                lr = 1e-4 * min(1.0, (step + 1) / (warm_up + 1))
                optimizer.param_groups[0].update(lr=torch.tensor(lr).to(run.device), peak_lr=1e-4)
                with accelerator("cuda") as counts:
                    optimizer.step()
                waits.append(counts.by_line())
        late = [any(own.waits and "rounding.py" in line for line, own in found.items()) for found in waits]
        assert sum(late) == 1 and (warm_up == 0 or not any(late[: warm_up // 2]))
        assert [str(own.message).startswith("w: ") for own in caught] == [True]


class TestEvaluationOfAveragedIterates:
    def run(self, recipe: str, evaluated: bool, steps: int = 1) -> list[str]:
        model = Net()
        optimizer = compose(recipe, model)
        for _ in range(steps):
            backward(model)
            optimizer.step()
        copied = copy.deepcopy(model)
        if evaluated:
            optimizer.eval()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(torch.ones(2, 4))
            for net in (model.eval(), model, copied.eval(), pickle.loads(pickle.dumps(model))):
                net(torch.ones(2, 4))
                with torch.no_grad():
                    net(torch.ones(2, 4))
        return [str(warning.message) for warning in caught]

    def test_a_forgotten_switch_is_said_once(self) -> None:
        said = self.run("schedule_free_adamw", evaluated=False)
        assert len(said) == 1
        check_said(said[0], "schedule_free", "optimizer.eval()")

    def test_evaluated_or_unaveraged_iterates_give_no_warning(self) -> None:
        assert self.run("schedule_free_adamw", evaluated=True) == []
        assert self.run("schedule_free_adamw", evaluated=False, steps=0) == []
        assert self.run("adamw", evaluated=False) == []


class TestGroupsOfAModel:
    def test_routes_know_the_model(self) -> None:
        class Tokens(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table, self.hidden = nn.Embedding(5, 4), nn.Linear(4, 4)

        model = Tokens()
        groups = [
            {"params": [model.table.weight, model.hidden.weight], "weight_decay": 0.1},
            {"params": [("any name", model.hidden.bias)], "lr": 0.5},
        ]
        optimizer = compose("soap_fitted", grouped(model, groups))
        routes = {row.name: row.route for row in optimizer.routing_table()}
        assert routes == {row.name: row.route for row in compose("soap_fitted", model).routing_table()}
        assert optimizer.param_groups[0]["weight_decay"] == 0.1 and optimizer.param_groups[1]["lr"] == 0.5
        assert optimizer.param_groups[0]["param_names"] == ["table.weight", "hidden.weight"]

    def test_a_parameter_of_another_model_is_refused(self) -> None:
        with refused(ValueError, "grouped", 0, "(5, 4)"):
            grouped(Net(), [{"params": list(Net().parameters())}])

    def test_other_arguments_are_refused(self) -> None:
        model: Any = Net()
        groups = [{"params": list(model.parameters())}]
        wrong: list[tuple[Any, Any, list[str | int]]] = [
            (groups, model, ["grouped", "module", "list"]),
            (model, groups[0]["params"], ["grouped", 0, "params", "Parameter"]),
            (model, [{"lr": 0.1}], ["grouped", 0, "params", "dict"]),
            (model, [{"params": "0.weight"}], ["grouped", 0, "0.weight"]),
            (model, [*groups, {"params": [3]}], ["grouped", 1, 0, "3"]),
        ]
        for first, second, said in wrong:
            with refused(TypeError, *said):
                grouped(first, second)


def test_the_result_of_an_operation_is_refused_by_its_name() -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    with refused(ValueError, "scaled", "operation"):
        Optimizer([("weight", weight), ("scaled", weight * 2)], "adamw")


@pytest.mark.parametrize("wrong", ["no", 1, None])
def test_checked_is_true_or_false(wrong: Any) -> None:
    with refused(TypeError, "checked", repr(wrong)):
        compose("adamw", Net(), checked=wrong)


@pytest.mark.parametrize("wrong", ["100", 0, -5, 10.5, True])
def test_steps_are_a_positive_integer(wrong: Any) -> None:
    with refused(ValueError, "steps", repr(wrong)):
        compose("adamw", Net(), steps=wrong)
    schedule = {"update.momentum.beta": [{"from": 0.5, "to": 0.9, "fraction": 0.5}]}
    assert compose("adamw", Net(), overrides=schedule, steps=np.int64(7)).recipe.total_steps == 7  # type: ignore[arg-type]


def test_options_of_compose_alone_are_named() -> None:
    with refused(TypeError, "silence", "compose"):
        Optimizer(Net().named_parameters(), "adamw", silence=["lr-zero"])


def test_an_option_put_into_a_group_by_hand_is_said_and_other_keys_are_not() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    optimizer = compose("sgd", model)
    optimizer.param_groups[0]["mine"] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = 0.5
    with warned(UserWarning, "momentum"):
        optimizer.step()


def test_a_field_of_a_stage_put_into_a_group_by_hand_is_said_with_its_path() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    optimizer = compose("adamw", model)
    optimizer.param_groups[0]["solver"] = "eigh"  # no stage of this recipe has it: a key of the user's
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    optimizer.param_groups[0]["beta"] = 0.5
    says = ("beta", "update.momentum.beta", "update.rms.beta")
    with warned(UserWarning, *says):
        optimizer.step()


def test_how_a_step_is_computed_is_said_where_it_is_not_as_asked() -> None:
    weight, bias = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Optimizer([("w", weight), ("b", bias)], "adamw", fused=True, foreach=True, capturable=False)
    with warned(UserWarning, "fused=True", "w", "Adam"):
        Optimizer([("w", weight), ("b", bias)], {"base": "soap", "routes": "default"}, fused=True)
    with warned(UserWarning, "fused=False"):
        Optimizer([("w", weight)], fused=False)
    with warned(UserWarning, "foreach=False"):
        optimizer = Optimizer([{"params": [("w", weight)], "foreach": False}])
    with warned(UserWarning, "fused=True"):
        Optimizer([("w", weight)], "soap").add_param_group({"params": [("b", bias)], "fused": True})
    with warned(UserWarning, "capturable"):
        optimizer.add_param_group({"params": [("b", bias)], "capturable": True})
    assert not Optimizer([("w", weight)], {"base": "adamw", "graph": True}, capturable=False).recipe.graph
