"""``init``: writes a small project of one kind, which trains as it is, into a new folder."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from trainwright.errors import StorageError, UsageError, install_remedy, require_choice
from trainwright.recipe import json_schema

TEMPLATES = Path(__file__).parent.parent / "templates"
SCHEMA = "recipe.schema.json"
"""The schema file that the first line of each ``recipe.yaml`` references. The installed version writes it."""
KINDS = {
    "classification": ("pytest", "sklearn"),
    "segmentation": ("pytest",),
    "language-model": ("pytest",),
    "finetune": ("pytest", "peft", "transformers"),
    "table": ("pytest", "sklearn"),
    "rl": ("pytest", "gymnasium"),
    "loop": ("pytest",),
}
"""The kinds of projects, and the modules that each imports in addition to those of Trainwright."""


@dataclass(frozen=True)
class NewProject:
    """A project that ``init`` has written.

    Attributes:
        kind: Its kind.
        folder: Its folder.
        files: Names of files in the folder.
        commands: The commands of its README, in order.
        missing: Modules that it imports and that are not installed.
    """

    kind: str
    folder: Path
    files: tuple[str, ...]
    commands: tuple[str, ...]
    missing: tuple[str, ...] = ()

    exit_code = 0

    def lines(self) -> list[str]:
        """Return the folder, and the commands to run next."""
        installs = [f"  {install_remedy(module)}" for module in self.missing]
        steps = [f"  cd {self.folder}", *installs, *(f"  {command}" for command in self.commands)]
        return [f"{self.folder}: {', '.join(self.files)}", "next:", *steps]

    def to_json(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        return {
            "kind": self.kind,
            "folder": str(self.folder),
            "files": [*self.files],
            "commands": [*self.commands],
            "missing": [*self.missing],
            "exit": self.exit_code,
        }


def init(kind: str, folder: str | Path | None = None) -> NewProject:
    """Write a small project that trains as it is: recipe, model, data, a test and a README.

    Args:
        kind: ``classification``, ``segmentation``, ``language-model``, ``finetune``, ``table``; or ``rl``, a policy
            gradient by ``tw.fit``, and ``loop``, a plain PyTorch loop under ``tw.watch``: both with ``train.py``
            instead of a recipe.
        folder: A folder that does not exist or is empty. Default: the kind, in the current folder.

    Returns:
        The folder, the names of its files, and the commands that test, train and evaluate it.

    Raises:
        UsageError: The kind is unknown, or the folder holds something already; nothing is overwritten.
        StorageError: The folder cannot be written.
    """
    require_choice("kind", kind, KINDS)
    path = Path(kind if folder is None else folder)
    template = TEMPLATES / kind.replace("-", "_")
    try:
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise UsageError(f"{path} exists already", remedy=f"name a new folder: trainwright init {kind} FOLDER")
        path.mkdir(parents=True, exist_ok=True)
        for file in sorted(template.iterdir()):
            if file.is_file():  # skips __pycache__ of an installer
                shutil.copyfile(file, path / file.name)
        if (path / "recipe.yaml").exists():
            (path / SCHEMA).write_text(json.dumps(json_schema(), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error}", remedy="name a folder that you can write") from None
    return NewProject(
        kind,
        path,
        files=tuple(sorted(file.name for file in path.iterdir())),
        commands=tuple(re.findall(r"^ {4}(\S.*)$", (path / "README.md").read_text("utf-8"), re.MULTILINE)),
        missing=tuple(module for module in KINDS[kind] if find_spec(module) is None),
    )
