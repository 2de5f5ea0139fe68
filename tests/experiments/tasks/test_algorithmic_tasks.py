"""Tasks whose data are computed: what is asked, what validates, and what the models may see."""

import pytest
import torch

from eigengraft import RecipeError
from eigengraft.component import validated
from eigengraft.experiments.tasks import Examples, ModularAddition, SequenceToSequence, Task
from eigengraft.testing import check_task

from ...refusals import refused

SMALL = SequenceToSequence(symbols=5, length=4, width=8, heads=2, batch_size=6, eval_sequences=10)
ADDITION = ModularAddition(modulus=7, width=8, heads=2, batch_size=6)
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("task", [SMALL, ADDITION], ids=["sequences", "addition"])
def test_the_laws_of_tasks(task: Task) -> None:
    assert "a mean over targets" in str(check_task(task))


@pytest.mark.parametrize("fraction", [0.3, 0.8])
def test_every_pair_trains_or_validates_once_with_its_sum(fraction: float) -> None:
    data = ModularAddition(modulus=7, train_fraction=fraction, batch_size=2).load()
    assert isinstance(data, Examples)
    both = [data.train, data.validation]
    pairs = [tuple(row) for batch in both for row in batch.inputs[:, :2].tolist()]
    assert sorted(pairs) == [(a, b) for a in range(7) for b in range(7)]
    assert len(data.train.targets) == round(fraction * 49)
    for inputs, targets in both:
        assert ((inputs[:, 0] + inputs[:, 1]) % 7 == targets).all()
        assert (inputs[:, 2] == 7).all()


@pytest.mark.parametrize("operation", ["sort", "reverse", "copy"])
def test_sequences_are_changed_as_asked_and_the_decoder_gets_what_was_before(operation: str) -> None:
    task = validated(SequenceToSequence, {"operation": operation, "symbols": 9, "length": 5})
    data = task.load()
    for rows, y in [data.batch(3, 1), *data.evaluation()]:
        x = rows[:, :5]
        expected = {"sort": x.sort(dim=1).values, "reverse": x.flip(1), "copy": x}[operation]
        assert torch.equal(y, expected)
        assert (rows[:, 5] == 9).all()
        assert torch.equal(rows[:, 6:], y[:, :-1])


def test_the_decoder_sees_the_whole_input_and_none_of_what_comes_after() -> None:
    model, (rows, _) = SMALL.new_model(0), SMALL.load().batch(0, 0)
    with torch.no_grad():
        before = model(rows)
        written, read = rows.clone(), rows.clone()
        written[:, 6] = (written[:, 6] + 1) % 5  # what the third output is given
        read[:, 3] = (read[:, 3] + 1) % 5
        later, other = model(written), model(read)
    torch.testing.assert_close(before[:, :2], later[:, :2])
    assert not torch.allclose(before[:, 2:], later[:, 2:])
    assert all(not torch.allclose(before[:, position], other[:, position]) for position in range(4))


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (
            ModularAddition,
            {"modulus": 5, "batch_size": 13},
            ("batch_size", 13, 12),
        ),
        (ModularAddition, {"modulus": 3, "train_fraction": 0.99, "batch_size": 2}, ("batch_size", 2, 9)),
        (ModularAddition, {"width": 6}, ("heads", 6, 4)),
        (SequenceToSequence, {"width": 6}, ("heads", 6, 4)),
    ],
)
def test_impossible_sizes_of_tasks_are_refused(
    kind: type[Task], fields: dict[str, object], says: tuple[object, ...]
) -> None:
    with refused(RecipeError, *says):
        validated(kind, fields)
