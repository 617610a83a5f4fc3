"""Runs the steps of containers/Dockerfile in a folder, for machines without a container engine.

    python scripts/image_steps.py /tmp/image --build-arg STACK=cpu

/opt, /workspace and /runs of the image are created in the folder. RUN steps of root are left out: they install
packages of the distribution and create the user.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCKERFILE = ROOT / "containers" / "Dockerfile"


@dataclass(frozen=True)
class Step:
    """One instruction: its name (``RUN``, ``COPY``, ``ENV``, ...) and the text after it."""

    name: str
    text: str


@dataclass
class Image:
    """The folder that stands for the image, and the variables, working directory and user that steps have set."""

    folder: Path
    arguments: Mapping[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    workdir: Path = Path("/")
    user: str = "root"

    def apply(self, step: Step) -> None:
        """Runs one step. Raises CalledProcessError if a command fails."""
        if step.name == "ARG":
            name, _, default = step.text.partition("=")
            self.variables[name] = self.arguments.get(name, self._expanded(default))
        elif step.name == "ENV":
            for word in shlex.split(step.text):
                name, _, value = word.partition("=")
                self.variables[name] = self._inside(self._expanded(value))
        elif step.name == "USER":
            self.user = step.text
        elif step.name == "WORKDIR":
            self.workdir = Path(self._inside(step.text))
            self.workdir.mkdir(parents=True, exist_ok=True)
        elif step.name == "COPY":
            *sources, target = (word for word in shlex.split(step.text) if not word.startswith("--"))
            for source in sources:
                self._copy(ROOT / source, self.workdir / target, many=len(sources) > 1 or target.endswith("/"))
        elif step.name == "RUN" and self.user != "root":
            sys.stderr.write(f"RUN {step.text}\n")
            environment = {**os.environ, **self.variables}
            command = ["bash", "-o", "pipefail", "-c", self._inside(step.text)]
            subprocess.run(command, cwd=self.workdir, env=environment, check=True)

    def _copy(self, source: Path, target: Path, *, many: bool) -> None:
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, target / source.name if many else target)

    def _inside(self, text: str) -> str:
        return re.sub(r"(?<![\w.])/(opt|workspace|runs)\b", lambda found: f"{self.folder}/{found[1]}", text)

    def _expanded(self, text: str) -> str:
        known = {**os.environ, **self.variables}
        return re.sub(r"\$\{?(\w+)\}?", lambda found: known.get(found[1], ""), text)


def steps(text: str) -> Iterator[Step]:
    """Yields the instructions of a Dockerfile. Comments are dropped, continued lines are joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for instruction in "\n".join(lines).replace("\\\n", " ").splitlines():
        name, _, rest = instruction.partition(" ")
        yield Step(name.upper(), rest.strip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    image = Image(options.folder.absolute(), dict(each.split("=", 1) for each in options.build_arg))
    for step in steps(DOCKERFILE.read_text("utf-8")):
        image.apply(step)
    sys.stdout.write(f"{image.folder}/opt/venv/bin/trainwright\n")


if __name__ == "__main__":
    main()
