"""Every block of Python in the README and in docs/ runs: those of a page in order, in one namespace, in a folder.

Every block of YAML is a part of a recipe, and every command is one, with options that it has.

A page may use what its reader has already, which is below. A block that cannot run here has a comment before it that
says why: ``<!-- not run: ... -->``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import typer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from trainwright.cli import app
from trainwright.recipe import from_mapping
from trainwright.recipe.yaml_core import read

pytestmark = [pytest.mark.examined, pytest.mark.usefixtures("forked_trials")]

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"(?:^<!-- not run: (?P<why>[^>]+) -->\n)?^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
OWN_TESTS = {"migrate.md"}
"""Pages whose blocks another test runs, and compares."""
WITHOUT_DOCTOR = {"faster-run.md", "sweep.md", "generate-text.md", "fine-tune.md", "grpo.md"}
"""Pages that train several times, and about something else."""
READMES = sorted(ROOT.glob("README*.md"))
TRANSLATED = [page for page in READMES if page.name != "README.md"]
"""Their blocks are those of README.md, as the last test says."""
PAGES = [page for page in (*READMES, *sorted((ROOT / "docs").rglob("*.md"))) if page.name not in OWN_TESTS]


def readers() -> dict[str, Any]:
    """Return the names that a reader of a page has defined: a model, its data, a loss."""
    x = torch.randn(128, 20)
    dataset, model = (
        TensorDataset(x, (x.sum(1) > 0).long()),
        nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, loss = DataLoader(dataset, 16, shuffle=True), nn.CrossEntropyLoss()
    names = {"__name__": "a_page", "torch": torch, "nn": nn, "F": F, "tw": tw, "model": model, "dataset": dataset}
    return names | {"loader": loader, "optimizer": optimizer, "scaler": None, "my_loss": loss}


def write_shards(folder: Path) -> None:
    """Files of samples for the model of ``readers``."""
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text("".join(f"{'0.5 ' * 20}{row % 2}\n" for row in range(12)))


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """Line, code, and why it cannot run, of each block."""
    text = page.read_text()
    found = list(BLOCK.finditer(text))
    assert text.count("```python") == len(found), f"{page.name}: a block has no end"
    return [(text.count("\n", 0, each.start("code")), each["code"], each["why"] or "") for each in found]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page) and page not in TRANSLATED], ids=lambda page: page.name
)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRAINWRIGHT_EXAMINE")  # as for a reader; to examine all steps takes longer than the runs
    if page.name in WITHOUT_DOCTOR:
        monkeypatch.setenv("TRAINWRIGHT_DOCTOR", "off")
    torch.manual_seed(0)
    write_shards(tmp_path / "shards")
    namespace = readers()
    for line, code, why in blocks(page):
        if not why:
            exec(compile("\n" * line + code, str(page), "exec", dont_inherit=True), namespace)


def test_a_block_that_does_not_run_says_why() -> None:
    reasons = [(page.name, why) for page in PAGES for _, _, why in blocks(page) if why]
    assert all(len(why.split()) > 3 for _, why in reasons), reasons
    assert len(reasons) <= 5, reasons


ANY_RECIPE = {"model": {"use": "mlp", "args": {"sizes": [4, 2]}}, "data": {"train": "digits"}}
ALL_PAGES = (*READMES, *sorted((ROOT / "docs").rglob("*.md")))


def test_every_block_of_yaml_is_part_of_a_recipe() -> None:
    block = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = [(page, text) for page in ALL_PAGES for text in block.findall(page.read_text())]
    of_devices = [text for page, text in found if page.name == "plan.md"]
    assert (len(found) > 12, len(of_devices)) == (True, 1)
    for page, text in found:
        if text not in of_devices:
            assert from_mapping({**ANY_RECIPE, **read(text, page.name).value}), page.name  # type: ignore[dict-item]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command, without ``trainwright`` and what explains it."""
    for line in re.findall(r"^(?: {4}|\$ )?trainwright (.+)$|`trainwright ([^`\n]+)`", text, re.MULTILINE):
        yield shlex.split(re.split(r" {3}| #| -- ", "".join(line))[0])


def test_every_command_is_one() -> None:
    found = [(page.name, words) for page in ALL_PAGES for words in commands(page.read_text())]
    assert len(found) > 80
    root = typer.main.get_command(app)
    for name, words in found:
        command, rest = root, words
        while rest and (verbs := getattr(command, "commands", {})):
            assert rest[0] in verbs, f"{name}: trainwright {' '.join(words)}"
            command, rest = verbs[rest[0]], rest[1:]
        known = {opt for each in command.params for opt in (*each.opts, *each.secondary_opts)} | {"--help", "--lang"}
        options = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert options <= known, f"{name}: trainwright {' '.join(words)}"


def figures(page: Path) -> list[list[str]]:
    """The numbers of each row of a table that has some."""
    rows = [line for line in page.read_text().splitlines() if line.startswith("|")]
    return [sorted(found) for row in rows if (found := re.findall(r"\d+(?:\.\d+)?", row))]


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: page.name)
def test_a_translated_readme_has_the_code_and_the_figures_of_the_original(page: Path) -> None:
    original = ROOT / "README.md"
    assert figures(page) == figures(original) != []
    code, translated = ([re.sub(r" *#.*", "", each) for _, each, _ in blocks(of)] for of in (original, page))
    assert code == translated != []
