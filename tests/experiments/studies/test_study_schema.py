"""The JSON schema of studies says what the loader says."""

import functools
import re
from pathlib import Path

import pytest

from eigengraft import Recipe, RecipeError
from eigengraft.experiments.benches import StepBench
from eigengraft.experiments.reproduction.claims import PaperClaims
from eigengraft.experiments.studies.study import Study, load_study, shipped_studies
from eigengraft.experiments.track.report import PUBLISHED, Ranking
from eigengraft.experiments.track.track import ENTRIES_FILE, Track, read_table
from eigengraft.experiments.training.experiment import Experiment
from eigengraft.optimizers.recipe.loading import parse_yaml, read_yaml
from eigengraft.optimizers.recipe.schema import json_schema

from ...json_schemas import CHECKED, NOTES, keywords, violations

schema_of, content = functools.cache(json_schema), functools.cache(read_yaml)
SCHEMA = schema_of(Study)
BASE = "base: {task: digits, recipe: soap_fitted}, axes: {method: {a: {}}}"
RIGHT = [
    "seeds: [0, 1]",
    "tune: {seeds: [3]}",
    "tune: {seeds: [3], space: {lr: {ratio: 2, start: 0.1}, weight_decay: [0, 0.1]}}",
    "tune: {kind: coordinate_descent, seeds: [3], trials: 4, seconds: 60}",
    "tune: {kind: random, seeds: [3], space: {lr: {low: 0.1, high: 1, log: true}, steps: [1, 2]}, together: 4}",
    "tune: {kind: tpe, seeds: [3], space: {lr: {low: 0.1, high: 1}}, halving: {least: 30, rate: 2}, startup: 3}",
    "settings: [{when: {method: a}, set: {lr: 0.1}}]",
    "baseline: {method: a}",
]
WRONG = [
    "tune: {seeds: 3}",
    "tune: {}",
    "tune: lr",
    "tune: {seeds: [3], field: lr}",
    "tune: {seeds: [3], halving: {least: 30}}",
    "tune: {kind: tpe, seeds: [3]}",
    "tune: {kind: tpe, seeds: [3], space: {lr: {ratio: 2}}}",
    "tune: {kind: annealing, seeds: [3]}",
    "tune: {kind: random, seeds: [3], space: {lr: 0.1}}",
    "metric: loss",
    "seeds: 3",
]


def test_the_schema_says_nothing_that_the_tests_cannot_read():
    assert keywords(SCHEMA) <= CHECKED | NOTES


@pytest.mark.parametrize("text", RIGHT)
def test_the_schema_accepts_what_the_loader_accepts(text):
    data = parse_yaml(f"{{{BASE}, {text}}}")
    assert violations(SCHEMA, load_study(data).model_dump(mode="json")) == violations(SCHEMA, data) == []


@pytest.mark.parametrize("text", WRONG)
def test_the_schema_refuses_what_the_loader_refuses(text):
    data = parse_yaml(f"{{{BASE}, {text}}}")
    with pytest.raises(RecipeError):
        load_study(data)
    assert violations(SCHEMA, data) != []


ROOT = Path(__file__).parents[3]
FOUND = sorted(path for folder in ("experiments", "papers") for path in (ROOT / folder).rglob("*.yaml"))
# the schema has no components of a file's own; parsing all files would take 0.3 s in each process that collects tests
FILES = [path for path in FOUND if not re.search("^imports:", path.read_text(), flags=re.MULTILINE)]
TABLES = {ENTRIES_FILE: Recipe, PUBLISHED: Ranking}
"""Files whose values, by name, follow a schema."""


def kind_of(path):
    """The schema that a file, or each value of a table, is written for."""
    fields = content(path)
    kinds = {"axes": Study, "claims": PaperClaims, "tasks": Track, "task": Experiment, "update": Recipe, "base": Recipe}
    kinds["candidates"] = StepBench
    return TABLES.get(path.name) or next(kinds[field] for field in kinds if field in fields)


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in FILES])
def test_every_file_of_experiments_and_papers_follows_its_schema(path):
    schema, data = schema_of(kind_of(path)), content(path)
    if path.name == ENTRIES_FILE:
        data = {name: dict(entry.recipe) for name, entry in read_table(path.parent).items()}
    for one in data.values() if path.name in TABLES else [data]:
        assert violations(schema, one) == []


def test_all_shipped_studies_are_among_the_files():
    studies = {path for path in FILES if kind_of(path) is Study}
    assert {path.resolve() for path in shipped_studies().values()} <= studies and len(studies) >= 20
