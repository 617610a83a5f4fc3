"""A small and a complete recipe."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {"model": "gpt", "data": {"train": "python-topics"}}
FULL: dict[str, Any] = {
    "name": "gpt-tiny_1.0",
    "seed": 7,
    "deterministic": True,
    "device": "cpu",
    "precision": "bf16",
    "until": "2ep",
    "model": {
        "use": "my_models.gpt:Gpt.small",
        "args": {"layers": 4, "text": "1e-3", "odd": ["yes", "010", "~", None, True, 1.5, {"ü": "日本"}]},
        "freeze": ["*.embed.*"],
        "activation_checkpointing": "block",
        "compile": True,
        "ema": 0.999,
        "lora": {"rank": 4, "targets": ["*.attn"]},
    },
    "data": {
        "train": {"use": "text-file", "args": {"path": "a: b # c"}},
        "val": "digits",
        "workers": 2,
        "pin_memory": False,
    },
    "loss": "language_model",
    "batch": {"size": 64, "micro": 8, "accumulation": 4},
    "optimizer": {
        "use": "sgd",
        "lr": 1e-5,
        "weight_decay": 1,
        "args": {"betas": (0.9, 0.95), "eps": 1e-08},
        "groups": [{"match": "head.*", "lr": 1e-4}, {"match": "*", "lr_scale": 0.5, "weight_decay": 0}],
        "clip": {"by": "agc", "at": 0.01},
        "lr_rule": {"rule": "sqrt", "base_batch": 256},
    },
    "schedule": {"use": "wsd", "warmup": "0.1ep", "floor": 0.1},
    "spikes": {"policy": "off", "factor": 4},
    "evaluation": {"every": "100steps", "batches": 5, "batch": 64},
    "checkpoint": {"every": None, "keep": 1},
    "log": {"every": "1.5min", "sinks": ["tensorboard", "wandb"]},
    "folder": "my runs/ü",
}
