"""Laws of what the source shows: they hold for healthy programs, and are broken at the line of each mistake."""

from __future__ import annotations

import ast
import runpy
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import trainwright as tw
from trainwright.doctor.program.evaluated import evaluations
from trainwright.doctor.program.moving import uneven_averages
from trainwright.doctor.program.sums import misplaced_sums
from trainwright.doctor.program.syntax import FunctionSyntax, OtherFileSyntax, ProgramSyntax
from trainwright.doctor.program.unread import unread_values
from trainwright.recorder.own_functions import own_functions
from trainwright.watching.watch import Watch
from zoo.mutate import HOSTS, program

LOOP = """
import copy
import torch
import torch.nn.functional as F
from torch import nn
import trainwright as tw

torch.manual_seed(0)
X, Y = torch.randn(64, 6), torch.randint(3, (64,))

def halves(x, scale):
    return x * scale

@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    loss, right, rows = 0.0, 0, 0
    for x, y in batches:
        logits = model(x)
        loss += F.cross_entropy(logits, y, reduction="sum").item()
        right += (logits.argmax(1) == y).sum().item()
        rows += len(y)
    model.train()
    return loss / rows, right / rows

def train(epochs=10):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(zip(X.split(16), Y.split(16)))
    best = copy.deepcopy(model.state_dict())
    losses, step, shown = [], 0, (0.0, 0.0)
    with tw.watch(model, optimizer, loader=batches, out=None, quiet=True, laws="cheap") as watch:
        for epoch in range(epochs):
            running, seen = 0.0, 0
            for x, y in batches:
                step += 1
                loss = F.cross_entropy(model(halves(x, 0.5)), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                running += loss.item() * len(y)
                seen += len(y)
            losses.append(running / seen)
            if step % 8 == 0:
                shown = evaluate(model, batches)
                best = copy.deepcopy(model.state_dict())
        model.load_state_dict(best)
    print(losses, shown)
    return watch
"""


def syntax(source: str) -> ProgramSyntax:
    tree = ast.parse(source)
    loops = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name in ("train", "fit", "run")]
    return ProgramSyntax(tree, loops[0].lineno)


@pytest.mark.parametrize("host", HOSTS)
def test_hosts_read_what_they_make(host: str) -> None:
    of = syntax(program(host).source)
    assert [*unread_values(of), *misplaced_sums(of)] == []
    assert len(of.functions) > 4


def test_a_healthy_loop_has_nothing_left_over() -> None:
    of = syntax(LOOP)
    assert [*unread_values(of), *misplaced_sums(of)] == []
    assert [each.lineno for each in evaluations(of)] == [LOOP[: LOOP.index("shown = ev")].count("\n") + 1]


@pytest.mark.parametrize(
    ("before", "after", "kind", "name"),
    [
        ("losses.append(running / seen)", "pass", "sum", "running"),
        ("model.load_state_dict(best)", "pass", "value", "best"),
        ("print(losses, shown", "print(shown", "list", "losses"),
        ("logits = model(x)\n", "logits = model(x)\n        logits = model(x * 2)\n", "replaced", "logits"),
        ("return x * scale", "return x", "argument", "scale"),
        ("for epoch in range(epochs)", "for epoch in range(10)", "setting", "epochs"),
        ("model(halves(x, 0.5)), y)", "model(halves(x, 0.5)), Y[:16])", "part", "y"),
    ],
)
def test_what_nothing_reads_is_found(before: str, after: str, kind: str, name: str) -> None:
    assert LOOP.count(before) == 1
    source = LOOP.replace(before, after)
    if kind == "part":
        source = source.replace("len(y)", "16", 3).replace("rows += 16", "rows += len(y)")
    assert (kind, name) in [(each.kind, each.name) for each in unread_values(syntax(source))]


PLAY = """
def play(actor, world, steps=8):
    state, rewards = world.reset(), []
    for _ in range(steps):
        state, reward, done, _, info = world.step(actor(state))
        rewards.append(reward)
        if done:
            state = world.reset()
    return rewards

def train(world, actor, updates=4):
    for update in range(updates):
        print(play(actor, world, 16))
"""


@pytest.mark.parametrize(
    ("before", "after", "unread"),
    [
        ("", "", []),
        ("if done", "if info", ["done"]),
        ("rewards.append(reward)", "rewards.append(state)", ["reward"]),
        ("reward, done, _, info", "_, done, _, info", []),
        ("range(updates)", "range(4)", ["updates"]),
        ("updates=4", "updates=None", []),
        ("range(steps)", "range(8)", []),  # a default of another function than that of the loop may be there for others
        ("world.step(actor(state))", "world.turn(actor(state))", []),
    ],
)
def test_what_a_step_of_an_environment_says_is_read(before: str, after: str, unread: list[str]) -> None:
    source = PLAY.replace(before, after, 1) if before else PLAY
    if before == "range(steps)":
        source = source.replace(", 16)", ")")
    assert [each.name for each in unread_values(syntax(source))] == unread


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("losses.append(running / seen)", "_running = running"),
        ("model.load_state_dict(best)", "print(locals())"),
        ("model.load_state_dict(best)", "final = train_again(model)"),
        ("for x, y in batches:\n                step", "for n, (x, y) in enumerate(batches):\n                step"),
        ("shown = evaluate", "shown, rest = evaluate"),
        ("return x * scale", "return (lambda: x * scale)()"),
        ("halves(x, 0.5)", "halves(x, epoch)"),
    ],
)
def test_what_may_be_left_over_is_not(before: str, after: str) -> None:
    found = [each.name for each in unread_values(syntax(LOOP.replace(before, after)))]
    assert not set(found) - {"running", "seen", "best"} and "final" not in found


@pytest.mark.parametrize(
    ("before", "after", "kind", "name"),
    [
        ("right += (logits", "right += (logits.argmax(1) == y).sum().item(); right += (logits", "twice", "right"),
        ("        right += (logits.argmax(1) == y).sum().item()\n", "", "never added to", "right"),
        ("    loss, right, rows = 0.0, 0, 0\n    for x, y in batches:\n",
         "    for x, y in batches:\n        loss, right, rows = 0.0, 0, 0\n", "begun anew", "rows"),
        ("        rows += len(y)\n", "    rows += len(y)\n", "behind", "rows"),
        ("return loss / rows", "return loss * rows", "multiplied", "loss"),
        ("losses.append(running / seen)", "losses.append(sum(losses) * len(losses))", "multiplied", "sum(losses)"),
        ("                shown = evaluate(model, batches)\n", "", "never set", "shown"),
        ("                seen += len(y)\n", "            seen += len(y)\n", "behind", "seen"),
    ],
)  # fmt: skip
def test_sums_in_the_wrong_place_are_found(before: str, after: str, kind: str, name: str) -> None:
    assert LOOP.count(before) == 1
    assert (kind, name) in [(each.kind, each.name) for each in misplaced_sums(syntax(LOOP.replace(before, after)))]


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("avg = loss if avg is None else 0.98 * avg + 0.2 * loss", True),
        ("avg = loss if avg is None else 0.98 * avg + loss", True),
        ("self.ema = self.decay * self.ema + self.decay * loss", True),
        ("smoothed = 0.9 * smoothed - 0.1 * loss", True),
        ("avg = loss if avg is None else beta * avg + (1 - beta) * loss", False),
        ("self.ema = 0.9 * self.ema + 0.1 * (loss + penalty)", False),
        ("avg = n / (n + 1) * avg + loss / (n + 1)", False),
        ("avg = (avg * n + loss) / (n + 1)", False),
        ("avg = avg + 0.1 * (loss - avg)", False),
        ("velocity = 0.9 * velocity + gradient", False),
    ],
)
def test_the_shares_of_a_moving_average_are_one(line: str, is_found: bool) -> None:
    function = ast.parse(f"def f():\n    {line}").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert bool(list(uneven_averages(FunctionSyntax(function)))) == is_found


@pytest.mark.parametrize(
    ("told", "is_found"),
    [
        ('{"loss": loss, "accuracy": loss}', True),
        ("dict(loss=loss, accuracy=loss)", True),
        ('{"loss": loss, "accuracy": accuracy}', False),
        ('{"accuracy": loss}', False),
        ('{"loss": loss, "accuracy": 0.0}', False),
    ],
)
def test_a_part_under_whose_name_another_is_told(told: str, is_found: bool) -> None:
    source = f"def f(model, data):\n    loss, accuracy = evaluate(model, data)\n    return {told}"
    found = list(unread_values(ProgramSyntax(ast.parse(source), 1)))
    assert [each.name for each in found if each.kind == "told"] == ["accuracy"] * is_found


def test_a_count_beside_a_list_that_is_never_added_to() -> None:
    listed = LOOP.replace("loss, right, rows = 0.0, 0, 0", "loss, right, rows, all_x = 0.0, 0, 0, []")
    listed = listed.replace("rows += len(y)", "rows += len(y)\n        all_x.append(x)\n    print(all_x)", 1)
    assert list(misplaced_sums(syntax(listed))) == []
    [found] = misplaced_sums(syntax(listed.replace("        right += (logits.argmax(1) == y).sum().item()\n", "")))
    assert (found.kind, found.name) == ("never added to", "right")


@pytest.mark.parametrize(("added", "is_found"), [("pass", True), ("gains += x.sum(1)", False), ("print(gains)", False)])
def test_zeros_that_nothing_is_added_to(added: str, is_found: bool) -> None:
    program = LOOP.replace(
        "loss, right, rows = 0.0, 0, 0", "loss, right, rows = 0.0, 0, 0\n    gains = torch.zeros(16)"
    )
    program = program.replace("rows += len(y)", f"rows += len(y)\n        {added}", 1)
    program = program.replace("return loss / rows, right / rows", "return loss / rows, right / rows + gains.mean()")
    kinds = [(each.kind, each.name) for each in misplaced_sums(syntax(program))]
    assert kinds == ([("never set", "gains")] if is_found else [])


@pytest.mark.parametrize(
    ("made", "is_evaluated"),
    [("copy.deepcopy(model)", True), ("optimizer.param_groups", False), ("nn.Linear(6, 3)", False)],
)
def test_what_was_made_of_the_model_is_evaluated(made: str, is_evaluated: bool) -> None:
    program = LOOP.replace("losses, step, shown =", f"average = {made}\n    losses, step, shown =")
    program = program.replace("= evaluate(model, batches)", "= evaluate(average, [(X, Y)])")
    assert bool(evaluations(syntax(program))) == is_evaluated


@pytest.mark.parametrize(
    ("returned", "is_found"), [("len(parts)", True), ("sum(parts) / len(parts)", False), ("parts", False)]
)
def test_a_list_that_is_only_counted(returned: str, is_found: bool) -> None:
    source = LOOP.replace("rows += len(y)", "rows += len(y)\n        parts.append(loss)")
    source = source.replace("    loss, right", "    parts = []\n    loss, right").replace(
        "return loss /", f"return {returned}, loss /"
    )
    assert (("counted", "parts") in [(each.kind, each.name) for each in unread_values(syntax(source))]) == is_found


def test_two_entries_that_get_the_same() -> None:
    both = LOOP.replace("step += 1", 'step += 1\n                t["a"] += len(x)\n                t["b"] += len({})')
    assert [each.name for each in misplaced_sums(syntax(both.format("x")))] == ["t['b']"]
    assert list(misplaced_sums(syntax(both.format("y")))) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("losses.append(running / seen)", "losses.append(loss.item())"),
        ("losses.append(running / seen)", "losses.append(running * 2 / seen)"),
        ("running += loss.item() * len(y)", "running += next(loss); running += next(loss)"),
        (
            "step += 1",
            "step += 1\n                rows = []\n                rows.append(y)\n                print(rows)",
        ),
    ],
)
def test_sums_that_may_be_so_are_not_found(before: str, after: str) -> None:
    assert list(misplaced_sums(syntax(LOOP.replace(before, after)))) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("", "", None),
        ("model.load_state_dict(best)", "pass", "law.program.values_are_read"),
        ("        rows += len(y)\n", "    rows += len(y)\n", "law.program.sums_are_made_in_their_loop"),
        ("if step % 8 == 0:", "if step % 8 == 9:", "law.data.evaluation_goes_on"),
        ("if step % 8 == 0:", "if step % 80 == 0:", None),
        ("loss = F.cross", "evaluate(model, batches[:1]); loss = F.cross", None),
    ],
)
def test_the_watch_reads_the_program(before: str, after: str, code: str | None, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(LOOP.replace(before, after, 1) if before else LOOP)
    watch = runpy.run_path(str(file))["train"]()
    assert watch.session.failures == []
    mine = ("law.program.values", "law.program.sums", "law.data.evaluation_goes")
    found = [each for each in watch.findings() if each.code.startswith(mine)]
    assert [each.code for each in found] == ([code] if code else [])
    assert all(str(each.where.source).startswith("program.py:") for each in found)


@pytest.mark.slow
def test_an_evaluation_that_never_comes_beside_passes_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    inside = LOOP.replace("loss = F.cross", "model(x).detach() if step else None; loss = F.cross", 1)
    file.write_text(inside.replace("model(x).detach()", "evaluate(model, batches[:1])").replace("% 8 == 0", "% 8 == 9"))
    [found] = [each for each in runpy.run_path(str(file))["train"]().findings() if "evaluation_goes" in each.code]
    assert found.symptom.startswith("shown is 0 after 40 steps")


@pytest.mark.parametrize(
    ("before", "after", "name", "is_missed"),
    [
        ("loss = F.cross", "sure = F.softmax(model(x), 1).max(); loss = F.cross", "sure", False),
        ("loss = F.cross", "hidden = model(x); loss = F.cross", "hidden", False),
        ("loss = F.cross", "penalty = model(x).square().mean(); loss = F.cross", "penalty", True),
        ("model.load_state_dict(best)", "pass", "best", True),
    ],
)
def test_what_may_be_there_to_be_looked_at_is_an_info(before: str, after: str, name: str, is_missed: bool) -> None:
    found = {each.name: each.is_missed for each in unread_values(syntax(LOOP.replace(before, after, 1)))}
    assert found[name] == is_missed


@pytest.mark.parametrize(
    "line",
    [
        "running = running + f(running); running = running + f(running)",
        "layers.append(nn.Linear(rows, rows)); layers.append(nn.Linear(rows, rows))",
    ],
)
def test_what_is_new_each_time_may_be_added_twice(line: str) -> None:
    assert not list(misplaced_sums(syntax(LOOP.replace("step += 1", f"step += 1; {line}"))))


PARTS = """
import torch
from torch import nn

class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        y = self.one(x)
        return self.other(x)

@torch.no_grad()
def measure(model, batches):
    total, rows = 0.0, 0
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y).item() * len(y)
        rows += len(y)
    total += loss
    return total / rows

def never_called(model, batches):
    unread = model(batches[0])
"""


def test_functions_of_other_files_are_read_where_an_object_of_the_loop_reaches_them(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    parts = runpy.run_path(str(tmp_path / "parts.py"))
    codes = own_functions([parts["Parts"](), parts["measure"], nn.functional.cross_entropy])
    assert {each.co_name for each in codes} == {"__init__", "forward", "measure"}
    of = OtherFileSyntax(ast.parse(PARTS), {each.co_firstlineno for each in codes})
    assert [(each.kind, each.name) for each in unread_values(of)] == [("value", "y")]
    assert [(each.kind, each.name) for each in misplaced_sums(of)] == [("behind", "total")]


class Trainer:
    """A loop in a method; the step is another one."""

    def __init__(self) -> None:
        self.model = nn.Linear(6, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.history: dict[str, list[float]] = {"loss": []}

    def fit(self) -> Watch:
        x, y = torch.randn(32, 6), torch.randint(3, (32,))
        with tw.watch(self.model, self.optimizer, out=None, quiet=True, laws="cheap") as watch:
            for _ in range(4):
                self.step(x, y)
            assert self.history["loss"][-1] == watch._numbers()["self.history.loss[-1]"]
        return watch

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss_of_weights = self.model.weight.square().sum()  # noqa: F841
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.history["loss"].append(loss.item())


def test_a_method_beside_that_of_the_loop_is_read() -> None:
    (finding,) = [each for each in Trainer().fit().findings() if each.code == "law.program.values_are_read"]
    assert finding.severity == "warning" and "loss_of_weights" in finding.symptom
    assert (finding.where.source or "").startswith("test_written.py:")


@dataclass
class Settings:
    """As a script has them: ``extra`` is no field, and is read; ``lr`` has no default."""

    lr: float
    warmup: int = 0
    accumulation: int = 1


@pytest.mark.parametrize(
    ("name", "is_told"),
    [("warmup", False), ("warmups", True), ("extra", False), ("accumulations", False), ("lr_", False)],
)
def test_a_setting_that_nothing_reads_is_nearly_one_that_has_its_default(name: str, is_told: bool) -> None:
    settings = Settings(lr=0.1)
    setattr(settings, name, 4)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for _ in range(settings.warmup + getattr(settings, "accumulation", 1) + 2):
            optimizer.zero_grad()
            model(torch.randn(8, 6)).square().mean().backward()
            optimizer.step()
    if len(watch.records) < 0:
        print(settings.accumulations)  # type: ignore[attr-defined]
    found = [each for each in watch.findings() if each.code == "law.program.names_are_read"]
    assert [each.severity for each in found] == ["warning"] * is_told
    assert all(name in each.symptom for each in found)
