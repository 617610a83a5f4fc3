"""Reference log-probabilities for DPO: computed once with the initial weights of a run, and kept in the cache.

A dataset of preference samples gets two more keys, ``reference_chosen`` and ``reference_rejected``. Their value is
``UNKNOWN`` until ``fill`` has computed them. The cache is keyed by a hash of weights, samples and precision.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from trainwright.checkpoint.shards import is_sharded
from trainwright.data.fingerprint import fingerprint
from trainwright.data.loading import to_device
from trainwright.data.padding import IDS, IGNORE, LABELS, collate_of
from trainwright.data.unwrap import Unwrapped, length_of
from trainwright.distributed.group import SOLO, World
from trainwright.engine.evaluate import evaluating
from trainwright.errors import DataError, UsageError
from trainwright.finetune.losses import REFERENCE_CHOSEN, REFERENCE_REJECTED, UNKNOWN, completion_log_probs
from trainwright.finetune.store import cache_folder

Say = Callable[[str], None]
KIND = "reference"
"""Folder in the cache."""


class WithReference(Dataset[dict[str, Any]]):
    """Preference samples with the log-probabilities of their completions under the reference model.

    Attributes:
        values: Log-probabilities of the chosen and of the rejected completions; UNKNOWN until they are computed.
        digest: Identifies the reference model; "" until it is known.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.values = torch.full((len(dataset), 2), UNKNOWN)
        self.digest = ""
        self.deterministic = type(dataset) is list or bool(getattr(dataset, "deterministic", False))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        chosen, rejected = self.values[index]
        return {**self.dataset[index], REFERENCE_CHOSEN: chosen, REFERENCE_REJECTED: rejected}

    def content_sha256(self) -> str:
        """Return a hash of the samples and of the reference model, so that a resume reports a changed reference."""
        return hashlib.sha256(f"{fingerprint(self.dataset).sha256} {self.digest}".encode()).hexdigest()


def with_reference(loss: object, data: Unwrapped) -> Unwrapped:
    """Return the data with keys for the reference, if the loss needs it and the samples do not have it.

    Raises UsageError for data without positions.
    """
    if not getattr(loss, "needs_reference", False) or isinstance(data.dataset, WithReference):
        return data
    if data.own_batches is not None or not hasattr(data.dataset, "__getitem__") or not length_of(data.dataset):
        raise UsageError(
            "dpo computes the reference for each sample once, so it needs a dataset with __getitem__ and __len__",
            remedy=f"pass such a dataset, or yield {REFERENCE_CHOSEN} and {REFERENCE_REJECTED} in the batches",
        )
    first = data.dataset[0]
    if isinstance(first, Mapping) and REFERENCE_CHOSEN in first:
        return data
    collate = collate_of(data.dataset) if data.collate is default_collate else data.collate
    return replace(data, dataset=WithReference(data.dataset), collate=collate)


def fill(
    sets: Sequence[Unwrapped | None],
    model: nn.Module,
    device: torch.device,
    *,
    batch: int,
    world: World = SOLO,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    precision: str = "fp32",
    cache: Path | None = None,
    say: Say = lambda line: None,
) -> None:
    """Compute the reference of datasets that need it with ``model``, or read it from the cache.

    Ranks compute a part each. Every rank calls the model equally often, so it may be sharded; then the cache is not
    used.
    """
    wanted = [each for each in sets if each is not None and isinstance(each.dataset, WithReference)]
    if not wanted:
        return
    weights = "" if is_sharded(model) else weights_digest(model)
    for data in wanted:
        dataset: WithReference = data.dataset
        require_preferences(dataset.dataset, say)
        key = hashlib.sha256(f"{weights} {_samples_digest(dataset.dataset)} {precision}".encode()).hexdigest()
        file = cache_folder(cache) / KIND / f"{key[:32]}.safetensors"
        known = world.agree(file.is_file() and weights != "") if world.rank == 0 else world.agree(None)
        if known:
            dataset.values = load_file(file)["log_probs"] if world.rank == 0 else dataset.values
            world.copy_first_([dataset.values])
            say(f"reference log-probabilities of {len(dataset):,} pairs: read from {file}")
        else:
            say(f"reference log-probabilities of {len(dataset):,} pairs: computing with the initial weights")
            dataset.values = _computed(dataset, data, model, device, batch, world, autocast)
            if world.rank == 0 and weights:
                _save(file, dataset.values)
        dataset.digest = f"{weights} {precision}"


def _computed(
    dataset: WithReference,
    data: Unwrapped,
    model: nn.Module,
    device: torch.device,
    batch: int,
    world: World,
    autocast: Callable[[], AbstractContextManager[object]],
) -> Tensor:
    """Return (N, 2). Samples of similar length share a batch; the last batches of a rank may repeat its first ones."""
    samples = dataset.dataset
    lengths = [max(len(each[f"{which}_{IDS}"]) for which in ("chosen", "rejected")) for each in _each(samples)]
    order = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    rounds = -(-len(batches) // world.size)
    found_N2 = torch.full((len(dataset), 2), float("nan"), dtype=torch.float32)
    with evaluating(model):
        for number in range(rounds):
            positions = batches[(number * world.size + world.rank) % len(batches)]
            rows = to_device(data.collate([samples[position] for position in positions]), device)
            with autocast():
                log_probs = completion_log_probs(model, rows)
            found_N2[positions] = torch.stack(log_probs, 1).float().cpu()
    for part_N2 in world.collect(found_N2):
        found_N2 = torch.where(found_N2.isnan(), part_N2, found_N2)
    if world.size > 1:  # several ranks may have computed a batch: use the value of one
        world.copy_first_([found_N2])
    return found_N2


def require_preferences(samples: Any, say: Say = lambda line: None) -> None:
    """Raise DataError for pairs that carry no preference: completions without a label, or all pairs equal.

    Reports the number of equal pairs and of pairs that also occur with chosen and rejected swapped.
    """
    unlabelled, equal, seen, reversed_ = list[int](), 0, set[tuple[bytes, bytes]](), 0
    for position, sample in enumerate(_each(samples)):
        sides = [torch.as_tensor(sample[f"{which}_{IDS}"]) for which in ("chosen", "rejected")]
        labels = [torch.as_tensor(sample[f"{which}_{LABELS}"]) for which in ("chosen", "rejected")]
        if any(not bool((each[1:] != IGNORE).any()) for each in labels):
            unlabelled.append(position)
        chosen, rejected = (_bytes(each) for each in sides)
        equal += chosen == rejected
        reversed_ += chosen != rejected and (rejected, chosen) in seen
        seen.add((chosen, rejected))
    count = len(samples)
    if unlabelled:
        raise DataError(
            f"{len(unlabelled):,} of {count:,} pairs have a completion without a label, the first is pair "
            f"{unlabelled[0]}: it has no tokens, or a length limit has cut it off",
            sample_ids=unlabelled[:16],
            remedy="raise the length limit, or leave these pairs out",
        )
    if equal == count:
        raise DataError(
            f"the chosen and the rejected completion are equal in all {count:,} pairs, so the loss stays at ln 2",
            remedy="check the columns that chosen and rejected are read from",
        )
    if equal:
        say(f"{equal:,} of {count:,} pairs have equal completions, which carry no preference")
    if reversed_:
        say(f"{reversed_:,} of {count:,} pairs are also there the other way round: their preferences contradict")


def weights_digest(model: nn.Module) -> str:
    """Return a hash of all parameters and buffers of a model."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(_bytes(value))
    return digest.hexdigest()


def _samples_digest(samples: Any) -> str:
    digest = hashlib.sha256()
    for sample in _each(samples):
        for name in sorted(sample):
            if name.startswith(("chosen_", "rejected_")):
                value = torch.as_tensor(sample[name])
                digest.update(f"{name} {tuple(value.shape)}".encode())
                digest.update(_bytes(value))
    return digest.hexdigest()


def _bytes(value: Tensor) -> bytes:
    raw: bytes = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw


def _each(samples: Any) -> Any:
    return (samples[position] for position in range(len(samples)))


def _save(file: Path, values: Tensor) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f"{file.name}.{os.getpid()}.draft")
    save_file({"log_probs": values.contiguous()}, draft)
    draft.replace(file)
