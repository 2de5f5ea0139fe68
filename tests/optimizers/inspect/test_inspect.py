"""Inspection: every measure against its definition in float64, and nothing that a watched step changes."""

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from eigengraft import (
    ContractError,
    Inspection,
    Measurement,
    Optimizer,
    Slot,
    Stage,
    State,
    StepContext,
    Traits,
    compose,
)
from eigengraft.optimizers.inspect.norms import NormWatch
from eigengraft.preconditioners import Cadence, Every, Probability
from eigengraft.quantization import Int8

from ...recipes import COVER, SHIPPED
from ...refusals import refused
from ...trajectories import named, normal
from ..step.test_kernels import Kernels

Array = NDArray[np.float64]


def trained(
    recipe: Any, shapes: tuple[tuple[int, ...], ...] = ((6, 4),), steps: int = 12, watch: bool = True, **kwargs: Any
) -> tuple[Optimizer, list[nn.Parameter], list[Tensor]]:
    """(optimizer, parameters, gradients of the last step) after some steps in float64, of which the last is watched."""
    held = [nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(shapes)]
    optimizer = Optimizer(named(held), recipe, lr=1e-2, weight_decay=0.0, **kwargs)
    for step in range(1, steps + 1):
        for i, parameter in enumerate(held):
            parameter.grad = normal(*parameter.shape, seed=100 * step + i)
        if watch and step == steps:
            optimizer.watch_next_step()
        optimizer.step()
    return optimizer, held, [parameter.grad for parameter in held if parameter.grad is not None]


def numbers(optimizer: Optimizer, parameter: Tensor, key: str) -> Array:
    """A slot of the first block of a parameter."""
    return np.asarray(optimizer.state[parameter][f"0/{key}"].double())


def only(table: Inspection, **chosen: Any) -> float:
    """The value of the only row that is chosen."""
    (value,) = table.select(**chosen).values()
    return value


def cosine(x: Array, y: Array) -> float:
    return float((x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y))


def test_sizes_and_cosines_of_directions_are_those_of_each_stage() -> None:
    recipe = [{"kind": "momentum", "beta": 0.9, "bias_correction": False}, {"kind": "sign"}]
    optimizer, (p,), (g,) = trained(recipe)
    m, gradient = numbers(optimizer, p, "update.momentum/m"), g.numpy()
    table = optimizer.inspect()
    # sums are taken in another order: a few roundings
    assert math.isclose(only(table, stage="momentum", measure="update_rms"), np.sqrt((m**2).mean()), rel_tol=1e-14)
    assert math.isclose(only(table, stage="momentum", measure="cosine"), cosine(m, gradient), rel_tol=1e-14)
    for stage in ("update.sign", "update"):
        assert only(table, stage=stage, measure="update_rms") == 1
        assert math.isclose(only(table, stage=stage, measure="cosine"), cosine(np.sign(m), gradient), rel_tol=1e-14)


def test_blocks_of_a_parameter_join_to_what_it_has_together() -> None:
    recipe = {"update": [{"kind": "momentum", "bias_correction": False}], "blocking": {"size": 4}}
    optimizer, (p,), (g,) = trained(recipe, shapes=((6, 4),))
    table = optimizer.inspect()
    parts = [np.asarray(optimizer.state[p][f"{block}/update.momentum/m"]) for block in (0, 1)]
    assert [row.block for row in table.select(stage="momentum", measure="update_rms")] == [0, 1]
    together, m = table.by_parameter(), np.concatenate([part.ravel() for part in parts])
    # sums are taken in another order: a few roundings
    assert math.isclose(only(together, stage="momentum", measure="update_rms"), np.sqrt((m**2).mean()), rel_tol=1e-14)
    assert math.isclose(only(together, stage="momentum", measure="cosine"), cosine(m, g.numpy().ravel()), rel_tol=1e-14)


def test_a_zero_direction_has_size_and_cosine_zero() -> None:
    held = nn.Parameter(normal(3, 2, seed=0))
    optimizer = Optimizer([("w", held)], ["identity"], lr=1e-2)
    held.grad = torch.zeros_like(held)
    optimizer.watch_next_step()
    optimizer.step()
    assert [row.value for row in optimizer.inspect().select(stage="update")] == [0, 0]


def eigenbasis(frame: str = "fixed") -> dict[str, Any]:
    return {
        "update": [
            {
                "kind": "eigenbasis",
                "statistic": {"kind": "gram", "beta": 0.9, "bias_correction": False},
                "statistic_frame": frame,
                "refresh": {"kind": "every", "steps": 5, "stagger": "none"},
                "inner": [{"kind": "momentum"}, {"kind": "rms"}],
            }
        ]
    }


@pytest.mark.parametrize("frame", ["fixed", "basis"])
def test_condition_numbers_and_drift_of_a_basis(frame: str) -> None:
    optimizer, (p,), _ = trained(eigenbasis(frame))
    table = optimizer.inspect()
    for axis in (0, 1):
        a, q = (numbers(optimizer, p, f"update.eigenbasis/{name}.{axis}") for name in ("factor", "basis"))
        b = a if frame == "basis" else q.T @ a @ q
        values = np.linalg.eigvalsh(a)
        along = np.diag(b)
        turned = np.degrees(np.arccos(along / np.linalg.norm(b, axis=0)))  # of Q e_i and A Q e_i, in the basis
        expected = {
            f"factor.{axis}/condition": values[-1] / values[0],
            f"basis.{axis}/off_diagonal": np.linalg.norm(b - np.diag(along)) / np.linalg.norm(b),
            f"basis.{axis}/angle": (along * turned).sum() / along.sum(),
            f"basis.{axis}/orthogonality": np.linalg.norm(q.T @ q - np.eye(len(q))) / len(q) ** 0.5,
        }
        for name, value in expected.items():
            slot, measure = name.split("/")
            # eigenvalues in float64 are off by 1e-16 of the largest, the condition number is below 1e5
            assert math.isclose(only(table, slot=slot, measure=measure), value, rel_tol=1e-9, abs_tol=1e-14), name
    assert only(table, stage="eigenbasis", measure="staleness") == 2  # of 12 steps the 10th refreshed


def test_a_fresh_basis_of_eigenvectors_has_not_drifted() -> None:
    recipe = eigenbasis()
    recipe["update"][0] |= {"solver": "eigh", "refresh": {"kind": "every", "steps": 1}}
    table = trained(recipe)[0].inspect()
    assert max(table.select(measure="off_diagonal").values()) < 1e-14
    assert max(table.select(measure="angle").values()) < 1e-6  # degrees: rounding beside small eigenvalues
    assert set(table.select(measure="staleness").values()) == {0}


def test_condition_numbers_end_where_the_dtype_does() -> None:
    recipe = [{"kind": "shampoo", "statistic": {"kind": "gram", "beta": 0.5}}]
    optimizer = trained(recipe, shapes=((9, 1),), steps=1)[0]  # a statistic of rank one
    assert math.isclose(only(optimizer.inspect(), slot="factor.0", measure="condition"), 2.0**52)


def test_a_diagonal_statistic_has_the_ratio_of_its_entries() -> None:
    recipe = [{"kind": "shampoo", "statistic": {"kind": "gram", "beta": 1.0, "axes": {"entries": "diagonal"}}}]
    optimizer, (p,), _ = trained(recipe)
    values = numbers(optimizer, p, "update.shampoo/factor.0")
    assert only(optimizer.inspect(), slot="factor.0", measure="condition") == values.max() / values.min()


@pytest.mark.parametrize("exponent", [None, "1/2", "3/4"])
@pytest.mark.parametrize("steps", [10, 13])
def test_residuals_of_roots(exponent: str | None, steps: int) -> None:
    stage: dict[str, Any] = {"kind": "shampoo", "exponent": exponent, "statistic": {"kind": "gram", "beta": 1.0}}
    recipe = [{**stage, "refresh": {"kind": "every", "steps": 5, "stagger": "none"}}]
    optimizer, (p,), _ = trained(recipe, steps=steps)
    table = optimizer.inspect()
    m, n = {None: (4, 1), "1/2": (2, 1), "3/4": (4, 3)}[exponent]
    for axis in (0, 1):
        a, x = (numbers(optimizer, p, f"update.shampoo/{name}.{axis}") for name in ("factor", "root"))
        unit = np.linalg.matrix_power(x, m) @ np.linalg.matrix_power(a, n)
        expected = np.linalg.norm(a @ unit - a) / np.linalg.norm(a)
        found = only(table, slot=f"root.{axis}", measure="residual")
        # condition numbers below 1e3 to the power 3; roundings of a fresh root
        assert math.isclose(found, expected, rel_tol=1e-6, abs_tol=1e-9)
        assert (found < 1e-9) == (steps == 10), "a fresh root of an exact solver has no residual, a stale one has"


class Dated(Stage):
    """Remembers when it was refreshed, for the age that inspection finds."""

    kind: Literal["test_dated"] = "test_dated"
    every: Cadence
    late: bool = False

    def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
        return {"last": Slot((), role="count", dtype=torch.float64)}

    def cadence(self) -> Cadence:
        return self.every

    def traits(self, block: tuple[int, ...]) -> Traits:
        return Traits(lagged=self.late)

    def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
        state["last"] = context.step.double()

    def measures(self, state: State, context: StepContext) -> Mapping[str, Tensor]:
        last = state["last"].clone()
        state["last"] = last + 99  # inspection writes nothing back
        return {"expected": context.step - last, "last/double": 2 * last}

    def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
        return direction * 2


Stage.members.pop("test_dated")  # the laws are about every member of the family


def test_norms_are_of_the_weight_before_the_step_of_its_gradient_and_of_its_change() -> None:
    values = {
        "w": normal(5, 3, seed=0),
        "z": torch.complex(normal(4, seed=1), normal(4, seed=2)),
        "zero": torch.zeros(2, dtype=torch.float64),
    }
    values["unused"] = normal(2, seed=3)
    held = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    optimizer = Optimizer(held.items(), "sgd", lr=0.1, weight_decay=0.0)
    given = {
        "w": normal(5, 3, seed=3),
        "z": torch.complex(normal(4, seed=4), normal(4, seed=5)),
        "zero": normal(2, seed=6),
    }
    optimizer.watch_next_step()

    def closure() -> Tensor:  # gradients appear inside the step, after it has begun
        for name, gradient in given.items():
            held[name].grad = gradient
        return torch.zeros(())

    optimizer.step(closure)
    table = optimizer.inspect()
    for name, before in values.items():
        change, weight = float((held[name].detach() - before).norm()), float(before.norm())
        assert math.isclose(only(table, parameter=name, measure="weight_norm"), weight, rel_tol=1e-14)
        ratio = only(table, parameter=name, measure="update_ratio")
        assert math.isclose(ratio, change / weight, rel_tol=1e-14) if weight else math.isnan(ratio)
        norms = table.select(parameter=name, measure="gradient_norm").values()
        assert norms == pytest.approx([float(given[name].norm())] if name in given else [], rel=1e-14)


def test_norms_take_as_many_kernels_for_many_parameters_as_for_few() -> None:
    def kernels(count: int) -> Kernels:
        found, held = Kernels(), [nn.Parameter(normal(4, 3, seed=i)) for i in range(count)]
        for parameter in held:
            parameter.grad = torch.ones_like(parameter)
        with found:
            NormWatch(held).squares()
        del found.counts["aten::empty_like"]  # memory for copies, which no kernel fills
        return found

    assert kernels(2).counts == kernels(20).counts


def test_the_worst_rows_are_the_ends_of_each_measure() -> None:
    def row(name: str, measure: str, value: float) -> Measurement:
        return Measurement(name, None, "", "", measure, (value, 1.0, 1.0))

    rows = [row("a", "update_ratio", 0.5), row("b", "update_ratio", 0.2), row("c", "update_ratio", math.nan)]
    rows += [row("a", "skipped", 0.0), row("b", "skipped", 0.0), row("a", "condition", 3.0), row("b", "condition", 2.0)]
    rows.insert(0, Measurement("of weights that are 0", None, "", "", "update_ratio", (1.0, 1.0, 0.0)))
    worst = Inspection((*rows, row("a", "cosine", 0.1))).worst()
    assert [(one.parameter, one.measure) for one in worst] == [
        ("c", "update_ratio"), ("b", "update_ratio"), ("a", "condition")
    ]  # fmt: skip
    assert [one.unusual for one in worst] == [True, True, False] and not row("a", "cosine", math.nan).unusual
    head, largest, smallest, condition, legend = str(worst).splitlines()
    assert legend.startswith("usual: ")
    assert head.endswith("usual") and largest.endswith("0.0001 to 0.1  outside") and smallest.endswith("outside")
    assert condition.endswith("1 to 1e+06") and "usual" not in str(Inspection(tuple(rows)))


def test_a_layer_that_is_both_ends_of_a_measure_is_listed_once() -> None:
    rows = [Measurement(name, None, "", "", "update_ratio", (0.5, 1.0, 1.0)) for name in "abc"]
    assert [row.parameter for row in Inspection(tuple(rows)).worst()] == ["a"]
    assert [row.parameter for row in Inspection(tuple(rows[:1])).worst()] == ["a"]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "cadence",
    [
        Every(steps=4, min_wave_work=1),
        Every(steps=4, stagger="none", offset=1),
        Every(steps=7, start=3, min_wave_work=1),
        Every(steps=3, start=90),
        Probability(probability=0.2),
    ],
)
def test_staleness_counts_from_the_last_refresh(cadence: Cadence, late: bool) -> None:
    for steps in (1, 2, 11):
        optimizer = trained([Dated(every=cadence, late=late)], shapes=((2, 2),) * 6, steps=steps + late)[0]
        table = optimizer.inspect()
        assert table.select(measure="staleness").values() == table.select(measure="expected").values()
        assert len(table.select(measure="staleness")) == 6


def test_a_stage_of_ones_own_joins_in() -> None:
    optimizer, (p,), _ = trained([Dated(every=Every(steps=4, stagger="none"))])
    for _ in range(2):  # the first inspection left everything as it was
        table = optimizer.inspect()
        assert only(table, stage="test_dated", slot="last", measure="double") == 24
        assert math.isclose(only(table, stage="test_dated", measure="cosine"), 1, rel_tol=1e-15)
    assert optimizer.state[p]["0/update.test_dated/last"] == 12


def test_measures_of_another_shape_are_refused() -> None:
    class Wrong(Dated):
        def measures(self, state: State, context: StepContext) -> Mapping[str, Tensor]:
            return {"x": torch.zeros(2, 2)}

    optimizer = trained([{"kind": "momentum"}])[0]
    stage = Dated.model_construct(every=Every(), late=False)
    object.__setattr__(stage, "measures", Wrong.measures.__get__(stage))
    optimizer = trained([stage])[0]
    with refused(ContractError, "update.test_dated", "measures()", "x", "[N]", 2):
        optimizer.inspect()


def test_the_error_of_storage_is_of_what_was_written_last() -> None:
    quantizer = Int8(min_elements=1)
    recipe = {"update": [{"kind": "momentum", "beta": 0.5}], "storage": {"first_moment": quantizer}}
    before, (p,), _ = trained(recipe, steps=3, watch=False)
    optimizer, _, (g,) = trained(recipe, steps=4)
    slot = Slot((6, 4), role="first_moment")

    def decoded(source: Optimizer, parameter: Tensor) -> Array:
        state, start = source.state[parameter], "0/update.momentum/m/"
        codes = {key.removeprefix(start): x.unsqueeze(0) for key, x in state.items() if key.startswith(start)}
        return np.asarray(quantizer.decode(codes, slot, torch.float64))[0]

    written = 0.5 * decoded(before, p) + 0.5 * g.numpy()
    (q,) = optimizer.param_groups[0]["params"]
    expected = np.linalg.norm(decoded(optimizer, q) - written) / np.linalg.norm(written)
    found = only(optimizer.inspect(), stage="momentum", slot="m", measure="storage_error")
    assert math.isclose(found, expected, rel_tol=1e-12)  # a difference of nearly equal numbers
    assert 1e-4 < found < 1e-2  # 8 bits
    with refused(ValueError, "storage_error", "watch_next_step"):
        trained([{"kind": "momentum"}])[0].inspect().select(measure="storage_error")


def test_no_row_is_lost_where_other_parameters_have_no_gradient() -> None:
    """Blocks of one stack whose bases are written at different moments of a step: each has the rows it has alone."""
    slots = ("statistic.inner.inner", "basis.inner", "first_moment", "second_moment")
    overrides = {f"storage.{slot}.min_elements": 1 for slot in slots}

    def seen(names: set[str]) -> list[set[Any]]:
        parameters = {f"p{i}": nn.Parameter(normal(8, 6, seed=i).float()) for i in range(3) if f"p{i}" in names}
        optimizer = Optimizer(parameters.items(), "soap_4bit", lr=0.01, overrides=overrides)
        found = []
        for step in range(3):
            for name, parameter in parameters.items():
                number = int(name[1:])
                missing = (step + number) % 4 == 1
                parameter.grad = None if missing else normal(8, 6, seed=10 * step + number + 3).float()
            optimizer.watch_next_step()
            optimizer.step()
            found.append({row.key for row in optimizer.inspect() if row.measure == "storage_error"})
        return found

    alone = [seen({f"p{i}"}) for i in range(3)]
    assert seen({"p0", "p1", "p2"}) == [set().union(*rows) for rows in zip(*alone, strict=True)]
    assert all(rows[1] for rows in alone[1:])


def test_failures_and_skipped_steps_are_counted() -> None:
    recipe = [{"kind": "shampoo", "refresh": {"kind": "every", "steps": 50, "stagger": "none"}}]
    optimizer, (p, q), _ = trained(recipe, shapes=((3, 2), (3, 2)), steps=3)
    optimizer.state[p]["0/update.shampoo/failures.1"].fill_(3)
    assert p.grad is not None and q.grad is not None
    p.grad[0, 0] = torch.nan
    optimizer.watch_next_step()
    optimizer.step()
    table = optimizer.inspect()
    assert [row.value for row in table.select(slot="failures.1", measure="failures")] == [3, 0]
    assert [row.value for row in table.select(measure="skipped")] == [1, 0]
    assert [row.parameter for row in table.select(stage="update", measure="cosine")] == ["p1"]


def test_state_is_inspected_without_a_watched_step_and_before_the_first_one() -> None:
    optimizer = trained([{"kind": "shampoo"}], steps=2, watch=False)[0]
    told = {row.measure for row in optimizer.inspect()}
    assert told == {"condition", "root_condition", "residual", "failures", "staleness", "skipped"}
    fresh = Optimizer([("w", nn.Parameter(normal(3, 2, seed=0)))], "soap_fitted")
    assert [row.measure for row in fresh.inspect()] == ["skipped"]


def test_what_is_not_finite_is_nan_and_null_in_json() -> None:
    optimizer, (p,), _ = trained(eigenbasis())
    optimizer.state[p]["0/update.eigenbasis/factor.0"][0, 0] = torch.nan
    table = optimizer.inspect()
    bad = [row for row in table if math.isnan(row.value)]
    assert {(row.slot, row.measure) for row in bad} == {
        ("factor.0", "condition"), ("basis.0", "off_diagonal"), ("basis.0", "angle")
    }  # fmt: skip
    assert [row["value"] for row in json.loads(json.dumps(table.records(), allow_nan=False))].count(None) == len(bad)


def test_a_table_is_printed_chosen_from_and_given_to_data_frames() -> None:
    rows = (
        Measurement("w", 0, "update.rms", "", "update_rms", (4.0, 4.0, 1.0)),
        Measurement("w", 1, "update.rms", "", "update_rms", (12.0, 12.0, 3.0)),
        Measurement("w", None, "", "", "skipped", (2.0, 1.0, 1.0)),
    )
    table = Inspection(rows)
    assert str(table[1:]).splitlines() == [
        "parameter  block  stage       slot  measure     value",
        "w          1      update.rms        update_rms  2",
        "w          all                      skipped     2",
    ]
    assert table.columns()["value"] == [2.0, 2.0, 2.0] and table.columns()["block"] == [0, 1, None]
    assert table.select(stage="rms").rows == table.select(stage="update.rms").rows == rows[:2]
    assert len(table.select(measure="skipped", stage="rms")) == 0
    for wrong in ({"parameter": "v"}, {"stage": "rmss"}, {"measure": "skiped"}):
        ((column, value),) = wrong.items()
        with refused(ValueError, column, value, {"parameter": "w", "stage": "'rms'", "measure": "'skipped'"}[column]):
            table.select(**wrong)
    assert table.by_parameter().values() == [2.0, 2.0] and len(table) == 3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6, bias=False), nn.Linear(6, 3)).double()


def stepped(recipe: str, watched: bool, checked: bool = False) -> tuple[Optimizer, nn.Module, Kernels]:
    """(optimizer, model, operators of the last step) after 12 steps; watched: whether the 11th is."""
    net, kernels = model(), Kernels()
    optimizer = compose(recipe, net, lr=1e-2, checked=checked)
    hidden = net.get_parameter("0.weight")
    optimizer.provide("max_logit", lambda: {hidden: torch.zeros(1)})  # there is no attention to clip
    for signal in ("hessian_diagonal", "gradient_variance"):
        optimizer.provide(signal, lambda: {p: torch.ones_like(p) for p in net.parameters()})
    for step in range(12):
        optimizer.zero_grad()
        net(normal(16, 6, seed=step)).square().mean().backward()
        if watched and step == 10:
            optimizer.watch_next_step()
        if step == 11:
            with kernels:
                optimizer.step()
        else:
            optimizer.step()
    return optimizer, net, kernels


QUICK = ("adam", "psgd_kron", "shampoo_4bit", "soap_muon", "splus")
"""Moments, learned factors, coded roots, a basis, and averaged iterates."""


@pytest.mark.parametrize(
    "recipe", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SHIPPED]
)
def test_every_recipe_is_inspected_and_no_number_changes(recipe: str) -> None:
    plain, twin, usual = stepped(recipe, watched=False)
    assert plain.inspect()
    watched, net, after = stepped(recipe, watched=True)
    table = watched.inspect()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(x, plain.state[q][key]) for key, x in watched.state[p].items())
    assert after.counts == usual.counts, "a step that is not watched has no operation of its own"
    chains = {"update", "after_decay"} | {f"routes.{r.name}.update" for r in watched.recipe.routes}
    whole = table.by_parameter()
    for name, _ in net.named_parameters():
        found = [row for row in whole if row.parameter == name and row.measure == "update_rms" and row.stage in chains]
        assert found and all(0 <= row.value < math.inf for row in found)
    allowed = ("condition", "root_condition", "off_diagonal", "angle", "residual", "orthogonality", "storage_error")
    assert all(math.isfinite(row.value) or row.measure in allowed for row in table)
    assert all(-1 - 1e-12 <= row.value <= 1 + 1e-12 for row in table.select(measure="cosine"))
    assert len({row.key for row in table}) == len(table)


@pytest.mark.parametrize("recipe", [name for name in ("soap_4bit", "shampoo") if name in COVER] or list(COVER[:1]))
def test_checks_and_measures_go_together(recipe: str) -> None:
    optimizer, net, _ = stepped(recipe, watched=True, checked=True)
    plain, twin, _ = stepped(recipe, watched=True)
    assert optimizer.inspect() == plain.inspect()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), twin.parameters(), strict=True))
    assert all(stack_state.step_watch is None for stack_state in optimizer.stack_states())
