"""``init``: writes a small project of one kind, which trains without changes, in a new folder."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from trainwright.errors import StorageError, UsageError, install_remedy, require_choice
from trainwright.recipe import json_schema

TEMPLATES = Path(__file__).parent.parent / "templates"
SCHEMA = "recipe.schema.json"
"""The schema file that the first line of each ``recipe.yaml`` references. The installed version writes it."""
KINDS = {
    "classification": ("pytest", "sklearn"),
    "segmentation": ("pytest",),
    "language-model": ("pytest",),
    "table": ("pytest", "sklearn"),
    "rl": ("pytest", "gymnasium"),
    "loop": ("pytest",),
}
"""The kinds of projects, and the modules that each imports in addition to those of Trainwright."""
FINETUNE = "finetune"
"""The kind of project that is written for one pretrained model and one file of data."""

OnBadRecord: TypeAlias = Literal["stop", "skip"]


@dataclass(frozen=True)
class NewProject:
    """A project that ``init`` has written. ``commands`` are those of its README, in order.

    ``missing`` are modules that it imports and that are not installed.
    """

    kind: str
    folder: Path
    files: tuple[str, ...]
    commands: tuple[str, ...]
    missing: tuple[str, ...] = ()

    exit_code = 0

    def lines(self) -> list[str]:
        installs = [f"  {install_remedy(module)}" for module in self.missing]
        steps = [f"  cd {self.folder}", *installs, *(f"  {command}" for command in self.commands)]
        return [f"{self.folder}: {', '.join(self.files)}", "next:", *steps]

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "folder": str(self.folder),
            "files": [*self.files],
            "commands": [*self.commands],
            "missing": [*self.missing],
            "exit": self.exit_code,
        }


def init(
    kind: str,
    folder: str | Path | None = None,
    *,
    model: str | Path | None = None,
    data: str | Path | None = None,
    chat_template: str | Path | None = None,
    on_bad_record: OnBadRecord = "stop",
) -> NewProject:
    """Write a small project that trains without changes: recipe, model, data, a test and a README.

    With ``finetune``, write recipes that fine-tune ``model`` on ``data``. The layout of the records, the chat template
    and the lengths of the samples decide what is in them. No weights are read.

    Args:
        kind: With a recipe: ``classification``, ``segmentation``, ``language-model``, ``table`` or ``finetune``. With
            ``train.py`` instead of a recipe: ``rl`` (a policy gradient by ``tw.fit``) or ``loop`` (a plain PyTorch loop
            under ``tw.watch``).
        folder: A folder that does not exist or is empty. Default: the kind, in the current folder.
        model: For ``finetune``: the folder or the hub name of a pretrained model.
        data: For ``finetune``: a file of conversations, instructions, prompts with completions, texts, or
            preferences, which are trained on by DPO.
        chat_template: For ``finetune``: a file with the chat template, for a tokenizer that has none.
        on_bad_record: For ``finetune``: ``skip`` leaves out records that cannot be used.

    Returns:
        The folder, the names of its files, and the commands that test, train and evaluate it.

    Raises:
        UsageError: The kind is unknown, or the folder holds something already; nothing is overwritten. For
            ``finetune``: the model or the data cannot be used.
        StorageError: The folder cannot be written.
    """
    require_choice("kind", kind, [*KINDS, FINETUNE])
    path = Path(kind if folder is None else folder)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"{path} exists already", remedy=f"name a new folder: trainwright init {kind} FOLDER")
    files = _finetune_files(model, data, chat_template, on_bad_record) if kind == FINETUNE else {}
    has_options = any(each is not None for each in (model, data, chat_template)) or on_bad_record != "stop"
    if kind != FINETUNE and has_options:
        rule = f"--model, --data, --chat-template and --on-bad-record are for finetune, not for {kind}"
        raise UsageError(rule, remedy="leave them out")
    template = TEMPLATES / kind.replace("-", "_")
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (path / name).write_text(text, "utf-8")
        for file in sorted(template.iterdir()) if kind in KINDS else ():
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
        missing=tuple(module for module in KINDS.get(kind, ("peft",)) if find_spec(module) is None),
    )


def _finetune_files(
    model: str | Path | None, data: str | Path | None, chat_template: str | Path | None, on_bad_record: OnBadRecord
) -> dict[str, str]:
    if model is None or data is None:
        raise UsageError(
            "init finetune needs a model and a file of data",
            remedy="trainwright init finetune --model FOLDER --data FILE.jsonl",
        )
    from trainwright.commands.init_finetune import files_of, gather

    template = None if chat_template is None else str(chat_template)
    return files_of(gather(str(model), str(data), chat_template=template, on_bad_record=on_bad_record))
