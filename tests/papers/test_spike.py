"""One gradient 1e4 times too large in a training run: what the transport of second moments makes of it."""

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import eigengraft
from eigengraft.experiments.training.experiment import load_experiment

from .scripts import script

pytestmark = pytest.mark.slow

spike = script("basis_transport", "spike")
LINES, WINDOW, SMALL, LEARNING_RATES = spike.LINES, spike.WINDOW, spike.SMALL, spike.LEARNING_RATES
LR = LEARNING_RATES[0]


def quick(line: str, **more: Any) -> Any:
    return spike.spike_run(line, LR, 0, task=SMALL, spike=64, **more)


def test_with_exact_transport_the_updates_after_a_spike_are_about_as_large_as_before() -> None:
    """1.5 is required, and also holds for the stricter ratio to the median before (0.9 and 1.2 measured;
    1.1 and 1.4 on a shorter text).

    One dominant gradient makes Adam's update sqrt(1 - b), 0.224 (0.229 with the bias correction at step 60), wherever
    the basis is; a refresh may concentrate the momentum in fewer entries than the squares, for which 1.3 is room.
    """
    row = quick("exact")
    assert row.ratio <= 1.5 and row.ratio_to_median <= 1.5
    assert 0.9 * spike.BOUND <= row.largest <= 1.3 * spike.BOUND


@pytest.mark.parametrize("line", ["permute", "none, momentum outside"])
def test_without_it_the_refreshes_after_a_spike_overshoot(line: str) -> None:
    """6 to 17 measured with two seeds; 3 is twice what is required of exact transport. The overshoot starts at a
    refresh, not at the spike."""
    row = quick(line)
    assert row.ratio > 3 and row.largest_after >= 1


def test_what_stays_in_its_slot_with_its_own_squares_cannot_overshoot() -> None:
    """With the momentum inside the basis and `none`, both moments are means of one sequence with one decay, so that
    |m| <= sqrt(v) in every entry whatever the basis does: the direction is wrong, its size is not (0.9 to 1.2
    measured).
    """
    row = quick("none")
    assert row.ratio <= 1.5 and max(row.sizes) <= 1 + 1e-3  # rounding of float32


def test_without_a_spike_the_ratio_is_about_one() -> None:
    """Largest against largest of equal windows; the updates move by a few per cent a step, in windows of 20 by less
    than 1.5 (0.9 to 1.1 with other seeds)."""
    assert 1 / 1.5 <= quick("exact", factor=1.0).ratio <= 1.5


def test_a_row_says_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """size(t) of a sign update is 1 at every step, to the rounding of parameters near 0.1 moved by 3e-3."""
    monkeypatch.setattr(spike, "recipe_for", lambda line: eigengraft.load_recipe([{"kind": "sign"}]))
    row = spike.spike_run("sign", LR, 0, task={**SMALL, "max_bytes": 2**16}, spike=WINDOW + 1)
    torch.testing.assert_close(torch.tensor(row.sizes), torch.ones(2 * WINDOW + 1), rtol=1e-3, atol=0)
    assert (row.ratio, row.before, row.largest) == pytest.approx((1, 1, 1), rel=1e-3)
    assert row == spike.spike_run("sign", LR, 0, task={**SMALL, "max_bytes": 2**16}, spike=WINDOW + 1)


def test_the_lines_differ_in_what_they_are_called_after() -> None:
    soap = eigengraft.load_recipe("soap_fitted")
    assert spike.recipe_for("marginals") == soap and spike.recipe_for("published") == eigengraft.load_recipe(
        "reference/soap"
    )
    for transport in ("exact", "permute"):
        assert spike.recipe_for(transport) == eigengraft.load_recipe(
            "soap_fitted", {"update.eigenbasis.transport": transport}
        )
    momentum, basis = spike.recipe_for("none, momentum outside").update
    (inside,) = soap.update
    assert (momentum, *basis.chain) == inside.chain  # type: ignore[attr-defined]
    assert basis == inside.replace(inner=basis.chain, transport="none")  # type: ignore[attr-defined]


def test_all_second_order_lines_give_the_watched_matrices_to_the_basis() -> None:
    for line in LINES:
        experiment = load_experiment({"task": SMALL, "recipe": spike.recipe_for(line)})
        model = experiment.task.new_model(0)
        optimizer = eigengraft.compose(experiment.recipe, model)
        for name, p in model.named_parameters():
            if name.startswith("blocks.") and p.ndim == 2:
                assert any("/basis." in key or ".basis." in key for key in optimizer.state[p]), (line, name)


def test_the_committed_rows_are_what_the_readme_says() -> None:
    """Of the recipe's own learning rate; all lines, seeds and learning rates are there."""
    rows = spike.read_spike_rows()
    assert {(row.line, row.lr, row.seed) for row in rows} == {
        (line, lr, seed) for line in LINES for lr in LEARNING_RATES for seed in spike.SEEDS
    }
    assert max(row.ratio for row in rows if (row.line, row.lr) == ("exact", LR)) <= 1.5
    assert max(row.ratio for row in rows if row.line == "marginals") <= 1.5
    assert min(row.ratio for row in rows if row.line not in ("exact", "marginals", "none")) > 3
    for row in rows:
        before, after = row.sizes[WINDOW : 2 * WINDOW], row.sizes[2 * WINDOW :]
        # four digits of the sizes are kept
        assert row.ratio == pytest.approx(max(after) / max(before), rel=2e-3)
        assert row.ratio_to_median == pytest.approx(max(after) / median(before), rel=2e-3)


def test_the_figure_has_a_line_for_each_transport(tmp_path: Path) -> None:
    sizes = [0.2] * (3 * WINDOW + 1)
    row = spike.SpikeRow("", LR, 0, 100, 1e4, 1, 1, 1, 0.2, 0.2, 0, 2, 2, sizes)
    spike.draw_spike([replace(row, line=line, lr=lr) for line in LINES for lr in LEARNING_RATES], tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    ElementTree.fromstring(text)
    for word in ("exact", "permute", "none", "published", "0.003", "0.032", "steps after the spike"):
        assert word in text


def test_the_script_prints_ratios_and_writes_rows_and_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = spike.read_spike_rows()[0]
    monkeypatch.setattr(spike, "spike_run", lambda **cell: replace(first, line=cell["line"], ratio=7.25))
    spike.main([str(tmp_path / "new"), "--quick"])
    printed = capsys.readouterr().out
    assert "7.25" in printed and "none, momentum outside" in printed
    assert [row.line for row in spike.read_spike_rows(tmp_path / "new" / "spike.jsonl")] == list(LINES)
    assert (tmp_path / "new" / "spike.svg").read_text().startswith("<?xml")
