"""Group relative policy optimization: the loss generates completions, and a function of the user scores them.

A completion depends only on its prompt, the weights and torch's random generator. A checkpoint contains all three, so a
resumed run and a replayed step generate the same completions.

Shapes: B prompts, G completions of each, R = B * G rows, T tokens of a row, C tokens of a completion.
"""

from __future__ import annotations

import inspect
import json
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainwright.checkpoint.shards import is_sharded
from trainwright.data.padding import ATTENTION_KEY, IDS, IGNORE, LABELS
from trainwright.engine.loss import Batch, Loss
from trainwright.engine.token_batch import following, token_batch
from trainwright.engine.user_log import log
from trainwright.errors import UsageError, require_choice, text_of
from trainwright.finetune.prompts import RECORD
from trainwright.finetune.tokenizer import load_tokenizer, tokenizer_of
from trainwright.finetune.vllm import VllmServer
from trainwright.models.generate import evaluation_mode
from trainwright.models.pretrained import hub_model_of, require_transformers

if TYPE_CHECKING:
    from trainwright.finetune.tokenizer import Tokenizer

Reward = Callable[..., Sequence[float]]
LossType: TypeAlias = Literal["dapo", "grpo", "dr_grpo"]
ADVANTAGES, OLD_LOG_PROBS = "advantages", "old_log_probs"
"""Keys of a batch that already contains completions. Shapes: (R,), and (R, T) aligned with ``labels``."""
STD_EPSILON = 1e-4
"""Added to the standard deviation of the rewards of a group, as in TRL."""


class CompletionGroups(NamedTuple):
    """Prompts with their completions, padded on the right, and the advantage of each completion in its group."""

    ids: Tensor
    """(R, T)."""
    labels: Tensor
    """(R, T): the ids of the completion, -100 elsewhere."""
    mask: Tensor
    """(R, T): 0 for padding."""
    advantages: Tensor
    """(R,)."""
    old: Tensor | None = None
    """(R, T): log-probabilities under the policy that generated the tokens, aligned with ``labels``. None: the current
    policy."""


class GRPO(nn.Module):
    """Group relative policy optimization (https://arxiv.org/abs/2402.03300) on batches of ``prompts``.

    Generates ``completions`` completions for each prompt, calls the reward function, and compares each completion with
    the others of its prompt: the advantage is ``(reward - mean) / (std + 1e-4)`` over the group. Each rollout is used
    for one update, so the ratio of probabilities is 1 and the clip has no effect. A batch may contain completions
    instead of prompts: ``input_ids``, ``labels`` (-100 on the prompt), ``advantages`` (R,) and, from an earlier policy,
    ``old_log_probs`` (R, T). With ``old_log_probs`` the clip has an effect.

    Args:
        reward: A function, or ``module:function`` in the folder of the recipe, or a list of these, whose rewards are
            added. The arguments are those of TRL: ``prompts``, ``completions``, ``completion_ids``, and every other
            key of the records. Each is a list with one entry per completion. A function gets only the arguments that
            it has parameters for, and returns one number per completion.
        completions: Number of completions per prompt.
        max_new_tokens: Maximum number of tokens of a completion.
        temperature: Temperature of the policy, in generation and in the loss.
        beta: Weight of the KL divergence from the weights at the start of the run; 0: none.
        clip: The ratio of probabilities is clipped to ``1 - clip`` to ``1 + clip``.
        clip_high: The upper bound is ``1 + clip_high``; null: ``1 + clip``.
        scale_rewards: Divide by the standard deviation of the group.
        loss_type: ``dapo`` gives all tokens the same weight, ``grpo`` all completions. ``dr_grpo`` divides the sum over
            the tokens by (number of completions * ``max_new_tokens``).
        tokenizer: Decodes completions; null: the tokenizer in the folder of the model.
        vllm: Address of a vLLM server that generates completions, given the model's adapters; null: the model does.
        vllm_folder: A folder that the server can read, for the adapters; null: a temporary one.

    Raises UsageError for a value that cannot be used.
    """

    measures_progress = False
    """The value of the loss may rise while the policy improves; watch ``reward``."""

    def __init__(
        self,
        reward: Any,
        *,
        completions: int = 8,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        beta: float = 0.0,
        clip: float = 0.2,
        clip_high: float | None = None,
        scale_rewards: bool = True,
        loss_type: LossType = "dapo",
        tokenizer: str | Path | Tokenizer | None = None,
        vllm: str | None = None,
        vllm_folder: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.server = None if vllm is None else VllmServer(vllm, vllm_folder)
        require_choice("loss_type", loss_type, get_args(LossType))
        for wrong, rule, remedy in (
            (completions < 2, f"completions={completions} leaves none to compare with", "try completions: 8"),
            (max_new_tokens < 1, f"max_new_tokens={max_new_tokens} generates nothing", "try max_new_tokens: 256"),
            (temperature <= 0, f"temperature={temperature} must be above 0", "try temperature: 1.0"),
            (beta < 0, f"beta={beta} must be 0 or more", "try beta: 0.04"),
            (not 0 < clip < 1, f"clip={clip} must be in (0, 1)", "try clip: 0.2"),
            (clip_high is not None and clip_high <= 0, f"clip_high={clip_high} must be above 0", "try clip_high: 0.28"),
        ):
            if wrong:
                raise UsageError(f"grpo: {rule}", remedy=remedy)
        rewards = [reward] if isinstance(reward, str) or callable(reward) else list(reward)
        if not rewards:
            raise UsageError("grpo: the list of rewards is empty", remedy="write reward: module:function")
        self.rewards = [_import_reward(each) if isinstance(each, str) else each for each in rewards]
        self.completions, self.max_new_tokens, self.temperature = completions, max_new_tokens, temperature
        self.beta, self.bounds = beta, (1 - clip, 1 + (clip if clip_high is None else clip_high))
        self.scale_rewards, self.loss_type = scale_rewards, loss_type
        self._tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        self._reference: dict[str, Tensor] = {}

    def keep_reference(self, model: nn.Module) -> None:
        """Copy the trained weights of ``model`` as the reference of the KL divergence. Does nothing if ``beta`` is 0.

        A run calls this before its first step. In any other loop the first call of the loss does. ``state_dict``
        contains the copy, which is small if only adapters are trained.
        """
        if self.beta:
            trained = ((name, each) for name, each in model.named_parameters() if each.requires_grad)
            self._reference = {name: each.detach().clone() for name, each in trained}

    def get_extra_state(self) -> dict[str, Tensor]:
        """Return the reference, for checkpoints."""
        return self._reference

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Load the reference from a checkpoint."""
        self._reference = dict(state)

    def forward(self, model: nn.Module, batch: Batch) -> Loss:
        """Return the summed loss over tokens or completions."""
        rollout = (
            self._read_rollout(batch)
            if isinstance(batch, Mapping) and ADVANTAGES in batch
            else self._generate_rollout(model, batch)
        )
        reference_RT = self._reference_log_probs(model, rollout)
        return self.loss(self.log_probs(model, rollout), rollout, reference_RT)

    def loss(self, log_probs_RT: Tensor, rollout: CompletionGroups, reference_RT: Tensor | None = None) -> Loss:
        """Return the loss of a rollout with these log-probabilities of the policy and of the reference.

        Position t of each has the log-probability of token t + 1.
        """
        mask_RT = (following(rollout.labels) != IGNORE).to(log_probs_RT.dtype)
        old_RT = log_probs_RT.detach() if rollout.old is None else F.pad(rollout.old[:, 1:], (0, 1))
        ratio_RT, advantages_R1 = (log_probs_RT - old_RT).exp(), rollout.advantages[:, None]
        low, high = self.bounds
        loss_RT = -torch.minimum(ratio_RT * advantages_R1, ratio_RT.clamp(low, high) * advantages_R1)
        outside_RT = ((ratio_RT < low) & (advantages_R1 < 0)) | ((ratio_RT > high) & (advantages_R1 > 0))
        tokens = mask_RT.sum()
        log(clipped=(outside_RT * mask_RT).sum() / tokens.clamp(min=1))
        if reference_RT is not None:
            log_ratio_RT = reference_RT - log_probs_RT
            kl_RT = log_ratio_RT.exp() - log_ratio_RT - 1
            log(kl=(kl_RT.detach() * mask_RT).sum() / tokens.clamp(min=1))
            loss_RT = loss_RT + self.beta * ratio_RT * kl_RT  # the ratio makes its gradient that of the KL
        sums_R = (loss_RT * mask_RT).sum(1)
        if self.loss_type == "grpo":
            return Loss((sums_R / mask_RT.sum(1).clamp(min=1)).sum(), float(len(sums_R)))
        if self.loss_type == "dr_grpo":
            return Loss(sums_R.sum() / self.max_new_tokens, float(len(sums_R)))
        return Loss(sums_R.sum(), tokens)

    def log_probs(
        self, model: nn.Module, rollout: CompletionGroups, weights: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Return the log-probability of the label that follows each position, (R, T); 0 where there is none.

        ``weights`` replace the weights of the model that have these names.
        """
        called = token_batch(model, {IDS: rollout.ids, LABELS: rollout.labels, ATTENTION_KEY: rollout.mask})
        if weights is None:
            output = model(**called.inputs)
        else:
            output = torch.func.functional_call(model, dict(weights), (), called.inputs)
        logits_RTV = output.logits.float() / self.temperature
        return -F.cross_entropy(logits_RTV.transpose(1, 2), called.target, reduction="none", ignore_index=IGNORE)

    def _reference_log_probs(self, model: nn.Module, rollout: CompletionGroups) -> Tensor | None:
        if not self.beta:
            return None
        if type(rollout.ids) is not Tensor:  # fake tensors: a pass without gradients does not raise the memory peak
            return torch.zeros_like(rollout.ids, dtype=torch.float32)
        if not self._reference:
            self.keep_reference(model)  # the first call outside of a run, such as that of `trainwright check`
        reference = {name: each.to(rollout.ids.device) for name, each in self._reference.items()}
        with torch.no_grad(), evaluation_mode(model):
            found_RT = self.log_probs(model, rollout, reference)
        torch.clear_autocast_cache()  # casts that were made without a graph would have no gradient
        return found_RT

    def _read_rollout(self, batch: Mapping[str, Any]) -> CompletionGroups:
        mask_RT = batch.get(ATTENTION_KEY, torch.ones_like(batch[IDS]))
        return CompletionGroups(batch[IDS], batch[LABELS], mask_RT, batch[ADVANTAGES], batch.get(OLD_LOG_PROBS))

    def _generate_rollout(self, model: nn.Module, batch: Batch) -> CompletionGroups:
        """Generate completions and score them. Synchronizes with the device once per token."""
        if not isinstance(batch, Mapping) or not {IDS, RECORD} <= set(batch):
            got = ", ".join(map(str, batch)) if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
            remedy = "use the data set prompts, or trainwright.finetune.prompts.Prompts in Python"
            raise UsageError(f"grpo needs batches of prompts; this one has {got}", remedy=remedy)
        ids_RT = batch[IDS].repeat_interleave(self.completions, 0)
        mask_BT = batch.get(ATTENTION_KEY, torch.ones_like(batch[IDS]))
        mask_RT = mask_BT.repeat_interleave(self.completions, 0)
        if type(ids_RT) is not Tensor:  # fake tensors have no values: assume completions of maximum length
            longest_RT = F.pad(ids_RT, (0, self.max_new_tokens))
            return CompletionGroups(longest_RT, longest_RT, torch.ones_like(longest_RT), longest_RT[:, 0].float())
        end_ids, tokenizer = self._end_ids(model), self._tokenizer_of(model)
        completion_RC = self._generate(model, ids_RT, mask_RT, end_ids, tokenizer)
        is_end_RC = torch.isin(completion_RC, torch.tensor(end_ids, device=ids_RT.device))
        kept_RC = (is_end_RC.cumsum(1) - is_end_RC.long()) == 0
        lengths = kept_RC.sum(1)
        texts = [row[:length] for row, length in zip(completion_RC.tolist(), lengths.tolist(), strict=True)]
        rewards_R = self._score(batch[RECORD], texts, tokenizer).to(ids_RT.device)
        grouped_BG = rewards_R.view(-1, self.completions)
        std_B1, centred_BG = grouped_BG.std(1, keepdim=True), grouped_BG - grouped_BG.mean(1, keepdim=True)
        advantages_BG = centred_BG / (std_B1 + STD_EPSILON) if self.scale_rewards else centred_BG
        log(
            reward=rewards_R.mean(),
            reward_std=std_B1.mean(),
            groups_of_equal_reward=(std_B1 == 0).float().mean(),
            completion_tokens=lengths.float().mean(),
            completions_cut=1 - is_end_RC.any(1).float().mean(),
        )
        rows_RT = torch.cat([ids_RT, completion_RC], 1)
        labels_RT = torch.cat([torch.full_like(ids_RT, IGNORE), completion_RC.masked_fill(~kept_RC, IGNORE)], 1)
        seen_RT = torch.cat([mask_RT, kept_RC.to(mask_RT.dtype)], 1)
        order_RT = (1 - seen_RT).argsort(dim=1, stable=True)[:, : int(seen_RT.sum(1).max())]  # padding to the right
        ids_RT, labels_RT, seen_RT = (each.gather(1, order_RT) for each in (rows_RT, labels_RT, seen_RT))
        return CompletionGroups(ids_RT, labels_RT, seen_RT, advantages_BG.flatten())

    @torch.no_grad()
    def _generate(
        self, model: Any, ids_RT: Tensor, mask_RT: Tensor, end_ids: list[int], tokenizer: Tokenizer
    ) -> Tensor:
        """Return the token ids of sampled completions, (R, C)."""
        if is_sharded(model) or not hasattr(model, "generate"):
            what = "ranks divide its weights" if is_sharded(model) else "it has no generate()"
            remedy = "use a transformers model that fits on each rank (parallel: {replicate: auto})"
            raise UsageError(f"grpo cannot generate with a {type(model).__name__}: {what}", remedy=remedy)
        if self.server is not None:
            found = self.server.complete(
                model,
                [ids[seen > 0].tolist() for ids, seen in zip(ids_RT, mask_RT, strict=True)][:: self.completions],
                count=self.completions,
                max_tokens=self.max_new_tokens,
                temperature=self.temperature,
                end_ids=end_ids,
            )
            rows = [torch.tensor(each, dtype=ids_RT.dtype, device=ids_RT.device) for each in found]
            return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=end_ids[0])
        order_RT = mask_RT.argsort(dim=1, stable=True)  # padding to the left
        pad = tokenizer.pad_token_id
        settings = require_transformers("grpo").GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            do_sample=True,
            temperature=self.temperature,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            eos_token_id=end_ids,
            pad_token_id=end_ids[0] if pad is None else pad,
            use_cache=True,
        )
        with evaluation_mode(model):
            found_RT: Tensor = model.generate(
                input_ids=ids_RT.gather(1, order_RT),
                attention_mask=mask_RT.gather(1, order_RT),
                generation_config=settings,
            )
        torch.clear_autocast_cache()  # casts that were made without a graph would have no gradient
        return found_RT[:, ids_RT.shape[1] :]

    def _score(self, records: Sequence[str], completion_ids: list[list[int]], tokenizer: Tokenizer) -> Tensor:
        """Return the sum of the rewards of each completion, (R,)."""
        fields = [json.loads(each) for each in records for _ in range(self.completions)]
        texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completion_ids]
        completions = [
            text if isinstance(each["prompt"], str) else [{"role": "assistant", "content": text}]
            for each, text in zip(fields, texts, strict=True)
        ]
        arguments = {"prompts": [each["prompt"] for each in fields], "completions": completions}
        arguments |= {"completion_ids": completion_ids}
        names = dict.fromkeys(name for each in fields for name in each if name != "prompt")
        if taken := [name for name in names if name in arguments]:
            what = f"grpo: the records have a key {taken[0]!r}, which is also an argument of the reward function"
            raise UsageError(what, remedy=f"rename {taken[0]!r} in the records")
        arguments |= {name: [each.get(name) for each in fields] for name in names}
        total_R = torch.zeros(len(fields))
        for function in self.rewards:
            values_R = _require_rewards(function, function(**_accepted_arguments(function, arguments)), len(fields))
            if len(self.rewards) > 1:
                log(**{f"reward_{_name(function)}": values_R.mean()})
            total_R += values_R
        return total_R

    def _tokenizer_of(self, model: nn.Module) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = tokenizer_of(model, "grpo", "pass it: GRPO(reward, tokenizer=tokenizer)")
        return self._tokenizer

    def _end_ids(self, model: nn.Module) -> list[int]:
        """Return the token ids that end a completion, from the model and from the tokenizer."""
        found = getattr(getattr(hub_model_of(model), "generation_config", None), "eos_token_id", None)
        ids = [*(found if isinstance(found, list) else [found]), self._tokenizer_of(model).eos_token_id]
        known = list(dict.fromkeys(int(each) for each in ids if each is not None))
        if not known:
            remedy = "set tokenizer.eos_token, or eos_token_id in generation_config.json"
            raise UsageError("grpo: neither the model nor the tokenizer has an end token", remedy=remedy)
        return known


def _import_reward(name: str) -> Reward:
    """Import the function ``module:name``. The import path includes the folder of the recipe."""
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        remedy = "write reward: module:function, with the module in the folder of the recipe"
        raise UsageError(
            f"grpo: there is no reward function {name!r}: {text_of(error, lines=1)}", remedy=remedy
        ) from None
    if not callable(found):
        rule = f"grpo: the reward {name} is a {type(found).__name__}, not a function"
        raise UsageError(rule, remedy="write reward: module:function")
    return found  # type: ignore[no-any-return]


def _accepted_arguments(function: Reward, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function has parameters for. Raises UsageError if a required one is missing."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return dict(arguments)
    if missing := [
        name
        for name, each in parameters.items()
        if name not in arguments and each.default is inspect.Parameter.empty and each.kind is not each.VAR_POSITIONAL
    ]:
        remedy = f"use some of these: {', '.join(arguments)}"
        what = f"grpo: the reward {_name(function)} has the parameter {missing[0]!r}, which is no key of the records"
        raise UsageError(what, remedy=remedy)
    return {name: value for name, value in arguments.items() if name in parameters}


def _require_rewards(function: Reward, values: Any, count: int) -> Tensor:
    """Return rewards as a float tensor (count,). Raises UsageError unless there is one finite number per completion."""
    found = values.tolist() if hasattr(values, "tolist") else values
    listed = list(found) if isinstance(found, list | tuple) else []
    if len(listed) != count or not all(isinstance(each, int | float) and math.isfinite(each) for each in listed):
        bad = next((each for each in listed if not (isinstance(each, int | float) and math.isfinite(each))), None)
        what = f"{len(listed)} values" if len(listed) != count else f"{bad!r}"
        remedy = "return a list with one finite number per completion"
        raise UsageError(f"grpo: the reward {_name(function)} returned {what} for {count} completions", remedy=remedy)
    return torch.tensor([float(each) for each in listed], device="cpu")


def _name(function: Reward) -> str:
    return str(getattr(function, "__name__", type(function).__name__))
