"""Compares full fine-tuning, LoRA and QLoRA of a pretrained model on devices: memory, longest sequence, time, price."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from torch import Tensor

from trainwright.assembly.assemble import Parts
from trainwright.engine.chunked import CHUNK_BYTES_ELSEWHERE
from trainwright.engine.precision import PrecisionName
from trainwright.errors import UsageError
from trainwright.plan.batch import solve_batch
from trainwright.plan.call_trace import Trace
from trainwright.plan.devices import Device
from trainwright.plan.duration import Pace, extent
from trainwright.plan.layout import Layout, Option, weigh
from trainwright.plan.scale import Scaled
from trainwright.plan.trace.blueprint import Blueprint, make_blueprint
from trainwright.plan.trace.layouts import LayoutSurvey
from trainwright.plan.trace.operator_call import tensors_in
from trainwright.recipe import Loaded, Lora, Recipe

Method = Literal["full", "LoRA", "QLoRA"]
METHODS: tuple[Method, ...] = ("full", "LoRA", "QLoRA")
TRACED_TOKENS = 1024
"""Length of the shorter of two traced sequences; the other is twice as long.

Memory and time of other lengths are extrapolated linearly. The mask and the matrix products of attention grow
quadratically, so they are underestimated for much longer sequences.
"""
MAX_TOKENS = 1 << 20
"""The longest sequence that is considered if the model's configuration has no limit."""


@dataclass(frozen=True)
class MethodForecast:
    """The forecast of one method with micro-batches of one sequence and activation checkpointing of each block.

    ``tokens`` is the length of the sequences of the recipe, ``max_tokens`` the limit of the model. ``sequences`` is the
    number of sequences per step, ``steps`` the number of steps of the run (None if it is not known).
    """

    method: Method
    trainable: int
    layout: Layout
    tokens: int
    max_tokens: int
    sequences: int
    steps: int | None
    settings: tuple[str, ...]

    def at(self, tokens: int, device: Device) -> Option:
        """Return memory and time of a step with sequences of ``tokens`` on a device."""
        layout = replace(self.layout, precision=finetuning_precision(device))
        return weigh(layout, device, tokens * self.sequences, tokens)

    def longest(self, device: Device) -> int:
        """Return the length of the longest sequence that fits, rounded down to a multiple of 64; 0 if none fits."""
        fits, most = 0, self.max_tokens // 64
        while fits < most:
            middle = (fits + most + 1) // 2
            if self.at(64 * middle, device).fits:
                fits = middle
            else:
                most = middle - 1
        return 64 * fits

    def run_s(self, device: Device) -> float | None:
        """Return the seconds of the steps of the run; None if its length is not known in steps."""
        return None if self.steps is None else self.steps * self.at(self.tokens, device).step_s


def compares_methods(recipe: Recipe) -> bool:
    """Return True if the recipe fine-tunes a pretrained model of ``transformers``."""
    return recipe.model.use == "hf" and "name" in recipe.model.args


def finetuning_precision(device: Device) -> PrecisionName:
    """Return the precision of fine-tuning on a device: bf16, or fp16 without it."""
    names: tuple[PrecisionName, ...] = ("bf16", "fp16", "fp32")
    return next(name for name in names if name in device.flops)


def forecast_methods(loaded: Loaded, device: Device, parts: Parts | None = None) -> list[MethodForecast]:
    """Trace each method, on fake tensors, with two short sequences.

    Full fine-tuning keeps fp32 weights; LoRA and QLoRA keep the base model in bf16 (QLoRA: nf4) and fp32 adapters. If
    the recipe has ``model.lora``, the adapters get its settings.

    Returns:
        The forecasts; none if the samples are not sequences of tokens.

    Raises:
        RecipeError: An object of the recipe cannot be built.
    """
    found = []
    for method in METHODS:
        variant = _variant(loaded, method)
        blueprint = make_blueprint(variant, parts)
        length = _length(blueprint.sample)
        if length is None:
            return []
        with_chunks = blueprint.classes is not None and variant.recipe.loss.chunked is not False
        first = min(TRACED_TOKENS, _limit(blueprint) // 2)
        if with_chunks and blueprint.classes is not None:
            first = max(first, -(-2 * CHUNK_BYTES_ELSEWHERE // (4 * blueprint.classes)))
        sizes = (first, 2 * first)
        try:
            traces = [_trace(blueprint, device, tokens, chunked=with_chunks) for tokens in sizes]
        except UsageError:
            if method == "full":
                raise
            continue  # its layers cannot be adapted or quantized
        policy = "block" if LayoutSurvey(blueprint, device, finetuning_precision(device)).blocks else "none"
        layout = Layout(finetuning_precision(device), policy, with_chunks, Scaled(traces[0], traces[1], sizes), 0, 0)
        recipe = variant.recipe
        batch = solve_batch(recipe.batch.size, recipe.batch.micro, recipe.batch.accumulation)
        has_length = hasattr(blueprint.train.dataset, "__len__") and blueprint.train.own_batches is None
        samples = len(cast(Sequence[object], blueprint.train.dataset)) if has_length else None
        per_epoch = None if samples is None else -(-samples // batch.size)
        steps = None
        if recipe.until.unit in ("steps", "s") or per_epoch is not None:
            steps = extent(recipe.until, Pace(batch.size, per_epoch, length)).steps
        found.append(
            MethodForecast(
                method,
                blueprint.counts[1],
                layout,
                length,
                _limit(blueprint),
                batch.size,
                steps,
                tuple(_settings(method, loaded)),
            )
        )
    return found


def _variant(loaded: Loaded, method: Method) -> Loaded:
    model = loaded.recipe.model
    args = {**model.args, "dtype": "fp32" if method == "full" else "bf16"}
    lora = None if method == "full" else (model.lora or Lora(rank=16, alpha=32.0, targets=("all-linear",)))
    if lora is not None:
        lora = lora.model_copy(update={"quantize": "nf4" if method == "QLoRA" else "none"})
    freeze = model.freeze if method == "full" else ()
    changed = model.model_copy(update={"args": args, "lora": lora, "freeze": freeze})
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"model": changed}))


def _settings(method: Method, loaded: Loaded) -> Iterator[str]:
    """Yield the settings that change a recipe to another method."""
    lora = loaded.recipe.model.lora
    dtype = "model.dtype" if "model.dtype" in loaded.source.places else "model.args.dtype"
    quantized = lora is not None and lora.quantize != "none"
    if method == "full":
        yield from ["model.lora=null", f"{dtype}=fp32"] if lora is not None else []
    elif lora is None:
        quantize = ", quantize: nf4" if method == "QLoRA" else ""
        yield from [f"model.lora={{rank: 16, alpha: 32.0, targets: all-linear{quantize}}}", f"{dtype}=bf16"]
    elif quantized != (method == "QLoRA"):
        yield f"model.lora.quantize={'nf4' if method == 'QLoRA' else 'none'}"


def _trace(blueprint: Blueprint, device: Device, tokens: int, *, chunked: bool) -> Trace:
    sample = _resized(blueprint.sample, tokens)
    survey = LayoutSurvey(replace(blueprint, sample=sample), device, finetuning_precision(device))
    return survey.trace(1, chunked=chunked, checkpointing=survey.checkpointing("block") if survey.blocks else None)


def _length(sample: object) -> int | None:
    """Return the number of tokens of a sample; None if it is not a sequence of tokens."""
    first = next((each for each in tensors_in((sample,)) if each.dim() == 1 and not each.is_floating_point()), None)
    return None if first is None else len(first)


def _resized(sample: object, tokens: int) -> object:
    """Return the sample with its tokens repeated or cut to ``tokens``."""
    length = _length(sample)

    def resize(value: object) -> object:
        if isinstance(value, Tensor) and value.dim() == 1 and len(value) == length:
            return value.repeat(-(-tokens // len(value)))[:tokens]
        return value

    if isinstance(sample, Mapping):
        return {name: resize(value) for name, value in sample.items()}
    return type(sample)(map(resize, sample)) if isinstance(sample, tuple | list) else resize(sample)


def _limit(blueprint: Blueprint) -> int:
    """Return the number of positions of the model."""
    from trainwright.models.pretrained import find_folder, read_json

    args = blueprint.loaded.recipe.model.args
    config = read_json(find_folder(args["name"], args.get("revision")) / "config.json")
    config = {**config, **args}
    known = [config.get(key) for key in ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len")]
    return next((each for each in known if isinstance(each, int)), MAX_TOKENS)
