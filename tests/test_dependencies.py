"""pyproject.toml declares what the code imports, and nothing else."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.house import TEMPLATES, files, nodes
from trainwright.errors import OPTIONAL, install_remedy
from trainwright.recipe.catalog import OPTIMIZER_ALIASES

pytestmark = pytest.mark.slow  # the first of them parses every file

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOR_DEVELOPERS = {"dev", "docs"}
"""Extras of a checkout: nothing in the package imports their packages."""
MODULES = {
    "pyyaml": "yaml",
    "nvidia-ml-py": "pynvml",
    "scikit-learn": "sklearn",
    "liger-kernel": "liger_kernel",
    "ipython": "IPython",
    "pillow": "PIL",
}
"""Distributions whose module has another name."""
IMPORTERS = {"import_module", "find_spec", "import_optional", "importorskip"}
"""Functions that are given the name of a module."""
OF_THE_USER = {"timm", "torchvision", "lm_eval", "matplotlib"}
"""Libraries that no extra installs: users of such a model, of these tasks, or of such a figure have theirs."""
TOOLS = {
    "mypy": ("scripts/check", "bin/mypy"),
    "ruff": ("scripts/check", "bin/ruff"),
    "pytest-xdist": ("scripts/test", "--dist worksteal"),
    "pytest-timeout": ("pyproject.toml", "\ntimeout ="),
    "types-pyyaml": ("trainwright/recipe/yaml_core.py", "yaml"),
    "types-psutil": ("trainwright/plan/machine.py", "psutil"),
}
"""Tools that nothing imports: a file that uses each, and what shows it there."""


def distributions(requirements: list[str]) -> set[str]:
    names = (re.match(r"[A-Za-z0-9._-]+", requirement) for requirement in requirements)
    return {name[0].lower() for name in names if name} - {"trainwright"}


def module_of(distribution: str) -> str:
    return MODULES.get(distribution, distribution)


def modules_named(path: Path) -> Iterator[str]:
    """Yields the full name of every module that a file imports, by a statement or by one of IMPORTERS."""
    for node in nodes(path, ast.Import, ast.ImportFrom, ast.Call):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in IMPORTERS:
                yield str(node.args[0].value)


@cache
def imported(*folders: str) -> set[str]:
    names = {name for folder in folders for path in files(ROOT / folder) for name in modules_named(path)}
    wrapped = {"tensorboard"} if any(name.startswith("torch.utils.tensorboard") for name in names) else set()
    return {name.split(".")[0] for name in names} | wrapped


def test_what_is_declared_is_imported() -> None:
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    for_users = [
        *PROJECT["dependencies"],
        *(each for name in extras if name not in FOR_DEVELOPERS for each in extras[name]),
    ]
    templates = {name.split(".")[0] for path in TEMPLATES.rglob("*.py") for name in modules_named(path)}
    named = {row.factory.partition(":")[0].partition(".")[0] for row in OPTIMIZER_ALIASES.values()}
    used = imported("trainwright") | templates | named
    unused = {name for name in distributions(for_users) if module_of(name) not in used}
    assert not unused, "nothing in trainwright/ imports these"
    in_tests = imported("tests", "benchmarks")
    for name in distributions(extras["dev"]):
        if name in TOOLS:
            file, shown_by = TOOLS[name]
            assert shown_by in (ROOT / file).read_text(), name
        else:
            assert module_of(name) in in_tests, f"no test imports {name}"


def test_what_is_imported_is_declared() -> None:
    extras = [each for requirements in PROJECT["optional-dependencies"].values() for each in requirements]
    declared = {module_of(name) for name in distributions([*PROJECT["dependencies"], *extras])}
    foreign = imported("trainwright") - set(sys.stdlib_module_names) - {"trainwright"} - OF_THE_USER
    foreign.discard("pydantic_core")  # a part of pydantic, of its exact version
    assert foreign <= declared, "pyproject.toml does not declare these"


def test_constraints_pin_what_is_declared() -> None:
    pinned = distributions((ROOT / "constraints.txt").read_text().splitlines())
    extras = PROJECT["optional-dependencies"]
    needed = distributions([*PROJECT["dependencies"], *(each for name in FOR_DEVELOPERS for each in extras[name])])
    assert needed <= pinned


def test_optional_packages_are_those_of_the_extras() -> None:
    """The remedy of a missing package names it with the version that its extra asks for."""
    extras: dict[str, list[str]] = PROJECT["optional-dependencies"]
    assert {each for name in extras if name not in FOR_DEVELOPERS for each in extras[name]} == set(OPTIONAL)


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        ("sklearn", 'pip install "scikit-learn>='),
        ("sklearn.datasets", 'pip install "scikit-learn>='),
        ("PIL", 'pip install "pillow>='),
        ("transformers", 'pip install "transformers>='),
        ("liger_kernel.transformers", 'pip install "liger-kernel>='),
        ("ray.train", 'pip install "ray[train]>='),
        ("cv2", "pip install opencv-python"),
        ("torchmetrics.classification", 'pip install "torchmetrics>='),
        ("timm.models", "pip install timm"),
    ],
)
def test_the_remedy_for_a_missing_module_can_work(module: str, remedy: str) -> None:
    assert install_remedy(module).startswith(remedy)


def test_no_page_and_no_message_installs_an_extra_by_name() -> None:
    """``pip install trainwright[x]`` works only where an index has Trainwright."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "trainwright").rglob("*.py")]
    assert [file.name for file in files if "trainwright[" in file.read_text()] == []


def test_extras_that_are_gone_are_gone() -> None:
    said = re.findall(r"The extras (.*?) are gone", (ROOT / "CHANGELOG.md").read_text(), re.DOTALL)
    gone = {name for part in said for name in re.findall(r"`(\w+)`", part)}
    assert gone and not gone & set(PROJECT["optional-dependencies"])


def test_the_readme_lists_the_extras() -> None:
    [said] = re.findall(r"The extras\s+are (.*?), as in", (ROOT / "README.md").read_text(), re.DOTALL)
    assert set(re.findall(r"`(\w+)`", said)) == set(PROJECT["optional-dependencies"]) - FOR_DEVELOPERS


LIMITED_BY_MLFLOW = {"pillow", "pyarrow", "python-dateutil"}
"""uv locks all extras at once, and the extra ``mlflow`` limits these. constraints.txt is without that extra."""


def test_the_lock_of_uv_has_the_pinned_versions() -> None:
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    locked = {each["name"]: each.get("version") for each in tomllib.loads((ROOT / "uv.lock").read_text())["package"]}
    names = {re.sub(r"[-_.]+", "-", name).lower(): version.split()[0] for name, version in pins.items()}
    shared = names.keys() & locked.keys() - LIMITED_BY_MLFLOW
    assert "torch" in shared and len(shared) > 100
    assert {name: locked[name] for name in shared} == {name: names[name] for name in shared}
