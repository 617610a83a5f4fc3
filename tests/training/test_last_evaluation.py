"""The evaluation at the end of a run of ``tw.fit`` with the doctor."""

from pathlib import Path

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.errors import UsageError


@pytest.mark.slow
def test_a_step_that_was_evaluated_is_not_evaluated_again(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    x, y = torch.randn(64, 4), torch.randint(2, (64,))
    settings = {"folder": str(tmp_path), "evaluation.every": "4steps"}
    tw.fit(nn.Linear(4, 2), (x, y), nn.CrossEntropyLoss(), val=(x, y), steps=8, settings=settings)
    lines = [line.split() for line in capfd.readouterr().out.splitlines() if line.startswith("step")]
    assert [line[1] for line in lines if "validation" in line] == ["4", "8"]


@pytest.mark.parametrize("name", ["out", "output_dir", "log_dir"])
def test_the_argument_for_a_folder_is_the_setting(name: str) -> None:
    with pytest.raises(UsageError) as error:
        tw.fit(nn.Linear(4, 2), [], nn.CrossEntropyLoss(), **{name: "runs"})  # type: ignore[call-arg, arg-type]
    assert error.value.remedy == f"write settings={{'folder': ...}} for {name}="
