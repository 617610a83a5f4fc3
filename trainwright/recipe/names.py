"""The short names a recipe may use, each as ``package.module:callable``.

Strings only: nothing is imported here, so that a recipe can be checked on a machine without torch.
"""

from __future__ import annotations

MODELS: dict[str, str] = {
    "gpt": "trainwright.models.gpt:gpt",
    "gpt2": "trainwright.models.gpt:gpt2",
    "resnet": "trainwright.models.resnet:resnet",
    "lstm": "trainwright.models.lstm:lstm",
    "mlp": "trainwright.models.mlp:mlp",
    "hf": "trainwright.models.hf:hf_model",
}

DATASETS: dict[str, str] = {
    "python-topics": "trainwright.data.text:python_topics",
    "stdlib-source": "trainwright.data.text:stdlib_source",
    "text-file": "trainwright.data.text:text_file",
    "digits": "trainwright.data.digits:digits",
}

LOSSES: dict[str, str] = {
    "cross_entropy": "trainwright.engine.losses:cross_entropy",
    "language_model": "trainwright.engine.losses:language_model",
    "mse": "trainwright.engine.losses:mse",
    "hf_causal_lm": "trainwright.engine.losses:hf_causal_lm",
}

# Optimizers, schedules and sinks are looked up by the room that builds them; here only their names.
OPTIMIZERS: tuple[str, ...] = ("sgd", "adam", "adamw", "adafactor", "muon", "lamb", "lars")
SCHEDULES: tuple[str, ...] = ("constant", "cosine", "restarts", "polynomial", "linear", "step", "wsd")
SINKS: tuple[str, ...] = ("tensorboard", "wandb")
SPIKE_POLICIES: tuple[str, ...] = ("warn", "skip", "rollback", "off")
