"""Map-style datasets of tokenized conversations, completions, texts and preferences.

Shapes: B batch, T tokens of a sequence, or of the longest of a batch.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from trainwright.data.padding import IGNORE
from trainwright.errors import UsageError, require_choice, suggest_file
from trainwright.finetune.chat import ChatRenderer
from trainwright.finetune.defects import Defect
from trainwright.finetune.encode import Encoder, TrainOn, Truncate
from trainwright.finetune.layouts import Use
from trainwright.finetune.read import open_source
from trainwright.finetune.similarity import groups, is_held_out
from trainwright.finetune.store import EncodingOptions, cache_folder, tokenized
from trainwright.finetune.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from trainwright.finetune.tokenizer import Tokenizer

Split: TypeAlias = Literal["train", "val"]
OnBadRecord: TypeAlias = Literal["stop", "skip"]


@dataclass(frozen=True)
class TokenizerSource:
    """How to load the tokenizer again in another process."""

    name: str | Path
    revision: str | None = None
    trust_remote_code: bool = False
    chat_template: str | None = None

    def load(self) -> Tokenizer:
        found = load_tokenizer(self.name, revision=self.revision, trust_remote_code=self.trust_remote_code)
        return with_template(found, self.chat_template)


class TokenizedSet(Dataset[dict[str, Tensor]]):
    """Records of a file, a folder or a hub dataset as token ids and labels.

    A sample is a dict of ``input_ids`` and ``labels``, int64 (T,), aligned as in ``transformers``. Labels are -100
    where no loss is computed. A sample of ``preference`` has ``chosen_`` and ``rejected_`` ids and labels. Samples
    without any label are left out. Tokens are kept in a cache, whose folder depends on the content of the files, the
    tokenizer and the options.

    Args:
        path: A .jsonl, .json, .csv or .parquet file, a folder of such files or one written by ``save_to_disk``, or
            the name of a hub dataset.
        tokenizer: The tokenizer, its folder or hub name. Default in a recipe: the tokenizer of ``model.name``.
        split: ``train``, or ``val``, which is what ``val_fraction`` holds out.
        val_fraction: Fraction of the records that is held out, chosen by their content. Equal and nearly equal
            records stay on one side.
        train_on: Tokens that carry loss: those of each ``assistant`` turn, of the ``last`` one, or ``all``.
        max_length: Maximum number of tokens of a sequence; null: no limit.
        truncate: What happens to longer sequences: an ``error``, cut at the ``left`` or ``right``, or ``drop``.
        chat_template: A file with another chat template, or its text.
        template_args: Values for the chat template, such as ``{enable_thinking: false}``.
        columns: For keys of a layout, their names in the file, such as ``{completion: answer}``.
        roles: For roles in the file, their names in the chat template, such as ``{bot: assistant}``.
        on_bad_record: A record that cannot be used ends the run, or is skipped and reported.
        source_split: Split of a hub dataset or of a saved one.
        revision: Branch, tag or commit of a hub dataset.
        tokenizer_revision: Branch, tag or commit of a hub tokenizer.
        trust_remote_code: Permit code in the repository of the tokenizer to run.
        short_first: Number of epochs that visit short samples first: ten groups of increasing length, each shuffled.
        by_source: For a validation set: also evaluate the samples of each source separately, and report the results
            under its name. The source is the key ``source`` of a record, else its file.
        cache: Folder of the cache; null: ``$TRAINWRIGHT_CACHE``, else ``~/.cache/trainwright``.

    Raises UsageError for records that cannot be used, with file and line of the first ones.
    """

    use: ClassVar[Use] = "chat"
    deterministic = True  # samples draw no random numbers

    def __init__(
        self,
        path: str | Path,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        split: Split = "train",
        val_fraction: float = 0.0,
        train_on: TrainOn = "assistant",
        max_length: int | None = None,
        truncate: Truncate = "error",
        chat_template: str | Path | None = None,
        template_args: Mapping[str, Any] | None = None,
        columns: Mapping[str, str] | None = None,
        roles: Mapping[str, str] | None = None,
        on_bad_record: OnBadRecord = "stop",
        source_split: str = "train",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        trust_remote_code: bool = False,
        short_first: int = 0,
        by_source: bool = False,
        cache: str | Path | None = None,
    ) -> None:
        require_choice("split", split, get_args(Split))
        require_choice("train_on", train_on, get_args(TrainOn))
        require_choice("truncate", truncate, get_args(Truncate))
        require_choice("on_bad_record", on_bad_record, get_args(OnBadRecord))
        _require_numbers(max_length, val_fraction, split)
        if tokenizer is None:
            remedy = "set tokenizer to a folder or a hub name, or model.name in the recipe"
            raise UsageError("there is no tokenizer", remedy=remedy)
        template = template_text(chat_template)
        self.template_override = template
        if isinstance(tokenizer, str | Path):
            self._source: TokenizerSource | None = TokenizerSource(
                tokenizer, tokenizer_revision, trust_remote_code, template
            )
            self._tokenizer: Tokenizer | None = self._source.load()
        else:
            self._source, self._tokenizer = None, with_template(tokenizer, template)
        encoder = Encoder(self.tokenizer, train_on, max_length, truncate, template_args)
        if not self.tokenizer.is_fast:
            remedy = "use a fast tokenizer: it has the file tokenizer.json"
            raise UsageError(f"{type(self.tokenizer).__name__} gives no positions of its tokens", remedy=remedy)
        if self.use in ("chat", "instruct"):
            encoder.renderer.require_template()
        if not isinstance(path, str | Path):
            raise UsageError(
                f"{type(self).__name__} reads files or a hub dataset, not a {type(path).__name__}",
                remedy="write the records to a file, one json.dumps(record) a line, or a Hugging Face dataset with "
                "save_to_disk, and pass its path",
            )
        source = open_source(path, split=source_split, revision=revision)
        options = EncodingOptions(
            self.use,
            train_on,
            max_length,
            truncate,
            on_bad_record,
            dict(template_args or {}),
            dict(columns or {}),
            dict(roles or {}),
        )
        self.store = tokenized(source, encoder, options, cache_folder(cache))
        self.train_on = train_on
        self.max_length = max_length
        self.split, self.by_source, self.short_first = split, by_source, short_first
        self.pad_id = pad_id_of(self.tokenizer)
        self._rows = self.store.rows()
        self._begins = _begins(self._rows, [len(each) for each in self.store.tokens()])
        self._chosen = _side(self._rows, split, val_fraction)
        is_sample = (self._rows["kept"] == 1) & (self._rows["rejected"] == 0)  # a rejected row follows its chosen one
        self._index = self._chosen[is_sample[self._chosen]]
        if not len(self._index):
            raise self._nothing_supervised()

    def _nothing_supervised(self) -> UsageError:
        """Return the error of a set in which no sample has a token that carries loss.

        It names the most frequent reason first. A record counts for the chat template only if it has no other reason.
        """
        rows = self.rows()
        unmarked = ("have no token that carries loss", "check the records and the chat template")
        if self.use == "chat" and self.renderer.marks_answers():
            unmarked = (
                "have assistant text that {% generation %} in the chat template does not enclose",
                "put it around the content and the end of each assistant turn, or remove it from the template",
            )
        reasons = {
            Defect.BAD_RECORD: ("cannot be used", "leave out on_bad_record to see what is wrong with each"),
            Defect.NO_ANSWER: ("have no assistant turn", "check the roles, or set train_on: all"),
            Defect.SWITCHED_OFF: (
                "have answers that are switched off, by weight: 0 or train: false in the message",
                "remove that key from the answers to train, or set it to 1",
            ),
            Defect.TRUNCATED | Defect.TOO_LONG: (
                f"have answers that max_length: {self.max_length} cuts off",
                "raise max_length",
            ),
            Defect.REWRITTEN_TURN: (
                "have answers that the chat template rewrites, since a turn follows",
                "end conversations with an answer, or use a template with {% generation %}",
            ),
            Defect.EMPTY_ANSWER: ("have empty answers", "fill in the answers"),
        }
        has = [rows["defects"].astype(np.int64) & int(defect) != 0 for defect in reasons]
        has.append(np.ones(len(rows), bool))
        first = np.argmax(has, axis=0)  # the first reason of each record; the last one is unmarked
        counts = Counter(first.tolist()).most_common()
        texts = [*reasons.values(), unmarked]
        why = ", ".join(f"{count:,} of {len(rows):,} records {texts[at][0]}" for at, count in counts)
        most = counts[0][0]
        place = self.store.place(rows[first == most][0])
        return UsageError(f"nothing is supervised: {why}; the first is {place}", remedy=texts[most][1])

    @property
    def order(self) -> ShortFirst | None:
        """The order in which ``short_first`` visits the samples; None without it."""
        return ShortFirst(self.longest(), self.short_first) if self.short_first else None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded again in a worker process."""
        if self._tokenizer is None:
            assert self._source is not None
            self._tokenizer = self._source.load()
        return self._tokenizer

    @property
    def renderer(self) -> ChatRenderer:
        return ChatRenderer(self.tokenizer, self.train_on)

    @cached_property
    def _shards(self) -> list[NDArray[Any]]:
        return self.store.tokens()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name != "_shards"}
        return state if self._source is None else {**state, "_tokenizer": None}

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, labels = self._sequence(self._row_of(index))
        return {"input_ids": ids, "labels": labels}

    def _row_of(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")  # ends iteration over a sequence
        return int(self._index[index % len(self)])

    def _sequence(self, row: int) -> tuple[Tensor, Tensor]:
        tokens = self.tokens_of_row(row)
        ids = torch.from_numpy(tokens["id"].astype(np.int64))
        mask = torch.from_numpy(tokens["supervised"] == 0)
        return ids, ids.masked_fill(mask, IGNORE)

    def tokens_of_row(self, row: int) -> NDArray[Any]:
        """Return the tokens of a row of ``rows``, see ``store.TOKEN``."""
        shard, begin = self._begins[row]
        found: NDArray[Any] = self._shards[shard][begin : begin + int(self._rows["length"][row])]
        return found

    def shards(self) -> Iterator[tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the tokens of each shard, the numbers of its rows, and their lengths."""
        for at, tokens in enumerate(self._shards):
            numbers = np.flatnonzero(self._begins[:, 0] == at)
            yield tokens, numbers, self._rows["length"][numbers]

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each sample (n,)."""
        found: NDArray[np.int64] = self._rows["length"][self._index]
        return found

    def longest(self) -> NDArray[np.int64]:
        """Return the number of tokens of the longest sequence of each sample (n,)."""
        return self.lengths()

    def sources(self) -> dict[str, Self]:
        """Return the samples of each source as a set, by name; {} without ``by_source`` or with one source."""
        origins = self._rows["source"][self._index]
        if not self.by_source or len(np.unique(origins)) < 2:
            return {}
        found = {}
        for number in np.unique(origins):
            part = copy.copy(self)
            part.by_source, part._index = False, self._index[origins == number]
            part._chosen = self._chosen[self._rows["source"][self._chosen] == number]
            found[self.store.sources[number]] = part
        return found

    def fetch_batch(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the samples as tensors (B, T), padded on the right; ``attention_mask`` is 0 there, labels -100."""
        return padded([self[int(at)] for at in indices], self.pad_id)

    def place(self, index: int) -> str:
        """Return ``file:line`` of a sample."""
        return self.store.place(self._rows[self._row_of(index)])

    def content_sha256(self) -> str:
        """Return a hash of the tokens and labels of all samples, in their order."""
        digest = hashlib.sha256(self.store.digest.encode())
        digest.update(self._index.tobytes())
        return digest.hexdigest()

    def rows(self) -> NDArray[Any]:
        """Return the rows of this split, including samples that are left out, see ``store.ROW``."""
        found: NDArray[Any] = self._rows[self._chosen]
        return found

    def row_numbers(self) -> NDArray[np.int64]:
        """Return the numbers of ``rows`` in the store."""
        return self._chosen


LENGTH_GROUPS = 10


class ShortFirst(Sampler[int]):
    """A curriculum by length. The first epochs visit shuffled groups of increasing length; later ones shuffle all.

    Draws from the global generator, which is seeded for each epoch.
    """

    def __init__(self, lengths: NDArray[np.int64], epochs: int) -> None:
        ranks = np.argsort(np.argsort(lengths, kind="stable"), kind="stable")
        self.group = torch.from_numpy(ranks * LENGTH_GROUPS // max(1, len(lengths)))
        self.epochs, self.epoch = epochs, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.group)

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(len(self.group), device="cpu")
        if self.epoch < self.epochs:
            order = order[torch.argsort(self.group[order], stable=True)]
        return iter(order.tolist())


class Chat(TokenizedSet):
    __doc__ = TokenizedSet.__doc__
    use: ClassVar[Use] = "chat"


class Instruct(TokenizedSet):
    __doc__ = TokenizedSet.__doc__
    use: ClassVar[Use] = "instruct"


class Completion(TokenizedSet):
    __doc__ = TokenizedSet.__doc__
    use: ClassVar[Use] = "completion"


class Texts(TokenizedSet):
    __doc__ = TokenizedSet.__doc__
    use: ClassVar[Use] = "text"


class Preference(TokenizedSet):
    __doc__ = TokenizedSet.__doc__
    use: ClassVar[Use] = "preference"

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._row_of(index)
        chosen_ids, chosen_labels = self._sequence(row)
        rejected_ids, rejected_labels = self._sequence(row + 1)
        return {
            "chosen_input_ids": chosen_ids,
            "chosen_labels": chosen_labels,
            "rejected_input_ids": rejected_ids,
            "rejected_labels": rejected_labels,
        }

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each pair (n,)."""
        found: NDArray[np.int64] = self._rows["length"][self._index] + self._rows["length"][self._index + 1]
        return found

    def longest(self) -> NDArray[np.int64]:
        """Return the number of tokens of the longer completion of each pair with its prompt (n,)."""
        found: NDArray[np.int64] = np.maximum(self._rows["length"][self._index], self._rows["length"][self._index + 1])
        return found


def padded(samples: Sequence[Mapping[str, Tensor]], pad_id: int) -> dict[str, Tensor]:
    """Return samples as tensors (B, T), padded on the right, with an attention mask for each kind of ids.

    Labels after the end of a sample are -100. An end token that is also the padding token keeps its label.
    """
    batch = {}
    for name in samples[0]:
        rows = [each[name] for each in samples]
        fill = IGNORE if name.endswith("labels") else pad_id
        batch[name] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)
        if name.endswith("input_ids"):
            lengths = torch.tensor([len(row) for row in rows], device="cpu")
            mask = torch.arange(batch[name].shape[1], device="cpu") < lengths[:, None]
            batch[name.replace("input_ids", "attention_mask")] = mask.long()
    return batch


def pad_id_of(tokenizer: Tokenizer) -> int:
    """Return the padding id of a tokenizer, else its end-of-text id, else 0."""
    found = tokenizer.pad_token_id
    found = tokenizer.eos_token_id if found is None else found
    return 0 if found is None else int(found)


def _begins(rows: NDArray[Any], sizes: Sequence[int]) -> NDArray[np.int64]:
    """Return (shard, first token in it) of each row (n, 2)."""
    ends = np.cumsum(rows["length"])
    begins = ends - rows["length"]
    bounds = np.cumsum([0, *sizes])
    shards = np.minimum(np.searchsorted(bounds[1:], begins, side="right"), len(sizes) - 1)
    return np.stack([shards, begins - bounds[shards]], 1)


def _side(rows: NDArray[Any], split: Split, fraction: float) -> NDArray[np.int64]:
    """Return the rows of a split. The rows of a pair have one hash, so they stay together."""
    if not fraction:
        return np.arange(len(rows), dtype=np.int64)
    group, usable_rows = groups(rows["hash"], rows["signature"]), rows["kept"] == 1
    held = is_held_out(rows["hash"], group, fraction)
    if usable_rows.any() and not (held & usable_rows).any():  # few samples, and none fell below the fraction
        least = np.flatnonzero(usable_rows)[rows["hash"][usable_rows].argmin()]
        held = held | (group == group[least])
    found: NDArray[np.int64] = np.flatnonzero(held if split == "val" else ~held)
    usable = int((rows["kept"][found] == 1).sum())
    if not usable and (rows["kept"] == 1).any():
        remedy = "raise val_fraction, or name a file of its own in data.val" if split == "val" else "lower val_fraction"
        raise UsageError(f"val_fraction: {fraction} leaves no sample for {split}", remedy=remedy)
    return found


def with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    """Set the chat template of ``tokenizer`` if there is one."""
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def template_text(template: str | Path | None) -> str | None:
    """Return the text of a template. ``template`` is this text or a file with it."""
    if template is None or (isinstance(template, str) and "{" in template):
        return template
    file = Path(template).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        remedy = suggest_file(file, "a chat template")
        raise UsageError(f"the chat template {file} cannot be read: {error}", remedy=remedy) from None


def _require_numbers(max_length: int | None, fraction: float, split: str) -> None:
    if max_length is not None and max_length < 2:
        raise UsageError(f"max_length={max_length} leaves nothing to predict", remedy="try max_length: 2048")
    if not 0 <= fraction < 1:
        raise UsageError(f"val_fraction must be in [0, 1); got {fraction}", remedy="try val_fraction: 0.05")
    if split == "val" and not fraction:
        raise UsageError("split: val has no samples without val_fraction", remedy="give both sets val_fraction: 0.05")
