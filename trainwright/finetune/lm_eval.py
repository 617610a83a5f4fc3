"""Tasks of the package lm-eval as a metric of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from torch import nn

from trainwright.errors import UsageError, import_optional, text_of
from trainwright.finetune.tokenizer import load_tokenizer, tokenizer_of
from trainwright.models.pretrained import hub_model_of

NO_FILTER = "none"
"""The filter of lm-eval that changes nothing. It is left out of the names of figures."""


class LmEval:
    """A metric: scores of the model on tasks of lm-eval, such as ``arc_easy``, once in each evaluation.

    The names of the figures are ``lm_eval.TASK.SCORE``, such as ``lm_eval.arc_easy.acc``. lm-eval downloads the
    records of most tasks from the hub. A custom task is a YAML file with a file of records.

    Args:
        tasks: Names of tasks.
        limit: Maximum number of records per task; null: all.
        num_fewshot: Number of examples in each prompt; null: the number in the task.
        batch_size: Prompts per call of the model.
        include_path: A folder with custom tasks.
        apply_chat_template: Write each prompt as a conversation.
        tokenizer: Folder or hub name of the tokenizer; null: the tokenizer in the folder of the model.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        *,
        limit: int | None = 100,
        num_fewshot: int | None = None,
        batch_size: int = 8,
        include_path: str | Path | None = None,
        apply_chat_template: bool = False,
        tokenizer: str | Path | None = None,
    ) -> None:
        if isinstance(tasks, str) or not tasks:
            raise UsageError("lm_eval: tasks must be a list of names", remedy="write tasks: [arc_easy]")
        self._library = import_optional("lm_eval", needed_for="the metric lm_eval", package="lm_eval")
        folder = None if include_path is None else str(Path(include_path).expanduser())
        self._manager = import_optional("lm_eval.tasks", needed_for="lm_eval").TaskManager(include_path=folder)
        if unknown := [each for each in tasks if each not in self._manager.all_tasks]:
            raise UsageError(f"lm_eval has no task {unknown[0]!r}", remedy="list them: lm_eval ls tasks")
        self.tasks = tuple(tasks)
        self.limit = limit
        self.num_fewshot = num_fewshot
        self.batch_size = batch_size
        self.apply_chat_template = apply_chat_template
        self._tokenizer: Any = None if tokenizer is None else load_tokenizer(tokenizer)

    def measure(self, model: nn.Module) -> Mapping[str, float]:
        """Return the scores of the model. Raises UsageError if lm-eval cannot evaluate it."""
        inside = hub_model_of(model)
        if inside is None:
            remedy = "leave lm_eval out, or use a model of transformers"
            raise UsageError(f"lm_eval cannot evaluate a {type(model).__name__}", remedy=remedy)
        if self._tokenizer is None:
            remedy = "name it: metrics: [{use: lm_eval, args: {tasks: [...], tokenizer: FOLDER}}]"
            self._tokenizer = tokenizer_of(model, "lm_eval", remedy)
        wrapper = import_optional("lm_eval.models.huggingface", needed_for="lm_eval").HFLM
        try:
            scored = wrapper(pretrained=inside, tokenizer=self._tokenizer, batch_size=self.batch_size)
            found = self._library.simple_evaluate(
                model=scored,
                tasks=[*self.tasks],
                task_manager=self._manager,
                limit=self.limit,
                num_fewshot=self.num_fewshot,
                apply_chat_template=self.apply_chat_template,
                log_samples=False,
                bootstrap_iters=0,
            )
        except Exception as error:  # an error of a task, of its data, or of the network
            remedy = "try the tasks alone: lm_eval run --model hf --tasks ..."
            raise UsageError(f"lm_eval failed: {text_of(error, lines=1)}", remedy=remedy) from error
        return dict(_scores(found["results"]))


def _scores(results: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of each score, without standard errors."""
    for task, scores in results.items():
        for key, value in scores.items():
            name, _, filtered = key.partition(",")
            if filtered and isinstance(value, Real) and not name.endswith("_stderr"):
                yield f"{task}.{name}" + ("" if filtered == NO_FILTER else f".{filtered}"), float(value)
