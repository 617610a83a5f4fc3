"""Reads records from jsonl, json, csv and parquet files, folders and the hub, each with its place in the file."""

from __future__ import annotations

import csv
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from trainwright.errors import MissingExtra, UsageError, suggest_file, text_of

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
HELD_OUT = ("validation", "valid", "val", "dev", "eval", "test")
"""Names of files that hold a split for evaluation. The first of these that a folder has is its validation set."""
SPLIT_NAME = re.compile(rf"(train|{'|'.join(HELD_OUT)})(?:[-_.\d].*)?", re.IGNORECASE)
HTML = re.compile(r"<!doctype\s+html|<html\b|<head\b", re.IGNORECASE)
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
COMPRESSED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"(\xb5/\xfd": "zstd"}
"""Compression formats by the first bytes of a file."""
SAVED_BY_DATASETS = ("dataset_info.json", "dataset_dict.json")
"""A folder with one of these files was written by ``save_to_disk`` of the package datasets."""


LINE_BITS = 36


def in_list(line: int, number: int) -> int:
    """Return a line and the number (from 1) of a record in a JSON list as one integer. A list may be on one line."""
    return line | number << LINE_BITS


def place_of(name: str, line: int, unit: str) -> str:
    """Return ``file:line``, ``file:line (record n)`` in a JSON list, or ``file row n`` for formats without lines."""
    if unit == "row":
        return f"{name} row {line}"
    number = line >> LINE_BITS
    return f"{name}:{line & (1 << LINE_BITS) - 1}" + (f" (record {number})" if number else "")


@dataclass(frozen=True)
class FileRecord:
    """One record: its file (by its number in ``RecordSource.names``), its line or row, and its fields or a problem.

    For a JSON list, the line also holds the number of the record in the list (see ``in_list``).
    """

    file: int
    line: int
    fields: Mapping[str, Any]
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class RecordSource:
    """Where records come from.

    Attributes:
        names: Names of the files, as users know them.
        digest: Hash of the content.
        unit: What ``FileRecord.line`` counts: ``line`` from 1, or ``row`` from 0.
        files: The files; empty for a dataset of the package datasets.
        dataset: That dataset.
        renamed: Returns the fields of a record under the names that the layouts use.
    """

    names: tuple[str, ...]
    digest: str
    unit: str
    files: tuple[Path, ...] = ()
    dataset: Any = None
    renamed: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict

    def place(self, file: int, line: int) -> str:
        """Return the place of a record (see ``place_of``)."""
        return place_of(self.names[file], line, self.unit)

    def records(self) -> Iterator[FileRecord]:
        """Yield all records in the order of the files."""
        if self.dataset is not None:
            for row, fields in enumerate(self.dataset):
                yield FileRecord(0, row, self.renamed(fields))
            return
        for number, path in enumerate(self.files):
            for record in _READERS[path.suffix](number, path):
                yield replace(record, fields=self.renamed(record.fields)) if record.fields else record


def open_source(path: str | Path, *, split: str = "train", revision: str | None = None) -> RecordSource:
    """Find the records that ``path`` names: a file, a folder, or the name of a dataset on the Hugging Face hub.

    Args:
        path: A .jsonl, .json, .csv, .tsv or .parquet file, a folder of such files, of .txt files with one text each,
            or one that ``save_to_disk`` wrote, or a hub name.
        split: Split of a dataset that has several, such as a folder with train.jsonl and validation.jsonl.
        revision: Branch, tag or commit of a hub dataset.

    Raises:
        UsageError: There are no such records.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        if (listed := _listed(local)) is not None:
            return _of_list(local, listed, split, revision)
        if any((local / name).exists() for name in SAVED_BY_DATASETS):
            return _saved(local, split)
        files = _data_files(local)
        if not files:
            remedy = f"put files of {', '.join((*SUFFIXES, '.txt'))} there, or a dataset written by save_to_disk"
            raise UsageError(f"the folder {local} holds no data", remedy=remedy)
        if splits := _splits(files):
            return _of_files(_split_of(splits, split, str(local)))
        return _of_files(files)
    if local.suffix in SUFFIXES or local.exists():
        if not local.is_file():
            raise UsageError(f"there is no file {local}", remedy=suggest_file(local, "the data"))
        if local.suffix not in SUFFIXES:
            raise UsageError(f"{local} is of no known format", remedy=f"give a file of {', '.join(SUFFIXES)}")
        return _of_files((local,))
    text = str(path)
    if isinstance(path, Path) or text.startswith(("/", "./", "../", "~")) or text.count("/") > 1:
        raise UsageError(f"there is no file or folder {local}", remedy=suggest_file(local, "the data"))
    return _hub(text, split, revision)


def validation_split(path: str | Path) -> str | None:
    """Return the name of the validation split of a folder with a file for each split; None for all other data."""
    local = Path(path).expanduser()
    if not local.is_dir() or _listed(local) is not None or any((local / name).exists() for name in SAVED_BY_DATASETS):
        return None
    return next((each for each in _splits(_data_files(local)) if each != "train"), None)


def _data_files(folder: Path) -> tuple[Path, ...]:
    files = tuple(sorted(each for each in folder.iterdir() if each.suffix in SUFFIXES))
    return files or tuple(sorted(folder.glob("*.txt")))


def _splits(files: tuple[Path, ...]) -> dict[str, tuple[Path, ...]]:
    """Return the files of each split, training first; {} unless all names begin with a split: train and others."""
    found: dict[str, tuple[Path, ...]] = dict.fromkeys(("train", *HELD_OUT), ())
    for path in files:
        name = SPLIT_NAME.fullmatch(path.stem)
        if name is None:
            return {}
        found[name[1].lower()] += (path,)
    splits = {name: each for name, each in found.items() if each}
    return splits if "train" in splits and len(splits) > 1 else {}


LISTED = ("file_name", "hf_hub_url")
LISTED_KEYS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "messages": "conversations",
    **{name: name for name in ("system", "history", "tools", "chosen", "rejected")},
}
"""Keys of the layouts for the columns that LLaMA-Factory names."""


def _listed(folder: Path) -> dict[str, Any] | None:
    """Return the data sets in LLaMA-Factory's ``dataset_info.json`` of a folder; None if there is no such file."""
    try:
        found = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_list = isinstance(found, dict) and found and all(isinstance(each, dict) for each in found.values())
    return found if is_list and any(key in each for each in found.values() for key in LISTED) else None


def _of_list(folder: Path, listed: Mapping[str, Any], name: str, revision: str | None) -> RecordSource:
    """Return the data set with that name, or the only one, with its listed columns and roles."""
    if name not in listed and len(listed) > 1:
        remedy = f"set source_split to one of {', '.join(listed)}"
        raise UsageError(f"{folder / 'dataset_info.json'} lists several data sets", remedy=remedy)
    entry = listed[name if name in listed else next(iter(listed))]
    if "file_name" not in entry and "hf_hub_url" not in entry:
        raise UsageError(f"the data set has no file_name in {folder / 'dataset_info.json'}", remedy="download its file")
    path = folder / entry["file_name"] if "file_name" in entry else entry["hf_hub_url"]
    found = open_source(path, split=entry.get("split", "train"), revision=revision)
    described = json.dumps(entry, sort_keys=True).encode()
    digest = hashlib.sha256(found.digest.encode() + described).hexdigest()
    return replace(found, digest=digest, renamed=lambda fields: _of_entry(fields, entry))


def _of_entry(fields: Mapping[str, Any], entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record of LLaMA-Factory with the keys of the layouts."""
    is_chat, columns, tags = entry.get("formatting") == "sharegpt", entry.get("columns", {}), entry.get("tags", {})
    named = {LISTED_KEYS.get(key, key): fields[theirs] for key, theirs in columns.items() if theirs in fields}
    rest = {key: value for key, value in fields.items() if key not in columns.values()}
    made = {**rest, **named}
    role, content = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    roles = {tags.get(f"{each}_tag", each): each for each in ("user", "assistant", "observation", "system")}
    roles[tags.get("function_tag", "function_call")] = "function_call"

    def turn(value: Any) -> Any:
        if not isinstance(value, Mapping) or role not in value:
            return value
        return {"from": roles.get(value[role], value[role]), "value": value.get(content)}

    if is_chat:
        made |= {key: [*map(turn, made[key])] for key in ("conversations",) if isinstance(made.get(key), list)}
        made |= {key: [turn(made[key])] for key in ("chosen", "rejected") if isinstance(made.get(key), Mapping)}
    if entry.get("ranking"):
        more = f"\n\n{made['input']}" if made.get("input") else ""
        made["prompt"] = made.pop("conversations") if is_chat else f"{made.pop('instruction', '')}{more}"
    elif set(columns) == {"prompt"} and "output" not in made:  # texts to pretrain on
        made["text"] = made.pop("instruction")
    return made


def _of_files(files: tuple[Path, ...]) -> RecordSource:
    digest = hashlib.sha256()
    for path in files:
        _require_data(path)
        digest.update(f"{path.name} {path.stat().st_size}:".encode())
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    units = {"row" if path.suffix == ".parquet" else "line" for path in files}
    if len(units) > 1:
        remedy = "put them into folders of their own"
        raise UsageError(f"the folder {files[0].parent} mixes .parquet with other formats", remedy=remedy)
    return RecordSource(tuple(path.name for path in files), digest.hexdigest(), units.pop(), files)


def _require_data(path: Path) -> None:
    """Raise UsageError for a web page or a Git LFS pointer, stored instead of the data, and for compressed files."""
    with path.open("rb") as file:
        head = file.read(4096)
    if head.startswith(LFS_POINTER):
        raise UsageError(f"{path}:1: it is a pointer of Git LFS, not the data", remedy="run git lfs pull there")
    if packed := next((name for begin, name in COMPRESSED.items() if head.startswith(begin)), None):
        raise UsageError(f"{path}:1: the file is compressed ({packed})", remedy=f"decompress it with {packed} first")
    text = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n")
    if HTML.match(text):
        title = re.search(r"<title>\s*([^<]*)", text, re.IGNORECASE)
        named = f" with the title {title[1].strip()!r}" if title and title[1].strip() else ""
        remedy = "download the file again: a server sends such a page for a wrong address or a missing permission"
        raise UsageError(f"{path} is an HTML page{named}, not data", remedy=remedy)


def _library() -> Any:
    try:
        import datasets
    except ModuleNotFoundError as error:
        if error.name != "datasets":
            raise
        raise MissingExtra("datasets", needed_for="a dataset that is no file") from None
    return datasets


def _saved(folder: Path, split: str) -> RecordSource:
    library = _library()
    try:
        found = library.load_from_disk(str(folder))
    except Exception as error:
        remedy = "write it again with dataset.save_to_disk(folder)"
        raise UsageError(f"{folder} cannot be read: {text_of(error, lines=1)}", remedy=remedy) from None
    return _of_dataset(_split_of(found, split, str(folder)), folder.name)


def _hub(name: str, split: str, revision: str | None) -> RecordSource:
    library = _library()
    try:
        found = library.load_dataset(name, revision=revision)
    except Exception as error:  # of the hub client, the network, or the format
        remedy = f"check the name and the network, or give a file; relative paths start at {Path.cwd()}"
        raise UsageError(f"the dataset {name!r} cannot be loaded: {text_of(error, lines=1)}", remedy=remedy) from None
    return _of_dataset(_split_of(found, split, name), name)


def _split_of(found: Any, split: str, name: str) -> Any:
    if not isinstance(found, dict):
        return found
    if split not in found:
        remedy = f"it has {', '.join(found)}: set source_split"
        raise UsageError(f"{name} has no split {split!r}", remedy=remedy)
    return found[split]


def _of_dataset(dataset: Any, name: str) -> RecordSource:
    plain = dataset.with_format(None)
    return RecordSource((name,), hashlib.sha256(str(dataset._fingerprint).encode()).hexdigest(), "row", dataset=plain)


def _lines(path: Path) -> Iterator[tuple[int, str | None, str]]:
    """Yield (line number, text, problem) of a UTF-8 file; the text is None where it cannot be decoded."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1 and raw.startswith((b"\xff\xfe", b"\xfe\xff")):
                yield number, None, "the file is UTF-16"
                return
            if number == 1 and raw.startswith(b"\xef\xbb\xbf"):
                raw = raw[3:]
            try:
                yield number, raw.decode("utf-8"), ""
            except UnicodeDecodeError as error:
                yield number, None, f"not UTF-8 at byte {error.start} of the line"


def _as_utf8(path: Path, problem: str) -> str:
    encoding, otherwise = ("UTF-16", "") if "UTF-16" in problem else ("LATIN1", " (or the encoding that it has)")
    return f"convert it: iconv -f {encoding} -t UTF-8 {path.name}{otherwise}"


def _jsonl(number: int, path: Path) -> Iterator[FileRecord]:
    for line, text, problem in _lines(path):
        if text is None:
            yield FileRecord(number, line, {}, problem, _as_utf8(path, problem))
        elif text.strip() in ("{", "["):
            problem, remedy = "a record is spread over several lines", f"write each on one line: jq -c . {path.name}"
            yield FileRecord(number, line, {}, problem, remedy)
            return
        elif text.strip():
            yield _parsed(number, line, text)


class DuplicateKeyError(ValueError):
    """Raised for a JSON object in which a key occurs twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of a JSON decoder. Raises DuplicateKeyError if it has to drop the value of a key."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found and found[key] != value:
            raise DuplicateKeyError(f"the key {key!r} has two values in one object")
        found[key] = value
    return found


def _parsed(number: int, line: int, text: str) -> FileRecord:
    try:
        value = json.loads(text, object_pairs_hook=_object)
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except DuplicateKeyError as error:
        return FileRecord(number, line, {}, str(error), "keep one of them: all but the last would be lost")
    except UnicodeEncodeError as error:
        problem = f"half of a character, {error.object[error.start]!a}"
        return FileRecord(
            number, line, {}, problem, "the text was cut inside an emoji: remove the half, or cut it again"
        )
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text[error.pos :].startswith("{"):
            return FileRecord(number, line, {}, "two records in one line", "put a line end between } and {")
        quoted = text.lstrip().startswith("{'")
        remedy = "write it with json.dumps, not str(): JSON has double quotes" if quoted else "write it with json.dumps"
        if not text.endswith("\n") and not text.rstrip().endswith("}"):
            remedy = "the file ends in the middle of a record: write or copy it again"
        return FileRecord(number, line, {}, f"not JSON: {error}", remedy)
    if not isinstance(value, dict):
        return FileRecord(number, line, {}, f"a {type(value).__name__}, not an object", "write one {...} a line")
    return FileRecord(number, line, value)


def _json(number: int, path: Path) -> Iterator[FileRecord]:
    """Yield the objects of a JSON list. A file with one object a line is read as .jsonl."""
    texts = []
    for line, text, problem in _lines(path):
        if text is None:
            yield FileRecord(number, line, {}, problem, _as_utf8(path, problem))
            return
        texts.append(text)
    text = "".join(texts)
    if text.lstrip().startswith("{"):
        yield from _one_object_or_lines(number, text, path)
    elif text.lstrip().startswith("["):
        yield from _list(number, text, text.index("[") + 1)
    elif text.strip():
        yield FileRecord(number, 1, {}, "not a list of records", "give a list of objects: [{...}, {...}]")


def _list(number: int, text: str, at: int) -> Iterator[FileRecord]:
    """Yield the objects of a list. ``at`` is the position after its opening bracket."""
    decoder, line, counted = json.JSONDecoder(), 1, 0
    for record in count(1):
        at = _skip(text, at)
        line, counted = line + text.count("\n", counted, at), at
        if text[at : at + 1] in ("]", ""):
            if not text[at:]:
                yield FileRecord(number, line, {}, "the list is not closed", "write or copy the file again")
            return
        place = in_list(line, record)
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError as error:
            yield FileRecord(number, place, {}, f"not JSON: {error}", "write it with json.dump")
            return
        if isinstance(value, dict):
            yield FileRecord(number, place, value)
        else:
            yield FileRecord(number, place, {}, f"a {type(value).__name__}, not an object", "give a list of objects")


def _one_object_or_lines(number: int, text: str, path: Path) -> Iterator[FileRecord]:
    lines = text.splitlines()
    try:
        value = json.loads(text)
    except ValueError:
        for line, each in enumerate(lines, start=1):
            if each.strip():
                yield _parsed(number, line, f"{each}\n" if line < len(lines) else each)
        return
    lists = [name for name, each in value.items() if isinstance(each, list) and each and isinstance(each[0], dict)]
    if len(lists) == 1 and lists[0] not in ("messages", "conversations"):  # {"data": [...]}
        begin = re.search(rf"{re.escape(json.dumps(lists[0]))}\s*:\s*\[", text)
        yield from _list(number, text, begin.end() if begin else text.index("[") + 1)
        return
    yield FileRecord(number, 1, value)


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n,":
        at += 1
    return at


@contextmanager
def _long_fields() -> Iterator[None]:
    """Allow fields of any length in csv files. The limit applies to the process, so it is restored."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _csv(number: int, path: Path) -> Iterator[FileRecord]:
    problems = [(line, problem) for line, text, problem in _lines(path) if text is None]
    if problems:
        line, problem = problems[0]
        yield FileRecord(number, line, {}, problem, _as_utf8(path, problem))
        return
    with path.open(newline="", encoding="utf-8-sig") as file, _long_fields():
        header = file.readline()
        file.seek(0)
        rows = csv.reader(file, delimiter=_separator_of(header))
        names = next(rows, [])
        begin = rows.line_num + 1
        for row in rows:
            if row and row == names:
                yield FileRecord(number, begin, {}, "the header again", "remove this line, left from joining files")
            elif row and len(row) != len(names):
                problem = f"{len(row)} fields, the header has {len(names)}"
                yield FileRecord(number, begin, {}, problem, "quote fields that contain commas or line ends")
            elif row:
                yield FileRecord(number, begin, {name: _cell(each) for name, each in zip(names, row, strict=True)})
            begin = rows.line_num + 1


def _separator_of(header: str) -> str:
    """Return the character between the names of columns: a comma, tab, semicolon or vertical bar."""
    if "\t" in header:
        return "\t"
    return "," if "," in header else next((each for each in ";|" if each in header), ",")


def _cell(text: str) -> object:
    """Return a list or object that was written as JSON into a cell, else the text."""
    if text.startswith(("[", "{")):
        try:
            return json.loads(text)
        except ValueError:
            return text
    return text


def _parquet(number: int, path: Path) -> Iterator[FileRecord]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise MissingExtra("pyarrow", needed_for=".parquet files") from None
    row = 0
    try:
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=256):
                for fields in batch.to_pylist():
                    yield FileRecord(number, row, fields)
                    row += 1
    except Exception as error:  # pyarrow has errors of its own
        yield FileRecord(number, row, {}, f"not readable: {text_of(error, lines=1)}", "write or copy the file again")


def _txt(number: int, path: Path) -> Iterator[FileRecord]:
    lines = [*_lines(path)]
    if (bad := next((each for each in lines if each[1] is None), None)) is not None:
        yield FileRecord(number, bad[0], {}, bad[2], _as_utf8(path, bad[2]))
    elif text := "".join(each or "" for _, each, _ in lines).strip():
        yield FileRecord(number, 1, {"text": text})


_READERS = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".tsv": _csv, ".parquet": _parquet, ".txt": _txt}
