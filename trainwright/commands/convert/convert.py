"""``convert FILE``: reads the settings of another trainer and writes the equivalent recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trainwright.commands.convert import axolotl, lightning, trainer
from trainwright.commands.convert.draft import Draft, KeyRow
from trainwright.errors import RecipeError, StorageError, UsageError, require_choice
from trainwright.recipe import from_mapping
from trainwright.recipe.yaml_core import Document, UnreadableError, read, write
from trainwright.runs.files import parse_json, read_text
from trainwright.runs.secrets import masked

MAX_BYTES = 1_000_000
FORMATS: Mapping[str, Callable[[Mapping[str, object]], Draft]] = {
    "trainer": trainer.convert,
    "lightning": lightning.convert,
    "axolotl": axolotl.convert,
}
NAMES: Mapping[str, str] = {"trainer": trainer.NAME, "lightning": lightning.NAME, "axolotl": axolotl.NAME}


@dataclass(frozen=True)
class Conversion:
    """The recipe from a file.

    Attributes:
        file: The file that was converted.
        source: Its format.
        recipe: The recipe as YAML. It has placeholders at the paths in ``to_fill_in``.
        rows: The outcome of each key of the file.
        to_fill_in: Paths of the recipe that the file cannot define, with what belongs there.
        path: The file that was written; None if none was.
    """

    file: str
    source: str
    recipe: str
    rows: tuple[KeyRow, ...]
    to_fill_in: Mapping[str, str]
    path: Path | None = None

    exit_code = 0

    def of(self, outcome: str) -> list[KeyRow]:
        """Return the rows with this outcome."""
        return [row for row in self.rows if row.outcome == outcome]

    def lines(self) -> list[str]:
        """Return a table of converted and unsupported keys with their remedies, and what is left to write."""
        taken, refused, skipped = (self.of(each) for each in ("taken", "not supported", "no meaning"))
        width = max((len(row.key) for row in (*taken, *refused)), default=0)
        lines = [f"{self.file}: {NAMES[self.source]}", "", f"taken ({len(taken)})"]
        for row in taken:
            note = f"; {row.note}" if row.note else ""
            lines.append(f"  {row.key:<{width}}  {row.value} -> {', '.join(row.paths)}{note}")
        lines += ["", f"not supported ({len(refused)})"]
        for row in refused:
            lines += [f"  {row.key:<{width}}  {row.value}: {row.note}", f"  {'':<{width}}  remedy: {row.remedy}"]
        lines += ["", f"no meaning here ({len(skipped)}; those that are off are not listed)"]
        lines += [f"  {row.key}: {row.note}" for row in skipped if row.note != "off"]
        if self.to_fill_in:
            lines += ["", "to fill in", *(f"  {path}: {what}" for path, what in self.to_fill_in.items())]
        end = ["", *self.recipe.splitlines()] if self.path is None else ["", f"wrote {self.path}"]
        return [*lines, *end]

    def to_json(self) -> dict[str, object]:
        """Return the object that ``--json`` prints."""
        return {
            "file": self.file,
            "source": self.source,
            "recipe": self.recipe,
            "rows": [{**vars(row), "paths": [*row.paths]} for row in self.rows],
            "to_fill_in": dict(self.to_fill_in),
            "path": None if self.path is None else str(self.path),
            "exit": self.exit_code,
        }


def convert(file: str | Path, *, source: str | None = None, out: str | Path | None = None) -> Conversion:
    """Turn the settings of another trainer into a recipe, and list each key that has no counterpart.

    No code is executed, and nothing that the file names is imported or opened. The recipe is valid. Values that the
    file does not define are placeholders, listed in ``to_fill_in``.

    Args:
        file: JSON of ``TrainingArguments`` of transformers, a YAML file of LightningCLI, or one of axolotl.
        source: ``trainer``, ``lightning`` or ``axolotl``. Default: detected from the keys of the file.
        out: The file to write. Existing files are not overwritten. Default: the recipe is only returned.

    Returns:
        The recipe as YAML, and the outcome of each key.

    Raises:
        UsageError: The format is unknown, the file is not JSON or YAML, or ``out`` exists.
        StorageError: The file cannot be read, or the recipe not be written.
    """
    path = Path(file)
    values, document = _read(path)
    if source is not None:
        require_choice("source", source, FORMATS)
    name = _format(values, path) if source is None else source
    draft = FORMATS[name](values)
    draft.mark_defaults(values)
    for problem in document.problems:
        draft.refuse(problem.path or "file", problem.got, problem.rule, problem.remedy)
    text = _recipe(draft, path, NAMES[name])
    conversion = Conversion(str(path), name, text, tuple(draft.rows), draft.to_fill_in)
    return conversion if out is None else _written(conversion, Path(out))


def _read(path: Path) -> tuple[Mapping[str, object], Document]:
    """Return the content of the file, read with the limits of a recipe. YAML tags are not followed."""
    name = str(path)
    text = read_text(path, max_bytes=MAX_BYTES, follow_links=True).removeprefix("\ufeff")
    document = Document(name)
    try:
        if path.suffix == ".json":
            document.value = parse_json(text)
        else:
            document = read(text, name)
    except UnreadableError as error:
        raise UsageError(str(error.problem), remedy=error.problem.remedy) from None
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}", remedy="give a JSON or YAML file") from None
    if not isinstance(document.value, dict):
        raise UsageError(f"{path} is not a mapping of keys to values", remedy="give a JSON or YAML file of settings")
    return document.value, document


def _format(values: Mapping[str, object], path: Path) -> str:
    """Return the format, by keys that only one format has. Raises UsageError."""
    if isinstance(values.get("trainer"), Mapping):
        return "lightning"
    if "base_model" in values or "micro_batch_size" in values:
        return "axolotl"
    if {"per_device_train_batch_size", "num_train_epochs", "output_dir", "optim"} & {*values}:
        return "trainer"
    known = "base_model (axolotl), trainer (LightningCLI), per_device_train_batch_size (TrainingArguments)"
    raise UsageError(f"{path} has none of the keys {known}", remedy=f"name its format: --from {'|'.join(FORMATS)}")


def _recipe(draft: Draft, path: Path, name: str) -> str:
    """Return the YAML of the draft. Values that the schema refuses are withdrawn and listed as not supported."""
    while True:
        try:
            from_mapping(draft.nested(), name=str(path))
            break
        except RecipeError as error:
            found = [draft.withdraw(each.path, each.rule, each.remedy) for each in error.problems]
            if not any(found):
                raise
    open_paths = [f"#   {path}: {what}" for path, what in draft.to_fill_in.items()]
    head = [f"# Made by `trainwright convert` from {path.name} ({name})."]
    head += ["# To fill in:", *open_paths] if open_paths else []
    return "\n".join(head) + "\n" + write(masked(draft.nested()))


def _written(conversion: Conversion, out: Path) -> Conversion:
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(conversion.recipe)
    except FileExistsError:
        raise UsageError(f"{out} exists already", remedy="give another --output") from None
    except OSError as error:
        raise StorageError(f"{out} cannot be written: {error}", remedy="give another --output") from None
    return Conversion(**{**vars(conversion), "path": out})
