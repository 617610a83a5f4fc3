"""The benchmarks run, and each prints figures of one shape. What they measure is nobody's business here."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


def figures(bench: str, *options: str) -> list[dict[str, Any]]:
    """What a quick run prints. One thread: two that spin for each other crawl beside other work."""
    command = [sys.executable, "-m", f"benchmarks.{bench}", "--quick", "--threads", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bench", "options", "cases"),
    [
        (
            "step_overhead",
            (),
            {"mlp_accum1", "mlp_accum4", "gpt_accum1", "gpt_accum4", "mlp_accum1_same_optimizer", "mlp_loader"},
        ),
        ("startup", (), {"import_extra", "help_extra", "first_step"}),
        ("time_to_loss", ("--seconds", "1"), {"same_loss", "loss_plain", "loss_ours"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_benchmark_prints_figures(bench: str, options: tuple[str, ...], cases: set[str]) -> None:
    seen = figures(bench, *options)
    assert cases <= {figure["case"] for figure in seen}
    for figure in seen:
        assert list(figure) == ["bench", "case", "value", "unit", "against", "n", "spread"]
        assert figure["bench"] == bench
        assert figure["unit"] in ("ratio", "s", "us", "nats")
        if figure["n"] == 0:  # the loss was not reached
            assert figure["value"] is None and figure["spread"] is None
        else:
            least, most = figure["spread"]
            assert least <= figure["value"] <= most
