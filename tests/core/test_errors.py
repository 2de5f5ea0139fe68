"""Hints about names, and counts in messages."""

import sysconfig
import warnings
from pathlib import Path

import pytest
import typer

from eigengraft import errors
from eigengraft.errors import counted, did_you_mean, hide_installed_lines, near_names, near_path, typing_errors
from eigengraft.optimizers.recipe.loading import shipped


@pytest.mark.parametrize(
    ("a", "b", "errors"),
    [("", "", 0), ("", "abc", 3), ("soap", "soap", 0), ("sopa", "soap", 1), ("sopa", "sophia", 2), ("ca", "abc", 3)],
)
def test_neighbors_in_the_wrong_order_are_one_typing_error(a: str, b: str, errors: int) -> None:
    """The last example has distance 2 if a pair may be changed after it was swapped."""
    assert typing_errors(a, b) == typing_errors(b, a) == errors


def test_the_nearest_of_shipped_recipes_is_suggested_or_none() -> None:
    assert near_names("sopa", shipped(), 0.5)[0] == "soap"
    assert near_names("adamv", shipped(), 0.5)[0] in ("adam", "adamw")
    assert "mars" not in near_names("ema", shipped(), 0.5) and "ademamix" not in near_names("ema", shipped(), 0.5)


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("fitted", ["muon", "soap_fitted", "soap_fitted_fast"], "soap_fitted"),
        ("rms_beta", ["beta", "rms", "eps"], "beta"),
        ("mu", ["muon"], ""),
        ("kron", ["aro", "psgd_kron"], "psgd_kron"),
        ("adam_w", ["adam_h", "adamw"], "adamw"),
        ("int9", ["bf16", "int8", "int4"], "int8' or 'int4"),
        ("weight_deacy", ["weight_decay", "weight"], "weight_decay"),
        ("learning_rate", ["lr", "steps"], "lr"),
        ("lerning_rate", ["lr", "steps"], "lr"),
        ("lerning_rate", ["steps"], ""),
    ],
)
def test_names_that_have_a_common_word_are_near(name: str, known: list[str], hint: str) -> None:
    assert did_you_mean(name, known) == (f", did you mean '{hint}'?" if hint else "")


def test_a_path_with_another_suffix_or_a_typing_error_is_near(tmp_path: Path) -> None:
    for name in ("exp.yaml", "exq.yml", "exp.py"):
        (tmp_path / name).touch()
    (tmp_path / "runs").mkdir()
    yaml = (".yaml", ".yml")
    assert near_path(tmp_path / "exp.yml", yaml) == f", did you mean '{tmp_path / 'exp.yaml'}'?"
    assert near_path(tmp_path / "exqq.yml", yaml) == f", did you mean '{tmp_path / 'exq.yml'}'?"
    assert near_path(tmp_path / "rums") == f", did you mean '{tmp_path / 'runs'}'?"
    assert near_path(tmp_path / "other.yaml", yaml) == near_path(tmp_path / "no" / "exp.yml", yaml) == ""


def test_one_thing_is_counted_in_the_singular() -> None:
    assert [counted(n, "row") for n in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
    assert [counted(n, "axis", "axes") for n in (1, 2)] == ["1 axis", "2 axes"]


def test_a_warning_shows_a_line_of_the_users_file_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    hide_installed_lines()
    script = Path(sysconfig.get_paths()["scripts"]) / "eigengraft"
    for file in (typer.__file__, warnings.__file__, errors.__file__, str(script)):
        assert warnings.formatwarning("a loss", UserWarning, str(file), 3) == "UserWarning: a loss\n"
    (tmp_path / "mine.py").write_text("first\nsecond\n")
    text = warnings.formatwarning("a loss", UserWarning, str(tmp_path / "mine.py"), 2)
    assert text == f"{tmp_path / 'mine.py'}:2: UserWarning: a loss\n  second\n"
