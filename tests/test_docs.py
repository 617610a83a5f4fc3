"""Every block of Python in the README and in docs/ runs: those of a page in order, in one namespace, in a folder.

A page may use what its reader has already, which is below. A block that cannot run here has a comment before it that
says why: ``<!-- not run: ... -->``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(?:^<!-- not run: (?P<why>[^>]+) -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
OWN_TESTS = {"migrate.md"}
"""Pages whose blocks another test runs, and compares."""
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if page.name not in OWN_TESTS]


def readers() -> dict[str, Any]:
    """What the reader of a page has already: a model, its data, a loss."""
    x = torch.randn(128, 20)
    dataset, model = (
        TensorDataset(x, (x.sum(1) > 0).long()),
        nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, loss = DataLoader(dataset, 16, shuffle=True), nn.CrossEntropyLoss()
    names = {"__name__": "a_page", "torch": torch, "nn": nn, "F": F, "tw": tw, "model": model, "dataset": dataset}
    return names | {"loader": loader, "optimizer": optimizer, "scaler": None, "my_loss": loss}


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Line, code, and why it cannot run, of each block."""
    text = page.read_text()
    found = list(BLOCK.finditer(text))
    assert text.count("```python") == len(found), f"{page.name}: a block has no end"
    return [(text.count("\n", 0, each.start("code")), each["code"], each["why"] or "") for each in found]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace = readers()
    for line, code, why in blocks(page):
        if not why:
            exec(compile("\n" * line + code, str(page), "exec", dont_inherit=True), namespace)


def test_a_block_that_does_not_run_says_why() -> None:
    reasons = [(page.name, why) for page in PAGES for _, _, why in blocks(page) if why]
    assert all(len(why.split()) > 3 for _, why in reasons), reasons
    assert len(reasons) <= 4, reasons
