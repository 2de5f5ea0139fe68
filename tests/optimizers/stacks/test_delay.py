"""Delayed refreshes: a refresh reads the state of t and takes effect at t + k, whatever a worker does in between."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eigengraft
from eigengraft import Optimizer, RecipeError, load_recipe
from eigengraft.errors import ContractError
from eigengraft.numerics import per_block, safe_ratio
from eigengraft.optimizers.stacks import delayed
from eigengraft.optimizers.stacks.delayed import StackRefreshes
from eigengraft.optimizers.stacks.streams import Streams
from eigengraft.optimizers.step import execution, traced
from eigengraft.preconditioners import DelayedRefresh, Every, Shampoo
from eigengraft.slots import State
from eigengraft.testing import accelerator

from ...processes import run, start
from ...refusals import refused
from ...trajectories import named, normal

SHAPES = ((8, 6), (8, 6), (8, 6), (5, 5), (6,))
BASIS, ROOT = "update.eigenbasis", "update.graft.direction.shampoo"
INNER = ["momentum", "rms"]
RECIPES: dict[str, tuple[Any, str]] = {
    "soap": ("soap", BASIS),
    "marginals": ("soap_fitted", BASIS),
    "permute": ({"base": "soap", "set": {f"{BASIS}.transport": "permute"}}, BASIS),
    "coded": ("soap_int8", BASIS),
    "in the basis": ("soap_4bit", BASIS),
    "kl": ("soap_kl", BASIS),
    "shampoo": ("shampoo", ROOT),
    "shampoo_kl": ("shampoo_kl", BASIS),
    "whitened roots": ({"base": "shampoo", "set": {f"{ROOT}.statistic": {"kind": "bregman", "q": 1}}}, ROOT),
    "diagonals": ({"base": "shampoo", "set": {f"{ROOT}.statistic.axes.entries": "diagonal"}}, ROOT),
}
SOME_QUICK = [
    pytest.param(name, marks=() if name in ("soap", "marginals", "shampoo") else pytest.mark.slow) for name in RECIPES
]


def spread(name: str, delay: int, steps: int = 5, **fields: Any) -> eigengraft.Recipe:
    """A recipe whose blocks are due at different steps, after a first refresh at the second step."""
    source, path = RECIPES[name]
    loaded = load_recipe(source)
    refresh = {"kind": "every", "steps": steps, "min_wave_work": 1, "delay": delay, **fields}
    return load_recipe(loaded, {f"{path}.refresh": refresh})


class Run:
    """An optimizer and its parameters; gradients follow from the number of the step."""

    def __init__(self, recipe: Any, shapes: Sequence[tuple[int, ...]] = SHAPES, **options: Any) -> None:
        self.parameters = [nn.Parameter(normal(*shape, seed=i).float()) for i, shape in enumerate(shapes)]
        self.optimizer = Optimizer(named(self.parameters), recipe, lr=0.01, **options)
        self.number = 0

    def step(self, times: int = 1, gaps: bool = False) -> Run:
        for _ in range(times):
            self.number += 1
            for i, p in enumerate(self.parameters):
                p.grad = normal(*p.shape, seed=100 * self.number + i).to(p)
                if gaps and (self.number + i) % 4 == 3:
                    p.grad = None
            self.optimizer.step()
        return self

    def held(self) -> list[Tensor]:
        """Parameters and all state, with the results of refreshes that are under way."""
        saved = self.optimizer.state_dict()["state"].values()
        return [*(p.detach().clone() for p in self.parameters), *(x.clone() for own in saved for x in own.values())]

    def under_way(self) -> int:
        stacks = [own.refreshes for own in self.optimizer.stack_states()]
        return sum(len(own._jobs) for own in stacks if own is not None)


def same(one: Run, other: Run) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one.held(), other.held(), strict=True))


class Definition(StackRefreshes):
    """What a delay means, in one thread: compute from a copy of the state at t, and keep the results until t + k."""

    def begin(self, state: State, seeds: Any, what: str, solve: Callable[[], Mapping[str, Tensor]]) -> None:
        found = {name: x.clone() for name, x in solve().items()}
        future: Future[Any] = Future()
        future.set_result((found, None))
        self._jobs.append(delayed._Job(state, seeds, what, solve, None, future, delayed.os.getpid()))


@contextmanager
def defined() -> Iterator[None]:
    """Replace worker threads by the definition, for optimizers that are made inside."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eigengraft.optimizers.stacks.stack.StackRefreshes", Definition)
        yield


@contextmanager
def late_results() -> Iterator[None]:
    """Delay every job of the worker thread, so that steps overtake it."""
    computed = delayed._computed

    def slow(*given: Any) -> Any:
        time.sleep(0.002)
        return computed(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delayed, "_computed", slow)
        yield


@pytest.mark.parametrize(
    ("name", "delay"),
    [
        *(pytest.param(*each.values, 3, marks=each.marks) for each in SOME_QUICK),
        *(pytest.param(name, k, marks=pytest.mark.slow) for name in ("soap", "shampoo") for k in (1, 5)),
    ],
)
def test_a_worker_thread_gives_the_bits_of_the_definition(name: str, delay: int) -> None:
    """Every recipe with results that take effect before the next refresh, two of them also at once and at the next."""
    with defined():
        ours = Run(spread(name, delay)).step(18, gaps=True)
    with late_results():
        theirs = Run(spread(name, delay)).step(18, gaps=True)
    assert same(ours, theirs)


@pytest.mark.parametrize("name", SOME_QUICK)
def test_a_delay_of_zero_is_no_delay(name: str) -> None:
    source, path = RECIPES[name]
    plain = load_recipe(load_recipe(source), {f"{path}.refresh": {"kind": "every", "steps": 5, "min_wave_work": 1}})
    ours, theirs = Run(spread(name, 0)).step(12), Run(plain).step(12)
    assert same(ours, theirs) and not any("pending" in key for key in theirs.optimizer.state[theirs.parameters[0]])
    delayed_weights = Run(spread(name, 2)).step(12).parameters
    assert not torch.equal(theirs.parameters[0], delayed_weights[0])


@pytest.mark.parametrize("stagger", ["cost", "none"])
def test_checked_mode_changes_no_bit(stagger: str) -> None:
    fields = {"stagger": stagger} | ({"min_wave_work": 8} if stagger == "none" else {})
    for name in ("soap", "shampoo"):
        recipe = spread(name, 3, **fields)
        assert same(Run(recipe).step(14), Run(recipe, checked=True).step(14))


def test_a_model_that_is_compiled_meanwhile_changes_no_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flag of compilation is one for all threads: here it is set whenever the worker looks."""
    wanted = [Run(spread(name, 4)).step(12) for name in ("soap", "shampoo")]
    main, asked = threading.current_thread(), set[bool]()

    def compiling() -> bool:
        asked.add(threading.current_thread() is main)
        return threading.current_thread() is not main

    monkeypatch.setattr(torch.compiler, "is_compiling", compiling)
    assert all(map(same, wanted, [Run(spread(name, 4)).step(12) for name in ("soap", "shampoo")]))
    assert asked == {True, False}


@pytest.mark.slow
def test_compiled_programs_leave_out_steps_in_which_a_refresh_begins_or_takes_effect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(traced, "generate", lambda graph, symbolic: lambda tensors: graph(*tensors))
    monkeypatch.setattr(traced, "_PROGRAMS", {})
    given, seen = execution._block_inputs, set[int]()

    def noted(program: Any, step: Any, numbers: Any) -> Any:
        found = given(program, step, numbers)
        if found is not None and step.blocks.stack_state.refreshes is not None:
            seen.add(int(step.context.steps[0]))
        return found

    monkeypatch.setattr(execution, "_block_inputs", noted)
    recipe = spread("shampoo", 3, stagger="none", min_wave_work=8)
    ours, theirs = Run(load_recipe(recipe, {"compile": True})).step(21), Run(recipe).step(21)
    for p, q in zip(ours.parameters, theirs.parameters, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)
    asked, effect = {5, 10, 15, 20}, {8, 13, 18}
    assert {11, 12, 14, 16, 17, 19, 21} <= seen and not seen & (asked | effect)


# the definition in formulas


def eigenvectors(a: Tensor) -> Tensor:
    return torch.linalg.eigh(a).eigenvectors.flip(-1)


def soap_with_delay(w: Tensor, gradients: Sequence[Tensor], interval: int, delay: int) -> Tensor:
    """SOAP of one matrix with eigenvectors of the statistic of t used from update t + delay on. The first basis is that
    of update 2, at once."""
    w, (m, n) = w.clone(), w.shape
    stats, bases = (
        [torch.zeros(m, m).double(), torch.zeros(n, n).double()],
        [torch.eye(m).double(), torch.eye(n).double()],
    )
    first, second = torch.zeros_like(w), torch.zeros_like(w)
    asked: dict[int, list[Tensor]] = {}
    for t, g in enumerate(gradients, start=1):
        stats = [0.9 * a + 0.1 * o for a, o in zip(stats, (g @ g.T, g.T @ g), strict=True)]
        if t == 2:
            asked[t] = [eigenvectors(a) for a in stats]
        elif t > 2 and t % interval == 0:
            asked[t + delay] = [eigenvectors(a) for a in stats]
        if t in asked:
            turns = [old.T @ new for old, new in zip(bases, asked[t], strict=True)]
            first = turns[0].T @ first @ turns[1]
            second = turns[0].square().T @ second @ turns[1].square()
            bases = asked[t]
        inside = bases[0].T @ g @ bases[1]
        first, second = 0.8 * first + 0.2 * inside, 0.95 * second + 0.05 * inside.square()
        step = (first / (1 - 0.8**t)) / ((second / (1 - 0.95**t)).sqrt() + 1e-8)
        w = w - 0.01 * bases[0] @ step @ bases[1].T
    return w


def shampoo_with_delay(w: Tensor, gradients: Sequence[Tensor], interval: int, delay: int) -> Tensor:
    """Shampoo of one matrix with the roots of the statistics of t used from update t + delay on."""
    w, (m, n) = w.clone(), w.shape
    stats, roots = (
        [torch.zeros(m, m).double(), torch.zeros(n, n).double()],
        [torch.eye(m).double(), torch.eye(n).double()],
    )
    asked: dict[int, list[Tensor]] = {}
    for t, g in enumerate(gradients, start=1):
        stats = [0.9 * a + 0.1 * o for a, o in zip(stats, (g @ g.T, g.T @ g), strict=True)]
        now = t if t == 2 else t + delay if t > 2 and t % interval == 0 else None
        if now is not None:
            pairs = [torch.linalg.eigh(a / (1 - 0.9**t)) for a in stats]
            asked[now] = [q @ torch.diag((x + 1e-3).pow(-0.25)) @ q.T for x, q in pairs]
        roots = asked.get(t, roots)
        w = w - 0.01 * roots[0] @ g @ roots[1]
    return w


@pytest.mark.parametrize("delay", [0, 1, 3, 4])
@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_the_formulas(name: str, delay: int) -> None:
    refresh = {"kind": "every", "steps": 4, "start": 2, "stagger": "none", "delay": delay}
    statistic = {"kind": "gram", "beta": 0.9}
    if name == "soap":
        inner = [{"kind": "momentum", "beta": 0.8}, {"kind": "rms", "beta": 0.95, "eps": 1e-8}]
        stage: dict[str, Any] = {"kind": "eigenbasis", "solver": "eigh", "inner": inner}
    else:
        stage = {"kind": "shampoo", "solver": {"kind": "eigh", "eps": 1e-3, "deficiency": "add"}}
    w, gradients = normal(6, 4, seed=1), [normal(6, 4, seed=t) for t in range(2, 24)]
    parameter = nn.Parameter(w.clone())
    recipe = {"update": [{**stage, "statistic": statistic, "refresh": refresh}]}
    optimizer = Optimizer(named([parameter]), recipe, lr=0.01, weight_decay=0.0)
    for g in gradients:
        parameter.grad = g.clone()
        optimizer.step()
    wanted = {"soap": soap_with_delay, "shampoo": shampoo_with_delay}[name](w, gradients, 4, delay)
    torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-9, atol=1e-10)


# checkpoints and copies


def through_state_dict(before: Run, recipe: Any) -> Run:
    after = Run(recipe)
    after.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
    return with_weights(after, before)


def with_weights(after: Run, before: Run) -> Run:
    for p, q in zip(after.parameters, before.parameters, strict=True):
        p.data.copy_(q.data)
    after.number = before.number
    return after


def through_copy(before: Run, recipe: Any) -> Run:
    return copy.deepcopy(before)


def through_pickle(before: Run, recipe: Any) -> Run:
    found: Run = pickle.loads(pickle.dumps(before))
    return found


WAYS = {"state_dict": through_state_dict, "deepcopy": through_copy, "pickle": through_pickle}
STOPS = {"state_dict": range(6, 12), "deepcopy": range(6, 12, 2), "pickle": range(7, 12, 2)}
"""Every step between a refresh and its effect; a copy is made by what pickles, so that the two share these steps."""
END = 16
"""Step by which the results of all refreshes before the last stop have taken effect."""


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["soap", "kl", "shampoo", "coded"])
def test_a_resume_between_a_refresh_and_its_effect_changes_no_bit(name: str, way: str) -> None:
    recipe = spread(name, 4)
    whole = Run(recipe).step(END)
    for stop in STOPS[way]:
        before = Run(recipe)
        with late_results():
            before.step(stop)
            after = WAYS[way](before, recipe)
        assert same(after.step(END - stop), whole)
        assert same(before.step(END - stop), whole)  # saving has not disturbed the run itself


def test_a_block_takes_results_that_others_of_its_refresh_take_later() -> None:
    """Two parameters ask for roots together; one of them then has no gradient once, and is a step behind."""
    ours, changed = Run(spread("shampoo", 3, stagger="none", min_wave_work=8), SHAPES[:2]).step(10), []
    assert ours.under_way() == 1
    (state,) = ours.optimizer.stack_states()
    for number in range(11, 15):
        before = state.tensors[f"{ROOT}/root.0"].clone()
        for i, p in enumerate(ours.parameters):
            p.grad = None if (i, number) == (1, 11) else normal(*p.shape, seed=number).to(p)
        ours.optimizer.step()
        changed.append((before != state.tensors[f"{ROOT}/root.0"]).flatten(1).any(1).tolist())
    assert changed == [[False, False], [False, False], [True, False], [False, True]]


def test_pending_results_are_state() -> None:
    ours = Run(spread("soap", 4, stagger="none", min_wave_work=8)).step(11)  # the first gradient is no update
    assert ours.under_way()
    saved = ours.optimizer.state_dict()
    assert not ours.under_way()
    results = [x for own in saved["state"].values() for key, x in own.items() if "pending.result" in key]
    assert results and all(int(x) == 1 for x in results)
    ours.step(4)
    results = [
        x for own in ours.optimizer.state_dict()["state"].values() for k, x in own.items() if "pending.result" in k
    ]
    assert all(int(x) == 0 for x in results)
    row = next(row for row in ours.optimizer.slot_sizes() if row.role == "pending")
    assert row.stored == row.declared > 0


def test_loading_drops_what_is_under_way() -> None:
    recipe = spread("soap", 4)
    first = Run(recipe).step(7)
    saved = copy.deepcopy(first.optimizer.state_dict())
    other = with_weights(Run(recipe).step(10), first)
    with late_results():
        other.optimizer.load_state_dict(saved)
    assert same(with_weights(other, first).step(8), first.step(8))


def test_a_host_that_moves_state_between_steps_changes_no_bit() -> None:
    recipe = spread("soap", 4)
    whole, ours = Run(recipe).step(20), Run(recipe)
    for _ in range(20):
        ours.step()
        for own in ours.optimizer.state.values():
            for key, x in own.items():
                own[key] = x.clone()
    assert same(ours, whole)


def test_offloaded_state_changes_no_bit(tmp_path: Path) -> None:
    """Snapshots are made while the state is held, and pending slots stay where they are."""
    recipe = spread("soap", 3)
    disk = {"kind": "offload", "to": "disk", "directory": str(tmp_path), "min_elements": 1}
    storage = {"statistic": disk, "basis": disk, BASIS: disk}
    whole, ours = Run(recipe), Run(load_recipe(recipe, {"storage": storage}))
    for own in (whole, ours):
        own.step(9, gaps=True).held()
        own.step(9, gaps=True)
    buffers = [buffer for stack in ours.optimizer.stack_states() for buffer in stack.host_buffers]
    names = [name for buffer in buffers for name in buffer.views(buffer.memory)]
    assert any("factor" in name for name in names) and not any("pending" in name for name in names)
    assert all(map(torch.equal, whole.parameters, ours.parameters))


def test_a_thawed_parameter_leaves_refreshes_as_they_are() -> None:
    recipe = spread("soap", 4)
    runs = [Run(recipe), Run(recipe)]
    with defined():
        runs[1] = Run(recipe)
    for own in runs:
        last = own.parameters[2]
        del own.optimizer.state[last]
        own.step(8, gaps=True).step(12)
    assert same(*runs)


KILLED = """
    import os, sys, torch
    sys.path.insert(0, {root!r})
    from tests.optimizers.stacks.test_delay import Run, spread, with_weights
    run = Run(spread("soap", 4))
    if os.path.exists("saved.pt"):
        saved = torch.load("saved.pt", weights_only=True)
        run.optimizer.load_state_dict(saved["optimizer"])
        for p, x in zip(run.parameters, saved["weights"]):
            p.data.copy_(x)
        run.number = saved["number"]
        torch.save([p.detach() for p in run.step(20 - run.number).parameters], "ended.pt")
    else:
        run.step({stop})
        state = {{"optimizer": run.optimizer.state_dict(), "weights": [p.detach() for p in run.parameters]}}
        torch.save({{**state, "number": run.number}}, "saved.pt")
        run.step(2)
        assert run.under_way()
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_killed_run_resumes(tmp_path: Path) -> None:
    code = textwrap.dedent(KILLED).format(root=str(Path(__file__).parents[3]), stop=9)
    killed = start("-c", code, folder=tmp_path)
    assert killed.wait() == -9
    done = run("-c", code, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    wanted = Run(spread("soap", 4)).step(20).parameters
    assert all(map(torch.equal, torch.load(tmp_path / "ended.pt"), [p.detach() for p in wanted]))


ENDING = """
    import sys, time, torch
    sys.path.insert(0, {root!r})
    from tests.optimizers.stacks.test_delay import Run, spread
    run = Run(spread("soap", 4, stagger="none", min_wave_work=8)).step(11)
    assert run.under_way()
    {then}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("then", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('seven')", 1)])
def test_a_process_ends_while_a_refresh_is_under_way(then: str, code: int, tmp_path: Path) -> None:
    text = textwrap.dedent(ENDING).format(root=str(Path(__file__).parents[3]), then=then)
    process = start("-c", text, folder=tmp_path)
    assert process.wait(30) == code


def test_a_forked_process_computes_what_is_under_way_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent's thread, here one that waits for the fork, is not in it."""
    recipe, forked, computed = (
        spread("shampoo", 3, stagger="none", min_wave_work=8),
        threading.Event(),
        delayed._computed,
    )
    whole, ours = Run(recipe).step(14), Run(recipe).step(9)
    monkeypatch.setattr(delayed, "_computed", lambda *given: forked.wait() and computed(*given))
    ours.step(3)  # asked for at 10
    process = os.fork()
    if process == 0:
        signal.alarm(20)
        os._exit(0 if all(map(torch.equal, ours.step(2).parameters, whole.parameters)) else 1)
    forked.set()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert same(ours.step(2), whole)


# errors


def test_what_cannot_be_delayed_is_refused() -> None:
    with refused(RecipeError, "refresh.delay", 6, 5):
        load_recipe("soap", {f"{BASIS}.refresh": {"kind": "every", "steps": 5, "delay": 6}})
    with refused(RecipeError, "delay", -1):
        Every(steps=5, delay=-1)
    with refused(RecipeError, "update.psgd.refresh", "delay: 1", "psgd"):
        load_recipe({"update": [{"kind": "psgd", "refresh": {"kind": "every", "steps": 5, "delay": 1}}]})
    with refused(RecipeError, "update.adaptive_shampoo.refresh", "delay: 1"):
        load_recipe({"update": [{"kind": "adaptive_shampoo", "refresh": {"kind": "every", "steps": 5, "delay": 1}}]})
    with refused(RecipeError, "update.projected.renewal", "delay: 1"):
        renewal = {"kind": "every", "steps": 5, "delay": 1}
        load_recipe({"update": [{"kind": "projected", "rank": 2, "renewal": renewal, "inner": INNER}]})
    with refused(RecipeError, "delay", "gauss_seidel"):
        load_recipe("soap_kl", {f"{BASIS}.statistic.order": "gauss_seidel", f"{BASIS}.refresh.delay": 2})
    with refused(RecipeError, "delay"):
        load_recipe("soap", {f"{BASIS}.refresh": {"kind": "probability", "probability": 0.1, "delay": 2}})
    with refused(RecipeError, "graph", BASIS, "delay: 3"):
        load_recipe("soap", {"graph": True, f"{BASIS}.refresh": {"kind": "every", "steps": 5, "delay": 3}})
    diagonal = {"kind": "shampoo", "statistic": {"kind": "gram", "axes": {"entries": "diagonal"}}}
    with refused(RecipeError, "pending.root.0"):
        inner = [{**diagonal, "refresh": {"kind": "every", "steps": 5, "delay": 1}}]
        load_recipe({"update": [{"kind": "eigenbasis", "inner": inner}]})
    with refused(RecipeError, "storage", "pending"):
        load_recipe(spread("soap", 2), {"storage": {"pending": "int8"}})


class Failing(RuntimeError):
    pass


def broken(*_: Any) -> Any:
    raise Failing("no such luck")


def test_an_error_of_the_worker_is_raised_when_the_refresh_takes_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Run(spread("shampoo", 3, stagger="none", min_wave_work=8)).step(9)
    main = threading.main_thread()

    def fail(*_: Any) -> Any:
        assert threading.current_thread() is not main
        raise Failing("no such luck")

    monkeypatch.setattr(Shampoo, "solve", fail)
    ours.step(3)  # asked for at 10
    before = [p.detach().clone() for p in ours.parameters]
    with refused(RuntimeError, f"{ROOT}: solve() at step 10", "Failing", "no such luck") as caught:
        ours.step()
    assert isinstance(caught.value.__cause__, Failing)
    assert all(map(torch.equal, before[:3], [p.detach() for p in ours.parameters[:3]]))
    monkeypatch.undo()


def test_an_error_of_the_worker_is_raised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Run(spread("shampoo", 3, stagger="none", min_wave_work=8), SHAPES[:2]).step(9)
    with monkeypatch.context() as patch:
        patch.setattr(Shampoo, "solve", broken)
        ours.step(3)
        # The patch stays until the error was raised: the worker may call `solve` as late as that step.
        with refused(RuntimeError, f"{ROOT}: solve() at step 10", "Failing"):
            ours.step()
    ours.step(6)  # over the effect of the next refresh
    assert ours.optimizer.state_dict()["state"]


def test_results_that_are_no_pending_slots_break_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Run(spread("shampoo", 1, stagger="none", min_wave_work=8)).step(9)
    monkeypatch.setattr(Shampoo, "solve", lambda *_: {"pending.root.7": torch.ones(1)})
    ours.step()
    with refused(ContractError, ROOT, "pending.root.0", "pending.root.7"):
        ours.step()


def test_a_failed_decomposition_is_counted_when_the_refresh_takes_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe(spread("shampoo", 3, stagger="none", min_wave_work=8), {"failure.roots": 0})
    ours, theirs = Run(recipe).step(9), Run(recipe).step(9)
    solve = Shampoo.solve

    def fail(stage: Shampoo, state: State, context: Any) -> Mapping[str, Tensor]:
        found = dict(solve(stage, state, context))
        return {k: -torch.ones_like(x) if k == "pending.result.0" else x for k, x in found.items()}

    monkeypatch.setattr(Shampoo, "solve", fail)
    ours.step(3)
    kept = {k: x.clone() for k, x in ours.optimizer.state[ours.parameters[0]].items() if k.endswith("root.0")}
    with refused(ArithmeticError, "p0"):
        ours.step()
    state = ours.optimizer.state[ours.parameters[0]]
    assert [int(x) for key, x in state.items() if key.endswith("failures.0")] == [1]
    assert all(torch.equal(x, state[key]) for key, x in kept.items() if "pending" not in key)
    monkeypatch.undo()
    theirs.step(4)


# devices


class Queue(Streams):
    """A stand-in for a side stream of the simulated accelerator: it runs work in a worker thread, and writes a log."""

    log: list[tuple[str, str]]

    def __init__(self, device: torch.device, log: list[tuple[str, str]], mode: Any) -> None:
        self.device, self.log, self.mode, self.marks, self.joined = device, log, mode, 0, 0

    def _note(self, what: str) -> None:
        self.log.append((what, threading.current_thread().name.partition("-")[0]))

    def mark(self) -> int:
        self.marks += 1
        self._note(f"mark {self.marks}")
        return self.marks

    @contextmanager
    def aside(self) -> Iterator[None]:
        torch.utils._python_dispatch.TorchDispatchMode.__enter__(self.mode)
        try:
            yield
        finally:
            torch.utils._python_dispatch.TorchDispatchMode.__exit__(self.mode, None, None, None)

    def wait(self, mark: int) -> None:
        self._note(f"wait {mark}")
        if threading.current_thread() is threading.main_thread():
            self.joined = mark

    def keep(self, tensors: Any) -> None:
        assert all(x.device == self.device for x in tensors)
        self._note(f"keep {self.joined}")


def test_a_device_computes_on_a_side_stream() -> None:
    from eigengraft.testing.accelerator import _Device

    recipe, log = spread("soap", 3, stagger="none", min_wave_work=8), list[tuple[str, str]]()
    gradients = [[normal(8, 6, seed=10 * t + i).float() for i in range(2)] for t in range(14)]

    def trained(place: Any) -> list[Tensor]:
        held = [nn.Parameter(normal(8, 6, seed=i).float().to(place)) for i in range(2)]
        optimizer = Optimizer(named(held), recipe, lr=0.01)
        for step in gradients:
            for p, g in zip(held, step, strict=True):
                p.grad = g.to(place)
            optimizer.step()
        return [p.detach().cpu() for p in held]

    with accelerator("cuda") as device:
        delayed.SIDE_STREAMS["cuda"] = lambda own: Queue(own, log, _Device.current)
        ours = trained(device.device)
        jobs = [f"{what} {n}" for job in range(2) for what, n in _protocol(job)]
        assert [what for what, _ in log][: len(jobs)] == jobs
        waits = {(int(what.split()[1]) % 2, thread) for what, thread in log if what.startswith("wait")}
        assert waits == {(1, "eigengraft"), (0, "MainThread")}
        assert {thread for what, thread in log if what.startswith("keep")} == {"MainThread"}
    log.clear()
    with accelerator("cuda") as device:  # without a side stream, results at once
        assert all(map(torch.equal, ours, trained(device.device))) and not log


def _protocol(job: int) -> list[tuple[str, int]]:
    """Return the calls of a job: the host marks the copies, the worker waits for the copies and marks its own end, and
    the host waits for that end and keeps the results."""
    first = 2 * job + 1
    return [("mark", first), ("wait", first), ("mark", first + 1), ("wait", first + 1), ("keep", first + 1)]


@pytest.mark.slow
def test_a_stage_of_an_outsider_may_be_delayed(registry: None) -> None:
    from typing import Literal

    from eigengraft import Slot, StepContext

    class Halved(DelayedRefresh):
        """d / (2 |g|_max) of an earlier gradient"""

        kind: Literal["halved_for_test"] = "halved_for_test"
        refresh_at: Every = Every(steps=3, stagger="none", delay=2)

        def slots(self, block: tuple[int, ...]) -> Mapping[str, Slot]:
            waiting = {"next": Slot((), role="pending")} if self.refresh_at.delay else {}
            return {"seen": Slot(()), "size": Slot((), 1.0), **waiting}

        def cadence(self) -> Every:
            return self.refresh_at

        def observe(self, state: State, gradient: Tensor, context: StepContext) -> None:
            state["seen"] = gradient.flatten(1).abs().amax(1)

        def solve(self, state: State, context: StepContext) -> Mapping[str, Tensor]:
            return {"next": state["seen"] * 2}

        def adopt(self, state: State, context: StepContext) -> None:
            state["size"] = torch.where(state["next"] > 0, state["next"], state["size"])
            state["next"] = torch.zeros_like(state["next"])

        def refresh(self, state: State, gradient: Tensor, context: StepContext) -> None:
            state["size"] = state["seen"] * 2

        def apply(self, state: State, gradient: Tensor, direction: Tensor, context: StepContext) -> Tensor:
            return direction * per_block(safe_ratio(torch.ones_like(state["size"]), state["size"]), direction)

    own = Run({"update": ["halved_for_test"]}, ((3, 2),))
    sizes, largest = [], []
    for _ in range(10):
        own.step()
        (state,) = own.optimizer.stack_states()
        sizes.append(float(state.tensors["update.halved_for_test/size"]))
        largest.append(2 * float(state.tensors["update.halved_for_test/seen"]))
    seen = [1, 1, 1, 1, 3, 3, 3, 6, 6, 6]  # asked for at 3, 6, 9; in effect two steps later; the first at once
    assert sizes == [largest[t - 1] for t in seen]
    eigengraft.testing.check_stage(Halved())
