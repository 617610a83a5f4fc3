"""The model card of an exported model: the README.md of a repository on the hub, made from a run folder."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from trainwright.runs.files import UnreadableFile, read_text
from trainwright.runs.findings import findings_in
from trainwright.runs.folder import RunFolder
from trainwright.runs.reader import LogContents, read_newest
from trainwright.runs.records import Evaluated, Found, Record, Step, Withdrawn
from trainwright.runs.shapes import ProvenanceFile, read_as
from trainwright.version import __version__

MAX_ROWS = 12
"""Rows of the table of each curve: the first, the last, and others at equal distances."""
RowT = TypeVar("RowT")


def model_card(run: RunFolder, step: int, kind: str) -> str:
    """Return the model card of the checkpoint at ``step`` as Markdown. ``kind`` is the class of the model.

    Later records are left out. The licence is left to the author.
    """
    try:
        origin = read_as(run.provenance, ProvenanceFile)
    except UnreadableFile:
        origin = ProvenanceFile()
    kinds = (Step, Evaluated, Found, Withdrawn)
    log = read_newest(run.log, kinds) if os.path.lexists(run.log) else LogContents((), 0, torn=False)
    parts = [
        "\n".join(_front_matter(origin)),
        f"# {run.name}",
        _introduction(origin, step, kind),
        f'```python\nfrom transformers import AutoTokenizer, {kind}\n\nmodel = {kind}.from_pretrained("FOLDER")\n```',
        "## Intended use and limitations\n\nTo be written by the author.",
        "\n".join(["## Training data", "", *_data(origin)]),
        "\n".join(["## Results", "", *_results(log.records, step)]),
        "\n".join(["## Findings", "", *_findings(log.records, step)]),
        "\n".join(["## Versions", "", *_versions(origin)]),
        f"## Recipe\n\n```yaml\n{read_text(run.recipe).rstrip()}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(origin: ProvenanceFile) -> Iterator[str]:
    yield "---"
    yield "library_name: transformers"
    if origin.base is not None and not origin.base.name.startswith((".", "/", "~")):
        yield f"base_model: {origin.base.name}"
    yield "tags:"
    yield from ("- trainwright", *(["- lora"] if origin.adapters else []))
    yield "# license: to be added by the author; it must agree with that of the base model and of the data"
    yield "---"


def _introduction(origin: ProvenanceFile, step: int, kind: str) -> str:
    if origin.base is None:
        begin = f"A `{kind}`"
    else:
        begin = f"A `{kind}`, fine-tuned from `{origin.base.name}` (revision `{origin.base.revision}`)"
    how = " with low-rank adapters" if origin.adapters else ""
    return (
        f"{begin}{how} for {step:,} steps by [Trainwright](https://github.com/trainwright/trainwright) {__version__}."
    )


def _data(origin: ProvenanceFile) -> Iterator[str]:
    yield from _table(("set", "fingerprint"), ((name, f"`{each}`") for name, each in (origin.data or {}).items()))


def _results(records: Iterable[Record], step: int) -> Iterator[str]:
    until = [each for each in records if isinstance(each, Step | Evaluated) and each.step <= step]
    steps = [each for each in until if isinstance(each, Step)]
    evaluated = [each for each in until if isinstance(each, Evaluated)]
    rows = ((f"{each.step:,}", f"{each.loss:.6g}", f"{each.lr:.4g}") for each in _thinned(steps))
    yield from _table(("step", "training loss", "learning rate"), rows)
    if evaluated:
        names = sorted({name for each in evaluated for name in each.metrics})
        yield ""
        yield from _table(
            ("step", "validation loss", *names),
            (
                (
                    f"{each.step:,}",
                    f"{each.loss:.6g}",
                    *(f"{each.metrics.get(name, float('nan')):.6g}" for name in names),
                )
                for each in _thinned(evaluated)
            ),
        )


def _findings(records: Iterable[Record], step: int) -> Iterator[str]:
    found = [each for each in findings_in(records) if each.step <= step and each.severity != "info"]
    if not found:
        yield "None."
    for each in found:
        yield f"- {each.severity}: `{each.code}` (step {each.step:,}): {each.symptom}"


def _versions(origin: ProvenanceFile) -> Iterator[str]:
    packages = origin.packages.versions if origin.packages else {}
    commit = origin.git.commit if origin.git else None
    rows = [*packages.items(), *([("python", origin.python)] if origin.python else [])]
    rows += [("commit of the project", commit)] if commit else []
    yield from _table(("package", "version"), rows)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(each.replace('|', chr(92) + '|') for each in row)} |"


def _thinned(rows: Sequence[RowT]) -> list[RowT]:
    if len(rows) <= MAX_ROWS:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (MAX_ROWS - 1))] for i in range(MAX_ROWS)]
