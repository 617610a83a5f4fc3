"""``convert FILE``: turns ``TrainingArguments`` of transformers into a recipe, and lists keys without a counterpart.

The file is the JSON of ``to_json_string``, or what ``HfArgumentParser`` reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from trainwright.errors import RecipeError, StorageError, UsageError
from trainwright.recipe import METRICS, Recipe, from_mapping
from trainwright.recipe.catalog import SINKS
from trainwright.recipe.formatting import format_value
from trainwright.recipe.yaml_core import Document, UnreadableError, read, write
from trainwright.runs.files import parse_json, read_text
from trainwright.runs.secrets import MASK, is_secret, masked

MAX_BYTES = 1_000_000


@dataclass(frozen=True)
class Conversion:
    """The recipe from a file.

    Attributes:
        file: The file that was converted.
        recipe: The recipe as YAML. It has placeholders at the paths in ``to_fill_in``.
        rows: The outcome of each key of the file.
        to_fill_in: Paths of the recipe that the file cannot define, with what belongs there.
        path: The file that was written; None if none was.
    """

    file: str
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
        lines = [f"{self.file}: TrainingArguments", "", f"taken ({len(taken)})"]
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
            "recipe": self.recipe,
            "rows": [{**vars(row), "paths": [*row.paths]} for row in self.rows],
            "to_fill_in": dict(self.to_fill_in),
            "path": None if self.path is None else str(self.path),
            "exit": self.exit_code,
        }


def convert(file: str | Path, *, out: str | Path | None = None) -> Conversion:
    """Turn the ``TrainingArguments`` of transformers into a recipe, and list each key that has no counterpart.

    No code is executed, and nothing that the file names is imported or opened. The recipe is valid. Values that the
    file does not define are placeholders, listed in ``to_fill_in``.

    Args:
        file: JSON as ``to_json_string`` writes it, or JSON or YAML as ``HfArgumentParser`` reads it.
        out: The file to write. Existing files are not overwritten. Default: the recipe is only returned.

    Returns:
        The recipe as YAML, and the outcome of each key.

    Raises:
        UsageError: The file is not JSON or YAML, has no training arguments, or ``out`` exists.
        StorageError: The file cannot be read, or the recipe not be written.
    """
    path = Path(file)
    values, document = _read(path)
    if not {"per_device_train_batch_size", "num_train_epochs", "output_dir", "optim"} & {*values}:
        remedy = "save them with TrainingArguments.to_json_string(); docs/how-to/migrate.md shows other trainers"
        raise UsageError(f"{path} has no keys of TrainingArguments, such as output_dir", remedy=remedy)
    draft = _draft(values)
    draft.mark_defaults(values)
    for problem in document.problems:
        draft.refuse(problem.path or "file", problem.got, problem.rule, problem.remedy)
    conversion = Conversion(str(path), _recipe(draft, path), tuple(draft.rows), draft.to_fill_in)
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


def _recipe(draft: Draft, path: Path) -> str:
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
    head = [f"# Made by `trainwright convert` from {path.name}."]
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


KeyOutcome = Literal["taken", "no meaning", "not supported"]
INACTIVE = ("", "no", "none", "off", "None")
"""Strings that turn a feature off, as null, false, 0 and an empty list do. Such a key needs no counterpart."""


@dataclass(frozen=True)
class KeyRow:
    """The outcome of one key of the file. ``paths`` are the recipe keys that it sets."""

    key: str
    value: str
    outcome: KeyOutcome
    note: str = ""
    remedy: str = ""
    paths: tuple[str, ...] = ()


@dataclass
class Draft:
    """Collects recipe values by dotted path, rows by key, and what the user has to write."""

    settings: dict[str, object] = field(default_factory=dict)
    rows: list[KeyRow] = field(default_factory=list)
    to_fill_in: dict[str, str] = field(default_factory=dict)
    """By path: what belongs there. ``settings`` has a placeholder."""

    def take(self, key: str, value: object, settings: Mapping[str, object], note: str = "") -> None:
        """Record that the key sets these paths of the recipe."""
        self.settings |= settings
        self.rows.append(KeyRow(key, text_of(key, value), "taken", note=note, paths=tuple(settings)))

    def skip(self, key: str, value: object, why: str) -> None:
        """Record that the key needs no counterpart."""
        self.rows.append(KeyRow(key, text_of(key, value), "no meaning", note=why))

    def refuse(self, key: str, value: object, why: str, remedy: str) -> None:
        """Record that the key has no counterpart, although it would change the run."""
        self.rows.append(KeyRow(key, text_of(key, value), "not supported", note=why, remedy=remedy))

    def leave_open(self, path: str, placeholder: object, what: str) -> None:
        """Add a placeholder for a value that the file cannot define, unless a key has set it."""
        if path not in self.settings:
            self.settings[path] = placeholder
            self.to_fill_in[path] = what

    def withdraw(self, path: str, why: str, remedy: str) -> bool:
        """Remove the value of this path, or of a part of it, because the schema refuses it. Returns False if none was
        set.
        """
        for index, row in reversed([*enumerate(self.rows)]):  # the last one that set it counts
            at_fault = [each for each in row.paths if f"{path}.".startswith(f"{each}.") or each.startswith(f"{path}.")]
            if at_fault:
                for each in row.paths:
                    self.settings.pop(each, None)
                self.rows[index] = KeyRow(row.key, row.value, "not supported", note=why, remedy=remedy)
                return True
        return False

    def mark_defaults(self, values: Mapping[str, object]) -> None:
        """Note in rows of keys that are not in the file that the value is the default of the other trainer."""
        for index, row in enumerate(self.rows):
            if row.outcome == "taken" and row.key.partition(".")[0] not in values:
                self.rows[index] = replace(row, note="; ".join(filter(None, ["the default there", row.note])))

    def nested(self) -> dict[str, object]:
        """Return the settings as nested mappings, in the order of the schema."""
        order = {name: index for index, name in enumerate(Recipe.model_fields)}
        found: dict[str, object] = {}
        for path, value in sorted(
            self.settings.items(), key=lambda item: (order[item[0].split(".")[0]], item[0][-4:] != ".use")
        ):
            *above, last = path.split(".")
            inner = found
            for key in above:
                step = inner.setdefault(key, {})
                if not isinstance(step, dict):
                    step = inner[key] = {"use": step}
                inner = step
            inner[last] = value
        return found


Rule = Callable[[Draft, str, object], None]
"""Decides on one key by adding one row to the draft."""


def is_inactive(value: object) -> bool:
    """Return True for a value that turns a feature off."""
    return value in INACTIVE if isinstance(value, str) else not value


def at(path: str) -> Rule:
    """Return the rule that copies the value to this path. null keeps the default of the recipe."""

    def rule(draft: Draft, key: str, value: object) -> None:
        if value is None:
            draft.skip(key, value, "off")
        else:
            draft.take(key, value, {path: number(value)})

    return rule


def span(path: str, note: str = "") -> Rule:
    """Return the rule of a number of steps, or below 1 of a fraction of the run."""

    def rule(draft: Draft, key: str, value: object) -> None:
        amount = number(value)
        if not amount:
            draft.skip(key, value, "off")
        elif isinstance(amount, float) and amount < 1:
            draft.take(key, value, {path: f"{amount!r}run"}, note)
        else:
            draft.take(key, value, {path: f"{whole(amount)}steps"}, note)

    return rule


def switch(path: str, on: object = True) -> Rule:
    """Return the rule that sets ``on`` for true and refuses any other active value."""

    def rule(draft: Draft, key: str, value: object) -> None:
        if value in (True, "true", "True"):
            draft.take(key, value, {path: on})
        elif is_inactive(value) or value == "false":
            draft.skip(key, value, "off")
        else:
            draft.refuse(key, value, "not one of true and false", f"set {path} in the recipe")

    return rule


def nothing(why: str) -> Rule:
    """Return the rule of a key that needs no counterpart."""
    return lambda draft, key, value: draft.skip(key, value, "off" if is_inactive(value) else why)


def refused(why: str, remedy: str) -> Rule:
    """Return the rule of a key without a counterpart. A value that turns it off needs none."""

    def rule(draft: Draft, key: str, value: object) -> None:
        if is_inactive(value):
            draft.skip(key, value, "off")
        else:
            draft.refuse(key, value, why, remedy)

    return rule


def number(value: object) -> object:
    """Return the number in a string such as ``2e-4``, as YAML 1.1 reads it; any other value unchanged."""
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value.strip()):
        amount = float(value)
        return int(amount) if value.strip().lstrip("+-").isdecimal() else amount
    return value


def whole(value: object) -> object:
    """Return ``3`` for ``3.0``."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def text_of(key: str, value: object) -> str:
    """Return a value as text for a row, with secrets masked."""
    return MASK if is_secret(key) and value else format_value(value)


def run_name(value: object) -> str:
    """Return the last part of a path as the name of a run: ``lora-out`` for ``./outputs/lora-out``."""
    last = str(value).replace("\\", "/").rstrip("/").rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", last)[:100].strip("-. ") or "run"


DEFAULTS: Mapping[str, object] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "optim": "adamw_torch",
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "seed": 42,
}
"""Defaults of ``TrainingArguments`` that change the result. The recipe states them."""

ADAMW = {f"adamw_{kind}": "adamw" for kind in ("torch", "torch_fused", "hf", "apex_fused", "torch_xla")}
SMALL_ADAMW = {
    **{f"{kind}adamw_8bit": "adamw8bit" for kind in ("", "paged_")},
    **{f"adamw_{kind}8bit": "adamw8bit" for kind in ("bnb_", "torch_")},
    "adamw_torch_4bit": "adamw4bit",
}
BY_TORCHAO = "by torchao, on the device: other last bits than bitsandbytes, and no paging"
OPTIMIZERS: Mapping[str, Mapping[str, object]] = {
    **{name: {"optimizer.use": use} for name, use in {**ADAMW, **SMALL_ADAMW, "sgd": "sgd"}.items()},
    "adafactor": {
        "optimizer.use": "transformers.optimization:Adafactor",
        "optimizer.args.scale_parameter": False,
        "optimizer.args.relative_step": False,
    },
    "adagrad": {"optimizer.use": "torch.optim:Adagrad"},
    "rmsprop": {"optimizer.use": "torch.optim:RMSprop"},
}
"""Recipe settings by the name in ``optim``."""
SMALL_STATES = "the states have another precision, which changes the updates"
SCHEDULES: Mapping[str, str] = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "polynomial": "polynomial",
}
WARMUP = "the factor of step i is (i + 1) / W here, i / W there"
REPORTED = "the run folder has it"
RANKS = "trainwright train RECIPE -- --nproc-per-node N"
ZERO = "parallel.shard: the number of ranks that share the state (docs/how-to/several-gpus.md)"


def optimizer(draft: Draft, key: str, value: object) -> None:
    """Convert ``optim``."""
    name = str(value).removeprefix("OptimizerNames.").lower()
    if name in OPTIMIZERS:
        draft.take(key, value, OPTIMIZERS[name], note=BY_TORCHAO if "bit" in name else "")
        return
    draft.settings["optimizer.use"] = "adamw"
    if "8bit" in name or "4bit" in name or "paged" in name:
        remedy = "name the class: optimizer.use: package.module:Class"
        draft.refuse(key, value, f"the recipe has adamw: {SMALL_STATES}", remedy)
    else:
        draft.refuse(key, value, "the recipe has adamw", "name the class: optimizer.use: package.module:Class")


def schedule(draft: Draft, key: str, value: object) -> None:
    """Convert ``lr_scheduler_type``. Its ``kwargs`` have a separate rule."""
    name = str(value).removeprefix("SchedulerType.").lower()
    if name in SCHEDULES:
        draft.take(key, value, {"schedule.use": SCHEDULES[name]})
    else:
        remedy = "choose one of docs/reference/catalog.md, or set schedule.use: package.module:callable"
        draft.settings["schedule.use"] = "constant"
        draft.refuse(key, value, "the recipe has constant", remedy)


def schedule_arguments(draft: Draft, key: str, value: object) -> None:
    """Convert ``lr_scheduler_kwargs`` of the schedules that a recipe has."""
    values = value if isinstance(value, Mapping) else {}
    lr = number(draft.settings.get("optimizer.lr"))
    known: dict[str, object] = {}
    for name, each in values.items():
        amount = number(each)
        if name == "min_lr_rate":
            known["schedule.floor"] = amount
        elif name in ("min_lr", "lr_end") and isinstance(amount, int | float) and isinstance(lr, int | float) and lr:
            known["schedule.floor"] = float(f"{amount / lr:.12g}")
        elif name == "power":
            known["schedule.args.power"] = amount
        else:
            remedy = "see the arguments of the schedules in docs/reference/catalog.md"
            draft.refuse(f"{key}.{name}", each, "no counterpart is known", remedy)
    if known:
        draft.take(key, value, known)
    elif not values:
        draft.skip(key, value, "off")


def warmup_ratio(draft: Draft, key: str, value: object) -> None:
    """Convert ``warmup_ratio``. Steps take precedence."""
    if not number(value) or "schedule.warmup" in draft.settings:
        draft.skip(key, value, "off")
    else:
        draft.take(key, value, {"schedule.warmup": f"{number(value)!r}run"}, WARMUP)


def weight_decay(draft: Draft, key: str, value: object) -> None:
    """Convert ``weight_decay``. Trainer excludes norms and biases from it."""
    settings: dict[str, object] = {"optimizer.weight_decay": number(value)}
    if number(value):
        settings["optimizer.decay_norms_and_biases"] = False
    draft.take(key, value, settings, "not on norms and biases, as there" if number(value) else "")


def clipping(draft: Draft, key: str, value: object) -> None:
    """Convert ``max_grad_norm``. 0 turns it off."""
    if not number(value):
        draft.skip(key, value, "off")
    else:
        draft.take(key, value, {"optimizer.clip.by": "norm", "optimizer.clip.at": decimal(value)})


def max_steps(draft: Draft, key: str, value: object) -> None:
    """Convert ``max_steps``, which takes precedence over epochs. -1 turns it off."""
    amount = number(value)
    if isinstance(amount, int | float) and amount > 0:
        draft.take(key, value, {"until": f"{whole(amount)}steps"})
    else:
        draft.skip(key, value, "off")


def epochs(draft: Draft, key: str, value: object) -> None:
    """Convert ``num_train_epochs``, unless steps are set."""
    if str(draft.settings.get("until", "")).endswith("steps"):
        draft.skip(key, value, "max_steps wins")
    else:
        draft.take(key, value, {"until": f"{whole(number(value))}ep"})


def strategy(section: str) -> Rule:
    """Return the rule of ``eval_strategy`` or ``save_strategy``: no, steps, epoch or best."""

    def rule(draft: Draft, key: str, value: object) -> None:
        name = str(value).rpartition(".")[2].lower()
        if name == "epoch":
            draft.take(key, value, {f"{section}.every": "1ep"})
        elif name == "steps":
            draft.skip(key, value, "the number of steps is converted separately")
        elif name == "no" and section == "checkpoint":
            draft.take(key, value, {"checkpoint.every": None, "checkpoint.at_least_every": None})
        elif name == "no":
            draft.skip(key, value, "leave data.val out")
        elif name == "best" and section == "checkpoint":
            draft.skip(key, value, "the best checkpoint is always kept, see checkpoint.best")
        else:
            draft.refuse(key, value, "not known", f"set {section}.every in the recipe")

    return rule


def cadence(section: str, decided_by: str, values: Mapping[str, object]) -> Rule:
    """Return the rule of ``eval_steps`` or ``save_steps``, if the strategy counts in steps."""
    chosen = str(values.get(decided_by, "steps" if section == "checkpoint" else "no")).rpartition(".")[2].lower()

    def rule(draft: Draft, key: str, value: object) -> None:
        if chosen != "steps":
            draft.skip(key, value, f"{decided_by} does not count in steps")
        else:
            span(f"{section}.every")(draft, key, value)

    return rule


def best_metric(draft: Draft, key: str, value: object) -> None:
    """Convert ``metric_for_best_model``: ``eval_loss`` is ``loss``."""
    if value is None:
        draft.skip(key, value, "off")
    else:
        name = str(value).removeprefix("eval_")
        draft.take(key, value, {"checkpoint.best": name, **({"metrics": [name]} if name in METRICS else {})})


def greater_is_better(draft: Draft, key: str, value: object) -> None:
    if value is None:
        draft.skip(key, value, "off")
    else:
        draft.take(key, value, {"checkpoint.best_mode": "max" if value else "min"})


def tf32(draft: Draft, key: str, value: object) -> None:
    """Convert ``tf32``. null leaves it to torch; mixed precision takes precedence."""
    if value is None or "precision" in draft.settings:
        draft.skip(key, value, "off" if value is None else "of products of float32 matrices, which are few here")
    else:
        draft.take(key, value, {"precision": "tf32" if value else "fp32"})


def betas(draft: Draft, values: Mapping[str, object]) -> None:
    """Convert ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon``, which are arguments of the Adam family only."""
    given = {
        name: values[name] for name in ("adam_beta1", "adam_beta2", "adam_epsilon") if values.get(name) is not None
    }
    is_adam = draft.settings.get("optimizer.use") == "adamw"
    for name, value in given.items():
        if not is_adam:
            draft.skip(name, value, "the optimizer has none")
        elif name == "adam_epsilon":
            draft.take(name, value, {"optimizer.args.eps": number(value)})
        else:
            pair = [number(given.get("adam_beta1", 0.9)), number(given.get("adam_beta2", 0.999))]
            draft.take(name, value, {"optimizer.args.betas": pair})


def sinks(draft: Draft, key: str, value: object) -> None:
    """Convert ``report_to`` to the trackers that a recipe has."""
    names = value if isinstance(value, list) else [value]
    known = [name for name in names if name in SINKS]
    others = [name for name in names if name not in SINKS and not is_inactive(name)]
    if known:
        draft.take(key, value, {"log.sinks": known})
    if others:
        draft.refuse(key, others, f"not among {', '.join(SINKS)}", "see docs/how-to/trackers.md for custom trackers")
    if not known and not others:
        draft.skip(key, value, "off")


def decimal(value: object) -> object:
    """Return ``1.0`` for ``1``, because the recipe key is a float."""
    amount = number(value)
    return float(amount) if isinstance(amount, int) and not isinstance(amount, bool) else amount


def folder_as_name(draft: Draft, key: str, value: object) -> None:
    """Convert ``output_dir``: its last part names the run, whose folder is below ``runs``."""
    if is_inactive(value):
        draft.skip(key, value, "off")
    elif "name" in draft.settings:
        draft.skip(key, value, "runs lie below the folder of the recipe: runs")
    else:
        draft.take(key, value, {"name": run_name(value)}, "the last part names the run, below runs")


def tracker_name(draft: Draft, key: str, value: object) -> None:
    if is_inactive(value):
        draft.skip(key, value, "off")
    else:
        draft.take(key, value, {"name": run_name(value)})


LIGER = refused("no recipe key enables it", "use the fused loss of the built-in models (docs/how-to/out-of-memory.md)")
HUB = nothing("nothing is sent to a hub: trainwright export writes the folder")


def rules_for(values: Mapping[str, object]) -> dict[str, Rule]:
    """Return the rules in the order in which they are applied."""
    once_given = nothing("how the library computes it, not what")
    return {
        "run_name": tracker_name,
        "output_dir": folder_as_name,
        "max_steps": max_steps,
        "num_train_epochs": epochs,
        "learning_rate": at("optimizer.lr"),
        "optim": optimizer,
        "optim_args": refused("a string in a special format", "write them into optimizer.args"),
        "weight_decay": weight_decay,
        "max_grad_norm": clipping,
        "lr_scheduler_type": schedule,
        "lr_scheduler_kwargs": schedule_arguments,
        "warmup_steps": span("schedule.warmup", WARMUP),
        "warmup_ratio": warmup_ratio,
        "per_device_train_batch_size": at("batch.micro"),
        "gradient_accumulation_steps": at("batch.accumulation"),
        "per_device_eval_batch_size": at("evaluation.batch"),
        "bf16": switch("precision", "bf16"),
        "fp16": switch("precision", "fp16"),
        "tf32": tf32,
        "bf16_full_eval": refused("evaluation has the precision of training", "set precision"),
        "fp16_full_eval": refused("evaluation has the precision of training", "set precision"),
        "gradient_checkpointing": switch("model.activation_checkpointing", "block"),
        "activation_checkpointing": switch("model.activation_checkpointing", "block"),
        "gradient_checkpointing_kwargs": nothing("checkpoints are always non-reentrant"),
        "activation_checkpointing_kwargs": nothing("checkpoints are always non-reentrant"),
        "torch_compile": switch("model.compile"),
        "torch_compile_backend": refused("only inductor", "compile the model in your own function, and name that"),
        "torch_compile_mode": refused("only the default mode", "compile the model in your own function, and name that"),
        "label_smoothing_factor": refused(
            "the loss of the model has none", "write a loss with F.cross_entropy(..., label_smoothing=...), and name it"
        ),
        "neftune_noise_alpha": refused("no noise on embeddings", "add it in the forward of your model"),
        "eval_strategy": strategy("evaluation"),
        "evaluation_strategy": strategy("evaluation"),
        "eval_steps": cadence("evaluation", "eval_strategy" if "eval_strategy" in values else "evaluation_strategy",
                              values),
        "save_strategy": strategy("checkpoint"),
        "save_steps": cadence("checkpoint", "save_strategy", values),
        "save_total_limit": at("checkpoint.keep"),
        "load_best_model_at_end": switch("checkpoint.restore_best"),
        "metric_for_best_model": best_metric,
        "greater_is_better": greater_is_better,
        "logging_steps": span("log.every"),
        "logging_strategy": nothing("log.every sets it"),
        "report_to": sinks,
        "seed": at("seed"),
        "data_seed": refused("one seed for all", "set seed"),
        "full_determinism": switch("deterministic"),
        "use_cpu": switch("device", "cpu"),
        "no_cuda": switch("device", "cpu"),
        "dataloader_num_workers": at("data.workers"),
        "dataloader_prefetch_factor": at("data.prefetch"),
        "dataloader_drop_last": switch("data.drop_last"),
        "dataloader_pin_memory": at("data.pin_memory"),
        "train_sampling_strategy": refused_unless("random", "the order is random", "sort in your dataset"),
        "group_by_length": refused("the order is random", "sort or pack in your dataset (docs/how-to/data.md)"),
        "use_liger_kernel": LIGER,
        "deepspeed": refused("ranks share the state by FSDP", ZERO),
        "fsdp": refused("the number of ranks that share the state is a number here", ZERO),
        "fsdp_config": refused("the number of ranks that share the state is a number here", ZERO),
        "parallelism_config": refused("degrees are keys of parallel", "set parallel.tensor and the like"),
        "auto_find_batch_size": switch("batch.micro", "auto"),
        "resume_from_checkpoint": refused("a recipe begins a new run", "trainwright resume RUN continues one"),
        "hub_token": HUB,
        **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push"), HUB),
        **dict.fromkeys(("project", "trackio_space_id", "logging_dir", "disable_tqdm", "log_level"), nothing(REPORTED)),
        **dict.fromkeys(("log_level_replica", "log_on_each_node", "logging_first_step"), nothing(REPORTED)),
        **dict.fromkeys(("logging_nan_inf_filter", "skip_memory_metrics", "debug"), nothing(REPORTED)),
        **dict.fromkeys(("include_num_input_tokens_seen", "include_tokens_per_second"), nothing(REPORTED)),
        **dict.fromkeys(("local_rank", "ddp_backend", "ddp_timeout", "ddp_bucket_cap_mb"), nothing(f"ranks: {RANKS}")),
        **dict.fromkeys(("ddp_find_unused_parameters", "ddp_broadcast_buffers"), nothing(f"ranks: {RANKS}")),
        **dict.fromkeys(("do_train", "do_eval", "do_predict", "overwrite_output_dir"), nothing("set by the command")),
        **dict.fromkeys(("remove_unused_columns", "label_names"), nothing("the dataset returns the model inputs")),
        **dict.fromkeys(("length_column_name", "include_for_metrics"), nothing("your dataset returns it")),
        **dict.fromkeys(("dataloader_in_order", "dataloader_persistent_workers"), once_given),
        **dict.fromkeys(("eval_do_concat_batches", "use_cache"), once_given),
        **dict.fromkeys(("accelerator_config", "average_tokens_across_devices", "torch_empty_cache_steps"), once_given),
        **dict.fromkeys(("save_safetensors", "ignore_data_skip", "eval_accumulation_steps"), once_given),
    }  # fmt: skip


def refused_unless(value: object, why: str, remedy: str) -> Rule:
    """Return a rule as ``refused`` does, but accept ``value``, which describes the behaviour of a recipe."""

    def rule(draft: Draft, key: str, found: object) -> None:
        if found == value:
            draft.skip(key, found, "as here")
        else:
            refused(why, remedy)(draft, key, found)

    return rule


def _draft(values: Mapping[str, object]) -> Draft:
    """Apply the rule of each key to a new draft."""
    draft = Draft()
    stated = {key: value for key, value in values.items() if key not in ("adam_beta1", "adam_beta2", "adam_epsilon")}
    effective = {**DEFAULTS, **stated}
    rules = rules_for(effective)
    for key in (*rules, *(key for key in effective if key not in rules)):
        if key not in effective:
            continue
        value = effective[key]
        if key in rules:
            rules[key](draft, key, value)
        elif is_inactive(value):
            draft.skip(key, value, "off")
        else:
            draft.refuse(key, value, "no counterpart is known", "write in your recipe what it does")
    betas(draft, values)
    fill_in(draft)
    return draft


def fill_in(draft: Draft) -> None:
    """Leave model and data open, which are not part of ``TrainingArguments``. The model returns the loss."""
    draft.leave_open("model.use", "model:make_model", "a function in model.py that returns the model")
    draft.leave_open("data.train", "data:train_set", "a function in data.py that returns the training set")
    if "evaluation.every" in draft.settings:
        draft.leave_open("data.val", "data:val_set", "a function in data.py that returns the validation set")
    draft.settings.setdefault("loss", "of_model")
