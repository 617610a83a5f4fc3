"""Completions of a few prompts before the first step and after each evaluation of a run.

The completions are saved in the run folder and shown in its report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from trainwright.checkpoint.shards import is_sharded
from trainwright.checkpoint.train_state import TrainState
from trainwright.engine.evaluate import evaluating
from trainwright.engine.step import StepResult
from trainwright.errors import UsageError
from trainwright.finetune.tokenizer import load_tokenizer, prompt_ids, tokenizer_of
from trainwright.models.pretrained import hub_model_of, require_transformers
from trainwright.runs.printing import printable


class Generations:
    """An observer that shows how the model completes some prompts, before the first step and after each evaluation.

    It has no effect on the training. Decoding is greedy, so texts differ only if the weights differ.

    Args:
        prompts: Texts. If the tokenizer has a chat template, each is a message of a user.
        max_new_tokens: Maximum number of tokens of a completion.
        tokenizer: Folder or hub name of the tokenizer; null: the tokenizer in the folder of the model.
    """

    needs_evaluation = True

    def __init__(self, prompts: Sequence[str], max_new_tokens: int = 64, tokenizer: str | None = None) -> None:
        if isinstance(prompts, str) or not prompts or not all(isinstance(each, str) for each in prompts):
            raise UsageError("generate: prompts must be a list of texts", remedy="write prompts: [How are you?]")
        if max_new_tokens < 1:
            raise UsageError(f"generate: max_new_tokens={max_new_tokens}", remedy="try max_new_tokens: 64")
        self.prompts, self.max_new_tokens = tuple(prompts), max_new_tokens
        self._tokenizer: Any = None if tokenizer is None else load_tokenizer(tokenizer)
        self.show: Callable[[str], None] = lambda title: None
        """Writes the result of ``text_of`` under a title. The run sets it."""

    def observe(self, result: StepResult, state: TrainState) -> None:
        if result.evaluation is not None:
            self.show(f"step {state.step:,}")

    def text_of(self, model: nn.Module) -> str:
        """Return prompts and completions as text without control characters; "" for a model that cannot generate."""
        inside = hub_model_of(model)
        if inside is None or is_sharded(model) or not hasattr(inside, "generate"):
            return ""
        if self._tokenizer is None:
            remedy = "name it: observers: [{use: generate, args: {prompts: [...], tokenizer: FOLDER}}]"
            self._tokenizer = tokenizer_of(model, "generate", remedy)
        tokenizer = self._tokenizer
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        settings = require_transformers("generate").GenerationConfig(
            max_new_tokens=self.max_new_tokens, do_sample=False, use_cache=True, pad_token_id=pad
        )
        lines = []
        with evaluating(model):
            for prompt in self.prompts:
                request = [{"role": "user", "content": prompt}] if tokenizer.chat_template else prompt
                ids_1T = torch.tensor([prompt_ids(tokenizer, request)], device=inside.device)
                generated_1T = inside.generate(
                    ids_1T, attention_mask=torch.ones_like(ids_1T), generation_config=settings
                )
                completion = tokenizer.decode(generated_1T[0, ids_1T.shape[1] :], skip_special_tokens=True)
                lines += [f"> {printable(prompt)}", printable(completion)]
        torch.clear_autocast_cache()  # casts that were made without a graph would have no gradient
        return "\n".join(lines)

    def close(self) -> None: ...
