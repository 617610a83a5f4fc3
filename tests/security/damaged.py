"""A run folder with every kind of file, and ways to damage the files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trainwright as tw
from tests.report_pages.runs import BEGAN_S, found
from trainwright.profiling.verdict import ModuleTime, OperatorTime, ProfileFacts
from trainwright.report.bad_cases import BadCase, BadCases, ConfidenceBin, ConfusedPair, LossSlice, SamplePreview
from trainwright.runs.folder import RunFolder
from trainwright.runs.json_values import strict
from trainwright.runs.records import (
    Logged,
    NotSaved,
    OutOfMemory,
    Quarantined,
    Record,
    Replayed,
    Skipped,
    Unexamined,
    to_json,
)
from trainwright.runs.supervision import DecodedSample, LossCount, MarkedText, Supervision, SupervisionFinding


def make_whole_run(root: Path) -> Path:
    """Trains a few steps, and adds the files that other commands write."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 6)
    data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    result = tw.fit(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)),
        data,
        nn.CrossEntropyLoss(),
        val=data,
        until="8steps",
        batch=16,
        quiet=True,
        name="whole",
        settings={"log.every": "1steps", "folder": str(root), "checkpoint.keep": 1},
    )
    folder = RunFolder(result.run)
    _add_records(folder)
    facts = ProfileFacts(
        *("cpu", "fp32", 10, 0.01, {"data": 0.001, "forward": 0.004}),
        operators=(OperatorTime("forward", "mm", 2.0, 0.001),),
        modules=(ModuleTime("0", "Linear", 0.001, 0.002),),
        memory=(10, 20, 30),
    )
    verdict = {"headline": "it computes", "evidence": ["90 %"]}
    folder.write_json("profile.json", {"facts": facts, "verdict": verdict, "next": "nothing", "advice": ["a"]})
    bad = BadCases(
        *("val", 10, 0.5),
        worst=(BadCase(1, 2.0, "a", "b", 0.9, 0.1),),
        slices=(LossSlice("length", "3", 3, 0.1, 0.2, 0.3, 0.5),),
        bins=(ConfidenceBin(3, 0.1, 0.2),),
        confused=(ConfusedPair("a", "b", 2),),
        classes=("a", "b"),
        matrix=((1, 2), (3, 4)),
        shown={1: SamplePreview("text", "hello")},
        accuracy=0.5,
        ece=0.1,
    )
    folder.write_json("errors.json", bad.to_json())
    shares = (LossCount("user", 5, 0), LossCount("assistant", 5, 4))
    finding = SupervisionFinding("empty_answer", "warning", "1 of 3 has an empty answer", "fill it in", 1, "a:2")
    sample = DecodedSample("a:1", (MarkedText("hello", False), MarkedText("you", True)))
    audit = Supervision(
        *("train", "tokens", "train_on: assistant", 3, 3, 0, 10, 4),
        roles=shares,
        findings=(finding,),
        decoded=(sample,),
    )
    folder.write_json("supervision.json", [audit])
    folder.write_text("samples/samples.txt", "--- once upon a time\n")
    folder.write_text("graph.svg", "<svg></svg>")
    (folder.path / "report.html").unlink()
    return folder.path


def _add_records(folder: RunFolder) -> None:
    more: list[Record] = [
        found(),
        Quarantined(time_s=BEGAN_S, step=7, sample_ids=(41,), reason="cannot be decoded"),
        Skipped(
            time_s=BEGAN_S, step=3, reason="nan", micro_batch=0, sample_ids=(5,), scale_before=None, scale_after=None
        ),
        NotSaved(time_s=BEGAN_S, step=6, reason="the disk is full"),
        Replayed(time_s=BEGAN_S, step=5, bundle="b", same_bits=True, outcome="o"),
        Unexamined(
            time_s=BEGAN_S, step=8, experiments=("casts",), examined_s=0.1, trained_s=3.0, bundle="step-00000008"
        ),
        Logged(time_s=BEGAN_S, step=5, figures={"val/loss": 0.5, "x": 1.0}),
        OutOfMemory(
            time_s=BEGAN_S,
            step=4,
            phase="forward",
            module="0",
            error="e",
            micro=4,
            next_micro=2,
            asked_bytes=5,
            in_use_bytes=6,
            given_back_bytes=1,
            capacity_bytes=10,
            reserved_bytes=None,
            held={"weights": 1},
        ),
    ]
    *first, end = folder.log.read_text().splitlines()
    folder.log.write_text("\n".join([*first, *map(to_json, more), end]) + "\n")


def removed(path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    return path


def _sparse(path: Path) -> None:
    with removed(path).open("wb") as file:
        file.truncate(2**40)


def _truncated(path: Path) -> None:
    if path.is_file():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": removed,
    "pipe": lambda path: os.mkfifo(removed(path)),
    "folder": lambda path: removed(path).mkdir(),
    "sparse": _sparse,
    "empty": lambda path: removed(path).touch(),
    "truncated": _truncated,
    "not UTF-8": lambda path: removed(path).write_bytes(b'\xff\xfe\x80{"a": 1}\n'),
    "link to nothing": lambda path: removed(path).symlink_to("nothing"),
    "link away": lambda path: removed(path).symlink_to("/etc/passwd"),
    "device": lambda path: removed(path).symlink_to("/dev/zero"),
    "deep mapping": lambda path: removed(path).write_text('{"files":' * 993 + "1" + "}" * 993),
    "digits": lambda path: removed(path).write_text("9" * 5000),
    "list": lambda path: removed(path).write_text("[1]"),
}

ODD: tuple[object, ...] = (
    *(-1, 0, 10**19, 10**39, int("9" * 400), 1e308, -1e308, 1e-308, True, None),
    *("x", "", "NaN", "Infinity", "\ud800", "\x1b[2J\u202e", [], [{}], {}, {"x": 1}),
)
"""Values that are invalid in most places."""
RAW = ("@Infinity@", "@NaN@", "@1e999@")
"""Numbers that Python's parser accepts although they are not JSON."""


def paths_in(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all values; of lists, only of the first two items."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, each in items:
        yield (*at, key)
        yield from paths_in(each, (*at, key))


def mutants(value: Any, number: int = 0) -> Iterator[str]:
    """Yields the JSON of ``value`` with one inner value replaced. Even and odd ``number`` replace alternate paths."""
    for turn, path in enumerate([*paths_in(value)][number % 2 :: 2], number):
        changed = json.loads(json.dumps(value))
        inside = changed
        for key in path[:-1]:
            inside = inside[key]
        inside[path[-1]] = (*ODD, *RAW)[turn % (len(ODD) + len(RAW))]
        text = json.dumps(strict(changed), separators=(",", ":"))
        yield text.replace('"@', "").replace('@"', "")
