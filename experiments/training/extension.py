"""Extension of a run to more steps.

Training continues from the last checkpoint up to which the learning rates of the short and of the long run are equal.
The extended run therefore ends with the same weights as a run that had the larger number of steps from the start. Only
its metrics have one row more: the row of the last step of the short run, which was evaluated. A run without such a
checkpoint is refused.
"""

from __future__ import annotations

from typing import Any

from eigengraft.errors import RecipeError
from eigengraft.signals import follows_run

from .environment import describe_provenance, require_provenance
from .experiment import Experiment
from .rundir import RunDirectory


def branch_step(experiment: Experiment) -> int | None:
    """Return the last step up to which the learning rates of a run do not depend on its length.

    The checkpoint of this step is kept, so that a longer run can continue from it. Returns None if no checkpoint has to
    be kept, because the learning rates depend on the length right after the warm-up, or not at all.
    """
    last = experiment.schedule.shared_steps(experiment.steps) - 1
    return last if experiment.schedule.warmup_steps < last < experiment.steps else None


def extend_run(run: RunDirectory, experiment: Experiment) -> None:
    """Change the run in a directory, finished or not, to an unfinished run with the steps of `experiment`.

    Nothing is changed if the run has these steps already. A kill at any time leaves a run that can be extended again.

    Raises:
        RecipeError: there is no run, its experiment differs in more than the steps, its code or data have changed, or
            its first steps are not those of the longer run.
    """
    known = run.read("config")
    if known is None:
        raise RecipeError(f"{run.path}: there is no run to extend; train it first, without --extend")
    run.require_config({**known, "steps": experiment.steps}, experiment.model_dump(mode="json"))
    if experiment.steps == known["steps"]:
        return
    with run.locked():
        _extend(run, experiment, known)


def _extend(run: RunDirectory, experiment: Experiment, known: dict[str, Any]) -> None:
    steps = known["steps"]
    found = describe_provenance(experiment.task.new_data().fingerprint, experiment)
    require_provenance(run, found)
    _require_extensible(run, experiment, steps)
    shared = experiment.schedule.shared_steps(steps, experiment.steps)
    if not any(step < shared for step in run.checkpoint_steps()):
        raise RecipeError(_no_checkpoint(run, experiment, steps, shared))
    (run.path / "result.json").unlink(missing_ok=True)
    run.rewind_checkpoints(shared - 1)
    run.write("config", {**known, "steps": experiment.steps})


def _require_extensible(run: RunDirectory, experiment: Experiment, steps: int) -> None:
    """Raise RecipeError if the run ended before its last step, or if its recipe depends on its length."""
    if experiment.steps < steps:
        raise RecipeError(f"{run.path}: the run has {steps} steps; --extend needs more, got {experiment.steps}")
    result: dict[str, Any] = run.read("result") or {}
    if result.get("diverged"):
        raise RecipeError(f"{run.path}: the run diverged at step {result['steps']}, so there is nothing to extend")
    if result.get("steps", steps) < steps:
        raise RecipeError(
            f"{run.path}: the run cannot be extended, because a callback ended it at step {result['steps']} of {steps} "
            "and would end a longer run too"
        )
    path = follows_run(experiment.recipe.rules()) if experiment.recipe.total_steps is None else None
    if path is not None:
        raise RecipeError(
            f"{run.path}: recipe.{path} depends on the length of the run, so the first {steps} steps of a longer run "
            "would differ from this run; train the longer run in another directory"
        )


def _no_checkpoint(run: RunDirectory, experiment: Experiment, steps: int, shared: int) -> str:
    kept = run.checkpoint_steps()
    if not kept:
        return f"{run.path}: the run has no checkpoint to continue from; train the longer run in another directory"
    kind, longer = getattr(experiment.schedule, "kind", "?"), experiment.steps
    rates = [experiment.schedule.factor(shared, length) for length in (steps, longer)]
    return (
        f"{run.path}: schedule.{kind} depends on the length of the run: its factor at step {shared + 1} is "
        f"{rates[0]:.4g} in {steps} steps and {rates[1]:.4g} in {longer}, and the first checkpoint is that of step "
        f"{min(kept)}; train the longer run in another directory. The schedules constant and wsd allow extensions"
    )
