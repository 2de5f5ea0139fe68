"""The JSON schema of studies says what the loader says."""

import pytest

from eigengraft import RecipeError
from eigengraft.experiments.studies.study import Study, load_study, shipped_studies
from eigengraft.optimizers.recipe.schema import json_schema
from eigengraft.optimizers.recipe.yaml_files import parse_yaml, read_yaml

from ...json_schemas import CHECKED, NOTES, keywords, violations

SCHEMA = json_schema(Study)
BASE = "base: {task: digits, recipe: soap}, axes: {method: {a: {}}}"
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


@pytest.mark.parametrize("name", shipped_studies())
def test_shipped_studies_follow_the_schema(name):
    assert violations(SCHEMA, read_yaml(shipped_studies()[name])) == []
