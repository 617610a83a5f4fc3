"""Low-rank adapters (https://arxiv.org/abs/2106.09685) by PEFT: W x becomes W x + (alpha / rank) B A x."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from trainwright.errors import UsageError, import_optional
from trainwright.models.options import require_dropout
from trainwright.models.pretrained import output_layer, pretrained_of

ALL_LINEAR = "all-linear"
INIT = {"default": True}
"""Names of initializations that PEFT spells differently."""
_ADAPTER = re.compile(r"(?P<layer>.+)\.(?P<part>lora_\w+)\.(?P<adapter>[^.]+)(?P<rest>\.weight|\.bias)?")
"""An adapter's parameter in a state dict: ``layers.0.query.lora_A.default.weight``."""
_SAVED_MODULE = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
_PEFT_PREFIX = "base_model.model."
"""The prefix of the base model's names in a ``PeftModel``."""


def lora_config(
    targets: Sequence[str],
    *,
    rank: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    dora: bool = False,
    rslora: bool = False,
    init: str = "default",
    **more: object,
) -> Any:
    """Return PEFT's configuration of adapters on the linear layers ``targets``."""
    return import_optional("peft", needed_for="model.lora").LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=list(targets),
        bias="none",
        use_dora=dora,
        use_rslora=rslora,
        init_lora_weights=INIT.get(init, init),
        **more,
    )


def add_lora(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    dropout: float = 0.0,
    targets: Sequence[str] = (),
    dora: bool = False,
    rslora: bool = False,
    init: str = "default",
) -> nn.Module:
    """Add adapters to ``model``, freeze all else and return it. Class, forward and initial output (B = 0) do not
    change.

    The adapters are injected (``peft.inject_adapter_in_model``), so attributes such as ``model.blocks`` stay. Their
    parameters are called ``<target>.lora_A.default.weight`` and ``<target>.lora_B.default.weight``, and with DoRA
    ``<target>.lora_magnitude_vector.default.weight``. They are float32, also if the model is in half precision. The new
    head of a pretrained model, which its files do not contain, is trained as a whole.

    Args:
        model: Changed in place.
        rank: Rank of the adapters.
        alpha: The adapters are scaled by alpha / rank.
        dropout: Dropout of the adapters' input.
        targets: Module names or their endings ("query", "blocks.0.mlp.up"), or "all-linear": every linear layer but
            the output layer. By default every linear layer in the model's lists of blocks, or, without such a list,
            every linear layer but the last.
        dora: Weight-decomposed adapters (https://arxiv.org/abs/2402.09353).
        rslora: Scale by alpha / sqrt(rank) instead (https://arxiv.org/abs/2312.03732).
        init: ``default``, or another initialization of PEFT: gaussian, orthogonal, pissa, olora.

    Raises:
        UsageError: A target matches nothing.
        MissingExtra: PEFT is not installed.
    """
    peft = import_optional("peft", needed_for="add_lora")
    if rank < 1 or alpha <= 0:
        raise UsageError(f"rank={rank} and alpha={alpha} must be positive", remedy="try rank=8, alpha=16")
    require_dropout(dropout)
    origin = pretrained_of(model)
    head = set(origin.new) - set(origin.new_in_base) if origin else set[str]()
    config = lora_config(
        _layers_to_adapt(model, targets, head),
        rank=rank,
        alpha=alpha,
        dropout=dropout,
        dora=dora,
        rslora=rslora,
        init=init,
    )
    with warnings.catch_warnings():
        # the weight of transformers' Conv1D is transposed; PEFT handles that, and warns
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to", category=UserWarning)
        adapted: nn.Module = peft.inject_adapter_in_model(config, model)
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name in head)
    _to_fp32(adapted)
    return adapted


def _to_fp32(model: nn.Module) -> None:
    """Convert adapters to float32: their updates are too small for half precision."""
    for path, module in model.named_modules():
        if "lora_" in path:
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.dtype in (torch.bfloat16, torch.float16):
                    master = nn.Parameter(parameter.detach().float(), requires_grad=parameter.requires_grad)
                    module._parameters[name] = master


def merged_weights(weights: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of the base model into whose weights PEFT has merged the adapters.

    The model is not needed. The names are those of the base model, without the prefix of a ``PeftModel``.

    Args:
        weights: The state dict of a model with adapters.
        config: The fields of PEFT's configuration of the adapters.

    Raises:
        UsageError: The kind of adapter is not known, or an adapted weight is shared with another layer.
    """
    plain, adapters, _ = _split(weights)
    tied: dict[int, list[str]] = {}
    for name, value in plain.items():
        tied.setdefault(id(value), []).append(name)
    transposed = any(_is_transposed(plain.get(f"{layer}.weight"), parts) for layer, parts in adapters.items())
    for layer, parts in adapters.items():
        base = plain.get(f"{layer}.weight")
        if not isinstance(base, Tensor):
            raise UsageError(f"{layer} has an adapter and no weight", remedy=_MERGE_IN_PYTHON)
        if len(names := tied[id(base)]) > 1:
            raise UsageError(
                f"the adapter of {layer} cannot be merged: it would change {' and '.join(names)}, which share a tensor",
                remedy="keep the adapter apart from the model",
            )
        plain |= {f"{layer}.{name}": value for name, value in _merge(layer, plain, parts, config, transposed).items()}
    return plain


_MERGE_IN_PYTHON = "export the adapter alone (--adapter), and merge it in Python: PeftModel.merge_and_unload"


def _split(weights: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]], list[str]]:
    """Return the weights of the base model under its names, the adapter of each layer, and the names of weights that
    PEFT trains whole (``modules_to_save``).
    """
    plain: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    adapters: dict[str, dict[str, Tensor]] = {}
    for full, value in weights.items():
        name = full.removeprefix(_PEFT_PREFIX)
        if found := _ADAPTER.fullmatch(name):
            adapters.setdefault(found["layer"], {})[f"{found['part']}{found['rest'] or ''}"] = value
        elif found := _SAVED_MODULE.fullmatch(name):
            saved[f"{found['module']}.{found['rest']}"] = value
        else:
            plain[name.replace(".base_layer.", ".").replace(".original_module.", ".")] = value
    return plain | saved, adapters, list(saved)


def _merge(
    layer: str, plain: Mapping[str, Any], parts: Mapping[str, Tensor], config: Mapping[str, Any], transposed: bool
) -> dict[str, Tensor]:
    """Return weight and bias of one layer after PEFT's own merge of its adapter."""
    peft = import_optional("peft", needed_for="merging adapters")
    base = {name: plain[f"{layer}.{name}"] for name in ("weight", "bias") if f"{layer}.{name}" in plain}
    weight = base["weight"]
    if weight.dim() != 2 or not {"lora_A.weight", "lora_embedding_A"} & parts.keys():
        raise UsageError(f"the adapter of {layer} is of a kind that is not merged here", remedy=_MERGE_IN_PYTHON)
    holder = nn.Module()
    holder.layer = _layer_like(base, transposed and "lora_A.weight" in parts, "lora_embedding_A" in parts)
    known = {key: config[key] for key in ("use_rslora", "use_dora", "lora_bias") if key in config}
    rank = (parts["lora_A.weight"] if "lora_A.weight" in parts else parts["lora_embedding_A"]).shape[0]
    alpha = _alpha_of(layer, config)
    settings = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=["layer"], fan_in_fan_out=transposed, **known)
    with torch.random.fork_rng(devices=()), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(settings, holder)
        tuner: Any = holder.layer
        for name, parameter in tuner.named_parameters():
            if found := _ADAPTER.fullmatch(f"x.{name}"):
                parameter.data = parts[f"{found['part']}{found['rest'] or ''}"].clone()
        tuner.merge()
        return {name: getattr(tuner.base_layer, name).data for name in base}


def _layer_like(base: Mapping[str, Tensor], transposed: bool, is_embedding: bool) -> nn.Module:
    rows, columns = base["weight"].shape
    made: nn.Module
    if is_embedding:
        made = nn.Embedding(rows, columns, device="meta")
    elif transposed:
        from transformers.pytorch_utils import Conv1D

        made = Conv1D(columns, rows)
    else:
        made = nn.Linear(columns, rows, bias="bias" in base, device="meta")
    for name, value in base.items():
        made._parameters[name] = nn.Parameter(value.clone(), requires_grad=False)
    return made


def _alpha_of(layer: str, config: Mapping[str, Any]) -> float:
    """Return alpha of one layer as PEFT does: by the first matching pattern, else the general value."""
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):
            return float(value)
    return float(config.get("lora_alpha", 8))


def _is_transposed(weight: Any, parts: Mapping[str, Tensor]) -> bool:
    """Return True if the shape of a weight is (in, out), as in transformers' Conv1D; False for a square weight."""
    if not isinstance(weight, Tensor) or weight.dim() != 2 or "lora_A.weight" not in parts:
        return False
    rows, columns = weight.shape
    return rows != columns and rows == parts["lora_A.weight"].shape[1]


def save_adapter(
    weights: Mapping[str, Any],
    config: Mapping[str, Any],
    folder: Path,
    *,
    head: Sequence[str] = (),
    base: str | None = None,
    about: Mapping[str, str],
) -> int:
    """Write adapters as ``PeftModel.save_pretrained`` does, without the model. Return the number of tensors.

    Args:
        weights: The state dict of a model with adapters.
        config: The fields of PEFT's configuration of the adapters.
        folder: An existing folder.
        head: Names of further trained weights, which are saved whole.
        base: Name of the base model.
        about: Metadata of the safetensors file.

    Raises:
        UsageError: The adapters do not apply to the unchanged base model.
    """
    peft = import_optional("peft", needed_for="--adapter")
    if str(config.get("init_lora_weights")).startswith(("pissa", "olora", "corda", "loftq")):
        raise UsageError(
            f"the adapters began as {config['init_lora_weights']}, which changed the base model: they do not "
            "fit the original",
            remedy="leave --adapter out: the merged model is exported",
        )
    plain, adapters, saved = _split(weights)
    whole = [*saved, *(name for name in head if name in plain)]
    tensors = {f"{_PEFT_PREFIX}{name}": plain[name] for name in whole}
    for layer, parts in adapters.items():
        for part, value in parts.items():
            name = part.removesuffix(".weight") if part.startswith("lora_magnitude") else part
            tensors[f"{_PEFT_PREFIX}{layer}.{name}"] = value
    known = inspect.signature(peft.LoraConfig).parameters
    fields = {key: value for key, value in config.items() if key in known and value is not None}
    fields |= {
        "target_modules": sorted(adapters),
        "modules_to_save": sorted({name.rpartition(".")[0] for name in whole}) or None,
        "fan_in_fan_out": any(_is_transposed(plain.get(f"{layer}.weight"), parts) for layer, parts in adapters.items()),
        "inference_mode": True,
        "base_model_name_or_path": base,
    }
    for key in ("runtime_config", "loftq_config", "peft_type", "layers_to_transform", "layers_pattern"):
        fields.pop(key, None)
    peft.LoraConfig(**fields).save_pretrained(folder)
    save_file(
        {name: value.cpu().contiguous() for name, value in tensors.items()},
        folder / "adapter_model.safetensors",
        dict(about),
    )
    return len(tensors)


def adapters_of(model: nn.Module) -> dict[str, dict[str, object]]:
    """Return the configuration of each of PEFT's adapters in a model as plain values; empty without adapters."""
    configs: dict[str, Any] = next(
        (vars(each)["peft_config"] for each in model.modules() if "peft_config" in vars(each)), {}
    )
    return {name: _plain(config.to_dict()) for name, config in configs.items()}


def _plain(value: Any) -> Any:
    """Return a configuration with values that JSON has: enums by value, sets as sorted lists."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return (
        value if value is None or isinstance(value, bool | int | float | str) else getattr(value, "value", str(value))
    )


def _layers_to_adapt(model: nn.Module, targets: Sequence[str], head: set[str]) -> list[str]:
    """Return the names of the linear layers that get adapters; ``head`` are the new weights of a pretrained model."""
    linears = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # GPT-2 of transformers
    ]
    if tuple(targets) == (ALL_LINEAR,):
        output = output_layer(model)
        chosen = [name for name in linears if model.get_submodule(name) is not output and f"{name}.weight" not in head]
        chosen = chosen[:-1] if output is None and not head else chosen
    elif targets:
        chosen = [name for target in targets for name in _named(target, linears)]
    else:
        lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
        chosen = [name for name in linears if name.startswith(lists)] or linears[:-1]
    if not chosen:
        raise UsageError(
            f"{type(model).__name__} has no linear layer beside its output", remedy="adapters need linear layers"
        )
    return list(dict.fromkeys(chosen))


def _named(target: str, linears: Sequence[str]) -> list[str]:
    matching = [name for name in linears if name == target or name.endswith(f".{target}")]
    if not matching:
        remedy = f"take some of: {', '.join(linears)}" if linears else "the model has no linear layer"
        raise UsageError(f"no linear layer of the model is called {target!r}", remedy=remedy)
    return matching
