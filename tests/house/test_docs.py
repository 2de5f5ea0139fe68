"""The documentation: its examples run, its links and names exist, and it builds strictly without a network."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import eigengraft
import eigengraft.experiments
import eigengraft.testing
from eigengraft.component import families, validated
from eigengraft.experiments.cli.catalog import find_kinds
from eigengraft.experiments.cli.main import app
from eigengraft.experiments.cli.purposes import NUMBERS_FILE, goals
from eigengraft.experiments.reproduction.claims import PaperClaims
from eigengraft.experiments.studies.study import Study, load_study
from eigengraft.experiments.training.experiment import load_experiment
from eigengraft.optimizers.recipe.loading import parse_yaml
from eigengraft.optimizers.step import traced

from ..processes import FORK_SPAWNED, run
from ..refusals import lacking
from .pages import PAGES, PAPERS, ROOT, blocks, files, links, script, text

HOSTS = "docs/guide/hosts.md"
"""A page whose examples need other libraries; tests/hosts runs them."""


def pages_with(language: str) -> list[str]:
    return [page for page in PAGES if blocks(page, language)]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in pages_with("python") if script(page) and page != HOSTS])
def test_python_examples_run(page: str, tmp_path: Path) -> None:
    for name, source in files(page).items():
        (tmp_path / name).write_text(source)
    (tmp_path / "example.py").write_text(script(page))
    path = os.pathsep.join([str(ROOT / "src"), str(tmp_path)])
    done = run("example.py", folder=tmp_path, PYTHONPATH=path, **FORK_SPAWNED)
    assert done.returncode == 0, done.stderr


COMPILED = "docs/gpu.md"
"""A page whose example compiles programs; it takes seconds to load torch's compiler."""


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page == COMPILED else ()) for page in pages_with("yaml")],
)
def test_yaml_examples_load(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # programs are traced, and not compiled: what Inductor makes of those of AdamW is for test_compiled.py
    monkeypatch.setattr(traced, "generate", lambda graph, symbolic: lambda tensors: graph(*tensors))
    monkeypatch.setattr(traced, "_PROGRAMS", {})
    for block in blocks(page, "yaml"):
        data = parse_yaml(block)
        # Components of a page are not known here: see test_new_stage.py.
        if "imports" not in data and "imports" not in data.get("base", ()):
            assert load(data) is not None


def load(data: Mapping[str, Any]) -> object:
    """Claims, a study, an experiment, a recipe, or a recipe under its key, by the fields that are there."""
    if "claims" in data:
        return validated(PaperClaims, data)
    if "axes" in data:
        study: Study = load_study(data)
        return study
    if "task" in data:
        return load_experiment(data)
    recipe = eigengraft.load_recipe(data.get("recipe", data))
    model = torch.nn.Sequential(torch.nn.Embedding(7, 128), torch.nn.Linear(128, 128))
    return eigengraft.compose(recipe, model)


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_exist(page: str) -> None:
    known = {command.name for command in [*app.registered_commands, *app.registered_groups]}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for line in "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            assert words[1] in targets, line
        if "eigengraft" in words:
            command, *rest = words[words.index("eigengraft") + 1 :] or ["help"]
            if "git" not in words:
                assert command in known, line
                check_arguments(command, rest)


def check_arguments(command: str, rest: list[str]) -> None:
    from eigengraft.experiments.benches import Bench, read_bench

    if command == "show" and not find_kinds(rest[0]):
        eigengraft.load_recipe(rest[0], [word for word in rest[1:] if "=" in word])
    if command == "bench":
        assert read_bench(rest[0])["kind"] in Bench.members, rest


TABLE_ROW = re.compile(r"^\| `(torch\.optim\..*?)` \| `(Optimizer\(.*?)` \|$", flags=re.MULTILINE)
CALLS = [(page, *row) for page in ("README.md", "docs/from-torch.md") for row in TABLE_ROW.findall(text(page))]


@pytest.mark.parametrize(("page", "theirs", "ours"), CALLS, ids=[row[1] for row in CALLS])
def test_calls_of_torch_and_their_recipes_make_the_same_steps(page: str, theirs: str, ours: str) -> None:
    names = {"torch": torch, "Optimizer": eigengraft.Optimizer}
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 4, generator=generator)
    gradients = [torch.randn(6, 4, generator=generator) for _ in range(6)]
    ends = []
    for call in (theirs, ours):
        weight = torch.nn.Parameter(start.clone())
        optimizer = eval(call, names | {"p": [weight]})
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        ends.append(weight.detach() - start)
    tolerance = 0.02 if "Muon" in theirs else 1e-5  # Muon iterates in bfloat16
    assert (ends[0] - ends[1]).norm() <= tolerance * ends[0].norm()


def test_the_tables_of_calls_are_found() -> None:
    assert CALLS


def test_every_shipped_recipe_is_in_the_guide() -> None:
    for name in eigengraft.shipped_recipes():
        assert f"`{name}`" in text("docs/guide/recipes.md"), name


def test_the_install_page_has_every_extra_with_its_packages() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = [[re.findall(r"[\w.-]+", package) for package in packages] for packages in declared.values()]
    expected = {
        extra: [name for first, *rest in packages for name in (rest if first == "eigengraft" else [first])]
        for extra, packages in zip(declared, names, strict=True)
    }
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) \|$", text("docs/install.md"), flags=re.MULTILINE)
    assert {extra: re.findall(r"[\w.-]+", packages) for extra, packages in rows} == expected


def test_every_public_name_is_on_the_page_of_the_python_interface() -> None:
    page = text("docs/reference/python.md")
    for package in (eigengraft, eigengraft.experiments):
        for name in package.__all__:
            assert re.search(rf"\b{name}\b", page), f"{package.__name__}.{name}"


def test_every_paper_is_in_the_index() -> None:
    index = (ROOT / "papers" / "README.md").read_text(encoding="utf-8")
    for folder in (path for path in (ROOT / "papers").iterdir() if path.is_dir()):
        assert f"{folder.name}/README.md" in index


@pytest.mark.parametrize("page", [*PAGES, *PAPERS])
def test_links_lead_somewhere_in_a_clone(page: str) -> None:
    """Without the site: a page that is generated is no target, see docs/hooks/repository.py."""
    assert [link for link in links(page) if not ((ROOT / page).parent / link).exists()] == []


def test_files_that_pages_name_exist() -> None:
    """Paths in backticks that begin with a folder at the root of the repository."""
    folders = "preconditioners|quantization|distributed|optimizers|experiments|hosts|src|tests|docs|papers"
    for page in PAGES:
        for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", text(page)):
            assert (ROOT / path).exists(), f"{page}: {path}"


def hook(name: str) -> Any:
    """A module of the hooks that make pages."""
    sys.path.insert(0, str(ROOT / "docs" / "hooks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="session")
def family_pages() -> dict[str, str]:
    pages: dict[str, str] = hook("components").family_pages()
    return pages


@pytest.fixture(scope="session")
def recipe_pages() -> dict[str, str]:
    """Ten seconds, in which the time of a step is counted for every recipe: for slow tests alone."""
    pages: dict[str, str] = hook("recipes").recipe_pages()
    return pages


def test_the_page_of_the_contract_is_the_docstring() -> None:
    assert text("docs/guide/contract.md") == hook("contract").page(), "run docs/hooks/contract.py"


@pytest.mark.slow
def test_recipes_by_goal_follow_from_the_laptop_track(recipe_pages: dict[str, str]) -> None:
    measured = hook("measured")

    assert NUMBERS_FILE.read_text(encoding="utf-8") == measured.numbers_text(), "run docs/hooks/measured.py"
    chosen, now = {goal.title: goal.recipes for goal in goals()}, measured.track()
    guide = text("docs/guide/recipes.md")
    assert measured.goals_table("../../optimizers/recipe/shipped/{}.yaml".format) in guide
    assert measured.steps_table("optimizers/recipe/shipped/{}.yaml".format) in text("README.md")
    run = [name for name in eigengraft.shipped_recipes() if measured.task_scores(name)]
    times = (f"{measured.milliseconds('soap_fitted'):.0f}", f"{measured.gpu().milliseconds('soap_fitted'):.0f}")
    said = rf"`soap_fitted`, the time computed .* is (\d+) ms\. .* measured on an {measured.gpu().card}, .*\[(\d+) ms\]"
    assert re.findall(said, text("README.md")) == [times]
    assert f"**Measured time:** {measured.measured_text('muon')} ms" in recipe_pages["muon"]
    assert "**Measured time:**" not in recipe_pages["soap"]
    cards = hook("gallery").page().split('<div class="card">')[1:]
    assert {name: card.count("<svg") for name, card in zip(eigengraft.shipped_recipes(), cards, strict=True)} == {
        name: 2 if name in run else 0 for name in eigengraft.shipped_recipes()
    }
    for name, reason in (
        ("sophia", "`hessian_diagonal`"),
        ("muonclip", "`max_logit`"),
        ("shampoo_cq", "`shampoo_4bit`"),
    ):
        assert name not in run and lacking(measured.reason_not_run(name), reason) == []
        assert lacking(recipe_pages[name], reason) == []
    kinds = ("", measured.COUNTED)
    scores = [f"{measured.profile_of(name, kind):.2f}" for name in ("soap_fitted", "adamw") for kind in kinds]
    said = r"`soap_fitted` has (\S+) for steps and (\S+) for time, AdamW\s(\S+) and (\S+)\."
    assert re.findall(said, guide) == [tuple(scores)]
    assert chosen["fewest steps"][0][0] == max(run, key=measured.profile_of)
    assert all(now.profiles[""][name.replace("/", "_")] >= 0.8 for name, _ in chosen["few steps and little memory"])
    assert measured.memory(chosen["least memory"][0][0]) < 0.1
    reached = [name for name in run if all(one.steps < math.inf for one in measured.task_scores(name).values())]
    rates = {name: [one.lr for one in measured.task_scores(name).values()] for name in reached}
    spread = {name: max(own) / min(own) for name, own in rates.items()}
    assert spread[chosen["little tuning"][0][0]] == pytest.approx(min(spread.values()))
    for name in run:  # each page has the steps of the track's page
        page = recipe_pages[name]
        for task, score in measured.task_scores(name).items():
            assert f"| {task} | {now.track.tasks[task].target:g} | {measured.steps_of(score)} |" in page
    assert "https://arxiv.org/abs/2409.11321" in recipe_pages["soap"]
    assert "papers/soap_2024/README.md" in recipe_pages["soap"]


@pytest.mark.slow
def test_every_family_has_a_page_with_all_members_and_fields(family_pages: dict[str, str]) -> None:
    ours = {name: family for name, family in families().items() if family.__module__.startswith("eigengraft.")}
    assert set(family_pages) == set(ours)
    for name, family in ours.items():
        for kind, member in family.members.items():
            if member.__module__.startswith("eigengraft."):
                _, _, section = family_pages[name].partition(f"## {kind} {{ #{kind} }}")
                fields = [field.alias or key for key, field in member.model_fields.items() if key != "kind"]
                assert [key for key in fields if f"| `{key}` |" not in section] == [], (name, kind)


def test_a_page_of_a_family_shows_formula_range_default_and_meaning(family_pages: dict[str, str]) -> None:
    section = family_pages["stage"].partition("## rms {")[2].partition("\n## ")[0]
    assert "v &lt;- b v" in section
    assert [f"**{label}:** " in section for label in ("Use", "Cost for a 1024 x 1024 matrix")] == [True, True]
    assert re.search(r"\| `beta` \| number in &#91;0, 1&#93; \| `0.999` \| decay", section)


def test_a_page_of_a_family_shows_what_a_member_defines_and_a_worked_file(family_pages: dict[str, str]) -> None:
    """From the class: every method that must be defined, no final one, and the types in the signatures."""
    for name, page in family_pages.items():
        section = page.partition("{ #own }")[2]
        family = families()[name]
        for method in getattr(family, "__abstractmethods__", ()):
            assert re.search(rf"\*\*`{method}[( ].*`\*\* \(required\)", section), (name, method)
    statistic = family_pages["statistic"].partition("{ #own }")[2]
    assert "`contribution(x: Tensor, axis: int, context: StepContext) -> Contribution`** (required)" in statistic
    assert "### Contribution" in statistic and "`observe(" not in statistic
    assert "class UnitGram(Statistic)" in statistic and "check_statistic" in statistic
    task = family_pages["task"].partition("{ #own }")[2]
    assert "### Dataset" in task and "`batch(seed: int, step: int) -> Batch`" in task


def test_the_guide_to_own_components_names_every_file_and_check() -> None:
    page = text("docs/guide/own-components.md")
    files = sorted((ROOT / "experiments" / "examples" / "components").glob("*.py"))
    checks = [name for name in vars(eigengraft.testing) if name.startswith("check_")]
    for name in [*(file.name for file in files), *checks]:
        assert f"`{name}`" in page, name


@pytest.mark.slow
def test_every_recipe_has_a_page_with_its_yaml(recipe_pages: dict[str, str]) -> None:
    assert set(recipe_pages) == set(eigengraft.shipped_recipes())
    assert "solver: {kind: power_qr, by_device: true}" in recipe_pages["soap_fitted"]


LOADING = re.compile(r"""<(?:script|img|iframe|source|link)\b(?:"[^"]*"|'[^']*'|[^>"'])*>""", flags=re.IGNORECASE)
"""Tags that may load something: to parse these alone takes a tenth of the time of a page."""


class Resources(HTMLParser):
    """What a page loads by itself: scripts, style sheets, icons, pictures."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.found: list[str] = []
        for tag in LOADING.findall(page.read_text(encoding="utf-8")):
            self.reset()  # after <script> it looks for nothing but the end of the script
            self.feed(tag)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        source = given.get("src") if tag in ("script", "img", "iframe", "source") else None
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preconnect", "preload"):
            source = given.get("href")
        if source is not None and not source.startswith("data:"):
            self.found.append(source)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site as `make docs` builds it, where nothing can reach a network.

    It is built in this process, whose hooks have counted the time of a step of every recipe for `recipe_pages`."""
    folder = tmp_path_factory.mktemp("site")
    variables = {f"{scheme}_proxy": "http://127.0.0.1:9" for scheme in ("http", "https", "HTTP", "HTTPS")}
    with mock.patch.dict(os.environ, {**variables, "NO_MKDOCS_2_WARNING": "1"}), contextlib.chdir(ROOT):
        from mkdocs.__main__ import cli

        cli(["build", "--strict", "--site-dir", str(folder)], standalone_mode=False)
    return folder


@pytest.mark.slow
def test_the_site_builds_strictly_with_a_page_for_everything(site: Path) -> None:
    moved = {"README.md": "index.html", "CONTRIBUTING.md": "contributing.html"}
    for page in PAGES:
        built = moved.get(page, page.removeprefix("docs/").removesuffix(".md") + ".html")
        assert (site / built).exists(), page
    ours = [name for name, family in families().items() if family.__module__.startswith("eigengraft.")]
    made = [f"reference/{name}" for name in ours] + [f"reference/recipes/{n}" for n in eigengraft.shipped_recipes()]
    assert [page for page in made if not (site / f"{page}.html").exists()] == []


@pytest.mark.slow
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """So that the site opens from a folder: every script, style sheet and picture lies beside the pages."""
    for page in site.rglob("*.html"):
        if page.name != "404.html":  # served by a server alone
            for source in Resources(page).found:
                assert "//" not in source, f"{page}: {source}"
                assert (page.parent / source.partition("?")[0].partition("#")[0]).exists(), f"{page}: {source}"


def test_the_search_for_resources_finds_them(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(
        '<a href="https://x.y"><script src="https://x.y/z.js"></script><link rel="stylesheet" href="a.css">'
    )
    assert Resources(page).found == ["https://x.y/z.js", "a.css"]
