"""Converts the YAML of axolotl: fine-tuning of a causal language model of transformers."""

from __future__ import annotations

from collections.abc import Mapping

from trainwright.commands.convert.draft import (
    Draft,
    Rule,
    apply,
    at,
    is_inactive,
    nothing,
    number,
    refused,
    span,
    switch,
)
from trainwright.commands.convert.trainer import (
    HUB,
    REPORTED,
    ZERO,
    best_metric,
    betas,
    clipping,
    decimal,
    epochs,
    folder_as_name,
    greater_is_better,
    max_steps,
    optimizer,
    precision,
    schedule,
    strategy,
    tf32,
    warmup_ratio,
    warmup_steps,
    weight_decay,
)

NAME = "axolotl"
DEFAULTS: Mapping[str, object] = {
    "optimizer": "adamw_torch_fused",
    "lr_scheduler": "cosine",
    "num_epochs": 1.0,
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "seed": 42,
}
"""Defaults of axolotl that change the result; the recipe states them."""
ATTENTION: Mapping[str, str] = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
    "flex_attention": "flex_attention",
}
DATASETS: Mapping[str, str] = {"chat_template": "chat", "sharegpt": "chat", "alpaca": "instruct", "completion": "text"}
"""Types of data sets, and their names here."""
PAIRS: Mapping[str, str] = {"dpo": "dpo", "ipo": "", "kto": "", "orpo": "", "simpo": "", "grpo": ""}
"""Values of ``rl``, and the losses that are equal to theirs."""
ONE_SET = "a data set is one file, folder or hub name of one layout"
TOKENIZER = "the tokenizer is used as it was saved"
QUANTIZED = "weights are trained as they are"
WITHOUT_QUANTIZED = "adapters of full weights (model.lora), on a device that holds them"


def base_model(draft: Draft, key: str, value: object) -> None:
    settings = {"model.use": "hf", "model.args.name": value}
    draft.take(
        key, value, settings, "its weights are read from safetensors, in float32 unless model.args.dtype says more"
    )


def adapter(draft: Draft, key: str, value: object) -> None:
    if is_inactive(value):
        draft.skip(key, value, "off")
    elif value == "lora":
        draft.take(key, value, {"model.lora.rank": 8})
    elif value == "qlora":
        draft.take(key, value, {"model.lora.rank": 8, "model.lora.quantize": "nf4"}, "by torchao")
    else:
        draft.refuse(key, value, "no such adapters", "model.lora has LoRA, DoRA, rsLoRA and QLoRA")


def in_4_bits(draft: Draft, key: str, value: object) -> None:
    if is_inactive(value) or "model.lora.quantize" in draft.settings:
        draft.skip(key, value, "as adapter says")
    else:
        draft.refuse(key, value, QUANTIZED, WITHOUT_QUANTIZED)


def of_lora(name: str) -> Rule:
    """Return the rule of an adapter setting. Without an adapter it has no effect."""

    def rule(draft: Draft, key: str, value: object) -> None:
        if is_inactive(value) or not any(path.startswith("model.lora.") for path in draft.settings):
            draft.skip(key, value, "off")
        else:
            draft.take(key, value, {f"model.lora.{name}": decimal(value) if name in ("alpha", "dropout") else value})

    return rule


def target_linear(draft: Draft, key: str, value: object) -> None:
    """Target every linear layer but the output layer."""
    if is_inactive(value) or "model.lora.targets" in draft.settings:
        draft.skip(key, value, "off")
    else:
        draft.take(key, value, {"model.lora.targets": ["all-linear"]})


def attention(draft: Draft, key: str, value: object) -> None:
    name = ATTENTION.get(key) if value is True else value
    if is_inactive(value) or not isinstance(name, str):
        draft.skip(key, value, "off")
    else:
        draft.take(key, value, {"model.args.attn_implementation": name})


def checkpointing(draft: Draft, key: str, value: object) -> None:
    if value in ("offload", "offload_disk"):
        draft.settings["model.activation_checkpointing"] = "block"
        draft.refuse(key, value, "activations are computed again, not moved", "the recipe has block")
    else:
        switch("model.activation_checkpointing", "block")(draft, key, value)


def learning_rate(draft: Draft, key: str, value: object) -> None:
    at("optimizer.lr")(draft, key, value)


def per_epoch(path: str) -> Rule:
    """Return the rule of a number per epoch."""

    def rule(draft: Draft, key: str, value: object) -> None:
        amount = number(value)
        if not isinstance(amount, int | float) or amount <= 0:
            draft.skip(key, value, "off")
        else:
            draft.take(key, value, {path: f"{1 / amount:.6g}ep"})

    return rule


def tracker(name: str) -> Rule:
    def rule(draft: Draft, key: str, value: object) -> None:
        if is_inactive(value):
            draft.skip(key, value, "off")
            return
        known = draft.settings.get("log.sinks", [])
        draft.take(key, value, {"log.sinks": [*(known if isinstance(known, list) else []), name]})

    return rule


def early_stopping(draft: Draft, key: str, value: object) -> None:
    if is_inactive(value):
        draft.skip(key, value, "off")
    else:
        draft.take(key, value, {"observers": [{"use": "early_stopping", "args": {"patience": value}}]})


def arguments(draft: Draft, key: str, value: object) -> None:
    """Convert ``optim_args`` given as a mapping."""
    if isinstance(value, Mapping) and value:
        draft.take(key, value, {f"optimizer.args.{name}": number(each) for name, each in value.items()})
    else:
        refused("a string in a special format", "write them into optimizer.args")(draft, key, value)


def datasets(draft: Draft, key: str, value: object) -> None:
    """Convert a list of one data set of a known type."""
    listed = value if isinstance(value, list) else [value]
    first = listed[0] if listed and isinstance(listed[0], Mapping) else {}
    kind, path = str(first.get("type") or ""), first.get("path")
    use = "preference" if "loss.use" in draft.settings else DATASETS.get(kind.partition(":")[0].partition(".")[0])
    if len(listed) != 1:
        draft.refuse(key, value, ONE_SET, "join them into one file, and name it in data.train.args.path")
    elif use is None or not isinstance(path, str):
        remedy = "convert it to chat, instruct, completion, text or preference (docs/how-to/chat-data.md)"
        draft.refuse(key, value, f"no layout is known for type: {kind}", remedy)
    else:
        files = first.get("data_files")
        given = files if isinstance(files, str) else path
        settings = {"data.train.use": use, "data.train.args.path": given}
        if isinstance(split := first.get("split"), str) and split != "train":
            settings["data.train.args.source_split"] = split
        draft.take(key, value, settings, "trainwright check RECIPE shows which tokens carry loss")


def of_data(name: str, value_here: object = None) -> Rule:
    """Return the rule of an option of the data set. Without a data set it is refused."""

    def rule(draft: Draft, key: str, value: object) -> None:
        if is_inactive(value):
            draft.skip(key, value, "off")
        elif "data.train.use" not in draft.settings:
            draft.refuse(key, value, "there is no data set in the recipe", f"set data.train.args.{name}")
        else:
            draft.take(key, value, {f"data.train.args.{name}": number(value) if value_here is None else value_here})

    return rule


def max_length(draft: Draft, key: str, value: object) -> None:
    """Drop longer samples, as axolotl does."""
    if "data.train.use" not in draft.settings or is_inactive(value):
        of_data("max_length")(draft, key, value)
        return
    settings = {"data.train.args.max_length": number(value), "data.train.args.truncate": "drop"}
    draft.take(key, value, settings, "longer samples are left out")


def packing(draft: Draft, key: str, value: object) -> None:
    length = draft.settings.get("data.train.args.max_length")
    if is_inactive(value):
        draft.skip(key, value, "off")
    elif length is None or "loss.use" in draft.settings:
        draft.refuse(key, value, "there is no length of the rows", "set data.packing: {by: bfd, max_length: 2048}")
    else:
        draft.take(key, value, {"data.packing": {"by": "bfd", "max_length": length}}, "batch sizes count rows")


def chat_template(draft: Draft, key: str, value: object) -> None:
    if is_inactive(value) or value == "tokenizer_default":
        draft.skip(key, value, "that of the tokenizer")
    elif isinstance(value, str) and "{" in value:
        of_data("chat_template")(draft, key, value)
    elif value == "jinja":
        draft.skip(key, value, "see chat_template_jinja")
    else:
        remedy = "write its text into a file, and set data.train.args.chat_template to that file"
        draft.refuse(key, value, "templates by name are files of axolotl", remedy)


def held_out(draft: Draft, key: str, value: object) -> None:
    """Convert ``val_set_size``: both sets get the fraction, and all options of the training set."""
    amount = number(value)
    if is_inactive(value):
        draft.skip(key, value, "off")
    elif "data.train.use" not in draft.settings:
        draft.refuse(key, value, "there is no data set in the recipe", "set val_fraction of data.train and data.val")
    elif not isinstance(amount, float) or not 0 < amount < 1:
        draft.refuse(key, value, "the validation set is a fraction", "set val_fraction of data.train and data.val")
    else:
        settings = {"data.train.args.val_fraction": amount, "data.val.args.split": "val"}
        draft.take(key, value, settings, "by content: nearly equal records stay on one side")


def preference(draft: Draft, key: str, value: object) -> None:
    if is_inactive(value):
        draft.skip(key, value, "off")
    elif loss := PAIRS.get(str(value)):
        draft.take(key, value, {"loss.use": loss})
    else:
        draft.refuse(key, value, "there is no such loss", "see docs/how-to/dpo.md and docs/how-to/grpo.md")


def of_dpo(draft: Draft, key: str, value: object) -> None:
    if value is None or "loss.use" not in draft.settings:
        draft.skip(key, value, "off")
    else:
        draft.take(key, value, {"loss.args.beta": number(value)})


def noise(draft: Draft, key: str, value: object) -> None:
    if is_inactive(value) or "loss.use" in draft.settings:
        draft.skip(key, value, "off")
    else:
        draft.take(key, value, {"loss.use": "hf_causal_lm", "loss.args.neftune_alpha": decimal(value)})


OFF = nothing("off, or as here")
RULES: Mapping[str, Rule] = {
    "base_model": base_model,
    "model_type": nothing("transformers finds the class"),
    "trust_remote_code": refused(
        "code of a repository is not executed unasked", "read it, then set model.trust_remote_code: true"
    ),
    "revision_of_model": at("model.args.revision"),
    "load_in_8bit": refused(QUANTIZED, WITHOUT_QUANTIZED),
    "adapter": adapter,
    "load_in_4bit": in_4_bits,
    "lora_r": of_lora("rank"),
    "lora_alpha": of_lora("alpha"),
    "lora_dropout": of_lora("dropout"),
    "lora_target_modules": of_lora("targets"),
    "lora_target_linear": target_linear,
    "lora_modules_to_save": refused("adapters only", "train all weights, or freeze by model.freeze"),
    "lora_model_dir": refused("adapters begin at zero", "trainwright resume RUN continues a run"),
    "peft_use_dora": of_lora("dora"),
    "peft_use_rslora": of_lora("rslora"),
    **dict.fromkeys(("flash_attention", "sdp_attention", "eager_attention", "flex_attention"), attention),
    "attn_implementation": attention,
    "output_dir": folder_as_name,
    "max_steps": max_steps,
    "num_epochs": epochs,
    "micro_batch_size": at("batch.micro"),
    "gradient_accumulation_steps": at("batch.accumulation"),
    "eval_batch_size": at("evaluation.batch"),
    "learning_rate": learning_rate,
    "optimizer": optimizer,
    "optim_args": arguments,
    "weight_decay": weight_decay,
    "max_grad_norm": clipping,
    "lr_scheduler": schedule,
    "cosine_min_lr_ratio": at("schedule.floor"),
    "warmup_steps": warmup_steps,
    "warmup_ratio": warmup_ratio,
    "bf16": precision("bf16"),
    "fp16": precision("fp16"),
    "tf32": tf32,
    "gradient_checkpointing": checkpointing,
    "gradient_checkpointing_kwargs": nothing("checkpoints are always non-reentrant, which gives the same gradients"),
    "torch_compile": switch("model.compile"),
    "evals_per_epoch": per_epoch("evaluation.every"),
    "eval_steps": span("evaluation.every", "steps", below_one="run"),
    "eval_strategy": strategy("evaluation"),
    "saves_per_epoch": per_epoch("checkpoint.every"),
    "save_steps": span("checkpoint.every", "steps", below_one="run"),
    "save_strategy": strategy("checkpoint"),
    "save_total_limit": at("checkpoint.keep"),
    "load_best_model_at_end": switch("checkpoint.restore_best"),
    "metric_for_best_model": best_metric,
    "greater_is_better": greater_is_better,
    "early_stopping_patience": early_stopping,
    "logging_steps": span("log.every", "steps", below_one="run"),
    "wandb_project": tracker("wandb"),
    "use_wandb": tracker("wandb"),
    "use_tensorboard": tracker("tensorboard"),
    "mlflow_experiment_name": tracker("mlflow"),
    "use_mlflow": tracker("mlflow"),
    "seed": at("seed"),
    "dataloader_num_workers": at("data.workers"),
    "dataloader_prefetch_factor": at("data.prefetch"),
    "dataloader_drop_last": switch("data.drop_last"),
    "dataloader_pin_memory": at("data.pin_memory"),
    "tensor_parallel_size": at("parallel.tensor"),
    "context_parallel_size": at("parallel.context"),
    "dp_shard_size": at("parallel.shard"),
    "dp_replicate_size": at("parallel.replicate"),
    "deepspeed": refused("ranks share the state by FSDP", ZERO),
    "fsdp": refused("the number of ranks that share the state is a number here", ZERO),
    "fsdp_config": refused("the number of ranks that share the state is a number here", ZERO),
    "fsdp_version": nothing("FSDP 2"),
    "rl": preference,
    **dict.fromkeys(("rl_beta", "dpo_beta"), of_dpo),
    "datasets": datasets,
    "pretraining_dataset": refused(
        "a stream of texts is not read", "set data.train: {use: text, args: {path: ...}} (docs/how-to/chat-data.md)"
    ),
    "test_datasets": refused(ONE_SET, "name a file in data.val"),
    "sequence_len": max_length,
    "sample_packing": packing,
    "eval_sample_packing": nothing("validation is packed as training is"),
    "pad_to_sequence_len": nothing("batches are padded to their longest sample"),
    "train_on_inputs": of_data("train_on", "all"),
    "chat_template": chat_template,
    "chat_template_jinja": chat_template,
    "val_set_size": held_out,
    "special_tokens": refused(TOKENIZER, "set them, and save it: tokenizer.save_pretrained(folder)"),
    "tokens": refused(TOKENIZER, "add them, resize the embedding, and save both in one folder"),
    "group_by_length": refused(
        "batches are drawn in random order", "sort or pack in your dataset (docs/how-to/data.md)"
    ),
    "neftune_noise_alpha": noise,
    "loss_watchdog_threshold": nothing("the doctor examines each step, and spikes has a policy"),
    "loss_watchdog_patience": nothing("the doctor examines each step, and spikes has a policy"),
    "plugins": refused("code of axolotl", "see docs/how-to/custom-step.md for custom steps"),
    "resume_from_checkpoint": refused("a recipe begins a new run", "trainwright resume RUN continues one"),
    "auto_resume_from_checkpoints": refused("a recipe begins a new run", "trainwright resume RUN continues one"),
    "hub_model_id": HUB,
    "hub_strategy": HUB,
    "push_dataset_to_hub": HUB,
    "hf_use_auth_token": HUB,
    "save_safetensors": OFF,
    "strict": OFF,
    "dataset_prepared_path": nothing("tokens are cached"),
    **dict.fromkeys(("dataset_processes", "dataset_num_proc", "dataset_keep_in_memory"), nothing("tokens are cached")),
    **dict.fromkeys(("tokenizer_type", "tokenizer_config", "tokenizer_use_fast"), nothing("that of the model")),
    **dict.fromkeys(("is_llama_derived_model", "is_mistral_derived_model", "is_falcon_derived_model"), OFF),
    **dict.fromkeys(
        ("wandb_entity", "wandb_watch", "wandb_name", "wandb_log_model", "wandb_run_id"), nothing(REPORTED)
    ),
    **dict.fromkeys(("debug", "save_first_step", "profiler_steps", "include_tokens_per_second"), nothing(REPORTED)),
    **dict.fromkeys(("ddp_timeout", "ddp_bucket_cap_mb", "ddp_find_unused_parameters", "local_rank"), OFF),
    **dict.fromkeys(("low_cpu_mem_usage", "gpu_memory_limit", "gc_steps", "device_map"), OFF),
}


def convert(values: Mapping[str, object]) -> Draft:
    """Return the draft of a recipe from a configuration of axolotl."""
    draft = Draft()
    moments = ("adam_beta1", "adam_beta2", "adam_epsilon")
    effective = {**DEFAULTS, **{key: value for key, value in values.items() if key not in moments}}
    ordered = {key: effective[key] for key in (*RULES, *effective) if key in effective}
    apply(RULES, ordered, draft, of=NAME)
    betas(draft, values)
    draft.leave_open("model.use", "model:make_model", "a function in model.py that returns the model")
    if "data.train.use" not in draft.settings:
        draft.leave_open("data.train", "data:train_set", "a data set (docs/how-to/chat-data.md)")
        draft.leave_open("data.val", "data:val_set", "the same for validation, or leave it out")
    elif "data.val.args.split" in draft.settings:  # the same file with the same options
        same = {path: value for path, value in draft.settings.items() if path.startswith("data.train.")}
        draft.settings |= {path.replace("data.train.", "data.val."): value for path, value in same.items()}
    if "loss.use" not in draft.settings:
        draft.settings["loss"] = "hf_causal_lm"
    return draft
