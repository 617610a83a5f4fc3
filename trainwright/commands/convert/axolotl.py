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
TOKENIZED = "a dataset here gives tokens"
TOKENIZE = "tokenize it in a function of data.py that returns (ids, next ids), and name that in data.train"
QUANTIZED = "weights are trained as they are"
WITHOUT_QUANTIZED = "adapters of full weights (model.lora), on a device that holds them"
PREFERENCE = "see examples/dpo.py for a custom loss"


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
    "datasets": refused(TOKENIZED, TOKENIZE),
    "pretraining_dataset": refused(
        TOKENIZED, "write the ids into a file, and use the dataset tokens (docs/how-to/data.md)"
    ),
    "test_datasets": refused(TOKENIZED, "the same for data.val"),
    "val_set_size": refused("the sets are two functions", "hold rows out in data.py, and name them in data.val"),
    "sequence_len": refused(TOKENIZED, "cut the rows in data.py at this length"),
    "sample_packing": refused(TOKENIZED, "write the ids into one file: dataset tokens with end (docs/how-to/data.md)"),
    "eval_sample_packing": refused(TOKENIZED, "the same for data.val"),
    "pad_to_sequence_len": refused(TOKENIZED, "pad the rows in data.py"),
    "train_on_inputs": refused(TOKENIZED, "-100 instead of the ids of the prompt leaves them out"),
    "chat_template": refused(TOKENIZED, "apply it in data.py: tokenizer.apply_chat_template"),
    "special_tokens": refused(TOKENIZED, "set them on the tokenizer in data.py"),
    "tokens": refused(TOKENIZED, "add them to the tokenizer, and resize the embedding in a function of yours"),
    "group_by_length": refused(
        "batches are drawn in random order", "sort or pack in your dataset (docs/how-to/data.md)"
    ),
    "rl": refused("there is no built-in loss on preferences", PREFERENCE),
    "neftune_noise_alpha": refused("no noise on embeddings", "add it in the forward of your model"),
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
    "dataset_prepared_path": nothing("your dataset keeps what it has prepared"),
    **dict.fromkeys(("dataset_processes", "dataset_num_proc", "dataset_keep_in_memory"), nothing("your dataset")),
    **dict.fromkeys(("tokenizer_type", "tokenizer_config", "tokenizer_use_fast"), nothing("data.py has the tokenizer")),
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
    draft.leave_open(
        "data.train", "data:train_set", "a function in data.py that returns rows (ids, next ids); -100 is not counted"
    )
    draft.leave_open("data.val", "data:val_set", "the same for validation, or leave it out")
    draft.settings.setdefault("loss", "hf_causal_lm")
    return draft
