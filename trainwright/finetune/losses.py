"""Losses of fine-tuning beyond the next token: preferences (DPO), reward models, and distillation.

Each returns a sum over pairs or tokens and its weight, so accumulation and ranks give the gradient of the full batch.

The reference log-probabilities of DPO are computed once with the initial weights of a run, and kept in the cache. A
dataset of preference samples gets two more keys, ``reference_chosen`` and ``reference_rejected``. Their value is
``UNKNOWN`` until ``fill`` has computed them. The cache is keyed by a hash of weights, samples and precision.

Shapes: B pairs, R = 2B rows (chosen, then rejected), T tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from trainwright.checkpoint.shards import is_sharded
from trainwright.data.fingerprint import fingerprint
from trainwright.data.loading import to_device
from trainwright.data.padding import ATTENTION_KEY, IDS, IGNORE, LABELS, collate_of
from trainwright.data.ready_batches import Say, silent
from trainwright.data.unwrap import Unwrapped, length_of
from trainwright.distributed.group import SOLO, World
from trainwright.engine.evaluate import evaluating
from trainwright.engine.loss import Batch, Loss
from trainwright.engine.token_batch import reads_one_row, takes, token_batch
from trainwright.errors import DataError, UsageError
from trainwright.finetune.store import cache_folder
from trainwright.models.pretrained import load_pretrained

REFERENCE_CHOSEN, REFERENCE_REJECTED = "reference_chosen", "reference_rejected"
"""Keys of a preference sample: log-probabilities of its completions under the reference model."""
UNKNOWN = 1.0
"""The value of a log-probability that is not computed yet. A computed log-probability is never above 0."""


class DPO(nn.Module):
    """Direct preference optimization (https://arxiv.org/abs/2305.18290), with the sigmoid loss.

    A batch has ``chosen_input_ids``, ``chosen_labels`` (unshifted; -100 on the prompt), the same for ``rejected_``, and
    ``reference_chosen`` and ``reference_rejected``, the log-probabilities of the completions under the reference model.
    A run computes these with its initial weights, before the first step.

    Args:
        beta: Strength of the penalty on divergence from the reference model.
        label_smoothing: Probability that a preference is the wrong way round (conservative DPO).
    """

    needs_reference = True

    def __init__(self, beta: float = 0.1, label_smoothing: float = 0.0) -> None:
        super().__init__()
        if beta <= 0:
            raise UsageError(f"dpo: beta must be above 0; got {beta}", remedy="try beta: 0.1")
        if not 0 <= label_smoothing < 0.5:
            rule = f"dpo: label_smoothing must be in [0, 0.5); got {label_smoothing}"
            raise UsageError(rule, remedy="leave it out, or try label_smoothing: 0.1")
        self.beta = beta
        self.label_smoothing = label_smoothing

    def forward(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the summed loss over the pairs, with the margin and accuracy of the implied rewards."""
        policies_B = completion_log_probs(model, batch)
        references_B = [batch.get(name) for name in (REFERENCE_CHOSEN, REFERENCE_REJECTED)]
        if None in references_B:
            raise UsageError(
                f"dpo: the batch has no {REFERENCE_CHOSEN} and {REFERENCE_REJECTED}",
                remedy="train with tw.fit or a recipe, which compute them, or see "
                "trainwright.finetune.losses.with_reference",
            )
        # Until a run has computed the reference, for example in `trainwright check`, the policy is the reference.
        rewards_B = [
            self.beta * (policy - torch.where(reference > 0, policy.detach(), reference.to(policy.dtype)))
            for policy, reference in zip(policies_B, references_B, strict=True)
        ]
        margin_B = rewards_B[0] - rewards_B[1]
        smoothing = self.label_smoothing
        loss_B = -(1 - smoothing) * F.logsigmoid(margin_B) - smoothing * F.logsigmoid(-margin_B)
        return Loss(loss_B.sum(), float(len(loss_B)), _reward_metrics(*rewards_B))


def bradley_terry(model: nn.Module, batch: Batch, *, center: float = 0.0) -> Loss:
    """Reward model: -log sigmoid of the difference of two rewards (Bradley-Terry), per pair.

    The model returns one logit for each row, as ``AutoModelForSequenceClassification`` with ``num_labels=1`` does. The
    reward is the logit of the last token that is no padding. A key ``margin`` of the batch is subtracted from the
    difference.

    Args:
        center: Weight of the squared sum of both rewards, which keeps them near 0 (https://arxiv.org/abs/2312.09244).
    """
    rows = pair_rows(batch)
    rewards_R = rewards(model, rows)
    chosen_B, rejected_B = rewards_R.chunk(2)
    loss_B = -F.logsigmoid(chosen_B - rejected_B - batch.get("margin", 0.0))
    if center:
        loss_B = loss_B + center * (chosen_B + rejected_B).square()
    return Loss(loss_B.sum(), float(len(loss_B)), _reward_metrics(chosen_B, rejected_B))


class Distillation(nn.Module):
    """Knowledge distillation of a causal language model: forward KL from a teacher, per label that is not -100.

    The loss of a token is ``weight * T**2 * KL(teacher || student) + (1 - weight) * cross-entropy``, both
    distributions at temperature T (https://arxiv.org/abs/1503.02531). Batches are those of ``hf_causal_lm``.

    Args:
        teacher: A module, or the folder or hub name of a model of transformers. It is frozen and not saved in
            checkpoints.
        temperature: Temperature of both distributions.
        weight: Weight of the KL divergence. The cross-entropy has the weight ``1 - weight``.
    """

    def __init__(self, teacher: nn.Module | str, temperature: float = 1.0, weight: float = 1.0) -> None:
        super().__init__()
        if temperature <= 0 or not 0 <= weight <= 1:
            raise UsageError(
                f"distillation: temperature={temperature} must be above 0 and weight={weight} in [0, 1]",
                remedy="try temperature: 2.0 and weight: 0.5",
            )
        model = load_pretrained(teacher, dtype="auto") if isinstance(teacher, str) else teacher
        self.teacher = model.requires_grad_(False).eval()
        self.temperature = temperature
        self.weight = weight
        self.register_state_dict_post_hook(_drop_teacher)  # type: ignore[no-untyped-call]

    def forward(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the summed loss over the labels, with both of its terms."""
        called = token_batch(model, batch, one_row=reads_one_row(self.teacher))
        inputs = {name: value for name, value in called.inputs.items() if takes(self.teacher, name)}
        student_BTV = model(**called.inputs).logits
        with torch.no_grad():
            teacher_BTV = self.teacher(**inputs).logits
        if teacher_BTV.shape[-1] != student_BTV.shape[-1]:
            raise UsageError(
                f"distillation: the teacher has {teacher_BTV.shape[-1]:,} tokens and the student "
                f"{student_BTV.shape[-1]:,}",
                remedy="use a teacher with the vocabulary of the student",
            )
        counted_BT = called.target != IGNORE
        student_NV, target_N = student_BTV[counted_BT].float(), called.target[counted_BT]
        kl = self.temperature**2 * F.kl_div(
            F.log_softmax(student_NV / self.temperature, -1),
            F.log_softmax(teacher_BTV[counted_BT].float() / self.temperature, -1),
            reduction="sum",
            log_target=True,
        )
        cross_entropy = F.cross_entropy(student_NV, target_N, reduction="sum")
        total = self.weight * kl + (1 - self.weight) * cross_entropy
        terms = {"kl": kl.detach(), "cross_entropy": cross_entropy.detach()}
        return Loss(total, float(len(target_N)), terms, student_BTV, called.target)

    def train(self, mode: bool = True) -> Self:
        """Set the mode; the teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self


def _drop_teacher(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    """Remove the teacher from a state dict, so that no checkpoint contains it."""
    for name in [each for each in state if each.startswith(f"{prefix}teacher.")]:
        del state[name]


class PairRows(NamedTuple):
    """The completions of B pairs as R rows, the chosen ones first."""

    ids: Tensor
    labels: Tensor
    mask: Tensor

    @property
    def batch(self) -> dict[str, Tensor]:
        """Return them as a padded batch."""
        return {IDS: self.ids, LABELS: self.labels, ATTENTION_KEY: self.mask}


def pair_rows(batch: Mapping[str, Tensor]) -> PairRows:
    """Return both completions of each pair of a batch in one tensor, padded to the longest.

    Raises UsageError for a batch that has no pairs.
    """
    _require_pairs(batch, "the batch")
    longest = max(batch[f"{which}_{IDS}"].shape[1] for which in ("chosen", "rejected"))

    def joined(key: str, fill: int) -> Tensor:
        parts = []
        for which in ("chosen", "rejected"):
            part = batch.get(f"{which}_{key}")
            part = torch.ones_like(batch[f"{which}_{IDS}"]) if part is None else part
            parts.append(F.pad(part, (0, longest - part.shape[1]), value=fill))
        return torch.cat(parts)

    return PairRows(joined(IDS, 0), joined(LABELS, IGNORE), joined(ATTENTION_KEY, 0))


def _require_pairs(value: object, kind: str) -> None:
    needed = [f"{which}_{key}" for which in ("chosen", "rejected") for key in (IDS, LABELS)]
    if not isinstance(value, Mapping) or any(name not in value for name in needed):
        got = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"a {type(value).__name__}"
        remedy = f"give samples with {needed}; for columns of text write data.train: {{use: preference}} in a recipe"
        raise UsageError(f"the loss compares two completions, and {kind} has {got}", remedy=remedy)


def completion_log_probs(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed log-probability of the labels of the chosen and of the rejected completions, (B,) each."""
    called = token_batch(model, pair_rows(batch).batch)
    logits_RTV = model(**called.inputs).logits
    loss_RT = F.cross_entropy(logits_RTV.float().transpose(1, 2), called.target, reduction="none", ignore_index=IGNORE)
    chosen_B, rejected_B = (-loss_RT.sum(1)).chunk(2)
    return chosen_B, rejected_B


def rewards(model: nn.Module, rows: PairRows) -> Tensor:
    """Return the reward of each row, (R,): the score of its last token that is no padding."""
    with _scores_by_token(model) as scores:
        output = model(**token_batch(model, rows.batch).inputs)
    if scores:
        last_R = rows.mask.sum(1) - 1
        found_R = scores[-1].gather(1, last_R[:, None, None].expand(-1, 1, scores[-1].shape[-1])).squeeze(1)
    else:
        found_R = getattr(output, "logits", output)
    if found_R.dim() > 1 and found_R.shape[-1] != 1:
        raise UsageError(
            f"a reward model returns one logit for each row; this one returns {tuple(found_R.shape)}",
            remedy="build it with num_labels: 1, such as AutoModelForSequenceClassification",
        )
    return found_R.reshape(-1).float()


@contextmanager
def _scores_by_token(model: nn.Module) -> Iterator[list[Tensor]]:
    """Context in which the scores (R, T, 1) of a model of transformers are kept, for all tokens.

    The model itself returns the score of the last token that is not ``pad_token_id``, which is the wrong token if the
    end of a text has this id, too. Without ``pad_token_id`` it accepts only one row.
    """
    find = getattr(model, "get_base_model", None)
    base: Any = find() if callable(find) else model
    head, config, found = getattr(base, "score", None), getattr(base, "config", None), list[Tensor]()
    if not isinstance(head, nn.Module) or config is None:
        yield found
        return
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    pad = text.pad_token_id
    handle = head.register_forward_hook(lambda module, args, output: found.append(output))
    text.pad_token_id = 0 if pad is None else pad
    try:
        yield found
    finally:
        text.pad_token_id = pad
        handle.remove()


def _reward_metrics(chosen_B: Tensor, rejected_B: Tensor) -> dict[str, Tensor]:
    chosen_B, rejected_B = chosen_B.detach(), rejected_B.detach()
    return {
        "reward_chosen": chosen_B.sum(),
        "reward_rejected": rejected_B.sum(),
        "reward_margin": (chosen_B - rejected_B).sum(),
        "reward_accuracy": (chosen_B > rejected_B).sum(),
    }


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
    say: Say = silent,
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


def require_preferences(samples: Any, say: Say = silent) -> None:
    """Raise UsageError for samples that are no pairs of ids, and DataError for pairs that carry no preference.

    Those have completions without a label, or all pairs are equal. Reports the number of equal pairs and of pairs that
    also occur with chosen and rejected swapped.
    """
    unlabelled, equal, seen, reversed_ = list[int](), 0, set[tuple[bytes, bytes]](), 0
    for position, sample in enumerate(_each(samples)):
        _require_pairs(sample, f"sample {position}")
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
