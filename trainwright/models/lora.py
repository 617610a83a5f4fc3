"""Low-rank adapters (https://arxiv.org/abs/2106.09685) by PEFT: W x becomes W x + (alpha / rank) B A x."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

from trainwright.errors import MissingExtra, UsageError
from trainwright.models.options import require_dropout


def add_lora(
    model: nn.Module, *, rank: int = 8, alpha: float = 16.0, dropout: float = 0.0, targets: Sequence[str] = ()
) -> nn.Module:
    """Add adapters to ``model``, freeze all else and return it. Class, forward and initial output (B = 0) do not
    change.

    The adapters are injected (``peft.inject_adapter_in_model``), so attributes such as ``model.blocks`` stay. Their
    parameters are called ``<target>.lora_A.default.weight`` and ``<target>.lora_B.default.weight``.

    Args:
        model: Changed in place.
        rank: Rank of the adapters.
        alpha: The adapters are scaled by alpha / rank.
        dropout: Dropout of the adapters' input.
        targets: Module names or their endings ("query", "blocks.0.mlp.up"). By default every linear layer in the
            model's lists of blocks, or, without such a list, every linear layer but the last.

    Raises:
        UsageError: A target matches nothing.
        MissingExtra: PEFT is not installed.
    """
    try:
        import peft
    except ModuleNotFoundError as error:
        if error.name != "peft":
            raise  # PEFT is installed but broken: its error message is more helpful
        raise MissingExtra("peft", needed_for="add_lora") from None
    if rank < 1 or alpha <= 0:
        raise UsageError(f"rank={rank} and alpha={alpha} must be positive", remedy="try rank=8, alpha=16")
    require_dropout(dropout)
    names = _named(model, targets) if targets else _inside_blocks(model)
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=names, bias="none")
    with warnings.catch_warnings():
        # the weight of transformers' Conv1D is transposed; PEFT handles that, and warns
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to", category=UserWarning)
        adapted: nn.Module = peft.inject_adapter_in_model(config, model)
    return adapted


def merge_lora(model: nn.Module) -> nn.Module:
    """Merge the adapters of ``add_lora`` into the weights and remove them; names become those of the base model.

    Raises UsageError for an adapted weight that is shared with another layer, which would change too.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name.replace(".base_layer", ""))
    for path, layer in list(model.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            base: nn.Module = layer.get_base_layer()
            if len(tied := names[id(base.weight)]) > 1:
                raise UsageError(
                    f"the adapter of {path} cannot be merged: it would change {' and '.join(tied)}, which are one",
                    remedy="keep the adapter apart from the model",
                )
            layer.merge()
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, base)
    vars(model).pop("peft_config", None)  # else PEFT warns that the model has adapters
    return model


def _linears(model: nn.Module) -> list[str]:
    """Return the names of the linear layers; those of GPT-2 in transformers are of the class Conv1D."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]


def _named(model: nn.Module, targets: Sequence[str]) -> list[str]:
    known = _linears(model)
    chosen: list[str] = []
    for target in targets:
        matching = [name for name in known if name == target or name.endswith(f".{target}")]
        if not matching:
            remedy = f"take some of: {', '.join(known)}" if known else "the model has no linear layer"
            raise UsageError(f"no linear layer of the model is called {target!r}", remedy=remedy)
        chosen += matching
    return list(dict.fromkeys(chosen))


def _inside_blocks(model: nn.Module) -> list[str]:
    linears = _linears(model)
    lists = [f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    chosen = [name for name in linears if name.startswith(tuple(lists))] or linears[:-1]
    if not chosen:
        raise UsageError(
            f"{type(model).__name__} has no linear layer beside its output",
            remedy="adapters need linear layers",
        )
    return chosen
