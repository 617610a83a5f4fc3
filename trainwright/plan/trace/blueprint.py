"""Builds what a traced step needs from a recipe: model, loss, optimizer and one micro-batch under fake tensors."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, IterableDataset

from trainwright.assembly.adapters import add_adapters
from trainwright.assembly.assemble import (
    Parts,
    at_recipe,
    build_dataset,
    build_loss,
    build_model,
    freeze,
    require_ready,
)
from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.rng import preserved_rng
from trainwright.data.fork import first_samples
from trainwright.data.ready_batches import ReadyBatches
from trainwright.data.unwrap import Unwrapped
from trainwright.engine.chunked import CHUNK_BYTES_ELSEWHERE, logits_bytes
from trainwright.engine.head import head_of, hf_head_of
from trainwright.engine.loss import Loss
from trainwright.errors import DataError, RecipeError, UsageError
from trainwright.finetune.losses import with_reference
from trainwright.optim.choose import make_optimizer
from trainwright.optim.groups import GroupRule
from trainwright.optim.user_optimizers import as_one, require_optimizer
from trainwright.plan.devices import Device
from trainwright.plan.memory import memory_bytes, room_for_logits
from trainwright.plan.trace.fake_tensors import UNTRACEABLE, fake_batch, fake_tensors
from trainwright.plan.trace.traced_step import TracedObjects
from trainwright.recipe import OPTIMIZERS, Loaded, optimizer_row
from trainwright.recipe.resolve import find, parameters_of

MAX_SAMPLES_READ = 16
"""The number of samples that are read. If they differ in size, the largest is used."""
NEEDS_MEMORY = (
    "give lazy modules (nn.LazyLinear) their shapes, and let __init__ read no values of tensors; or write batch.micro: "
    "a step that runs out of memory is repeated in smaller parts"
)
MIN_TRACED_SAMPLES = 2
"""Samples in the smaller of two traces. With one sample, some copies become views."""


@dataclass(frozen=True)
class Blueprint:
    """The objects that a recipe names; only the data is real.

    ``live`` is a model passed in Python. ``optimizer`` is an optimizer passed in Python, or several, or a factory.
    ``part``, if set, is applied to each new model and may reduce it to the part that one rank computes.
    """

    loaded: Loaded
    train: Unwrapped
    loss: Callable[..., Loss | Tensor]
    sample: object
    live: nn.Module | None = None
    optimizer: object = None
    part: Callable[[nn.Module], object] | None = None

    @cached_property
    def counts(self) -> tuple[int, int]:
        """The number of parameters, and of trained parameters."""
        with fake_tensors():
            model = self.model(torch.device("cpu"))
            sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)

    @cached_property
    def classes(self) -> int | None:
        """Rows of the output head if the loss can be computed in chunks, else None."""
        target = getattr(self.loss, "func", self.loss)
        if "chunked" not in parameters_of(target):
            return None
        with fake_tensors():
            model = self.model(torch.device("cpu"))
            head = head_of(model) or (hf_head_of(model) if hasattr(model, "get_output_embeddings") else None)
        return None if head is None else len(head.weight)

    def chunked(self, samples: int, device: Device) -> bool:
        """Return True if a run on ``device`` computes the logits of a micro-batch of ``samples`` in chunks."""
        setting, plain_up_to = self.loaded.recipe.loss.chunked, self.plain_up_to(device)
        if plain_up_to is None:
            return setting is True and self.classes is not None
        return samples > plain_up_to

    def plain_up_to(self, device: Device) -> int | None:
        """Return the number of samples whose full logits fit the device; None if the plan does not decide this."""
        if self.classes is None or self.loaded.recipe.loss.chunked != "auto":
            return None
        return self._room_for_logits(device) // logits_bytes(self.targets, self.classes)

    def _room_for_logits(self, device: Device) -> int:
        section, (parameters, trainable) = self.loaded.recipe.optimizer, self.counts
        held = memory_bytes(
            section.use,
            section.args,
            parameters=parameters,
            trainable=trainable,
            activations=0,
            offloaded=section.offload is True and device.kind != "cpu",
        )
        return room_for_logits(device.usable_bytes, sum(held.values()))

    @property
    def targets(self) -> int:
        """Targets per sample, such as its tokens."""
        tensors = [leaf for leaf in tree_leaves(self.sample) if isinstance(leaf, Tensor)]
        return tensors[-1].numel() if tensors else 1

    def sizes(self, *, chunked: bool) -> tuple[int, int]:
        """Return the samples of the two traces. With chunks, enough that each chunk has its full size."""
        if not chunked or self.classes is None:
            return MIN_TRACED_SAMPLES, 2 * MIN_TRACED_SAMPLES
        least = max(MIN_TRACED_SAMPLES, -(-2 * CHUNK_BYTES_ELSEWHERE // (4 * self.targets * self.classes)))
        return least, 2 * least

    def traced_objects(self, device: torch.device, *, samples: int, chunked: bool) -> TracedObjects:
        """Return the objects of one step; its micro-batch is one sample repeated ``samples`` times.

        Call it under fake tensors.
        """
        model = self.model(device)
        loss = partial(self.loss, chunked=chunked) if self.classes is not None else self.loss
        data = fake_batch(self.train.collate([self.sample] * samples), device)
        return TracedObjects(model, loss, self._optimizer(model), data)

    def model(self, device: torch.device) -> nn.Module:
        """Return the model as it is trained, before activation checkpointing. Call it under fake tensors."""
        recipe, model = self.loaded.recipe, self.bare_model(device)
        if recipe.model.lora is not None:
            with at_recipe(self.loaded.source, "model.lora"):
                model, _ = add_adapters(model, recipe.model.lora, is_simulated=True)
        if recipe.model.freeze:
            with at_recipe(self.loaded.source, "model.freeze"):
                freeze(model, recipe.model.freeze)
        if self.part is not None:
            self.part(model)
        return model if model.training else model.train()

    def bare_model(self, device: torch.device) -> nn.Module:
        """Return the model before adapters are added and weights are frozen. Call it under fake tensors."""
        return self._built() if self.live is None else fake_copy(self.live, device)

    def _built(self) -> nn.Module:
        """Build the model. Raises UsageError if it can be built, but not under fake tensors."""
        try:
            model = build_model(self.loaded, self.train)[0]
        except RecipeError as error:
            if not any(name in str(error) for name in ("Fake", *(each.__name__ for each in UNTRACEABLE))):
                raise
            why = error.problems[0].rule
            raise UsageError(f"the model cannot be made without its memory: {why}", remedy=NEEDS_MEMORY) from None
        with at_recipe(self.loaded.source, "model.use"):
            require_ready(model)
        return model

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        section = self.loaded.recipe.optimizer
        if self.optimizer is not None and not callable(self.optimizer):
            register_missing_kernels()
            return self._copied_optimizer(model)
        factory: Any = self.optimizer or section.use  # a short name, or the callable that a path names
        if self.optimizer is None and section.use not in OPTIMIZERS:
            factory = find(section.use, {}, "optimizer", self.loaded.source)
        args = dict(section.args)
        if optimizer_row(section.use).fused and not {"fused", "foreach", "dampening", "capturable"} & set(args):
            args["fused"] = True  # as on a GPU; make_optimizer does not recognize the simulated one
        register_missing_kernels()
        with at_recipe(self.loaded.source, "optimizer"):
            return make_optimizer(
                factory,
                model,
                lr=section.lr,
                weight_decay=section.weight_decay,
                decay_norms_and_biases=section.decay_norms_and_biases,
                rules=[GroupRule(**group.model_dump()) for group in section.groups],
                args=args,
            )

    def _copied_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return copies of the user's optimizers over the parameters of ``model``, without state."""
        assert self.live is not None
        parts = self.optimizer if isinstance(self.optimizer, list | tuple) else [self.optimizer]
        optimizers = [require_optimizer(each) for each in parts]
        fakes = dict(model.named_parameters())
        memo: dict[int, object] = {id(each): fakes[name] for name, each in self.live.named_parameters()}
        memo |= {id(part.state): defaultdict(dict) for each in optimizers for part in parts_of(each)}
        return as_one(copy.deepcopy(optimizers, memo), model, self.loss, closures=True)


def make_blueprint(loaded: Loaded, parts: Parts | None = None) -> Blueprint:
    """Read samples of the training set. ``parts`` are live objects that were passed in Python, not prepared yet.

    Raises RecipeError for what cannot be built, DataError when no sample can be read.
    """
    loss = build_loss(loaded) if parts is None else parts.loss
    train = with_reference(loss, build_dataset(loaded, "train") if parts is None else parts.train)
    with preserved_rng():  # samples may be augmented
        sample = _largest_sample(train, loaded.recipe.data.quarantine)
    if parts is not None:
        return Blueprint(loaded, train, loss, sample, parts.model, parts.custom.optimizer)
    return Blueprint(loaded, train, loss, sample)


def fake_copy(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a copy whose parameters and buffers are fake tensors on ``device``. Call it under fake tensors."""
    copies: dict[int, Tensor] = {}
    for parameter in model.parameters():
        fake = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
        copies[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        copies[id(buffer)] = torch.empty_strided(buffer.shape, buffer.stride(), dtype=buffer.dtype, device=device)
    return copy.deepcopy(model, copies)


def _largest_sample(train: Unwrapped, left_out: Collection[int]) -> object:
    """Return the sample with most values among the first samples that can be read."""
    found: list[tuple[int, int, object]] = []
    for sample in _first_samples(train.dataset, left_out):
        leaves = tree_leaves(sample)
        found.append((sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)), len(found), sample))
    if not found:
        raise DataError("no sample of the training set can be read", remedy="open one with dataset[0]")
    return max(found, key=lambda each: (each[0], -each[1]))[2]


def _first_samples(dataset: Dataset[object] | ReadyBatches, left_out: Collection[int]) -> Iterator[object]:
    if isinstance(dataset, ReadyBatches):
        return iter([dataset.first_row()])
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return islice(iter(dataset), 1)
    return first_samples(dataset, MAX_SAMPLES_READ, left_out)


IN_PLACE = ("_fused_sgd_", "_fused_adagrad_")
"""Operators that return nothing, so no shape is computed. torch 2.13 has no kernels of them for fake tensors."""


@cache
def register_missing_kernels() -> torch.library.Library:
    """Register empty kernels for ``IN_PLACE`` with torch at the first call, for the rest of the process."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in IN_PLACE:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, lambda *_args, **_kwargs: None, "Meta")  # type: ignore[no-untyped-call]
    return library
