"""The distribution, built and installed for real: wheel, sdist, editable install, bare checkout.

Everything happens in a copy of the checkout and in environments of its own; nothing is downloaded.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
# a neighbor that has the same name as one of our folders, as dask's scheduler does
Neighbor = "WHO = 'an installed package'"
TRAIN = """
import eigengraft, torch
layer = torch.nn.Linear(3, 2)
optimizer = eigengraft.Optimizer(layer.named_parameters(), recipe="adamw", lr=1e-2)
layer(torch.eye(3)).square().sum().backward()
optimizer.step()
"""


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Output of a process that sees no PYTHON* variable but those given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE", "PYTEST"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip_install(python: Path, *what: str | Path, cwd: Path) -> None:
    flags = ["--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed", "--no-index"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *flags, *what, cwd=cwd)


def new_environment(folder: Path) -> Path:
    """The interpreter of a fresh environment that borrows our libraries, but none of our `.pth` hooks."""
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    site = site_packages(python)
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "borrowed.pth").write_text("\n".join(sorted(borrowed)))
    (site / "distributed").mkdir()
    (site / "distributed" / "__init__.py").write_text(Neighbor)
    return python


def site_packages(python: Path) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run(python, "-c", code, cwd=python.parent).strip())


def data_files() -> set[str]:
    """What the library reads at run time beside its modules, by its path in the wheel."""
    folder = ROOT / "optimizers" / "recipe"
    recipes = [*(folder / "shipped").rglob("*.yaml"), folder / "shipped" / "shipped.json"]
    patterns = ("*.yaml", "*.jinja", "*.npz")
    recipes += [ROOT / "preconditioners" / "roots" / "timings.json", ROOT / "experiments" / "cli" / "recipes.json"]
    rest = [path for pattern in patterns for path in (ROOT / "experiments").rglob(pattern)]
    return {f"eigengraft/{path.relative_to(ROOT).as_posix()}" for path in recipes + rest} | {"eigengraft/py.typed"}


def modules() -> set[str]:
    root = ROOT / "src" / "eigengraft"
    names = {name.split(".")[1] for name in PACKAGES if "." in name}
    folders = {name for name in names if (root / name).is_dir() and not (root / name).is_symlink()}
    paths = [*root.glob("*.py"), *(path for folder in folders for path in (root / folder).rglob("*.py"))]
    found = {path.relative_to(root.parent).as_posix() for path in paths}
    paths = [path for name in names - folders for path in (ROOT / name).rglob("*.py")]
    return found | {f"eigengraft/{path.relative_to(ROOT).as_posix()}" for path in paths}


def members(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("packaging") / "check out"
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "runs", "site", "build", "dist", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
    return copy


@pytest.fixture(scope="session")
def built(checkout: Path) -> Path:
    """A folder with the sdist, the wheel made from the sdist, and in `direct/` the wheel made from the checkout."""
    out = checkout.parent / "built"
    build = [sys.executable, "-m", "build", "--no-isolation", "--skip-dependency-check"]
    run(*build, "--outdir", out, checkout, cwd=checkout.parent)
    run(*build, "--wheel", "--outdir", out / "direct", checkout, cwd=checkout.parent)
    return out


@pytest.fixture(scope="session")
def installed(built: Path) -> Path:
    python = new_environment(built.parent / "installed")
    pip_install(python, next(built.glob("*.whl")), cwd=built)
    return python


@pytest.fixture(scope="session")
def editable(built: Path, checkout: Path) -> Path:
    python = new_environment(built.parent / "editable")
    pip_install(python, "--editable", checkout, cwd=built)
    return python


def test_the_wheel_holds_every_module_and_data_file_and_nothing_else(built: Path) -> None:
    (wheel,) = (built / "direct").glob("*.whl")
    assert members(wheel) == modules() | data_files()
    assert len(data_files()) > 8, "recipes and templates are expected"


def test_the_sdist_gives_the_same_wheel(built: Path) -> None:
    (direct,), (from_sdist,), (sdist,) = (built / "direct").glob("*.whl"), built.glob("*.whl"), built.glob("*.tar.gz")
    assert members(from_sdist) == members(direct)
    # so the wheel does not rest on the symlinks, which a zip of the repository lacks
    with tarfile.open(sdist) as archive:
        assert not any(member.issym() for member in archive)


def test_the_installed_wheel_works_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    """One process, because torch takes seconds to import. First what the extras bring is hidden: declared dependencies
    are enough to train, and the command line says what to install. Then all of the library is imported."""
    hidden = ("typer", "rich", "ruamel", "ruamel.yaml", "matplotlib", "jinja2", "sklearn", "scipy")
    imports = "\n".join(f"import {package}" for package in PACKAGES)
    code = f"""
import sys
known = {{name: sys.modules.get(name) for name in {hidden}}}
assert set(known.values()) == {{None}}, known
sys.modules.update(known)  # None: as if it were not there
{TRAIN}
from eigengraft.__main__ import command_line
try:
    command_line()
except SystemExit as end:
    print(end)
assert {{name: sys.modules.pop(name) for name in known}} == known
{imports}
import eigengraft.experiments.cli.main
print(eigengraft.optimizers.__file__)
"""
    refused, place = run(installed, "-c", code, cwd=tmp_path).splitlines()
    assert "typer" in refused and 'pip install ".[experiments]"' in refused
    assert Path(place).is_relative_to(site_packages(installed))


def test_the_installed_command_works_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    assert "demo" in run(installed.with_name("eigengraft"), "--help", cwd=tmp_path)


def test_the_editable_install_reads_the_checkout(editable: Path, checkout: Path) -> None:
    imports = "\n".join(f"import {package}" for package in PACKAGES)
    where = "import eigengraft.optimizers, distributed; print(eigengraft.optimizers.__file__); print(distributed.WHO)"
    added = checkout / "preconditioners" / "added_later.py"
    added.write_text("HERE = True\n")
    later = "from eigengraft.preconditioners.added_later import HERE"
    try:
        code = f"{imports}\n{where}\n{later}\n{TRAIN}"
        printed = run(editable, "-c", code, cwd=checkout, PYTHONSAFEPATH="1").splitlines()
    finally:
        added.unlink()
    assert Path(printed[0]).samefile(checkout / "optimizers" / "__init__.py")
    assert printed[1:] == ["an installed package"]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_mends_a_checkout_whose_symlinks_became_text_files(checkout: Path, tmp_path: Path) -> None:
    unlinked = shutil.copytree(checkout, tmp_path / "from a zip", symlinks=True)
    links = [entry for entry in (unlinked / "src" / "eigengraft").iterdir() if entry.is_symlink()]
    for link in links:
        target = link.readlink()
        link.unlink()
        link.write_text(target.as_posix())
    run("make", "links", cwd=unlinked)
    assert {link.name: link.resolve() for link in links} == {link.name: unlinked / link.name for link in links}
    python = new_environment(tmp_path / "environment")
    pip_install(python, "--editable", unlinked, cwd=tmp_path)
    run(python, "-c", "import eigengraft.experiments", cwd=tmp_path)


def test_the_bare_checkout_is_importable(checkout: Path, tmp_path: Path) -> None:
    python = new_environment(tmp_path / "bare")
    run(python, "-c", TRAIN, cwd=tmp_path, PYTHONPATH=str(checkout / "src"))


def test_an_installed_distributed_is_not_hidden(editable: Path, checkout: Path) -> None:
    code = "import eigengraft.distributed, distributed\nprint(distributed.WHO)"
    assert run(editable, "-c", code, cwd=checkout).strip() == "an installed package"
