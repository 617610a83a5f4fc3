"""The laws of the program hold in healthy loops, and each is broken, at its place, by several kinds of mistake."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

import trainwright as tw
from tests.rows import each_row
from trainwright.doctor.case import Case
from trainwright.doctor.diagnose import LAWS, diagnose
from trainwright.doctor.finding import Finding
from trainwright.doctor.program.grammar import RULES, spelled
from trainwright.doctor.program.measure.names import nearly
from trainwright.runlog.records import Found, Watched

pytestmark = pytest.mark.slow

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)
STEPS = 14


class Loop:
    """A small healthy loop; what a test replaces makes it ill. ``evaluated`` is the model that is evaluated."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.dtype = dtype
        self.model: Any = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.optimizer: Optimizer = SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler: Any = CosineAnnealingLR(self.optimizer, 40)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=False)
        self.evaluated = self.model
        self.step = 0

    def run(self, steps: int = STEPS) -> Any:
        with tw.watch(self.model, self.optimizer, out=None, quiet=True, laws="cheap") as watch:
            for self.step in range(1, steps + 1):
                self.model.train()
                self.one_step(torch.randint(64, (8,)))
                self.after()
                if self.step % 4 == 0:
                    self.evaluate()
            self.end()
        assert watch.session.failures == []
        return watch

    def loss(self, rows: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            return F.cross_entropy(self.model(X[rows]), Y[rows])

    def one_step(self, rows: Tensor) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(rows)).backward()
        self.update()
        self.scheduler.step()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def evaluate(self) -> None:
        self.evaluated.eval()
        with torch.no_grad():
            F.cross_entropy(self.evaluated(X), Y)

    def after(self) -> None: ...
    def end(self) -> None: ...


def broken(watch: Any) -> dict[str, Found]:
    codes = {found.code: found for found in watch.findings() if found.severity != "info"}
    return {
        code.removeprefix("law.program."): found for code, found in codes.items() if code.startswith("law.program.")
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_laws_hold_in_a_healthy_loop(dtype: torch.dtype) -> None:
    class Healthy(Loop):
        def after(self) -> None:
            if self.step == 4:
                self.best = copy.deepcopy(self.model.state_dict())
                torch.save(self.model.state_dict(), io.BytesIO())

        def end(self) -> None:
            self.model.load_state_dict(self.best)

    watch = Healthy(dtype).run()
    assert [found for found in watch.findings() if "program" in found.code] == []
    states = {law.name: law.state for law in diagnose(Case(watch.records, finished=True)).laws}
    of_family = {law.name: states[law.name] for law in LAWS if law.name.startswith("program.")}
    assert of_family.pop("program.rate_has_its_course") == "not applicable"  # the run is short
    assert set(of_family.values()) == {"held"}, of_family


def test_other_healthy_ways_are_quiet() -> None:
    class Scaled(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)

        def update(self) -> None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            super().update()

    class Accumulating(Loop):
        def one_step(self, rows: Tensor) -> None:
            for part in rows.chunk(2):
                (self.loss(part) / 2).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            for p in self.model.parameters():
                p.grad = None
            if self.step % 5 == 0:
                self.scheduler.step()

    class Teacher(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = copy.deepcopy(self.model)

        def loss(self, rows: Tensor) -> Tensor:
            self.teacher.eval()
            with torch.no_grad():
                target = self.teacher(X[rows])
            return F.mse_loss(self.model(X[rows]), target)

        def evaluate(self) -> None: ...

    class Averaged(Loop):
        def __init__(self) -> None:
            super().__init__()
            self.evaluated = copy.deepcopy(self.model)

        @torch.no_grad()
        def after(self) -> None:
            for mine, theirs in zip(self.evaluated.parameters(), self.model.parameters()):
                mine.lerp_(theirs, 0.1)

    for loop in (Scaled, Accumulating, Teacher, Averaged):
        assert broken(loop().run()) == {}, loop.__name__


def stepped_twice(self: Loop) -> None:
    self.optimizer.step()
    if self.step % 3 == 0:
        self.optimizer.step()


def clipped_late(self: Loop) -> None:
    self.optimizer.step()
    nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)


def dropped(self: Loop) -> None:
    self.optimizer.zero_grad(set_to_none=False)
    self.optimizer.step()


def unscaled_never(self: Loop) -> None:
    if self.step == 1:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    self.optimizer.step()


def never_updated(self: Loop) -> None:
    if not self.scaler.is_enabled():
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        self.scaler.scale(torch.ones(()))
    self.scaler.step(self.optimizer)
    self.scaler._per_optimizer_states.clear()


def of_another(self: Loop) -> None:
    self.optimizer.step()
    if self.step == 1:
        self.scheduler = StepLR(AdamW(self.model.parameters()), 10)


def overruled(self: Loop) -> None:
    self.optimizer.param_groups[0]["lr"] = 0.01
    self.optimizer.step()


def of_two_schedulers(self: Loop) -> None:
    if self.step == 1:
        self.scheduler = LambdaLR(self.optimizer, lambda n: 1 / (1 + n))
        self.other = LambdaLR(self.optimizer, lambda n: 0.5)  # type: ignore[attr-defined]
    self.optimizer.param_groups[0]["lr"] *= 0.9
    self.optimizer.step()


def stepped_again(self: Loop) -> None:
    self.optimizer.step()
    if self.step % 4 == 0:
        self.scheduler.step()


def each_twice(self: Loop) -> None:
    self.optimizer.step()
    self.scheduler.step()


@each_row(
    ("update", "law", "words"),
    [
        (stepped_twice, "calls_come_in_order", "without a backward pass"),
        (clipped_late, "calls_come_in_order", "clipped where there are none"),
        (dropped, "calls_come_in_order", "dropped before"),
        (unscaled_never, "objects_belong_together", "loss scale still in"),
        (never_updated, "objects_belong_together", "never updated"),
        (of_another, "objects_belong_together", "made for never"),
        (overruled, "schedule_is_followed", "another learning rate"),
        (of_two_schedulers, "schedule_is_followed", "another learning rate"),
        (stepped_again, "schedule_is_followed", "once more"),
        (each_twice, "schedule_is_followed", "twice in a row"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_an_update_made_otherwise_is_found(update: Callable[[Loop], None], law: str, words: str) -> None:
    loop = type("Ill", (Loop,), {"update": update})()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = every_break(loop.run(steps=16))
    assert words in found[law].found.symptom, found
    if law == "calls_come_in_order":
        assert "test_program.py" in str(found[law].found.where.source)


def every_break(watch: Any) -> dict[str, Finding]:
    """What the laws say, also where a name takes it in."""
    results = [
        each for law in LAWS for each in law.judge(Case(watch.records, finished=True)) if isinstance(each, Finding)
    ]
    return {each.found.code.removeprefix("law.program."): each for each in results}


def kept(self: Loop) -> None:
    if self.step == 4:
        self.best = self.model.state_dict()  # type: ignore[attr-defined]


def loaded(self: Loop) -> None:
    self.model.load_state_dict(self.best)  # type: ignore[attr-defined]


def saved(self: Loop) -> None:
    torch.save({"model": self.best}, io.BytesIO())  # type: ignore[attr-defined]


@each_row("end", [loaded, saved, lambda self: None], ids=lambda value: value.__name__)
def test_a_state_that_is_kept_by_reference_is_found(end: Callable[[Loop], None]) -> None:
    watch = type("Ill", (Loop,), {"after": kept, "end": end})().run(steps=26)
    found = broken(watch)["kept_states_are_copies"]
    assert found.since_step == 4
    assert "test_program.py" in str(found.where.source)


def a_part(self: Loop) -> None:
    self.model[2].eval() if self.step > 4 else None


def one_step_in_eval(self: Loop, rows: Tensor) -> None:
    a_part(self)
    Loop.one_step(self, rows)


def test_a_part_that_stays_in_eval_mode_is_found() -> None:
    found = broken(type("Ill", (Loop,), {"one_step": one_step_in_eval})().run())["modes_come_back"]
    assert (found.where.module, found.since_step) == ("2", 5)
    assert "test_program.py" in str(found.where.source)


def test_evaluations_in_two_modes_are_found() -> None:
    class Ill(Loop):
        def evaluate(self) -> None:
            self.model.train(self.step > 8)
            with torch.no_grad():
                F.cross_entropy(self.model(X), Y)

    assert "in train mode before step 13" in broken(Ill().run(steps=20))["modes_come_back"].symptom


def test_the_evaluation_of_a_copy_that_stands_is_found() -> None:
    loop = Loop()
    loop.evaluated = copy.deepcopy(loop.model)
    assert "weights never change" in broken(loop.run())["objects_belong_together"].symptom


def misspelt(set_it: Callable[[Loop], None]) -> list[str]:
    loop = Loop()
    set_it(loop)
    found = broken(loop.run(steps=2)).get("names_are_read")
    return [] if found is None else [str(each.seen) for each in found.evidence]


@each_row(
    ("set_it", "name"),
    [
        (lambda loop: setattr(loop.model, "requires_grad", False), "requires_grad"),
        (lambda loop: setattr(loop.model[0].weight, "require_grad", False), "require_grad"),
        (lambda loop: setattr(loop.optimizer, "lr", 1e-4), "lr"),
        (lambda loop: loop.optimizer.param_groups[0].update(learning_rate=1e-4), "learning_rate"),
        (lambda loop: setattr(loop.model[2], "rate", 0.0), "rate"),
        (lambda loop: setattr(loop.model, "trainig", False), "trainig"),
        (lambda loop: setattr(loop.model, "name", "net"), None),
        (lambda loop: loop.optimizer.param_groups[0].update(lr_scale=0.5), None),
        (lambda loop: setattr(loop.model[0].weight, "no_decay", True), None),
    ],
    ids=lambda value: str(value),
)
def test_a_name_that_nothing_reads_is_found_where_it_is_nearly_known(set_it: Callable[[Loop], None], name: Any) -> None:
    assert misspelt(set_it) == ([] if name is None else [name])


@each_row(
    ("name", "known"),
    [("momentun", "momentum"), ("momnetum", "momentum"), ("weightDecay", "weight_decay"), ("eps", None), ("lrs", None)],
)
def test_a_name_is_nearly_another_by_one_edit(name: str, known: str | None) -> None:
    assert nearly(name, ["momentum", "weight_decay", "lr"]) == known


def test_a_loop_without_a_round_is_found() -> None:
    assert set(broken(Loop().run(0))) == {"steps_are_made"}
    loop = Loop()
    loop.one_step = lambda rows: loop.loss(rows).backward()  # type: ignore[method-assign]
    loop.update = lambda: None  # type: ignore[method-assign]
    assert "steps_are_made" not in broken(loop.run(2))
    with pytest.raises(ZeroDivisionError), tw.watch(loop.model, loop.optimizer, out=None, quiet=True) as watch:
        raise ZeroDivisionError
    assert "steps_are_made" not in broken(watch)


def of_constants(*layers: nn.Module, **options: Any) -> Loop:
    loop = Loop()
    loop.model = nn.Sequential(nn.Linear(6, 8), *layers, nn.Linear(8, 3))
    kind = AdamW if "betas" in options else SGD
    loop.optimizer = kind(loop.model.parameters(), lr=0.01, **options)
    loop.scheduler = CosineAnnealingLR(loop.optimizer, 40)
    return loop


@each_row(
    ("loop", "odd"),
    [
        (lambda: of_constants(nn.LeakyReLU(0.3), betas=(0.0, 0.9)), None),
        (lambda: of_constants(nn.BatchNorm1d(8, momentum=None), nn.PReLU(), momentum=0.99), None),
        (lambda: of_constants(betas=(0.9, 0.5)), "betas[0] of AdamW"),
        (lambda: of_constants(betas=(0.98, 0.9)), "betas[0] of AdamW"),
        (lambda: of_constants(betas=(0.5, 0.099)), "of AdamW"),
        (lambda: of_constants(nn.LeakyReLU(20.0)), "negative_slope of LeakyReLU"),
        (lambda: of_constants(nn.LayerNorm(8, eps=1.0)), "eps of LayerNorm"),
        (lambda: of_constants(nn.BatchNorm1d(8, momentum=1.0)), "momentum of BatchNorm1d"),
    ],
)
def test_constants_lie_where_they_are_of_use(loop: Callable[[], Loop], odd: str | None) -> None:
    found = broken(loop().run(3)).get("constants_are_usual")
    assert found is None if odd is None else found is not None and odd in found.symptom


def test_a_warning_is_kept_with_its_line_and_what_it_means() -> None:
    class Ill(Loop):
        def after(self) -> None:
            if self.step == 3:
                warnings.warn("Using a target size (8) that is different to the input size (8, 1).", stacklevel=1)

    class Odd(Loop):
        def after(self) -> None:
            warnings.warn("this function will be removed", stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *args: None
        found = broken(Ill().run())["warnings_are_heeded"]
        assert (found.step, found.where.source) == (4, found.where.source) and "test_program.py" in str(
            found.where.source
        )
        assert broken(Odd().run()) == {}


@each_row(
    ("rule", "good"),
    [(rule, good) for rule in RULES for good in ("zfbs", "lzfbfbcs", "bcs", "afbucs", "zfbbs", "alzfbucs")],
    ids=lambda value: getattr(value, "call", value),
)
def test_no_rule_is_against_a_usual_word(rule: Any, good: str) -> None:
    assert not rule.wrong.search(good), spelled(good)


def words(*letters: str) -> list[Finding]:
    """What the law says of steps with these calls."""
    kinds = {"z": ("zero_grad", 0), "f": ("forward", (0, True, True)), "b": ("backward", {"carried": True}),
             "c": ("clip", None), "s": ("step", {"optimizer": 0}), "l": ("schedule", "StepLR"),
             "Z": ("zero_grad", 1), "S": ("step", {"optimizer": 1})}  # fmt: skip
    steps = [
        Watched(time_s=0.0, step=n + 1, loss=1.0, grad_norm=1.0, lr=0.1, events=[kinds[each] for each in word])
        for n, word in enumerate(letters)
    ]
    [law] = [law for law in LAWS if law.name == "program.calls_come_in_order"]
    return [each for each in law.judge(Case(steps)) if isinstance(each, Finding)]


@each_row(
    ("letters", "since"),
    [
        (("zfbs",) * 6, None),
        (("zfbs", "s") * 3, 2),
        (("zfbs", "fbs", "zfbs", "fbs", "zfbs"), 2),
        (("fbs",) * 6, None),
        (("zfbs", "s", "zfbs", "zfbs", "zfbs"), None),
        (("s",) * 6, None),
        (("zfbs", "zfbls", "zfbls", "zfbls"), 2),
        (("zfbsZfbS",) * 4, None),
        (("zZfbszZfbS",) * 4, None),
        (("zZfbfbsS",) * 4, None),
        (("zfbszfbszfbsZfbS",) * 4, None),
        (("zfbsZfbzfbsZfbzfbsZfbS",) * 4, 1),
        (("zZfbzZfbsS",) * 4, 1),
        (("zfbsZfbS", "zfbsZfbZfbS", "zfbsZfbZzfbsZfbS", "zfbsZfbzfbsZfbS"), 3),
    ],
    ids=str,
)
def test_the_order_of_calls_is_judged_by_words(letters: tuple[str, ...], since: int | None) -> None:
    found = words(*letters)
    assert [each.found.since_step for each in found] == ([] if since is None else [since])


@each_row(
    ("rate", "state"),
    [
        (lambda step: 1.0, "not applicable"),
        (lambda step: min(1.0, (step + 1) / 10) * (1 - step / 60), "held"),
        (lambda step: 0.1 ** (step // 20), "held"),
        (lambda step: 1.0 if step % 20 < 10 else 1e-4, "held"),
        (lambda step: 0.3 ** (step // 4), "broken"),
        (lambda step: 1.0 if step < 20 else 0.0, "broken"),
        (lambda step: (step + 1) / 60, "broken"),
        (lambda step: 1.03**step, "broken"),
    ],
)
def test_the_course_of_the_rate(rate: Callable[[int], float], state: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=None, quiet=True, laws="cheap") as watch:
        for step in range(60):
            optimizer.param_groups[0]["lr"] = 0.1 * rate(step)
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()
    laws = diagnose(Case(watch.records, finished=True)).laws
    assert next(each.state for each in laws if each.name == "program.rate_has_its_course") == state
