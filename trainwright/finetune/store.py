"""Keeps tokenized records in a cache folder whose name is a hash of everything that the tokens depend on.

A shard is two files of NumPy arrays without pickled objects: ``shard-00000.tokens.npy`` and ``shard-00000.rows.npy``.
Each file is written under a temporary name, flushed to disk and renamed. The rows are written last, so a shard with
rows is complete. Tokenization that was killed continues after the last complete shard and writes the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from trainwright.errors import StorageError, UsageError
from trainwright.finetune.chat import Rendered
from trainwright.finetune.defects import Defect
from trainwright.finetune.encode import Encoded, Encoder
from trainwright.finetune.layouts import BadRecord, Example, Pair, Use, example_of
from trainwright.finetune.read import FileRecord, RecordSource, place_of
from trainwright.finetune.similarity import HASHES, content_hash, signature
from trainwright.finetune.tokenizer import tokenizer_digest
from trainwright.runs.printing import printable
from trainwright.runs.system_calls import try_lock

FORMAT = 11
"""Version of the files. Increase it if the same records give other tokens, defects or files."""
SHARD_RECORDS = 1000
MAX_PROBLEMS_SHOWN = 8
"""Maximum number of different problems in an error message."""
MAX_PLACES_SHOWN = 3
"""Maximum number of further records that are named for one problem."""
POSITION = re.compile(r"\[\d+\]|(?:line|column|char|byte) \d+")
"""The part of a message that differs between records with the same problem."""
MIN_SHOWN_S = 2.0
"""Progress is shown if tokenization takes longer."""
LOCK_POLL_S = 0.1
MIN_CUT_WORDS = 3
"""If a chosen answer of at least this many words is the beginning of the rejected one, it may be cut off."""
SOURCE_KEY, MAX_SOURCES, OTHER_SOURCES = "source", 32, "other sources"
"""The key of a record that names its source, and the maximum number of names. Further names share one source."""
TOKEN = np.dtype([("id", "<i4"), ("turn", "<u2"), ("role", "u1"), ("supervised", "u1")])
ROW = np.dtype(
    [
        ("length", "<i8"),
        ("line", "<i8"),
        ("hash", "<u8"),
        ("answer", "<u8"),
        ("defects", "<u8"),
        ("file", "<u2"),
        ("kept", "u1"),
        ("rejected", "u1"),
        ("source", "<u2"),
        ("signature", "<u4", (HASHES,)),
    ]
)
"""One row per sequence. ``hash`` and ``answer`` are hashes of all texts and of all answers of its record. ``defects``
is a ``Defect``. ``kept`` is 0 for a sequence that is left out, ``rejected`` is 1 in the second row of a pair."""


@dataclass(frozen=True)
class EncodingOptions:
    """The settings that determine the tokens of a record, besides the tokenizer."""

    use: Use
    train_on: str = "assistant"
    max_length: int | None = None
    truncate: str = "error"
    on_bad_record: str = "stop"
    template_args: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Store:
    """A complete folder of tokenized records. ``digest`` is a hash of its tokens, ``sources`` names their sources."""

    folder: Path
    shards: int
    digest: str
    names: tuple[str, ...]
    unit: str
    sources: tuple[str, ...] = ()

    def rows(self) -> NDArray[Any]:
        """Return all rows, including those of records that are left out."""
        return np.concatenate([np.load(_rows_file(self.folder, at), allow_pickle=False) for at in range(self.shards)])

    def tokens(self) -> list[NDArray[Any]]:
        """Return the tokens of each shard, memory-mapped."""
        return [_load_tokens(self.folder, at) for at in range(self.shards)]

    def place(self, row: Any) -> str:
        """Return the file and line of a row, such as ``chats.jsonl:3``."""
        return place_of(self.names[int(row["file"])], int(row["line"]), self.unit)


def cache_folder(folder: str | Path | None = None) -> Path:
    """Return the cache folder.

    It is ``folder``, else ``$TRAINWRIGHT_CACHE``, else ``trainwright`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.
    """
    if folder is not None:
        return Path(folder).expanduser()
    if named := os.environ.get("TRAINWRIGHT_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainwright"


def store_key(source: RecordSource, encoder: Encoder, options: EncodingOptions) -> str:
    """Return the hash of everything that the tokens depend on."""
    import tokenizers
    import transformers

    facts = {
        "format": FORMAT,
        "source": source.digest,
        "names": source.names,
        "tokenizer": tokenizer_digest(encoder.tokenizer),
        "options": asdict(options),
        "versions": [transformers.__version__, tokenizers.__version__],
        "shard": SHARD_RECORDS,
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def tokenized(source: RecordSource, encoder: Encoder, options: EncodingOptions, cache: Path) -> Store:
    """Return the tokenized records of a source, from the cache if it has them.

    Raises:
        UsageError: Records cannot be used. Names the first of them with file and line.
        StorageError: The cache cannot be written.
    """
    folder = cache / "tokens" / store_key(source, encoder, options)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            return _complete_store(folder, source) or _build(folder, source, encoder, options)
    except OSError as error:
        remedy = "free space or permit writing there, or set cache to another folder"
        raise StorageError(f"the cache {folder} cannot be written: {error.strerror or error}", remedy=remedy) from None


class TokenizationProgress:
    """Shows the number of tokenized records on a terminal if tokenization takes more than MIN_SHOWN_S."""

    def __init__(self, name: str, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._out, self._clock = name, out or sys.stderr, clock
        self._begin_s, self._shown = clock(), ""

    def show(self, records: int) -> None:
        """Replace the shown number."""
        if self._out.isatty() and self._clock() - self._begin_s > MIN_SHOWN_S:
            self._shown = f"tokenizing {printable(self._name)}: {records:,} records"
            self._out.write(f"\r{self._shown}")
            self._out.flush()

    def close(self) -> None:
        """Erase the line."""
        if self._shown:
            self._out.write(f"\r{' ' * len(self._shown)}\r")
            self._out.flush()


def _build(folder: Path, source: RecordSource, encoder: Encoder, options: EncodingOptions) -> Store:
    records = source.records()
    number, layout = 0, ""
    sources: dict[str, int] = {}
    progress = TokenizationProgress(source.names[0])
    try:
        while some := list(islice(records, SHARD_RECORDS)):
            layout = layout or _layout_of_first(some, options)
            of_records = [_source_number(each, source, options, sources) for each in some]
            if not _is_complete(folder, number):
                rows, tokens = _Shard(source, encoder, options, layout).encode(some, of_records)
                _write(_tokens_file(folder, number), tokens)
                _write(_rows_file(folder, number), rows)
            number += 1
            progress.show(number * SHARD_RECORDS)
    finally:
        progress.close()  # also before an error message
    if not number:
        raise UsageError(f"{source.names[0]} has no records", remedy="check that it is the right file")
    digest = hashlib.sha256()
    for at in range(number):
        digest.update(np.load(_rows_file(folder, at), allow_pickle=False)["length"].tobytes())
        digest.update(_load_tokens(folder, at).tobytes())
    done = {"format": FORMAT, "shards": number, "digest": digest.hexdigest(), "sources": [*sources]}
    _replace(folder / "done.json", json.dumps(done).encode())
    return Store(folder, number, digest.hexdigest(), source.names, source.unit, tuple(sources))


def _layout_of_first(records: Sequence[FileRecord], options: EncodingOptions) -> str:
    for record in records:
        with suppress(BadRecord):
            return example_of(_renamed(record.fields, options.columns), options.use, options.roles)[0]
    return ""


def _renamed(fields: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the fields under the names that the layouts use. ``columns`` maps these to the names in the file."""
    if not columns:
        return fields
    return {**fields, **{name: fields[theirs] for name, theirs in columns.items() if theirs in fields}}


def _source_number(record: FileRecord, source: RecordSource, options: EncodingOptions, known: dict[str, int]) -> int:
    """Return the number of a record's source, which is its key ``source``, else its file."""
    named = _renamed(record.fields, options.columns).get(SOURCE_KEY)
    name = named if isinstance(named, str) and named else Path(source.names[record.file]).stem
    name = name if name in known or len(known) < MAX_SOURCES else OTHER_SOURCES
    return known.setdefault(name, len(known))


class _Shard:
    def __init__(self, source: RecordSource, encoder: Encoder, options: EncodingOptions, layout: str) -> None:
        self.source, self.encoder, self.options, self.layout = source, encoder, options, layout
        self.problems: list[tuple[FileRecord, BadRecord]] = []

    def encode(self, records: Sequence[FileRecord], sources: Sequence[int]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the rows and tokens of records. ``sources`` are the numbers of their sources.

        Raises UsageError for bad records, unless ``on_bad_record`` is "skip".
        """
        rendered = [*map(self._rendered, records)]
        if self.problems and self.options.on_bad_record == "stop":
            raise self._error(len(records))
        examples = [each for item, _ in filter(None, rendered) for each in _examples(item)]
        texts = [each for _, of_item in filter(None, rendered) for each in of_item]
        encoded = iter(self.encoder.encode(examples, texts))
        rows, tokens = [], []
        too_long: list[tuple[FileRecord, int]] = []
        for record, usable, origin in zip(records, rendered, sources, strict=True):
            if usable is None:
                none = np.zeros(HASHES, np.uint32)
                rows.append((0, record.line, 0, 0, int(Defect.BAD_RECORD), record.file, 0, 0, origin, none))
                continue
            item, of_item = usable
            for row, each in self._rows(record, item, [next(encoded) for _ in of_item], origin, too_long):
                rows.append(row)
                tokens.append(each)
        if too_long:
            raise self._too_long(too_long)
        return np.array(rows, dtype=ROW), np.concatenate([*tokens, np.zeros(0, TOKEN)])

    def _rendered(self, record: FileRecord) -> tuple[Example | Pair, list[Rendered | None]] | None:
        """Return a record with the text of each of its conversations; None if it cannot be used."""
        try:
            if record.problem:
                raise BadRecord(record.problem, record.remedy)
            fields = _renamed(record.fields, self.options.columns)
            layout, item = example_of(fields, self.options.use, self.options.roles)
            if layout != self.layout:
                raise BadRecord(
                    f"it has the layout {layout!r}, and the records before it have {self.layout!r}",
                    "convert the file to one layout, or make two data sets of it",
                )
            return item, [self.encoder.renderer.render(each) if each.messages else None for each in _examples(item)]
        except BadRecord as error:
            self.problems.append((record, error))
            return None

    def _rows(
        self,
        record: FileRecord,
        item: Example | Pair,
        sequences: Sequence[Encoded],
        origin: int,
        too_long: list[tuple[FileRecord, int]],
    ) -> Iterator[tuple[Any, NDArray[Any]]]:
        """Yield (row, tokens) of each sequence of a record. Adds a record to ``too_long`` if its length is an error."""
        is_too_long = any(map(self.encoder.is_too_long, sequences))
        if is_too_long and self.options.truncate == "error":
            too_long.append((record, max(len(each.ids) for each in sequences)))
        cut = [self.encoder.cut(each) for each in sequences]
        parts = [part for each in _examples(item) for part in each.content()]
        extra = _pair_defects(item) if isinstance(item, Pair) else Defect(0)
        extra |= Defect.TOO_LONG if is_too_long and self.options.truncate == "drop" else Defect(0)
        if isinstance(item, Pair) and content_hash(item.chosen.content()) == content_hash(item.rejected.content()):
            extra |= Defect.SAME_PAIR
        elif len(cut) == 2 and np.array_equal(cut[0].ids, cut[1].ids):
            extra |= Defect.CUT_PAIR
        kept = all(each.supervised.any() for each in cut) and not extra & Defect.TOO_LONG
        identity, signed = content_hash(parts), signature(parts)
        answer = content_hash([each for each in parts if each[0] == "assistant"])
        for number, each in enumerate(cut):
            tokens = np.zeros(len(each.ids), TOKEN)
            tokens["id"], tokens["turn"], tokens["role"] = each.ids, each.turns, each.roles
            tokens["supervised"] = each.supervised
            defects = int(each.defects | extra)
            row = (len(tokens), record.line, identity, answer, defects, record.file, kept, number, origin, signed)
            yield row, tokens

    def _error(self, count: int) -> UsageError:
        kinds: dict[str, list[tuple[FileRecord, BadRecord]]] = {}
        for record, error in self.problems:
            kinds.setdefault(POSITION.sub("", error.problem), []).append((record, error))
        shown = [self._shown(found) for found in list(kinds.values())[:MAX_PROBLEMS_SHOWN]]
        more = sum(len(found) for found in list(kinds.values())[MAX_PROBLEMS_SHOWN:])
        rest = [f"and {more} more in these {count:,} records"] if more else []
        total = len({(record.file, record.line) for record, _ in self.problems})
        head = f"{total} record{'' if total == 1 else 's'} cannot be used:"
        remedy = "fix them, or set on_bad_record: skip, which leaves them out and counts them"
        return UsageError("\n  ".join([head, *shown, *rest]), remedy=remedy)

    def _shown(self, found: Sequence[tuple[FileRecord, BadRecord]]) -> str:
        """Return the text of one problem and the first records that have it."""
        error = found[0][1]
        first, *rest = dict.fromkeys(self.source.place(record.file, record.line) for record, _ in found)
        more = f" and {len(rest) - MAX_PLACES_SHOWN:,} more" if len(rest) > MAX_PLACES_SHOWN else ""
        also = (
            f"\n    {len(rest) + 1:,} records have it: also {', '.join(rest[:MAX_PLACES_SHOWN])}{more}" if rest else ""
        )
        return f"{first}: {error.problem}{also}\n    remedy: {error.remedy}"

    def _too_long(self, found: Sequence[tuple[FileRecord, int]]) -> UsageError:
        (record, length), limit = found[0], self.options.max_length
        place = self.source.place(record.file, record.line)
        longest = max(each for _, each in found)
        count = f"{len(found)} record{' is' if len(found) == 1 else 's are'}"
        return UsageError(
            f"{count} longer than max_length: {limit}; {place} has {length} tokens, the longest {longest}",
            remedy=f"set max_length: {longest}, or truncate: right, left or drop",
        )


def _examples(item: Example | Pair) -> tuple[Example, ...]:
    return (item.chosen, item.rejected) if isinstance(item, Pair) else (item,)


def _pair_defects(pair: Pair) -> Defect:
    found = Defect(0)
    if pair.scores is not None and pair.scores[0] <= pair.scores[1]:
        found |= Defect.TIED_SCORES if pair.scores[0] == pair.scores[1] else Defect.SCORES_SWAPPED
    chosen, rejected = (each.content()[-1][1].strip() for each in (pair.chosen, pair.rejected))
    cut = len(chosen)
    is_begin = rejected.startswith(chosen) and len(chosen.split()) >= MIN_CUT_WORDS
    if is_begin and chosen[-1].isalnum() and rejected[cut : cut + 1].isalnum():  # within a word
        found |= Defect.MID_SENTENCE
    return found


def _tokens_file(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.tokens.npy"


def _rows_file(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.rows.npy"


def _load_tokens(folder: Path, number: int) -> NDArray[Any]:
    file = _tokens_file(folder, number)
    try:
        return np.asarray(np.load(file, allow_pickle=False, mmap_mode="r"))  # slices of a plain array are faster
    except ValueError:  # an empty array cannot be memory-mapped
        return np.load(file, allow_pickle=False)  # type: ignore[no-any-return]


def _is_complete(folder: Path, number: int) -> bool:
    try:
        rows = np.load(_rows_file(folder, number), allow_pickle=False)
        tokens = _load_tokens(folder, number)
    except (OSError, ValueError, EOFError):
        return False
    return rows.dtype == ROW and tokens.dtype == TOKEN and int(rows["length"].sum()) == len(tokens)


def _complete_store(folder: Path, source: RecordSource) -> Store | None:
    """Return the store in a folder; None if the folder is not complete."""
    try:
        done = json.loads((folder / "done.json").read_text())
        sources = tuple(map(str, done["sources"]))
        found = Store(folder, int(done["shards"]), str(done["digest"]), source.names, source.unit, sources)
        is_readable = done["format"] == FORMAT and found.shards > 0
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if is_readable and all(_is_complete(folder, at) for at in range(found.shards)) else None


def _write(path: Path, array: NDArray[Any]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    _replace(path, buffer.getvalue())


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, so that one process tokenizes and others wait for its result. The lock ends with its process."""
    with (folder / "lock").open("w") as file:
        with suppress(OSError):  # a file system without locks: several processes write the same bytes
            while not try_lock(file.fileno()):
                time.sleep(LOCK_POLL_S)
            for left in folder.glob(".*"):  # temporary files of a process that was killed
                left.unlink(missing_ok=True)
        yield
