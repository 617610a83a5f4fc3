"""The benchmarks run, and each prints figures of one shape. What they measure is not tested."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks import finetune, soak, turns
from benchmarks.gpu import is_done, run_part, table
from benchmarks.gpu_parts import flops_per_token, utilization, verified
from tests import forked

ROOT = Path(__file__).parent.parent


def figures(bench: str, *options: str) -> list[dict[str, Any]]:
    """Return the figures of a quick run with one thread. Two threads would wait for each other on a busy machine."""
    run = f"import runpy, sys; sys.argv[0] = '{bench}.py'; runpy.run_module('benchmarks.{bench}', run_name='__main__')"
    done = forked.run(run, "--quick", "--threads", "1", *options)
    assert done.returncode == 0, done.stderr
    about, *seen = [json.loads(line) for line in done.stdout.splitlines()]
    assert list(about) == ["bench", "date", "command", "python", "versions", "machine", "cores", "load"]
    assert about["command"].startswith(f"python -m benchmarks.{bench} --quick")
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bench", "options", "cases"),
    [
        (
            "step_overhead",
            ("--tasks", "mlp", "--only", "plain_same_optimizer,fit"),
            {"mlp_plain_step", "mlp_fit", "mlp_fit_run", "mlp_fit_first_64", "mlp_fit_same_optimizer"},
        ),
        ("own_objects", ("--tasks", "mlp", "--cases", "several"), {"mlp_several", "mlp_several_step"}),
        ("auto", ("--recipes", "demo-digits"), {f"demo-digits_{name}" for name in ("precision", "update", "layout")}),
        ("own_step", (), {f"64_{name}{kind}" for name in ("plain", "steps", "fit") for kind in ("", "_cpu")}),
        ("scaling", ("--steps", "4"), {"one_step", "speed_up_2", "efficiency_2", "communication_2"}),
        ("startup", (), {"import_extra", "help_extra", "first_step"}),
        ("time_foretold", (), {"demo-digits_3steps_step", "demo-digits_3steps_run"}),
        ("time_to_loss", ("--seconds", "0.2"), {"same_loss", "loss_plain", "loss_ours"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_benchmark_prints_figures(bench: str, options: tuple[str, ...], cases: set[str]) -> None:
    seen = figures(bench, *options)
    assert cases <= {figure["case"] for figure in seen}
    for figure in seen:
        assert list(figure) == ["bench", "case", "value", "unit", "against", "n", "spread"]
        assert figure["bench"] == bench
        assert figure["unit"] in (
            "ratio",
            "s",
            "us",
            "nats",
            "share",
            "steps",
            "MiB",
            "threads",
            "files",
            "KiB per 1,000 steps",
        )
        if figure["n"] == 0:  # the loss was not reached
            assert figure["value"] is None and figure["spread"] is None
        else:
            least, most = figure["spread"]
            assert least <= figure["value"] <= most


@pytest.mark.slow
@pytest.mark.parametrize("name", soak.PROGRAMS)
def test_a_program_of_the_soak_trains(name: str, tmp_path: Path) -> None:
    """Forked: the benchmark starts a new Python, which takes longer to import torch than a test may take."""
    done = forked.run(soak.PROGRAMS[name], "0.005", cwd=tmp_path)
    assert int(done.stdout.split()[-1]) > 0, done.stderr
    seen = soak.sampled(psutil.Process())
    assert seen.rss_bytes > 0 and seen.threads > 0 and seen.files > 0


@pytest.mark.slow
def test_the_blocks_of_the_fine_tuning_benchmark_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    samples = finetune.make_samples()
    for block in (finetune.by_fit("padding_free"), finetune.by_fit({"by": "bfd", "max_length": 256})):
        clock = finetune.Clock()
        block(samples[:16], 4, clock)
        assert len(clock.times_s) == 4 and min(clock.step_s()) > 0
    assert 0.3 < finetune.padding(samples) < 0.7


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "fit"])
def test_a_turn_of_the_fine_tuning_benchmark_is_an_epoch(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answers: list[list[float]] = []

    def end(answer: list[float]) -> None:
        answers.append(answer)
        raise turns.TurnsOver

    monkeypatch.setattr(finetune, "wait_for_turn", end)
    finetune.child(variant)
    assert [len(each) for each in answers] == [finetune.EPOCH] and min(answers[0]) > 0


def test_the_utilization_of_gpt2() -> None:
    """GPT-2 124M: 124,439,808 parameters, of which 1024 x 768 are positions; 312 TFLOP/s is an A100 in bf16."""
    each = flops_per_token(124_439_808 - 1024 * 768, layers=12, d_model=768, block_size=1024)
    assert each == pytest.approx(6 * 123_653_376 + 12 * 12 * 1024 * 768)
    assert utilization(100_000, each, 312e12) == pytest.approx(0.274, abs=1e-3)
    assert utilization(200_000, each, 312e12) == pytest.approx(2 * utilization(100_000, each, 312e12))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_part_for_a_gpu_says_that_there_is_none(tmp_path: Path) -> None:
    assert run_part("mfu", tmp_path, "cuda")
    about, skipped, ended = [json.loads(line) for line in (tmp_path / "mfu.jsonl").read_text().splitlines()]
    assert about["bench"] == "gpu_mfu"
    assert skipped == {"bench": "gpu_mfu", "skipped": "no CUDA device"}
    assert ended["case"] == "mfu" and "error" not in ended


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.slow
def test_the_part_for_two_gpus_runs_on_gloo() -> None:
    output, passed = verified("replicate", torch.device("cpu"))
    assert passed and "3 steps on 2 ranks against one process" in output, output


def test_a_part_for_a_gpu_that_fails_leaves_its_error(tmp_path: Path) -> None:
    assert not run_part("mfu", tmp_path, "no-such-device")
    last = json.loads((tmp_path / "mfu.jsonl").read_text().splitlines()[-1])
    assert last["error"] == "exit code 1" and "no-such-device" in last["stderr"]
    assert not run_part("mfu", tmp_path, "cpu", limit_s=0.05)
    last = json.loads((tmp_path / "mfu.jsonl").read_text().splitlines()[-1])
    assert last["error"] == "not done after 0.05 s"


def test_parts_for_a_gpu_are_run_until_they_have_ended_well(tmp_path: Path) -> None:
    figure = {"bench": "b", "case": "c", "value": 2.0, "unit": "ms", "against": "plain", "n": 2, "spread": [1.0, 3.0]}
    ended = {"bench": "gpu", "case": "mfu", "seconds": 9.0}
    for part, lines in {
        "mfu": [figure, ended],
        "sync": [figure, ended | {"case": "sync", "error": "exit code 1"}],
    }.items():
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (tmp_path / "amp.jsonl").write_text(json.dumps(figure) + '\n{"bench": "gpu", "ca')  # the part was killed
    assert [is_done(part, tmp_path) for part in ("mfu", "sync", "amp", "zoo")] == [True, False, False, False]
    shown = list(table(tmp_path))
    assert (
        "| mfu | c | 2.0 | ms | plain | 1.0 to 3.0 |" in shown
        and "| sync | not measured | | | exit code 1 | |" in shown
    )


WINDOW = """
import sys
from pathlib import Path
from benchmarks import peers
print(*peers.window("ours", Path(sys.argv[1]), forks=True))
"""


@pytest.mark.slow
def test_trainers_are_compared_from_outside(tmp_path: Path) -> None:
    done = forked.run(WINDOW, str(tmp_path))
    assert float(done.stdout) < 1e-6, done.stderr


def test_the_newest_figures_are_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = runpy.run_path(str(ROOT / "scripts" / "benchmarks.py"))
    monkeypatch.setitem(scripts["keep"].__globals__, "RESULTS", tmp_path)
    about = {"bench": "b", "date": "2026-01-01 10:00", "command": "python -m benchmarks.b", "versions": {}, "cores": 2}
    for value in (1.0, 2.0):
        figure = {"bench": "b", "case": "c", "value": value, "unit": "s", "against": "x", "spread": [value, value]}
        list(scripts["keep"]([json.dumps(about), json.dumps(figure)]))
    assert "| c | 2.0 | s | x | 2.0 to 2.0 |" in (shown := scripts["page"]([tmp_path / "b.json"]))
    assert "| c | 1.0" not in shown


def test_the_page_of_figures_is_as_the_files_are() -> None:
    scripts = runpy.run_path(str(ROOT / "scripts" / "benchmarks.py"))
    page = (ROOT / "docs" / "reference" / "benchmarks.md").read_text()
    assert page == scripts["page"](sorted((ROOT / "benchmarks" / "results").glob("*.json")))
