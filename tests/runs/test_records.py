"""Records survive the way to disk and back, in JSON that any strict parser takes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from trainwright.runs.records import (
    KINDS,
    Ended,
    Evaluated,
    Evidence,
    Examined,
    Found,
    Layers,
    Logged,
    Media,
    NotCaptured,
    NotSaved,
    OutOfMemory,
    OutputGrads,
    Quarantined,
    Record,
    Replayed,
    RunVerdict,
    Saved,
    Skipped,
    Started,
    Step,
    Telemetry,
    Tried,
    Unexamined,
    Unknown,
    Watched,
    Where,
    Withdrawn,
    from_json,
    to_json,
)

STEP: dict[str, Any] = {
    **dict.fromkeys(("time_s", "grad_norm", "lr", "weight", "step_s", "wait_s"), 0.25),
    **dict.fromkeys(("samples", "tokens", "skipped", "mem_bytes"), 3),
    "step": 7,
    "loss": 2.25,
    "ids_hash": "a1",
}
SKIP: dict[str, Any] = {"time_s": 1.0, "step": 7, "reason": "overflow", "sample_ids": (3, 4)}
END: dict[str, Any] = {
    "time_s": 1.0,
    "ending": "finished",
    "reason": "200 steps",
    "step": 200,
    "seconds": 8.0,
}
FOUND = Found(
    time_s=3.0,
    code="optim.missing_zero_grad",
    severity="critical",
    step=12,
    since_step=1,
    symptom='the gradient grows: "a" \\ \n line two \u2028 ünïcode',
    cause="zero_grad is never called",
    remedy="call it",
    sure=0.97,
    where=Where(module="h.0.attn", op="mm", dtype="bfloat16", micro_batch=0, rank=0, sample_ids=(137, 2**53)),
    evidence=(Evidence(measure="grad norm", seen=math.inf, expected=1.0), Evidence(measure="m", seen="NaN?")),
    tried=(Tried(remedy="zero_grad", result="loss falls"),),
    consequences=("steps 1-12 are worthless",),
)
EXAMPLES: list[Record] = [
    Layers(time_s=2.0, step=2, layers=("a", "b"), grad_norm=(1.5, math.inf), act_log2=((3, 40, 60), ())),
    OutputGrads(time_s=2.0, step=2, layers=("a", "b"), norm=(1.5, math.inf), log2=((3, 40, 60), ())),
    Started(time_s=0.0, step=0, version="0.1.0", pid=7, command=("trainwright", "train", "a b.yaml")),
    Started(time_s=0.0, step=40, version="0.1.0", pid=8, resumed_from="checkpoints/step-00000040"),
    Step(**STEP),
    Step(**{**STEP, "loss": math.inf, "grad_norm": -math.inf, "probed": {"a/b": math.inf, "c": 1.0}}),
    Evaluated(time_s=1.0, step=7, loss=math.inf, weight=10.0, metrics={"accuracy": 0.5}, seconds=1.0),
    Saved(time_s=1.0, step=7, path="checkpoints/step-00000007", bytes=10**12, seconds=0.5),
    NotCaptured(time_s=1.0, step=7, reason="the model draws on the host"),
    NotSaved(time_s=1.0, step=7, reason="cannot write checkpoints: the disk is full (free space)"),
    Skipped(**SKIP, micro_batch=1, scale_before=65536.0, scale_after=32768.0),
    Skipped(**SKIP, micro_batch=None, scale_before=None, scale_after=None),
    OutOfMemory(
        time_s=1.0,
        step=7,
        phase="backward",
        module="",
        error="DefaultCPUAllocator: can't allocate memory",
        micro=8,
        next_micro=None,
        asked_bytes=None,
        in_use_bytes=2**40,
        given_back_bytes=2**39,
        capacity_bytes=2**40,
        reserved_bytes=None,
        held={"weights": 2**20, "gradients": 0},
    ),
    Quarantined(time_s=1.0, step=7, sample_ids=(137,), reason="OSError: cannot open image"),
    FOUND,
    Found(time_s=1.0, code="a.b", severity="info", step=1, symptom="", cause="", remedy="", sure=1.0),
    Withdrawn(time_s=1.0, code="a.b", step=9),
    Replayed(time_s=1.0, step=7, bundle="bundles/step-7", same_bits=True, outcome="first inf in h.3.mlp"),
    Ended(**END, loss=1.0, val_loss=None, skipped=0),
    Ended(**END, loss=1.0, val_loss=None, skipped=0, verdict=RunVerdict(word="overfits", sentence="so", best_step=40)),
    Watched(
        time_s=8.5,
        step=3,
        loss=math.nan,
        grad_norm=1.0,
        lr=0.1,
        events=[["step", {"optimizer": 0}]],  # type: ignore[list-item]  # as it is read
        values={"losses": [math.nan, 1.0], "vetoed": "gradients"},
    ),
    Examined(time_s=8.6, step=3, experiment="again", values={"norm_now": math.inf, "deep": [{"a": None}]}),
    Unexamined(time_s=8.7, step=3, experiments=("again",), examined_s=0.2, trained_s=4.0, bundle="step-00000003"),
    Logged(time_s=9.0, step=3, figures={"val_loss": 0.5, "accuracy": math.nan}),
    Media(time_s=9.0, step=3, name="val/drawn", file="media/val_drawn-1/step-00000003.png", caption="<b>"),
    Telemetry(time_s=9.0, step=3, values={"host/process_memory_bytes": 1e9}),
    Unknown(time_s=1.0, kind="dreamt", fields={"of": ["sheep", {"n": 1}], "loss": "NaN"}),
]


def reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@pytest.mark.parametrize("record", EXAMPLES, ids=lambda record: type(record).__name__)
def test_record_survives(record: Record) -> None:
    line = to_json(record)
    assert from_json(line) == record
    assert line.isascii()
    assert "\n" not in line
    assert json.loads(line, parse_constant=reject_constant)["time_s"] == record.time_s


def test_every_kind_has_an_example() -> None:
    assert {type(record) for record in EXAMPLES} == {*KINDS.values(), Unknown}


def test_nan_survives_in_every_field_that_holds_floats() -> None:
    line = to_json(Step(**{**STEP, "loss": math.nan, "probed": {"x": math.nan}}))
    assert '"loss":"NaN"' in line
    back = from_json(line)
    assert isinstance(back, Step)
    assert math.isnan(back.loss)
    assert math.isnan(back.probed["x"])
    ended = from_json(to_json(Ended(**END, loss=math.nan, val_loss=None, skipped=0)))
    assert isinstance(ended, Ended)
    assert ended.loss is not None
    assert math.isnan(ended.loss)


def test_a_text_field_that_says_nan_stays_text() -> None:
    saved = from_json(to_json(Saved(time_s=0.0, step=1, path="NaN", bytes=1, seconds=1.0)))
    assert isinstance(saved, Saved)
    assert saved.path == "NaN"


def test_a_whole_number_is_read_as_float_where_a_float_belongs() -> None:
    back = from_json(to_json(Step(**STEP)).replace('"loss":2.25', '"loss":2'))
    assert isinstance(back, Step)
    assert (back.loss, type(back.loss)) == (2.0, float)


def test_fields_of_a_newer_version_are_ignored_and_missing_optional_ones_get_their_default() -> None:
    line = json.loads(to_json(FOUND))
    line["mood"] = "sombre"
    line["where"]["galaxy"] = 3
    del line["consequences"]
    back = from_json(json.dumps(line))
    assert isinstance(back, Found)
    assert (back.where, back.consequences) == (FOUND.where, ())


@pytest.mark.parametrize(
    "line",
    [
        "",
        "5",
        "[]",
        "{}",
        '{"kind": 3}',
        '{"kind": "step"}',
        to_json(Step(**STEP))[:-1],
        to_json(Step(**STEP)).replace('"step":7', '"step":"7"'),
        to_json(Step(**STEP)).replace('"loss":2.25', '"loss":"low"'),
        to_json(Step(**STEP)).replace('"loss":2.25', '"loss":null'),
        to_json(FOUND).replace('"sample_ids":[137', '"sample_ids":["137"'),
    ],
)
def test_what_is_no_record_is_a_value_error(line: str) -> None:
    with pytest.raises(ValueError):
        from_json(line)


def test_a_tensor_in_a_record_is_our_bug_and_not_an_empty_object() -> None:
    with pytest.raises(TypeError, match="not Tensor"):
        to_json(Step(**{**STEP, "loss": torch.tensor(1.0)}))


def test_a_float_keeps_its_bits() -> None:
    values = {str(i): x for i, x in enumerate([0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0])}
    back = from_json(to_json(Step(**{**STEP, "probed": values})))
    assert isinstance(back, Step)
    assert {k: v.hex() for k, v in back.probed.items()} == {k: v.hex() for k, v in values.items()}


def test_findings_print_themselves_in_a_line_each() -> None:
    found = Found(
        time_s=0.0, code="loss.nan", severity="critical", step=3, symptom="it is nan", cause="", remedy="", sure=1
    )
    assert str([found]) == "[<critical: loss.nan (step 3): it is nan>]"
