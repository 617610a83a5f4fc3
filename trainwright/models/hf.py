"""A model of the ``transformers`` library: pretrained, by its name, or with new weights, by its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from trainwright.errors import UsageError
from trainwright.models.pretrained import (
    load_pretrained,
    require_config_keys,
    require_transformers,
    unknown_architecture,
)

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def hf_model(
    *,
    name: str | None = None,
    architecture: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    **config: object,
) -> nn.Module:
    """A model of the library ``transformers``: pretrained with ``name``, or with new weights.

    A pretrained model is read from a folder, or from the cache of the Hugging Face hub; only a name that the cache does
    not hold is downloaded. Weights are read from safetensors only. Without a name, the model is built from its
    configuration, and default ids of special tokens that are not below ``vocab_size`` are left out. The forward
    returns a ModelOutput, whose attribute ``logits`` holds the logits.

    Args:
        name: A folder with config.json and safetensors, or a name on the hub: ``org/model``.
        architecture: Name of the class: ``GPT2LMHeadModel``, ``LlamaForCausalLM``, ... Default: with a name the class
            in its config.json, else ``GPT2LMHeadModel``.
        revision: Commit, tag or branch of a name on the hub. The run records the commit.
        dtype: Dtype of the pretrained weights: fp32, bf16, fp16, or auto for that of the files. Default: fp32.
        trust_remote_code: Execute Python files of the repository of a model that transformers does not have.
        **config: Values of its configuration, such as ``n_layer: 2``. Without a name, ``vocab_size``, or
            ``num_labels`` of a model for classification, is taken from the training set where a recipe leaves it out.

    Raises UsageError for an unknown name, architecture or key, MissingExtra without transformers.
    """
    if name is not None:
        return load_pretrained(
            name,
            architecture=architecture,
            revision=revision,
            dtype=dtype or "fp32",
            trust_remote_code=trust_remote_code,
            **config,
        )
    if revision is not None or dtype is not None or trust_remote_code:
        remedy = "add name: FOLDER, or leave them out"
        raise UsageError("revision, dtype and trust_remote_code are for pretrained weights", remedy=remedy)
    return _new_model(architecture or "GPT2LMHeadModel", config)


def _new_model(architecture: str, config: Mapping[str, object]) -> nn.Module:
    transformers = require_transformers("hf_model")
    config_class = getattr(getattr(transformers, architecture, None), "config_class", None)
    if config_class is None:
        raise unknown_architecture(transformers, architecture)
    defaults = config_class()
    require_config_keys(defaults, config)
    try:
        settings = config_class(**{**_unusable_tokens(defaults, config.get("vocab_size")), **config})
        model: nn.Module = getattr(transformers, architecture)(settings)
    except Exception as error:  # the class of the error varies with the version of transformers
        remedy = f"see transformers.{config_class.__name__}"
        raise UsageError(f"{architecture} does not take these values: {error}", remedy=remedy) from error
    if "use_cache" not in config and hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # training would store the keys and values of past tokens and never read them
    return model


def _unusable_tokens(defaults: Any, vocab_size: object) -> dict[str, None]:
    """Return None for each special token whose default id is not below ``vocab_size``."""
    if not isinstance(vocab_size, int):
        return {}
    ids = {name: getattr(defaults, name, None) for name in TOKEN_IDS}
    return {name: None for name, token in ids.items() if isinstance(token, int) and token >= vocab_size}
