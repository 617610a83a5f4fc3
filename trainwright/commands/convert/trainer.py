"""Converts ``TrainingArguments`` of transformers: the JSON of ``to_json_string`` or of ``HfArgumentParser``."""

from __future__ import annotations

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
    run_name,
    span,
    switch,
    whole,
)
from trainwright.recipe.catalog import SINKS

NAME = "TrainingArguments"
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
    """Convert ``optim``, also of axolotl."""
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
    """Convert ``lr_scheduler_type``, also of axolotl. Its ``kwargs`` have a separate rule."""
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


def warmup_steps(draft: Draft, key: str, value: object) -> None:
    """Convert ``warmup_steps``: a number of steps, or below 1 a fraction of the run."""
    amount = number(value)
    if not amount:
        draft.skip(key, value, "off")
    elif isinstance(amount, float) and amount < 1:
        draft.take(key, value, {"schedule.warmup": f"{amount!r}run"}, WARMUP)
    else:
        draft.take(key, value, {"schedule.warmup": f"{whole(amount)}steps"}, WARMUP)


def warmup_ratio(draft: Draft, key: str, value: object) -> None:
    """Convert ``warmup_ratio``, also of axolotl. Steps take precedence."""
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
            span(f"{section}.every", "steps", below_one="run")(draft, key, value)

    return rule


def best_metric(draft: Draft, key: str, value: object) -> None:
    """Convert ``metric_for_best_model``: ``eval_loss`` is ``loss``."""
    if value is None:
        draft.skip(key, value, "off")
    else:
        name = str(value).removeprefix("eval_")
        draft.take(key, value, best(name))


def greater_is_better(draft: Draft, key: str, value: object) -> None:
    if value is None:
        draft.skip(key, value, "off")
    else:
        draft.take(key, value, {"checkpoint.best_mode": "max" if value else "min"})


def precision(name: str) -> Rule:
    """Return the rule of ``bf16`` or ``fp16``. axolotl also has ``auto``."""

    def rule(draft: Draft, key: str, value: object) -> None:
        if value == "auto":
            draft.take(key, value, {"precision": "auto"})
        else:
            switch("precision", name)(draft, key, value)

    return rule


def tf32(draft: Draft, key: str, value: object) -> None:
    """Convert ``tf32``. null leaves it to torch; mixed precision takes precedence."""
    if value is None or "precision" in draft.settings:
        draft.skip(key, value, "off" if value is None else "of products of float32 matrices, which are few here")
    else:
        draft.take(key, value, {"precision": "tf32" if value else "fp32"})


def betas(draft: Draft, values: Mapping[str, object], above: str = "") -> None:
    """Convert ``adam_beta1``, ``adam_beta2`` and ``adam_epsilon``, which are arguments of the Adam family only."""
    given = {
        name: values[name] for name in ("adam_beta1", "adam_beta2", "adam_epsilon") if values.get(name) is not None
    }
    is_adam = draft.settings.get("optimizer.use") == "adamw"
    for name, value in given.items():
        if not is_adam:
            draft.skip(above + name, value, "the optimizer has none")
        elif name == "adam_epsilon":
            draft.take(above + name, value, {"optimizer.args.eps": number(value)})
        else:
            pair = [number(given.get("adam_beta1", 0.9)), number(given.get("adam_beta2", 0.999))]
            draft.take(above + name, value, {"optimizer.args.betas": pair})


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
        "warmup_steps": warmup_steps,
        "warmup_ratio": warmup_ratio,
        "per_device_train_batch_size": at("batch.micro"),
        "gradient_accumulation_steps": at("batch.accumulation"),
        "per_device_eval_batch_size": at("evaluation.batch"),
        "bf16": precision("bf16"),
        "fp16": precision("fp16"),
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
        "logging_steps": span("log.every", "steps", below_one="run"),
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


def convert(values: Mapping[str, object]) -> Draft:
    """Return the draft of a recipe from the arguments of ``Trainer``."""
    draft = Draft()
    stated = {key: value for key, value in values.items() if key not in ("adam_beta1", "adam_beta2", "adam_epsilon")}
    effective = {**DEFAULTS, **stated}
    rules = rules_for(effective)
    ordered = {key: effective[key] for key in (*rules, *effective) if key in effective}
    apply(rules, ordered, draft, of=NAME)
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
