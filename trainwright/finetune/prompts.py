"""Prompts for policy optimization: token ids for the model, and the full record for the reward function.

Shapes: B prompts, T tokens of the longest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from trainwright.errors import UsageError, require_choice
from trainwright.finetune.datasets import Split, TokenizerSource, pad_id_of, padded, template_text, with_template
from trainwright.finetune.read import FileRecord, open_source
from trainwright.finetune.tokenizer import prompt_ids

if TYPE_CHECKING:
    from trainwright.finetune.tokenizer import Tokenizer

RECORD = "record"
"""Key of a batch: the record of each prompt as JSON."""


class Prompts(Dataset[dict[str, Any]]):
    """Prompts for the model to complete, for the loss ``grpo``.

    A record has ``prompt``: a text, or a list of messages. For messages the chat template appends the start of an
    answer. Its other keys are passed to the reward function. A sample is a dict of ``input_ids``, int64 (T,), and
    ``record``, the record as JSON.

    Args:
        path: A .jsonl, .json, .csv or .parquet file, a folder of such files, or the name of a hub dataset. In Python
            also a sequence of records.
        tokenizer: The tokenizer, its folder or hub name. Default in a recipe: the tokenizer of ``model.name``.
        split: ``train``, or ``val`` for the records that ``val_fraction`` holds out.
        val_fraction: Fraction of the records that is held out. A hash of a record decides whether it is.
        max_length: Maximum number of tokens of a prompt; a longer one is an error. null: no limit.
        chat_template: A file with another chat template, or its text.
        template_args: Values for the chat template, such as ``{enable_thinking: false}``.
        source_split: Split of a hub dataset or of a saved one.
        revision: Branch, tag or commit of a hub dataset.
        tokenizer_revision: Branch, tag or commit of a hub tokenizer.
        trust_remote_code: Permit code in the repository of the tokenizer to run.

    Raises UsageError for a record without a prompt, with file and line.
    """

    deterministic = True  # samples draw no random numbers

    def __init__(
        self,
        path: str | Path | Sequence[Mapping[str, Any]],
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        split: Split = "train",
        val_fraction: float = 0.0,
        max_length: int | None = None,
        chat_template: str | Path | None = None,
        template_args: Mapping[str, Any] | None = None,
        source_split: str = "train",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        require_choice("split", split, get_args(Split))
        if not 0 <= val_fraction < 1 or (split == "val" and not val_fraction):
            rule = f"split: {split} is not possible with val_fraction: {val_fraction}"
            raise UsageError(rule, remedy="give both sets the same val_fraction in (0, 1), such as 0.1")
        if tokenizer is None:
            remedy = "set tokenizer to a folder or a hub name, or model.name in the recipe"
            raise UsageError("there is no tokenizer", remedy=remedy)
        template = template_text(chat_template)
        self.template_override = template
        if isinstance(tokenizer, str | Path):
            self.tokenizer = TokenizerSource(tokenizer, tokenizer_revision, trust_remote_code, template).load()
        else:
            self.tokenizer = with_template(tokenizer, template)
        self._template_args = dict(template_args or {})
        self.pad_id = pad_id_of(self.tokenizer)
        found = list(_records(path, source_split, revision))
        self.records = [text for _, text in found if (split == "val") == (_split_position(text) < val_fraction)]
        if not self.records:
            remedy = "raise val_fraction" if split == "val" else "check that it is the right file"
            raise UsageError(f"there is no prompt for {split}", remedy=remedy)
        self._ids = [self._encode(json.loads(text)["prompt"]) for text in self.records]
        longest = max(map(len, self._ids))
        if max_length is not None and longest > max_length:
            record = self.records[[*map(len, self._ids)].index(longest)]
            place = next(place for place, text in found if text == record)
            rule = f"{place}: the prompt has {longest} tokens, more than max_length: {max_length}"
            raise UsageError(rule, remedy=f"set max_length: {longest}, or leave the record out")

    def _encode(self, prompt: str | list[dict[str, Any]]) -> list[int]:
        if not isinstance(prompt, str) and not self.tokenizer.chat_template:
            remedy = "set chat_template to a file, or give prompts as text"
            raise UsageError("the prompts are messages, but the tokenizer has no chat template", remedy=remedy)
        return prompt_ids(self.tokenizer, prompt, **self._template_args)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.tensor(self._ids[index], device="cpu"), RECORD: self.records[index]}

    def fetch_batch(self, indices: NDArray[np.int64]) -> dict[str, Any]:
        """Return the prompts as ids (B, T), padded on the right, with ``attention_mask``, and their records."""
        samples = [self[int(at)] for at in indices]
        ids: list[dict[str, Tensor]] = [{"input_ids": each["input_ids"]} for each in samples]
        return {**padded(ids, self.pad_id), RECORD: [each[RECORD] for each in samples]}

    def content_sha256(self) -> str:
        """Return a hash of all records and their ids."""
        return hashlib.sha256(json.dumps([self.records, self._ids]).encode()).hexdigest()


def _records(path: Any, split: str, revision: str | None) -> Iterator[tuple[str, str]]:
    """Yield (place, JSON) of each record. Raises UsageError for a record without a prompt."""
    found: Iterator[tuple[str, Any, FileRecord | None]]
    if isinstance(path, str | Path):
        source = open_source(path, split=split, revision=revision)
        found = ((source.place(each.file, each.line), each.fields, each) for each in source.records())
    else:
        found = ((f"record {at}", fields, None) for at, fields in enumerate(path))
    for place, fields, record in found:
        if record is not None and record.problem:
            raise UsageError(f"{place}: {record.problem}", remedy=record.remedy)
        prompt = fields.get("prompt") if isinstance(fields, Mapping) else None
        is_messages = isinstance(prompt, list) and all(isinstance(each, Mapping) and "role" in each for each in prompt)
        if not prompt or not (isinstance(prompt, str) or is_messages):
            remedy = "give each record a prompt: a text, or a list of messages with role and content"
            raise UsageError(f"{place}: the record has no prompt", remedy=remedy)
        yield place, json.dumps(dict(fields), sort_keys=True, default=str)


def _split_position(text: str) -> float:
    """Return a number in [0, 1) from a hash of the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2.0**48
