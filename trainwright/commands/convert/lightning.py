"""Converts the YAML of LightningCLI: ``trainer``, ``model``, ``data``, ``optimizer``, ``lr_scheduler``."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainwright.commands.convert.draft import (
    Draft,
    Rule,
    apply,
    at,
    best,
    is_inactive,
    nothing,
    number,
    refused,
    span,
    switch,
)
from trainwright.commands.convert.trainer import RANKS, REPORTED, clipping
from trainwright.recipe.catalog import OPTIMIZERS

NAME = "LightningCLI"
DEFAULT_EPOCHS = 1000
"""Epochs that ``Trainer`` trains if epochs, steps and time are not limited."""
PRECISIONS: Mapping[str, str | None] = {
    "32-true": None,
    "32": None,
    "16-mixed": "fp16",
    "16": "fp16",
    "bf16-mixed": "bf16",
    "bf16": "bf16",
}
IN_THE_BOX: Mapping[str, str] = {
    row.factory.replace(":", "."): name for name, row in OPTIMIZERS.items() if row.factory.startswith("torch.optim:")
}
LOGGERS: Mapping[str, str] = {
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
    "MLFlowLogger": "mlflow",
    "CSVLogger": "csv",
}
IN_CODE = "move the computation of training_step into a function loss(model, batch) (docs/how-to/migrate.md)"


def reference(class_path: object) -> str:
    """Return ``package.module:Class`` for ``package.module.Class``."""
    module, _, name = str(class_path).rpartition(".")
    return f"{module}:{name}" if module else str(class_path)


def parts(value: object) -> tuple[str, dict[str, object]]:
    """Return ``class_path`` and ``init_args``. A plain string is a class path."""
    if isinstance(value, Mapping):
        arguments = value.get("init_args", value.get("dict_kwargs"))
        return str(value.get("class_path", "")), dict(arguments) if isinstance(arguments, Mapping) else {}
    return str(value), {}


def seed(draft: Draft, key: str, value: object) -> None:
    """Convert ``seed_everything``. With true, Lightning draws a seed."""
    if value is True or is_inactive(value):
        draft.skip(key, value, "the seed of a recipe is 1337, and in its run folder")
    else:
        draft.take(key, value, {"seed": value})


def max_epochs(draft: Draft, key: str, value: object) -> None:
    amount = number(value)
    if "until" in draft.settings:
        draft.skip(key, value, "max_steps ends the run earlier, or set until yourself")
    elif isinstance(amount, int) and amount > 0:
        draft.take(key, value, {"until": f"{amount}ep"})
    elif amount == -1:
        draft.refuse(key, value, "a run has an end", "set until")
    else:
        draft.skip(key, value, "off")


def max_steps(draft: Draft, key: str, value: object) -> None:
    amount = number(value)
    if isinstance(amount, int) and amount > 0:
        draft.take(key, value, {"until": f"{amount}steps"})
    else:
        draft.skip(key, value, "off")


def max_time(draft: Draft, key: str, value: object) -> None:
    """Convert ``DD:HH:MM:SS``, or a mapping of days, hours, minutes and seconds."""
    seconds = 0.0
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+):(\d+):(\d+):(\d+)", value)):
        days, hours, minutes, rest = map(int, found.groups())
        seconds = ((days * 24 + hours) * 60 + minutes) * 60 + rest
    elif isinstance(value, Mapping):
        units = {"weeks": 604800, "days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
        amounts = [(units.get(str(name), 0), number(each)) for name, each in value.items()]
        seconds = sum(unit * each for unit, each in amounts if isinstance(each, int | float))
    if not seconds:
        refused("not a time", "set until, for example 90min")(draft, key, value)
    elif "until" in draft.settings:
        draft.refuse(key, value, "a run ends by one limit, and steps are given", f"set until: {int(seconds)}s")
    else:
        draft.take(key, value, {"until": f"{int(seconds)}s"})


def precision(draft: Draft, key: str, value: object) -> None:
    name = str(value)
    if value is None:
        draft.skip(key, value, "off")
    elif name not in PRECISIONS:
        remedy = "choose precision: fp32, tf32, bf16 or fp16; the weights stay in float32"
        draft.refuse(key, value, "no such precision", remedy)
    elif (ours := PRECISIONS[name]) is None:
        draft.skip(key, value, "the default")
    else:
        draft.take(key, value, {"precision": ours})


def accelerator(draft: Draft, key: str, value: object) -> None:
    device = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "auto": "auto"}.get(str(value))
    if device is None:
        draft.refuse(key, value, "no such device", "device is cpu, cuda or auto")
    else:
        draft.take(key, value, {"device": device})


def ranks(draft: Draft, key: str, value: object) -> None:
    """Convert ``devices`` and ``num_nodes``. The command line sets the number of ranks."""
    if value in (1, "1", "auto", -1, "-1"):
        draft.skip(key, value, f"ranks: {RANKS}")
    else:
        draft.refuse(key, value, "a recipe does not define the number of ranks", RANKS)


def strategy(draft: Draft, key: str, value: object) -> None:
    name = str(value.get("class_path") if isinstance(value, Mapping) else value).lower()
    if name in ("auto", "ddp", "single_device", "ddp_find_unused_parameters_true"):
        draft.skip(key, value, "ranks are copies of the model unless parallel says otherwise")
    else:
        remedy = "set parallel.shard, or parallel: auto (docs/how-to/several-gpus.md)"
        draft.refuse(key, value, "degrees are keys of parallel", remedy)


def val_check_interval(draft: Draft, key: str, value: object) -> None:
    """Convert an integer as a number of batches, a float as a fraction of an epoch."""
    amount = number(value)
    if isinstance(amount, bool) or not isinstance(amount, int | float):
        refused("not a number", "set evaluation.every")(draft, key, value)
    elif isinstance(amount, int):
        accumulated = number(draft.settings.get("batch.accumulation", 1))
        steps = amount // accumulated if isinstance(accumulated, int) and amount % accumulated == 0 else None
        if steps:
            draft.take(key, value, {"evaluation.every": f"{steps}steps"}, "batches there, optimizer steps here")
        else:
            draft.refuse(key, value, "batches, which are no whole number of optimizer steps", "set evaluation.every")
    elif amount != 1 or "evaluation.every" not in draft.settings:
        draft.take(key, value, {"evaluation.every": f"{amount:g}ep"})
    else:
        draft.skip(key, value, "off")


def limit_batches(draft: Draft, key: str, value: object) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        draft.take(key, value, {"evaluation.batches": value})
    elif value in (None, 1.0):
        draft.skip(key, value, "off")
    else:
        draft.refuse(key, value, "a number of batches", "set evaluation.batches, or leave data.val out")


def clip_algorithm(draft: Draft, key: str, value: object) -> None:
    if is_inactive(value) or "optimizer.clip.at" not in draft.settings:
        draft.skip(key, value, "off")
    else:
        draft.take(key, value, {"optimizer.clip.by": value})


def logger(draft: Draft, key: str, value: object) -> None:
    found: list[str] = []
    for each in value if isinstance(value, list) else [value]:
        name = parts(each)[0].rpartition(".")[2]
        if name in LOGGERS:
            found.append(LOGGERS[name])
            draft.take(key, name, {"log.sinks": [*found]})
        elif isinstance(each, bool) or is_inactive(each):
            draft.skip(key, each, REPORTED)
        else:
            draft.refuse(
                key, name, f"not among {', '.join(LOGGERS)}", "see docs/how-to/trackers.md for custom trackers"
            )


def callbacks(draft: Draft, key: str, value: object) -> None:
    for each in value if isinstance(value, list) else [value]:
        path, arguments = parts(each)
        name = path.rpartition(".")[2]
        row = f"{key}.{name}" if name else key
        if name == "EarlyStopping":
            args: dict[str, object] = {"metric": metric_name(arguments.get("monitor", "loss"))}
            args["patience"] = arguments.get("patience", 3)
            args |= {each: number(arguments[each]) for each in ("mode", "min_delta") if each in arguments}
            observers = draft.settings.get("observers", [])
            observers = [*(observers if isinstance(observers, list) else []), {"use": "early_stopping", "args": args}]
            draft.take(row, arguments, {"observers": observers})
        elif name == "ModelCheckpoint":
            apply(CHECKPOINT, arguments, draft, of=NAME, above=f"{row}.")
        elif name in ("LearningRateMonitor", "DeviceStatsMonitor", "ModelSummary", "RichModelSummary", "Timer"):
            draft.skip(row, arguments, REPORTED)
        elif name in ("RichProgressBar", "TQDMProgressBar"):
            draft.skip(row, arguments, "the terminal shows it")
        elif name == "StochasticWeightAveraging":
            apply(AVERAGING, {"swa_epoch_start": 0.8, **arguments}, draft, of=NAME, above=f"{row}.")
        elif not is_inactive(each):
            remedy = "write it as an observer: a function of (result, state), and name it in observers"
            draft.refuse(row, arguments, "your own code", remedy)


def metric_name(value: object) -> str:
    """Return ``val_loss`` and ``val/acc`` without the name of the set."""
    return re.sub(r"^(val|valid|validation|eval)[_/]", "", str(value))


def monitor(draft: Draft, key: str, value: object) -> None:
    if value is None:
        draft.skip(key, value, "off")
    else:
        name = metric_name(value)
        draft.take(key, value, best({"acc": "accuracy"}.get(name, name)))


def save_top_k(draft: Draft, key: str, value: object) -> None:
    if value in (1, -1):
        draft.skip(key, value, "the best one is kept, and the newest")
    else:
        draft.refuse(key, value, "one best checkpoint is kept, and the newest", "set checkpoint.keep")


def swa_start(draft: Draft, key: str, value: object) -> None:
    unit = "run" if isinstance(value, float) else "ep"
    draft.take(key, value, {"model.swa.start": f"{value}{unit}"})


AVERAGING: Mapping[str, Rule] = {
    "swa_epoch_start": swa_start,
    "swa_lrs": at("model.swa.lr"),
    "annealing_epochs": span("model.swa.anneal", "ep"),
    "annealing_strategy": at("model.swa.anneal_by"),
}
CHECKPOINT: Mapping[str, Rule] = {
    "monitor": monitor,
    "mode": at("checkpoint.best_mode"),
    "save_top_k": save_top_k,
    "every_n_train_steps": span("checkpoint.every", "steps"),
    "every_n_epochs": span("checkpoint.every", "ep"),
    **dict.fromkeys(("filename", "dirpath", "save_last", "auto_insert_metric_name"), nothing("checkpoints have names")),
    **dict.fromkeys(("verbose", "save_weights_only", "enable_version_counter"), nothing("checkpoints hold all")),
}
TRAINER: Mapping[str, Rule] = {
    "max_steps": max_steps,
    "max_epochs": max_epochs,
    "max_time": max_time,
    "accumulate_grad_batches": at("batch.accumulation"),
    "gradient_clip_val": clipping,
    "gradient_clip_algorithm": clip_algorithm,
    "precision": precision,
    "accelerator": accelerator,
    "devices": ranks,
    "num_nodes": ranks,
    "strategy": strategy,
    "check_val_every_n_epoch": span("evaluation.every", "ep"),
    "val_check_interval": val_check_interval,
    "limit_val_batches": limit_batches,
    "limit_train_batches": refused("an epoch is one pass over the data", "shorten the dataset, or set until"),
    "overfit_batches": refused("trainwright check overfits one batch", "trainwright check RECIPE"),
    "fast_dev_run": refused("trainwright check tries the first steps", "trainwright check RECIPE"),
    "log_every_n_steps": span("log.every", "steps"),
    "deterministic": switch("deterministic"),
    "sync_batchnorm": switch("parallel.sync_batchnorm"),
    "enable_checkpointing": nothing("checkpoints are always written"),
    "default_root_dir": at("folder"),
    "logger": logger,
    "callbacks": callbacks,
    "min_epochs": refused("a run has one end", "set until"),
    "min_steps": refused("a run has one end", "set until"),
    "plugins": refused("your own code", "see docs/how-to/custom-step.md for custom steps"),
    "profiler": nothing("trainwright profile RECIPE"),
    "detect_anomaly": nothing("log.doctor traces what is not finite"),
    "limit_test_batches": nothing("trainwright evaluate RUN tests"),
    "limit_predict_batches": nothing("trainwright predict RUN"),
    **dict.fromkeys(("enable_progress_bar", "enable_model_summary", "num_sanity_val_steps"), nothing(REPORTED)),
    **dict.fromkeys(("benchmark", "inference_mode", "barebones"), nothing("how it is computed, not what")),
    **dict.fromkeys(("use_distributed_sampler", "reload_dataloaders_every_n_epochs"), nothing("the order is built in")),
    **dict.fromkeys(("model_registry", "enable_autolog_hparams"), nothing(REPORTED)),
}


def model(draft: Draft, key: str, value: object) -> None:
    path, arguments = parts(value)
    if path:
        settings: dict[str, object] = {"model.use": reference(path)}
        settings |= {f"model.args.{name}": each for name, each in arguments.items()}
        draft.take(key, path, settings, IN_CODE)
    elif isinstance(value, Mapping) and value:
        draft.settings["model.use"] = "model:make_model"
        draft.to_fill_in["model.use"] = "package.module:Class of your LightningModule, or of the module inside it"
        draft.take(key, value, {f"model.args.{name}": each for name, each in value.items()}, IN_CODE)
    else:
        draft.skip(key, value, "off")


def data(draft: Draft, key: str, value: object) -> None:
    path, arguments = parts(value)
    if not path and isinstance(value, Mapping):
        arguments = dict(value)
    for name, target in (
        ("batch_size", "batch.micro"),
        ("train_batch_size", "batch.micro"),
        ("num_workers", "data.workers"),
    ):
        if name in arguments and target not in draft.settings:
            each = arguments.pop(name)
            draft.take(f"{key}.{name}", each, {target: number(each)})
    if path or arguments:
        remedy = "write functions that return the sets, and name them in data.train and data.val"
        draft.refuse(key, path or arguments, "a data module makes its own loaders", remedy)


def optimizer(draft: Draft, key: str, value: object) -> None:
    path, arguments = parts(value)
    settings: dict[str, object] = {"optimizer.use": IN_THE_BOX.get(path, reference(path))}
    for name, each in arguments.items():
        above = "optimizer" if name in ("lr", "weight_decay") else "optimizer.args"
        settings[f"{above}.{name}"] = number(each)
    draft.take(key, path, settings)


def scheduler(draft: Draft, key: str, value: object) -> None:
    """Convert a scheduler, which is stepped once per epoch as in LightningCLI."""
    path, arguments = parts(value)
    if path.endswith("ReduceLROnPlateau"):
        remedy = "choose a schedule of docs/reference/catalog.md, or step one in an observer"
        draft.refuse(key, path, "no schedule here follows a metric", remedy)
        return
    settings: dict[str, object] = {"schedule.use": reference(path), "schedule.every": "1ep"}
    settings |= {f"schedule.args.{name}": number(each) for name, each in arguments.items()}
    draft.take(key, path, settings, "stepped once an epoch, as there")


def convert(values: Mapping[str, object]) -> Draft:
    """Return the draft of a recipe from a configuration of LightningCLI."""
    draft = Draft()
    sections: dict[str, Rule] = {
        "seed_everything": seed,
        "model": model,
        "data": data,
        "optimizer": optimizer,
        "lr_scheduler": scheduler,
        "ckpt_path": refused("a recipe begins a new run", "trainwright resume RUN continues one"),
    }
    trainer = values.get("trainer")
    settings = trainer if isinstance(trainer, Mapping) else {}
    ordered = {key: settings[key] for key in (*TRAINER, *settings) if key in settings}
    apply(TRAINER, ordered, draft, of=NAME, above="trainer.")
    apply(sections, {key: value for key, value in values.items() if key != "trainer"}, draft, of=NAME)
    if "until" not in draft.settings:
        draft.take("trainer.max_epochs", None, {"until": f"{DEFAULT_EPOCHS}ep"}, "the default of Trainer")
    draft.leave_open("model.use", "model:make_model", "a function in model.py that returns the model")
    draft.leave_open("data.train", "data:train_set", "a function in data.py that returns the training set")
    draft.leave_open("data.val", "data:val_set", "a function in data.py that returns the validation set")
    draft.leave_open("loss", "model:loss", "a function loss(model, batch) in model.py: what training_step computes")
    draft.leave_open("batch.micro", 32, "the batch size of your DataLoader")
    if "optimizer" not in values:
        draft.leave_open("optimizer.use", "adamw", "what configure_optimizers returns")
    return draft
