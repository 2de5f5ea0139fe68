"""Heads are clipped by their largest logit on any rank, whatever divides attention. Real processes, gloo."""

from typing import Any

import pytest

from .launch import Outcome, Run, launch

pytestmark = pytest.mark.slow

MODELS: dict[str, dict[str, Any]] = {name: {"keys": keys} for name, keys in (("all", 4), ("pairs", 2), ("one", 1))}
PLACES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        **{
            f"{place} {name}": {"place": place, **MODELS[name]}
            for place in ("tp", "gathered", "dtensor")
            for name in ("all", "pairs")
        },
        "sequence pairs": {"place": "sequence", **MODELS["pairs"]},
        "fused pairs": {"place": "tp", "fused": 2, **MODELS["pairs"]},
        "some pairs": {"place": "some", **MODELS["pairs"]},
        "some one": {"place": "some", **MODELS["one"]},
        "cut pairs": {"place": "cut", **MODELS["pairs"]},
    },
    4: {
        "tp all": {"place": "tp", **MODELS["all"]},
        "some pairs": {"place": "some", **MODELS["pairs"]},
        "some one": {"place": "some", **MODELS["one"]},
        **{
            f"{place} {name}": {"place": place, **MODELS[name]}
            for place in ("data", "linear")
            for name in ("all", "pairs")
        },
        "data fused pairs": {"place": "data", "fused": 2, **MODELS["pairs"]},
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "positions": {"place": "positions", **MODELS["all"]},
    "cut fused": {"place": "cut", "fused": 1, **MODELS["pairs"]},
}
CELLS = [(ranks, case) for ranks, cases in PLACES.items() for case in cases]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Outcome]]:
    runs = [Run("one", "logits:run", 0, MODELS)]
    runs += [Run(f"on {ranks}", "logits:run", ranks, cases) for ranks, cases in PLACES.items()]
    runs.append(Run("refused", "logits:run", 2, REFUSED))
    return launch(runs, tmp_path_factory.mktemp("logits"))


@pytest.mark.parametrize(("ranks", "case"), CELLS)
def test_heads_are_clipped_as_in_one_process(outcomes: dict[str, list[Outcome]], ranks: int, case: str) -> None:
    """1e-6: logits are products of float32 that ranks compute from other shapes."""
    expected = outcomes["one"][0].result[case.split()[-1]]
    for outcome in outcomes[f"on {ranks}"]:
        for found, wanted in zip(outcome.result[case], expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-6)


def test_some_heads_are_clipped_and_by_as_much_as_each_asks(outcomes: dict[str, list[Outcome]]) -> None:
    queries, keys, values = outcomes["one"][0].result["all"]
    assert len(set(queries)) == 4 and queries == pytest.approx(keys, rel=1e-6) and min(values) == max(values) == 1.0


def test_heads_that_are_not_known_are_refused(outcomes: dict[str, list[Outcome]]) -> None:
    for outcome in outcomes["refused"]:
        assert "[(Shard(dim=2),), (Shard(dim=2),)]" in outcome.result["positions"]
        assert outcome.result["cut fused"].startswith("MaxLogits: 'qkv.weight': ")
