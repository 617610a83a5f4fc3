"""A model of the ``transformers`` library from its configuration class, with new weights and no download."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from trainwright.errors import MissingExtra, UsageError, suggest

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def hf_model(*, architecture: str = "GPT2LMHeadModel", **config: object) -> nn.Module:
    """A model of the library ``transformers`` with new weights.

    Its forward returns a ModelOutput, whose attribute ``logits`` holds the logits. Default ids of special tokens that
    are not below ``vocab_size`` are left out.

    Args:
        architecture: Name of the class: ``GPT2LMHeadModel``, ``LlamaForCausalLM``, ...
        **config: Values of its configuration, such as ``n_layer: 2``. ``vocab_size``, or ``num_labels`` of a model
            for classification, is taken from the training set where a recipe leaves it out.

    Raises UsageError for an unknown architecture or key, MissingExtra without transformers.
    """
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise  # transformers is installed but broken: its error message is more helpful
        raise MissingExtra("transformers", needed_for="hf_model") from None
    config_class = getattr(getattr(transformers, architecture, None), "config_class", None)
    if config_class is None:
        names = [name for name in dir(transformers) if "For" in name or name.endswith("Model")]
        raise UsageError(
            f"transformers has no architecture {architecture!r}", remedy=_short(suggest(architecture, names))
        )
    _require_known(config_class, config)
    try:
        settings = config_class(**_without_unusable_tokens(config_class, config))
        model: nn.Module = getattr(transformers, architecture)(settings)
    except Exception as error:  # the class of the error varies with the version of transformers
        remedy = f"see transformers.{config_class.__name__}"
        raise UsageError(f"{architecture} does not take these values: {error}", remedy=remedy) from error
    if "use_cache" not in config and hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # training would store the keys and values of past tokens and never read them
    return model


def _require_known(config_class: Any, config: Mapping[str, object]) -> None:
    """Raise UsageError for an unknown key, which transformers would store and ignore."""
    defaults = config_class()
    signature = inspect.signature(config_class.__init__).parameters
    known = {*signature, *defaults.to_dict(), *defaults.attribute_map, "num_labels"} - {"self", "kwargs"}
    for name in config:
        if name not in known:
            raise UsageError(f"{config_class.__name__} has no key {name!r}", remedy=suggest(name, sorted(known)))


def _without_unusable_tokens(config_class: Any, config: Mapping[str, object]) -> Mapping[str, object]:
    size = config.get("vocab_size")
    if not isinstance(size, int):
        return config
    defaults = config_class()
    unusable = [name for name in TOKEN_IDS if isinstance(id_ := getattr(defaults, name, None), int) and id_ >= size]
    return {**dict.fromkeys(unusable), **config}


def _short(remedy: str, limit: int = 300) -> str:
    return remedy if len(remedy) <= limit else "see the list of models in the transformers documentation"
