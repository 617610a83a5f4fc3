"""The supervision audit: reports which tokens of a data set carry loss, and its defects, before the first step.

Shapes: B batch, T tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainwright.data.padding import ATTENTION_KEY, IGNORE
from trainwright.finetune.datasets import Preference, TokenizedSet
from trainwright.finetune.defects import MEANINGS, Defect, Severity
from trainwright.finetune.encode import ROLE_CODES
from trainwright.finetune.signs import (
    MIN_SAMPLES,
    MIN_USUAL,
    OF_ANSWERS,
    SampleTexts,
    excerpt_of,
    is_about,
    shortened,
    signs_of_set,
)
from trainwright.finetune.similarity import near_pairs
from trainwright.runs.supervision import (
    DecodedSample,
    LossCount,
    MarkedText,
    Supervision,
    SupervisionFinding,
    most_severe_first,
    percent,
)

if TYPE_CHECKING:
    from trainwright.finetune.tokenizer import Tokenizer

DECODED_SAMPLES = 3
MAX_DECODED_TOKENS = 400
"""Maximum tokens of a decoded sample that are shown. The middle of a longer sample is left out."""
MAX_TURNS_SHOWN = 6
MIN_DUPLICATE_FRACTION = 0.01
"""Fraction of repeated samples above which they are a warning. Web data has a few repetitions."""
MIN_SAME_ANSWER_FRACTION = 0.5
MIN_SAME_ANSWER_WORDS = 4
"""Shorter answers may be class names, such as yes and no."""
MIN_SAME_ANSWERS = 8
"""Minimum number of equal answers, unless all are equal. In a small validation set, a majority may be chance."""
MIN_BEGINNINGS_FRACTION = 0.1
"""Minimum fraction of conversations that are the beginning of another one. A few, such as greetings, may be chance."""
MAX_WRAPPERS = 4
MAX_ENDS_READ = 256
MAX_SAMPLES_READ = 1000
"""Maximum number of samples that are decoded to compare their texts; each takes 30 us."""
MAX_ROWS_COMPARED = 200_000
"""Maximum number of rows that are compared to find near duplicates; each takes 20 us."""
SUBJECTS = Defect.HTML_LEFT | Defect.UNFILLED | Defect.ESCAPED_NEWLINE | Defect.PYTHON_TEXT
"""Defects that are not reported if the prompts ask for such text, as in a course on HTML (see ``_is_subject``)."""
_ROLE_NAMES = {code: name for name, code in ROLE_CODES.items()}


@dataclass(frozen=True)
class SpecialIds:
    """Ids of special tokens and their tokenizer; each is None if unknown."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None
    tokenizer: Tokenizer | None = None


def special_ids(*owners: object) -> SpecialIds:
    """Return the special tokens of the first owner with a tokenizer, else those of the first model configuration."""
    for owner in owners:
        for name in ("tokenizer", "processing_class"):
            found: Any = getattr(owner, name, None)
            if hasattr(found, "eos_token_id") and hasattr(found, "decode"):
                return SpecialIds(found.bos_token_id, found.eos_token_id, found.pad_token_id, found)
    for owner in owners:
        config = getattr(owner, "config", None)
        eos = getattr(config, "eos_token_id", None)
        if isinstance(eos, int):
            bos, pad = getattr(config, "bos_token_id", None), getattr(config, "pad_token_id", None)
            return SpecialIds(bos, eos, pad if isinstance(pad, int) else None)
    return SpecialIds()


def tokenized_set_of(dataset: object) -> TokenizedSet | None:
    """Return the tokenized set inside of wrappers such as a packed set; None if there is none."""
    for _ in range(MAX_WRAPPERS):
        if isinstance(dataset, TokenizedSet):
            return dataset
        dataset = next((getattr(dataset, name) for name in ("dataset", "base") if hasattr(dataset, name)), None)
    return None


@dataclass(frozen=True)
class ModelLimits:
    """Limits of a model.

    Attributes:
        rows: Number of rows of the embedding; ids are below it. None: unknown.
        positions: Maximum number of tokens of a sequence. None: unknown.
        ends: Ids at which generation stops. Empty: unknown.
    """

    rows: int | None = None
    positions: int | None = None
    ends: tuple[int, ...] = ()


def limits_of(model: object) -> ModelLimits:
    """Return the limits of a model of ``transformers``. Those of other models are unknown."""
    config = getattr(model, "config", None)
    if config is None or not callable(getattr(model, "get_input_embeddings", None)):
        return ModelLimits()
    try:
        rows = getattr(model.get_input_embeddings(), "num_embeddings", None)  # type: ignore[attr-defined]
    except Exception:  # a model that has no embedding
        rows = None
    positions = getattr(config, "max_position_embeddings", None)
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return ModelLimits(
        rows if isinstance(rows, int) else None,
        positions if isinstance(positions, int) else None,
        tuple(ends) if isinstance(ends, list | tuple) else (ends,) if isinstance(ends, int) else (),
    )


def audit_set(
    dataset: TokenizedSet,
    name: str = "train",
    train: TokenizedSet | None = None,
    limits: ModelLimits = ModelLimits(),
) -> Supervision:
    """Return the audit of a complete tokenized set.

    Args:
        dataset: The set.
        name: ``train`` or ``val``.
        train: The training set, if this is a validation set, to find samples that are in both.
        limits: What the model accepts.
    """
    rows = dataset.rows()
    numbers = dataset.row_numbers()
    findings = [*_defect_findings(dataset, rows), *_duplicates(dataset, rows), *_same_answers(dataset, rows)]
    findings += [*_signs_of_set(dataset, rows), *_beginnings(dataset, rows)]
    if train is not None:
        findings += _leaks(dataset, rows, train)
    kept = np.flatnonzero(rows["kept"] == 1)
    roles, turns, largest = _count_tokens(dataset, numbers[kept])
    findings += [*_beyond_the_model(dataset, rows, kept, limits, largest), *_other_end(dataset, rows, kept, limits)]
    by_role = [LossCount(_ROLE_NAMES[code], *map(int, roles[code])) for code in np.flatnonzero(roles[:, 0]).tolist()]
    by_turn = [LossCount(f"answer {at + 1}", *map(int, each)) for at, each in enumerate(turns) if each[0]]
    left_out = np.unique(np.stack([rows["file"], rows["line"]], 1)[rows["kept"] == 0], axis=0)
    return Supervision(
        name,
        "tokens",
        _masked_by(dataset),
        len(dataset),
        len(dataset),
        len(left_out),
        int(roles[:, 0].sum()),
        int(roles[:, 1].sum()),
        longest=int(rows["length"][kept].max(initial=0)),
        roles=tuple(by_role),
        turns=tuple(by_turn),
        findings=most_severe_first(findings),
        decoded=tuple(_decoded_rows(dataset, rows, numbers, kept)),
    )


def _masked_by(dataset: TokenizedSet) -> str:
    if dataset.use == "text":
        return "all tokens of a text"
    if dataset.use in ("completion", "preference") and dataset.train_on != "all":
        return "everything after the prompt"
    how = f"train_on: {dataset.train_on}"
    if dataset.train_on == "all" or not dataset.tokenizer.chat_template:
        return how
    marked = dataset.renderer.marks_answers()
    return f"{how}, by {'{% generation %}' if marked else 'the prompts'} of the chat template"


def _count_tokens(dataset: TokenizedSet, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return counts by role code (256, 2), counts by number of the answer (n, 2), and the largest id.

    The two columns of the counts are all tokens, and the tokens that carry loss.
    """
    largest = 0
    roles = np.zeros((256, 2), np.int64)
    turns = np.zeros((MAX_TURNS_SHOWN, 2), np.int64)
    for shard, numbers, lengths in dataset.shards():
        is_wanted = np.isin(numbers, rows)
        tokens = shard[np.repeat(is_wanted, lengths)]
        largest = max(largest, int(tokens["id"].max(initial=0)))
        row_of = np.repeat(numbers[is_wanted], lengths[is_wanted])
        weights = tokens["supervised"]
        roles[:, 0] += np.bincount(tokens["role"], minlength=256)
        roles[:, 1] += np.bincount(tokens["role"][weights == 1], minlength=256)
        is_answer = tokens["role"] == ROLE_CODES["assistant"]
        row_of, turn, weights = row_of[is_answer], tokens["turn"][is_answer].astype(np.int64), weights[is_answer]
        if not len(turn):
            continue
        begins = np.diff(row_of * 2**16 + turn, prepend=-1) != 0
        answer = np.cumsum(begins) - 1
        first = np.flatnonzero(np.diff(row_of, prepend=-1))  # the first token of each sample that has an answer
        number = answer - np.repeat(answer[first], np.diff([*first, len(answer)]))
        shown = number < MAX_TURNS_SHOWN
        turns[:, 0] += np.bincount(number[shown], minlength=MAX_TURNS_SHOWN)
        turns[:, 1] += np.bincount(number[shown & (weights == 1)], minlength=MAX_TURNS_SHOWN)
    return roles, turns, largest


def _finding(
    dataset: TokenizedSet,
    has: Sequence[int] | NDArray[np.int64],
    total: int,
    unit: str,
    name: str,
    says: str,
    remedy: str,
    severity: Severity = "warning",
    excerpt: str | None = None,
) -> SupervisionFinding:
    """Return a finding that states the number of rows in ``has``, their fraction, and the first one with an excerpt.

    By default, the excerpt is the beginning of the answer.
    """
    row = dataset.rows()[has[0]]
    place, count = dataset.store.place(row), len(has)
    if excerpt is None:
        excerpt = shortened(_texts_of(dataset, has[0]).answer.strip())
    message = f"{count:,} of {total:,} {unit} ({percent(count / total)}) {says}; the first is {place}"
    message += f": {excerpt!r}" if excerpt else ""
    return SupervisionFinding(name, severity, message, remedy, count, place)


def _texts_of(dataset: TokenizedSet, row: int, rejected: int | None = None) -> SampleTexts:
    """Return the last prompt and answer of a row, and the last answer of the rejected row, as decoded text."""
    tokens = dataset.tokens_of_row(int(dataset.row_numbers()[row]))
    answers = tokens[tokens["supervised"] == 1]
    last_answer = answers[answers["turn"] == answers["turn"].max(initial=0)]
    is_prompt = (tokens["role"] == ROLE_CODES["user"]) & (tokens["supervised"] == 0)
    is_prompt &= tokens["turn"] == tokens["turn"][is_prompt].max(initial=0)
    prompt, answer = (
        str(dataset.tokenizer.decode(each["id"].tolist(), skip_special_tokens=True))
        for each in (tokens[is_prompt], last_answer)
    )
    prompt, before = prompt.removeprefix("user\n"), tokens["id"][: is_prompt.argmax()].tobytes()
    return SampleTexts(prompt, answer, "" if rejected is None else _texts_of(dataset, rejected).answer, before)


def _beyond_the_model(
    dataset: TokenizedSet, rows: NDArray[Any], kept: NDArray[np.int64], limits: ModelLimits, largest: int
) -> Iterator[SupervisionFinding]:
    """Yield findings on ids and lengths that the model does not accept."""
    if limits.rows is not None and largest >= limits.rows:
        ids = [dataset.tokens_of_row(int(dataset.row_numbers()[at]))["id"].max(initial=0) for at in kept]
        has = kept[np.array(ids) >= limits.rows]
        says = f"have ids beyond the model: the largest is {largest}, the embedding has {limits.rows} rows, so "
        says += "the tokenizer does not fit the model"
        remedy = (
            "use the tokenizer of the model, or resize the embedding: model.resize_token_embeddings(len(tokenizer))"
        )
        yield _finding(dataset, has, len(kept), "sequences", "ids_beyond_the_model", says, remedy, "error")
    if limits.positions is not None and len(long := kept[rows["length"][kept] > limits.positions]):
        says = f"are longer than the {limits.positions:,} positions of the model, the longest has "
        says += f"{int(rows['length'][long].max()):,} tokens"
        remedy = f"set max_length: {limits.positions} and truncate: right or drop"
        yield _finding(dataset, long, len(kept), "sequences", "longer_than_the_model", says, remedy)


def _other_end(
    dataset: TokenizedSet, rows: NDArray[Any], kept: NDArray[np.int64], limits: ModelLimits
) -> Iterator[SupervisionFinding]:
    """Yield a note if answers end with another token than the one at which generation stops."""
    tokenizer = dataset.tokenizer
    stops = {*limits.ends, *([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])}
    added = set(tokenizer.get_added_vocab().values())
    ends: Counter[int] = Counter()
    for at in kept[:MAX_ENDS_READ]:
        tokens = dataset.tokens_of_row(int(dataset.row_numbers()[at]))
        last = [int(each) for each in tokens["id"][tokens["supervised"] == 1][-3:] if int(each) in added]
        ends.update(last[-1:])
    if ends and not stops & ends.keys():
        end = str(tokenizer.decode([ends.most_common(1)[0][0]]))
        message = f"answers end with {end!r}, and generation stops at {tokenizer.eos_token!r} only"
        remedy = f"set eos_token_id of the model's generation_config to {ends.most_common(1)[0][0]}, too"
        yield SupervisionFinding("other_end", "note", message, remedy, len(kept), dataset.store.place(rows[kept[0]]))


def _defect_findings(dataset: TokenizedSet, rows: NDArray[Any]) -> Iterator[SupervisionFinding]:
    defects = rows["defects"].astype(np.int64)
    pairs = np.cumsum(rows["rejected"] == 0)  # a rejected row follows its chosen one
    unit, total = "pairs" if isinstance(dataset, Preference) else "sequences", int(pairs[-1])
    for defect, meaning in MEANINGS.items():
        has = np.flatnonzero((defects & int(defect) != 0) & ((rows["rejected"] == 0) | (not defect & OF_ANSWERS)))
        if isinstance(dataset, Preference) and defect == Defect.REFUSAL:
            continue  # refusals may be preferred on purpose; SET_SIGNS compares both sides
        has = has[np.unique(pairs[has], return_index=True)[1]]
        if not len(has) or len(has) < meaning.least * total:
            continue
        if meaning.least and (total < MIN_SAMPLES or len(has) < MIN_USUAL):
            continue
        if defect in SUBJECTS and _is_subject(dataset, rows, defect, len(has)):
            continue
        remedy = meaning.remedy
        if defect == Defect.NO_END and dataset.tokenizer.chat_template and dataset.renderer.marks_answers():
            remedy = "move the end token of a turn into its {% generation %} block, before {% endgeneration %}"
        says = f"{'has' if len(has) == 1 else 'have'} {meaning.says}"
        yield _finding(
            dataset,
            has,
            total,
            unit,
            str(defect.name).lower(),
            says,
            remedy,
            meaning.severity,
            _excerpt(dataset, has[0], defect),
        )


def _is_subject(dataset: TokenizedSet, rows: NDArray[Any], defect: Defect, count: int) -> bool:
    """Return True if more samples have prompts that ask for such text than have the defect (``count``)."""
    samples = _samples(rows)
    read = samples[:MAX_SAMPLES_READ].tolist()
    about = sum(is_about(defect, _texts_of(dataset, row)) for row in read)
    return about * len(samples) > count * len(read)


def _excerpt(dataset: TokenizedSet, row: int, defect: Defect) -> str:
    """Return an excerpt of a row at the defect, or the beginning of its answer or prompt."""
    tokens, texts = dataset.tokens_of_row(int(dataset.row_numbers()[row])), _texts_of(dataset, row)
    whole = str(dataset.tokenizer.decode(tokens["id"].tolist()))
    for text in (texts.answer, texts.prompt, whole):
        if found := excerpt_of(text, defect):
            return found
    return shortened(texts.answer.strip() or texts.prompt.strip() or whole)


def _samples(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Return the rows of the kept samples; for a pair, only its chosen row."""
    return np.flatnonzero((rows["kept"] == 1) & (rows["rejected"] == 0))


def _duplicates(dataset: TokenizedSet, rows: NDArray[Any]) -> Iterator[SupervisionFinding]:
    samples = _samples(rows)
    _, first, inverse = np.unique(rows["hash"][samples], return_index=True, return_inverse=True)
    again = np.flatnonzero(first[inverse] != np.arange(len(samples)))
    if len(again):
        earlier = dataset.store.place(rows[samples[first[inverse[again[0]]]]])
        severity: Severity = "warning" if len(again) >= MIN_DUPLICATE_FRACTION * len(samples) else "note"
        remedy = "remove the copies: repeated samples have more weight than others"
        says = f"repeat an earlier one, the first of them {earlier}"
        yield _finding(dataset, samples[again], len(samples), "samples", "duplicates", says, remedy, severity)
    distinct = samples[np.sort(first)][:MAX_ROWS_COMPARED]
    near = [*near_pairs(rows["signature"][distinct])]
    if near:
        earlier = dataset.store.place(rows[distinct[near[0][1]]])
        says = f"are nearly equal to an earlier one, the first of them to {earlier}"
        remedy = "remove them if they are copies; a shared template is no fault"
        has = [int(distinct[row]) for row, _ in near]
        yield _finding(dataset, has, len(samples), "samples", "near_duplicates", says, remedy, "note")


def _same_answers(dataset: TokenizedSet, rows: NDArray[Any]) -> Iterator[SupervisionFinding]:
    samples = _samples(rows)
    if len(samples) < MIN_SAMPLES or dataset.use in ("text", "preference"):
        return
    values, counts = np.unique(rows["answer"][samples], return_counts=True)
    most = int(counts.argmax())
    has = samples[rows["answer"][samples] == values[most]]
    if values[most] == 0 or len(has) < MIN_SAME_ANSWER_FRACTION * len(samples):
        return
    if len(has) < MIN_SAME_ANSWERS and len(has) < len(samples):
        return
    is_long = len(_texts_of(dataset, has[0]).answer.split()) >= MIN_SAME_ANSWER_WORDS
    if is_long or len(has) == len(samples):
        remedy = "check how answers are read; a model that always gives this answer has a low loss"
        yield _finding(dataset, has, len(samples), "samples", "same_answer", "have the same answer", remedy)


def _signs_of_set(dataset: TokenizedSet, rows: NDArray[Any]) -> Iterator[SupervisionFinding]:
    samples = _samples(rows)[:MAX_SAMPLES_READ]
    is_pair = isinstance(dataset, Preference)
    texts = [_texts_of(dataset, row, row + 1 if is_pair else None) for row in samples.tolist()]
    for sign in signs_of_set(texts, dataset.use):
        has = samples[sign.samples]
        yield _finding(dataset, has, len(samples), sign.unit, sign.name, sign.says, sign.remedy, excerpt=sign.excerpt)


def _beginnings(dataset: TokenizedSet, rows: NDArray[Any]) -> Iterator[SupervisionFinding]:
    """Yield a finding if conversations are the beginning of others: a conversation may be stored once per answer."""
    if dataset.use != "chat" or dataset.train_on != "assistant":
        return
    samples = _samples(rows)[:MAX_SAMPLES_READ]
    texts = [dataset.tokens_of_row(int(dataset.row_numbers()[row]))["id"].tobytes() for row in samples]
    ordered = sorted(range(len(texts)), key=texts.__getitem__)  # a beginning is sorted directly before its continuation
    has = sorted(
        int(samples[at])
        for at, after in pairwise(ordered)
        if texts[after].startswith(texts[at]) and texts[at] != texts[after]
    )
    if len(has) >= max(MIN_USUAL, MIN_BEGINNINGS_FRACTION * len(samples)):
        says = "are the beginning of another conversation: their answers are trained again there"
        remedy = "keep the longest of each conversation, or set train_on: last"
        yield _finding(dataset, has, len(samples), "conversations", "beginnings", says, remedy)


def _leaks(dataset: TokenizedSet, rows: NDArray[Any], train: TokenizedSet) -> Iterator[SupervisionFinding]:
    """Yield findings on samples of a validation set that are in the training set."""
    samples, others = _samples(rows), train.rows()
    others = others[_samples(others)]
    known = dict(zip(others["hash"].tolist()[::-1], range(len(others) - 1, -1, -1), strict=True))
    equal = [(int(at), known[value]) for at in samples if (value := int(rows["hash"][at])) in known]
    rest = np.array([at for at in samples if int(rows["hash"][at]) not in known], dtype=np.int64)
    near = [(int(rest[row]), other) for row, other in near_pairs(rows["signature"][rest], others["signature"])]
    remedy = "split one file with val_fraction, which keeps copies on one side, or remove them from one set"
    for pairs, name, how in ((equal, "leaked", "are"), (near, "nearly_leaked", "are nearly equal to one")):
        if pairs:
            there = train.store.place(others[pairs[0][1]])
            says = f"{how} in the training set, the first of them {there}"
            yield _finding(dataset, [row for row, _ in pairs], len(samples), "validation samples", name, says, remedy)


def _decoded_rows(
    dataset: TokenizedSet, rows: NDArray[Any], numbers: NDArray[np.int64], kept: NDArray[np.int64]
) -> Iterator[DecodedSample]:
    """Yield the first, a middle and the last sample, or both sides of the first pair of preferences."""
    if isinstance(dataset, Preference):
        kept = kept[: DECODED_SAMPLES - DECODED_SAMPLES % 2]
    for row in dict.fromkeys([*kept[:1], *kept[len(kept) // 2 : len(kept) // 2 + 1], *kept[-1:]]):
        tokens = dataset.tokens_of_row(int(numbers[row]))
        place = dataset.store.place(rows[row])
        yield decoded(dataset.tokenizer, place, tokens["id"], tokens["supervised"].astype(bool))


def decoded(tokenizer: Tokenizer, place: str, ids: NDArray[np.integer], supervised: NDArray[np.bool_]) -> DecodedSample:
    """Return a sequence as text, in runs of tokens with and without loss. The middle of a long one is left out."""
    kept = np.arange(len(ids))
    if len(ids) > MAX_DECODED_TOKENS:
        half = MAX_DECODED_TOKENS // 2
        kept = np.concatenate([kept[:half], kept[-half:]])
    parts: list[MarkedText] = []
    begin = 0
    for at in range(1, len(kept) + 1):
        is_gap = at < len(kept) and kept[at] != kept[at - 1] + 1
        if at == len(kept) or is_gap or supervised[kept[at]] != supervised[kept[at - 1]]:
            run = ids[kept[begin:at]].tolist()
            parts.append(MarkedText(str(tokenizer.decode(run)), bool(supervised[kept[begin]])))
            begin = at
        if is_gap:
            parts.append(MarkedText(" [...] ", False))
    return DecodedSample(place, tuple(parts))


@dataclass
class _Counts:
    unit: str = ""
    samples: int = 0
    total: int = 0
    supervised: int = 0
    padding: int = 0
    unsupervised: tuple[int, ...] = ()
    masked_end: tuple[int, ...] = ()
    trained_ends: int = 0
    trained_padding: tuple[int, ...] = ()
    doubled_bos: tuple[int, ...] = ()
    too_long: tuple[int, ...] = ()
    equal: int = 0
    equal_next: int = 0
    compared: int = 0
    decoded: tuple[DecodedSample, ...] = ()


def audit_batches(
    batches: Iterable[tuple[object, Sequence[int]]],
    *,
    special: SpecialIds = SpecialIds(),
    limits: ModelLimits = ModelLimits(),
    collate: object = None,
    ignore_index: int = IGNORE,
    model_shifts: bool = False,
    labelled_before: Callable[[], bool | None] = lambda: None,
    size: int | None = None,
    name: str = "train",
) -> Supervision | None:
    """Return the audit of batches of any data set; None if they have no labels that could be masked.

    Batches are dicts with ``input_ids`` and ``labels``, or (inputs, targets) with a class for each token or pixel.

    Args:
        batches: Batches as the loss receives them, each with the positions of its samples.
        special: Ids of special tokens.
        limits: What the model accepts.
        collate: The collate function, whose name is reported.
        ignore_index: The target that the loss does not count.
        model_shifts: True if the model shifts labels by one itself, as those of ``transformers`` do.
        labelled_before: Returns True if labels of samples carry loss before they are collated, False if none does, and
            None if samples have no labels or they are unknown. Called only if nothing is supervised.
        size: Samples of the data set.
        name: Name of the data set.
    """
    counts = _Counts()
    pairs = 0
    for batch, ids in batches:
        found = _labelled(batch)
        if found is None:
            continue
        pairs += 1
        inputs, labels, mask = found
        _count_batch(counts, inputs, labels.detach().cpu(), mask, list(ids), special, limits, ignore_index)
    if not pairs or (counts.unit != "tokens" and counts.supervised == counts.total):
        return None  # class labels, none of which is ignored
    by = _collator_name(collate)
    findings = _batch_findings(counts, special, limits, by, model_shifts, labelled_before, ignore_index)
    return Supervision(
        name,
        counts.unit,
        f"masked by {by}" if by else f"ignored: {ignore_index}",
        counts.samples,
        size,
        0,
        counts.total,
        counts.supervised,
        counts.padding,
        findings=most_severe_first([*findings]),
        decoded=counts.decoded,
    )


def _collator_name(collate: object) -> str:
    name = getattr(collate, "__qualname__", type(collate).__qualname__) if collate is not None else ""
    return "" if name == "default_collate" else name


def _labelled(batch: object) -> tuple[Tensor | None, Tensor, Tensor | None] | None:
    """Return (ids of tokens, labels, attention mask) of a batch, if its labels have a value for each position."""
    ids: object = None
    mask: object = None
    if isinstance(batch, Mapping):
        labels, ids, mask = batch.get("labels"), batch.get("input_ids"), batch.get(ATTENTION_KEY)
    elif isinstance(batch, tuple | list) and len(batch) == 2:
        labels = batch[1]
    else:
        return None
    if not isinstance(labels, Tensor) or labels.dtype.is_floating_point or labels.dim() < 2:
        return None
    is_ids = isinstance(ids, Tensor) and not ids.dtype.is_floating_point and ids.shape == labels.shape
    has_mask = isinstance(mask, Tensor) and mask.shape == labels.shape
    return (
        ids.detach().cpu() if is_ids and isinstance(ids, Tensor) else None,
        labels,
        mask.detach().cpu() if has_mask and isinstance(mask, Tensor) else None,
    )


def _count_batch(
    counts: _Counts,
    ids_BT: Tensor | None,
    labels: Tensor,
    mask: Tensor | None,
    positions: list[int],
    special: SpecialIds,
    limits: ModelLimits,
    ignore_index: int,
) -> None:
    counts.unit = "tokens" if ids_BT is not None else "pixels" if labels.dim() > 2 else "targets"
    supervised = labels != ignore_index
    real = torch.ones_like(supervised) if mask is None else mask != 0
    if mask is None and ids_BT is not None and special.pad is not None and special.pad != special.eos:
        real = (ids_BT != special.pad) | supervised
    counts.samples += len(labels)
    counts.total += int(real.sum())
    counts.padding += int((~real).sum())
    counts.supervised += int((supervised & real).sum())
    before = counts.samples - len(labels)
    names = positions if len(positions) == len(labels) else [*range(before, before + len(labels))]
    flat = supervised.flatten(1).any(1)
    counts.unsupervised += tuple(names[at] for at in (~flat).nonzero().flatten().tolist())
    if mask is not None:
        counts.trained_padding += tuple(names[at] for at in (supervised & ~real).flatten(1).any(1).nonzero().flatten())
    if ids_BT is None or ids_BT.dim() != 2:
        return
    if limits.positions is not None:
        counts.too_long += tuple(names[at] for at in (real.sum(1) > limits.positions).nonzero().flatten().tolist())
    both = supervised[:, :-1]
    counts.equal += int((labels == ids_BT)[:, :-1][both].sum())
    counts.equal_next += int((labels[:, :-1] == ids_BT[:, 1:])[both].sum())
    counts.compared += int(both.sum())
    if special.eos is not None:
        is_end = ids_BT == special.eos
        counts.trained_ends += int((is_end & supervised).sum())
        after = is_end[:, 1:] & ~supervised[:, 1:] & supervised[:, :-1] & ~is_end[:, :-1]
        counts.masked_end += tuple(names[at] for at in after.any(1).nonzero().flatten().tolist())
    if special.bos is not None and ids_BT.shape[1] > 1:
        first = real.long().argmax(1).clamp(max=ids_BT.shape[1] - 2)
        rows = torch.arange(len(ids_BT), device="cpu")
        twice = (ids_BT[rows, first] == special.bos) & (ids_BT[rows, first + 1] == special.bos)
        counts.doubled_bos += tuple(names[at] for at in twice.nonzero().flatten().tolist())
    for at in range(len(ids_BT)):
        if special.tokenizer is not None and len(counts.decoded) < DECODED_SAMPLES:
            shown = ids_BT[at][real[at]].numpy(), supervised[at][real[at]].numpy()
            counts.decoded += (decoded(special.tokenizer, f"sample {names[at]}", *shown),)


def _batch_findings(
    counts: _Counts,
    special: SpecialIds,
    limits: ModelLimits,
    by: str,
    model_shifts: bool,
    labelled_before: Callable[[], bool | None],
    ignore_index: int,
) -> Iterator[SupervisionFinding]:
    if not counts.supervised:
        before = labelled_before() if by else False
        if before is False:
            who = f"every label of the data set is {ignore_index}" + (f", before {by} collates it" if by else "")
            remedy = "check the code that makes its labels: the role or text that it searches may be missing"
        else:
            who = f"the collate function {by} masks every label" + (", although samples have labels" if before else "")
            remedy = "check its response template or role: if it is not in the text, all labels are masked"
        if counts.unit != "tokens":
            remedy = f"check the labels: {ignore_index} is the class that the loss ignores"
        message = f"nothing is supervised: {who}"
        first = f"sample {counts.unsupervised[0]}" if counts.unsupervised else ""
        yield SupervisionFinding("nothing_supervised", "error", message, remedy, counts.samples, first)
        return
    masker = f" ({by})" if by else ""
    fits_no_token = max(counts.equal, counts.equal_next) < 0.5 * counts.compared  # a masked language model
    is_shifted = counts.equal_next > 0.95 * counts.compared and counts.equal < 0.5 * counts.compared
    shared = special.pad is not None and special.pad == special.eos
    end_remedy = (
        "mask padding by its position and not by its id, or use a separate padding token"
        if shared
        else ("let the mask include the end token after each answer")
    )
    for positions, name, says, remedy in (
        (
            counts.unsupervised,
            "unsupervised",
            f"no {counts.unit.removesuffix('s')} that carries loss{masker}",
            "raise the maximum length if their answers are cut off, or leave these samples out",
        ),
        (
            () if counts.trained_ends or is_shifted or fits_no_token else counts.masked_end,
            "masked_end",
            f"an end token after the answer that carries no loss{masker}: the model does not learn to stop"
            + ("; the end token is also the padding token, which is masked" if shared else ""),
            end_remedy,
        ),
        (
            counts.trained_padding,
            "trained_padding",
            f"padding that carries loss{masker}",
            f"set labels to {ignore_index} where attention_mask is 0",
        ),
        (
            counts.doubled_bos,
            "doubled_bos",
            "two begin tokens in a row",
            "tokenize the text of a chat template with add_special_tokens=False",
        ),
        (
            counts.too_long,
            "longer_than_the_model",
            f"more tokens than the model has positions ({limits.positions})",
            f"truncate samples to {limits.positions} tokens, or make the model with more max_position_embeddings",
        ),
    ):
        if positions:
            verb = "has" if len(positions) == 1 else "have"
            place = f"sample {int(positions[0])}"
            message = f"{len(positions):,} of {counts.samples:,} samples {verb} {says}; the first is {place}"
            yield SupervisionFinding(name, "warning", message, remedy, len(positions), place)
    if model_shifts and counts.compared and is_shifted:
        message = "labels are the next token already, and the model shifts them again: it would learn to skip a token"
        remedy = "give labels equal to input_ids, with -100 where no loss is computed"
        yield SupervisionFinding("shifted_twice", "warning", message, remedy, counts.samples, "sample 0")
