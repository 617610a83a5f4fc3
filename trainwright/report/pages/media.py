"""Images, texts and histograms that the user logged, for a page: an index by name, and contents for a report."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from trainwright.runs.files import UnreadableFile
from trainwright.runs.json_values import JsonValue
from trainwright.runs.media import HISTOGRAM, IMAGE, SUFFIXES, MediaFile, read_media
from trainwright.runs.printing import printable
from trainwright.runs.records import Media
from trainwright.runs.secrets import masked

MAX_SERIES = 400
"""Maximum number of names on a page."""
MAX_STEPS = 4000
"""Maximum number of steps of a name. If there are more, every second one of the older half is left out."""
EMBEDDED_STEPS = 12
"""Maximum steps of a name that a report contains: the first, the last, and others between them."""
EMBEDDED_BYTES = 8 * 2**20
"""Maximum total size of the files that a report contains."""

Key: TypeAlias = tuple[str, str]
"""The name and the type of a series."""


class LoggedMedia:
    """The media records of a log that were read so far, by name and step, in bounded memory."""

    def __init__(self) -> None:
        self._series: dict[Key, dict[int, Media]] = {}
        self.count = 0

    def take(self, record: Media) -> None:
        """Add a record; a later one of the same step replaces it."""
        suffix = record.file.rpartition(".")[2]
        type_ = next((each for each, known in SUFFIXES.items() if known == suffix), "")
        key = (record.name, type_)
        if not type_ or record.step < 0 or (key not in self._series and len(self._series) >= MAX_SERIES):
            return
        self.count += 1
        steps = self._series.setdefault(key, {})
        steps[record.step] = record
        if len(steps) > MAX_STEPS:
            older = sorted(steps)[: MAX_STEPS // 2]
            for step in older[1::2]:
                del steps[step]

    def go_back_to(self, step: int) -> None:
        self._series = {
            key: {at: record for at, record in steps.items() if at <= step} for key, steps in self._series.items()
        }
        self.count += 1

    def find(self, name: str, type_: str, step: int) -> Media | None:
        found = (steps.get(step) for key, steps in self._series.items() if (_shown(key[0]), key[1]) == (name, type_))
        return next(found, None)

    def to_json(self, embedded: Path | None = None) -> list[JsonValue]:
        """Return the series for a page: name, type, steps and captions.

        If ``embedded`` is the run folder, each series also has contents, up to EMBEDDED_BYTES in total. Otherwise the
        page requests contents from its server.
        """
        shown: list[JsonValue] = []
        left = EMBEDDED_BYTES
        series = {key: steps for key, steps in sorted(self._series.items()) if steps}
        for number, ((name, type_), steps) in enumerate(series.items()):
            order = sorted(steps)
            entry: dict[str, JsonValue] = {"name": _shown(name), "type": type_, "total": len(order)}
            contents: list[JsonValue] = []
            if embedded is not None:
                budget = left // (len(series) - number)
                order, contents, used = _embed(embedded, [steps[each] for each in order], budget)
                left -= used
                entry["contents"] = contents
            entry["steps"] = list(order)
            entry["captions"] = [printable(str(masked(steps[each].caption)))[:600] for each in order]
            shown.append(entry)
        return shown


def _embed(run: Path, records: Sequence[Media], budget: int) -> tuple[list[int], list[JsonValue], int]:
    """Return steps, contents and total size of the files that fit into ``budget`` bytes. Newer files are preferred."""
    last = len(records) - 1
    count = min(len(records), EMBEDDED_STEPS)
    chosen = [records[round(each * last / max(1, count - 1))] for each in range(count)] if count > 1 else [*records]
    kept: dict[int, JsonValue] = {}
    used = 0
    for record in reversed(chosen):
        content = content_of(run, record)
        size = len(content) if isinstance(content, str) else 0
        if used + size <= budget:
            kept[record.step] = content
            used += size
    steps = sorted(kept)
    return steps, [kept[each] for each in steps], used


def content_of(run: Path, record: Media) -> JsonValue:
    """Return what a page shows: the data URL of an image, a text, or a histogram; the reason if it cannot be read."""
    try:
        return _value_of(read_media(run, record))
    except UnreadableFile as error:
        return {"problem": error.reason}


def _value_of(file: MediaFile) -> JsonValue:
    if file.type == IMAGE:
        return f"data:image/png;base64,{base64.b64encode(file.content).decode()}"
    return dict(file.histogram) if file.type == HISTOGRAM else str(masked(file.text))


def _shown(name: str) -> str:
    return printable(name)[:200]
