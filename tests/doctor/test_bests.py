"""The best value so far, and the order of arguments, as the source of a loop shows them."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from trainwright.doctor.program.bests import broken_bests
from trainwright.doctor.program.exchanged import exchanged_arguments
from trainwright.doctor.program.syntax import ProgramSyntax
from zoo.mutate import HOSTS, program

LOOP = """
import copy
import torch
import torch.nn.functional as F
from torch import nn
import trainwright as tw

def noised(x, noise, scale):
    return x + scale * noise

def distance(first, second):
    return (first - second).square().mean()

def train(epochs=6):
    torch.manual_seed(0)
    x, y = torch.randn(64, 6), torch.randint(3, (64,))
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best, patience = float("inf"), 0
    kept = copy.deepcopy(model.state_dict())
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for epoch in range(epochs):
            noise = torch.randn(64, 6)
            loss = F.cross_entropy(model(noised(x, noise, 0.1)), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                val_loss, accuracy = F.cross_entropy(model(x), y).item(), 0.5
            if val_loss < best:
                best = val_loss
                kept = copy.deepcopy(model.state_dict())
                patience = 0
            else:
                patience += 1
            if patience > 3:
                break
        model.load_state_dict(kept)
    print(best, accuracy)
    return watch
"""


def syntax(source: str) -> ProgramSyntax:
    tree = ast.parse(source)
    [loop] = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name in ("train", "fit", "run")]
    return ProgramSyntax(tree, loop.lineno)


def changed(before: str, after: str) -> ProgramSyntax:
    assert LOOP.count(before) == 1
    return syntax(LOOP.replace(before, after))


@pytest.mark.parametrize("source", [LOOP, *(program(host).source for host in HOSTS if host != "contrast")])
def test_healthy_programs_keep_the_best_and_the_order(source: str) -> None:
    assert [*broken_bests(syntax(source)), *exchanged_arguments(syntax(source))] == []


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ("                best = val_loss\n", "", "never set"),
        ("if val_loss < best:", "if val_loss > best:", "never beaten"),
        ("if val_loss < best:", "if not val_loss < best:", "never beaten"),
        ('float("inf")', '-float("inf")', "never beaten"),
        ("best = val_loss", "best = max(best, val_loss)", "never beaten"),
        ("best = val_loss", "best = accuracy", "set to another"),
        ("best = val_loss", "best = -val_loss", "set to another"),
        ("if val_loss < best:", "if True:", "set in each round"),
        ("if val_loss < best:", "if val_loss < patience:", "set in each round"),
    ],
)
def test_a_best_that_is_none_is_found(before: str, after: str, kind: str) -> None:
    [found] = broken_bests(changed(before, after))
    assert (found.kind, found.name) == (kind, "best")
    assert LOOP.splitlines()[found.line - 1].lstrip().startswith("best, patience")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if val_loss < best:\n", "if best > val_loss + 1e-4 and epoch:\n"),
        ("best = val_loss", "best = min(best, val_loss)"),
        ("if val_loss < best:", "is_better = val_loss < best\n            if is_better:"),
        ("                best = val_loss\n", "                best = float(val_loss)\n"),
        ("            if val_loss <", "            if val_loss >= best:\n                continue\n            if 0 <"),
        ('best, patience = float("inf"), 0', 'best, limit, patience = float("inf"), float("inf"), 0'),
        ("if patience > 3:", "if patience > 3 or val_loss > 1e9:"),
        ("            if patience > 3:", "            before = val_loss\n            if patience > 3:"),
    ],
)  # fmt: skip
def test_other_ways_to_keep_the_best_are_right(before: str, after: str) -> None:
    assert list(broken_bests(changed(before, after))) == []


def test_a_limit_that_is_switched_off_is_no_best() -> None:
    source = LOOP.replace("best, patience = float", "limit, best, patience = math.inf, float")
    source = source.replace(
        "if patience > 3:", "if val_loss < limit:\n                print(epoch)\n            if epoch:"
    )
    assert list(broken_bests(syntax(source))) == []


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("noised(x, noise, 0.1)", "noised(noise, x, 0.1)", [("noise", "x")]),
        ("noised(x, noise, 0.1)", "noised(noise.clone(), x.float(), 0.1)", [("noise", "x")]),
        ("noised(x, noise, 0.1)", "noised(noise, noise, 0.1)", []),
        ("noised(x, noise, 0.1)", "noised(y, noise, 0.1)", []),
        ("print(best, accuracy)", "print(distance(second, first))", [("second", "first")]),
        ("print(best, accuracy)", "print(distance(second, first) + distance(first, second))", []),
        ("print(best, accuracy)", "print(distance(second_half, first_half))", [("second_half", "first_half")]),
    ],
)
def test_arguments_that_changed_places(before: str, after: str, names: list[tuple[str, str]]) -> None:
    found = list(exchanged_arguments(changed(before, after)))
    assert [each.names for each in found] == names


def test_letters_may_be_exchanged_and_the_arguments_of_a_model_may_not() -> None:
    loop = "class Net(nn.Module):\n    def forward(self, image, words):\n        return image * words\n\n\n"
    loop += "def kl(p, q):\n    return p - q\n\n\ndef fit(model, image, words, p, q):\n    return model({}), kl(q, p)\n"
    assert list(exchanged_arguments(syntax(loop.format("image, words")))) == []
    source = loop.replace("fit(model", "fit(model=Net()").replace("=Net(), image, words, p, q", ", image, words, p, q")
    [found] = exchanged_arguments(syntax(source.format("words, image").replace("kl(q, p)", "Net(), kl(q, p)")))
    assert (found.function, found.parameters) == ("model", ("image", "words"))


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("                best = val_loss\n", "", "law.program.bests_are_the_best"),
        ("noised(x, noise, 0.1)", "noised(noise, x, 0.1)", "law.program.arguments_are_in_order"),
    ],
)
def test_the_watch_tells_it_at_its_line(before: str, after: str, code: str, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(LOOP.replace(before, after))
    watch = runpy.run_path(str(file))["train"]()
    [found] = [each for each in watch.findings() if each.code.startswith(("law.program.bests", "law.program.arg"))]
    assert (found.code, found.severity, watch.session.failures) == (code, "warning", [])
    assert str(found.where.source).startswith("program.py:")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if val_loss < best:", "if (now := val_loss) < best:\n                val_loss = now"),
        ("if val_loss < best:", "now = val_loss\n            if now < best:"),
    ],
)
def test_a_best_is_set_to_the_same_under_another_name(before: str, after: str) -> None:
    assert not list(broken_bests(changed(before, after)))


@pytest.mark.parametrize(
    ("begin", "before", "after", "said"),
    [
        ("10.0", "best = val_loss", "best = val_loss", []),
        ("10.0", "best = val_loss", "last = val_loss", ["warning"]),
        ("10.0", "best = val_loss", "best = val_loss if epoch > 99 else best", ["warning"]),
        ("0.0", "patience > 3", "patience > 9", ["warning"]),
        ("0.0", "val_loss < best", "val_loss < best + 9", []),
        ("-10.0", "if val_loss < best", "val_loss = -val_loss\n            if val_loss > best", []),
    ],
)
def test_a_best_with_a_number_to_begin_with_is_followed(
    begin: str, before: str, after: str, said: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "program.py"
    assert LOOP.count(before) == 1
    file.write_text(LOOP.replace('float("inf"), 0', f"{begin}, 0").replace(before, after))
    watch = runpy.run_path(str(file))["train"]()
    assert watch.session.failures == []
    assert [each.severity for each in watch.findings() if each.code == "law.program.bests_are_the_best"] == said
