"""Pointing at the line: each fault at the line marked ``# HERE``, nothing in its healthy twin or in odd sources."""

from __future__ import annotations

import inspect
import textwrap

from tests.rows import each_row
from trainwright.doctor.source import CHECKS, point_at

MARK = "# HERE"

LOOP = """
model = Net()
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    model.train()
    for x, y in loader:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
"""
AMP = """
for x, y in loader:
    with torch.autocast("cuda"):
        loss = criterion(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(o)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(o)
    scaler.update()
    o.zero_grad()
"""
WINDOW = """
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = F.mse_loss(net(x), y) / A
        loss.backward()
        if (i + 1) % A == 0 or i + 1 == len(loader):
            optimizer.step()
            optimizer.zero_grad()
"""
MICRO = """
while step < steps:
    optimizer.zero_grad(set_to_none=True)
    for x, y in micro_batches(A):
        loss = F.mse_loss(net(x), y) / A
        loss.backward()
    clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    step += 1
"""
GAN = """
optG, optD = Adam(G.parameters()), Adam(D.parameters())
for real in loader:
    optD.zero_grad()
    fake = G(torch.randn(8, 4))
    d_loss = bce(D(real), one) + bce(D(fake.detach()), zero)
    d_loss.backward()
    optD.step()
    optG.zero_grad()
    g_loss = bce(D(fake), one)
    g_loss.backward()
    optG.step()
"""
METHOD = """
class Trainer:
    def fit(self):
        for epoch in range(self.epochs):
            self.model.train()
            for batch in self.loader:
                if batch is not None:
                    self.optimizer.zero_grad()
                    out = self.model(batch.x)
                    loss = self.criterion(out, batch.y)
                    if self.clip:
                        loss.backward()
                        clip_grad_norm_(self.model.parameters(), self.clip)
                        self.optimizer.step()
                        self.scheduler.step()
"""
LIGHTNING = """
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        z = self.net(x)
        loss = F.cross_entropy(z, y)
        self.log("loss", loss)
        return loss
"""
NETWORK = """
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.a(x).relu()
        h = F.dropout(h, 0.5, self.training)
        scores = h.softmax(-1) * h
        return self.b(scores)

model = Net()
for x, y in loader:
    opt.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    opt.step()
"""
VALIDATE = """
def validate(model, val_loader):
    model.eval()
    with torch.no_grad():
        for x, y in val_loader:
            total += F.cross_entropy(model(x), y)

def train(model, loader, opt):
    for epoch in range(9):
        model.train()
        for x, y in loader:
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
        validate(model, val_loader)
"""


def edit(source: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new, 1)
    return source


def with_line(source: str, after: str, line: str) -> str:
    """``line`` follows the line that has ``after``, as deep as that."""
    lines = source.splitlines()
    at = next(i for i, each in enumerate(lines) if after in each)
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    return "\n".join([*lines[: at + 1], indent + line, *lines[at + 1 :]])


def without(source: str, line: str) -> str:
    assert line in source, line
    return "\n".join(each for each in source.splitlines() if line not in each)


def here(source: str, line: str) -> str:
    """Marks the first line that has ``line``."""
    return edit(source, (line, f"{line}  {MARK}"))


SCHED = with_line(LOOP, "opt = ", "sched = torch.optim.lr_scheduler.StepLR(opt, 10)")
EMPTY = """
ps = [p for p in m.parameters()]
opt = SGD(ps, lr=0.1)
for x, y in loader:
    opt.zero_grad()
    m(x).sum().backward()
    clip_grad_norm_(ps, 1.0)
    opt.step()
"""
LOAD = """
def weights(m):
    nn.init.normal_(m.weight)

def freeze(m):
    m.requires_grad_(False)

m = Net()
m.load_state_dict(torch.load("x.pt"))
m.apply(freeze)
"""
SEEDED = """
g = torch.Generator().manual_seed(0)
for epoch in range(9):
    for x, y in DataLoader(data, generator=g):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()
"""
TORCHVISION = edit(LOOP, ("Net()", "nn.Sequential(\n    nn.Linear(4, 8),\n    nn.Linear(8, 3),\n)"))

CASES: list[tuple[str, str, str]] = [  # code, faulty, healthy
    ("opt.missing_zero_grad", here(without(LOOP, "zero_grad"), "loss.backward()"), LOOP),
    ("opt.missing_zero_grad", here(without(AMP, "zero_grad"), "scaler.scale(loss).backward()"), AMP),
    ("opt.missing_zero_grad", here(without(METHOD, "zero_grad"), "loss.backward()"), METHOD),
    ("opt.missing_zero_grad", here(without(GAN, "optD.zero_grad"), "d_loss.backward()"), GAN),
    ("opt.missing_zero_grad", here(without(WINDOW, "zero_grad"), "loss.backward()"), WINDOW),
    ("opt.missing_zero_grad", here(without(MICRO, "zero_grad"), "loss.backward()"), MICRO),
    (
        "opt.missing_zero_grad",
        here(with_line(without(LOOP, "opt.zero"), "model.train", "opt.zero_grad()"), "loss.backward()"),
        edit(LOOP, ("opt.zero_grad()", "for p in model.parameters():\n            p.grad = None")),
    ),
    (
        "opt.missing_zero_grad",
        here(without(GAN, "optG.zero_grad"), "g_loss.backward()"),
        edit(LOOP, ("opt.zero_grad()", "[o.zero_grad() for o in opts]")),
    ),
    (
        "opt.zero_grad_before_step",
        with_line(without(LOOP, "zero_grad"), "backward", f"opt.zero_grad()  {MARK}"),
        with_line(LOOP, "backward", "if torch.isnan(loss): opt.zero_grad(); continue"),
    ),
    ("opt.zero_grad_before_step", with_line(GAN, "g_loss.backward", f"optG.zero_grad()  {MARK}"), GAN),
    ("opt.zero_grad_before_step", with_line(MICRO, "clip_grad", f"net.zero_grad()  {MARK}"), MICRO),
    ("opt.step_never_called", here(without(LOOP, "opt.step"), "loss.backward()"), LOOP),
    ("opt.step_never_called", here(without(GAN, "optD.step"), "optD.zero_grad()"), GAN),
    ("opt.step_never_called", here(without(AMP, "scaler.step"), "scaler.scale(loss).backward()"), AMP),
    ("grad.clip_before_unscale", here(without(AMP, "unscale_"), "clip_grad_norm_(model.parameters(), 1.0)"), AMP),
    (
        "grad.clip_before_unscale",
        "from torch.nn.utils import clip_grad_norm_ as clip\n"
        + edit(without(AMP, "unscale_"), ("nn.utils.clip_grad_norm_(model.parameters(), 1.0)", f"clip(ps, 1)  {MARK}")),
        without(LOOP, "zero_grad"),
    ),
    ("grad.clip_no_effect", with_line(LOOP, "opt.step", f"clip_grad_norm_(model.parameters(), 1)  {MARK}"), METHOD),
    ("grad.clip_no_effect", with_line(LOOP, "zero_grad", f"clip_grad_norm_(model.parameters(), 1)  {MARK}"), MICRO),
    ("accum.not_normalised", here(edit(WINDOW, (" / A", "")), "loss.backward()"), WINDOW),
    ("accum.not_normalised", here(edit(MICRO, (" / A", "")), "loss.backward()"), MICRO),
    (
        "accum.not_normalised",
        here(edit(WINDOW, (" / A", " / len(y)")), "loss.backward()"),
        edit(WINDOW, (" / A", ""), ("loss.b", "loss /= A\n        loss.b")),
    ),
    (
        "accum.not_normalised",
        here(
            edit(WINDOW, (" / A", ""), ("if (i + 1) % A == 0 or", "ready = (i + 1) % A == 0\n        if ready or")),
            "loss.backward()",
        ),
        edit(WINDOW, (" / A", ""), ("loss.backward", "(loss / args.accumulate).backward")),
    ),
    ("accum.grads_discarded", with_line(WINDOW, "enumerate", f"    optimizer.zero_grad()  {MARK}"), WINDOW),
    ("accum.grads_discarded", with_line(without(MICRO, "zero"), "loss =", f"optimizer.zero_grad()  {MARK}"), MICRO),
    ("accum.leftover_window", edit(WINDOW, (" or i + 1 == len(loader):", f":  {MARK}")), WINDOW),
    (
        "accum.leftover_window",
        edit(WINDOW, (" or i + 1 == len(loader):", f":  {MARK}")),
        WINDOW + "    optimizer.step()\n",
    ),
    (
        "grad.graph_cut_at_loss",
        with_line(LOOP, "loss =", f"loss = torch.tensor(loss.item(), requires_grad=True)  {MARK}"),
        LOOP,
    ),
    ("grad.graph_cut_at_loss", here(edit(LOOP, ("model(x), y", "model(x).detach(), y")), "detach(), y)"), GAN),
    (
        "grad.graph_cut_at_loss",
        edit(METHOD, ("out = self.model(batch.x)", f"out = self.model(batch.x).data  {MARK}")),
        edit(LOOP, ("model(x), y", "model(x), teacher(x).detach()")),
    ),
    ("grad.graph_cut_at_loss", edit(LIGHTNING, ("return loss", f"return loss.detach()  {MARK}")), LIGHTNING),
    ("grad.graph_cut", with_line(NETWORK, "h = self.a", f"h = h.detach()  {MARK}"), NETWORK),
    (
        "grad.graph_cut",
        edit(
            LOOP,
            ("F.cross_entropy(model(x), y)", f"F.cross_entropy(head(model(x).detach()), y)  {MARK}"),
            ("model.tr", "head.tr"),
        ),
        GAN,
    ),
    ("loss.softmax_before_ce", edit(LOOP, ("model(x), y)", f"model(x).softmax(1), y)  {MARK}")), LOOP),
    (
        "loss.softmax_before_ce",
        edit(NETWORK, ("return self.b(scores)", f"return F.softmax(self.b(scores), -1)  {MARK}")),
        NETWORK,
    ),
    (
        "loss.softmax_before_ce",
        edit(TORCHVISION, ("    nn.Linear(8, 3),", f"    nn.Linear(8, 3),\n    nn.Softmax(1),  {MARK}")),
        TORCHVISION,
    ),
    ("loss.softmax_before_ce", with_line(LOOP, "Net()", f"model.add_module('sm', nn.Softmax(1))  {MARK}"), METHOD),
    (
        "loss.softmax_before_ce",
        edit(LIGHTNING, ("F.cross_entropy(z, y)", f"nn.CrossEntropyLoss()(torch.softmax(z, -1), y)  {MARK}")),
        edit(LIGHTNING, ("F.cross_entropy(z, y)", "F.nll_loss(z.softmax(-1).log(), y)")),
    ),
    (
        "loss.softmax_before_ce",
        "ce = nn.CrossEntropyLoss()\n"
        + edit(
            LOOP,
            ("loss = F.cross_entropy(model(x), y)", f"p = torch.softmax(model(x), 1)  {MARK}\n        loss = ce(p, y)"),
        ),
        edit(LOOP, ("model(x), y", "model(x), teacher(x).softmax(1)")),
    ),
    (
        "loss.nll_on_probs",
        edit(LOOP, ("F.cross_entropy(model(x), y)", f"F.nll_loss(model(x).softmax(1), y)  {MARK}")),
        LOOP,
    ),
    (
        "loss.nll_on_probs",
        edit(LOOP, ("F.cross_entropy(model(x), y)", f"nn.NLLLoss()(model(x).softmax(1), y)  {MARK}")),
        edit(LOOP, ("F.cross_entropy(model(x), y)", "F.nll_loss(model(x).log_softmax(1), y)")),
    ),
    ("loss.wrong_sign", edit(LOOP, ("loss.backward()", f"(-loss).backward()  {MARK}")), LOOP),
    ("loss.wrong_sign", edit(AMP, ("scale(loss).backward()", f"scale(-loss).backward()  {MARK}")), AMP),
    (
        "loss.wrong_sign",
        edit(LOOP, ("= F.cross_entropy(model(x), y)", f"= -F.cross_entropy(model(x), y)  {MARK}")),
        edit(LOOP, ("F.cross_entropy(model(x), y)", "-(model(x).log_softmax(1) * y).sum()")),
    ),
    ("loss.wrong_sign", edit(LIGHTNING, ("return loss", f"return {{'loss': -loss}}  {MARK}")), LIGHTNING),
    ("loss.wrong_sign", edit(LOOP, ("lr=0.1)", f"lr=0.1, maximize=True)  {MARK}")), GAN),
    (
        "mode.eval_during_training",
        without(LOOP, "train()") + f"\n    model.eval()  {MARK}\n    check(model)",
        LOOP + "    model.eval()",
    ),
    (
        "mode.eval_during_training",
        edit(LOOP, ("model.train()", f"model.eval()  {MARK}")),
        with_line(LOOP, "Net()", "model.eval()"),
    ),
    ("mode.eval_during_training", here(without(VALIDATE, "train()"), "model.eval()"), VALIDATE),
    (
        "mode.eval_during_training",
        edit(METHOD, ("model.train()", f"model.train(False)  {MARK}")),
        with_line(LOOP, "zero_grad", "teacher.eval()"),
    ),
    ("mode.train_during_eval", here(without(VALIDATE, "eval()"), "for x, y in val_loader:"), VALIDATE),
    (
        "mode.train_during_eval",
        LOOP + f"    with torch.no_grad():\n        acc = (model(xv).argmax(1) == yv).float().mean()  {MARK}\n",
        LOOP
        + "    model.eval()\n    with torch.no_grad():\n        acc = (model(xv).argmax(1) == yv).float().mean()\n",
    ),
    (
        "mode.functional_dropout",
        edit(NETWORK, ("F.dropout(h, 0.5, self.training)", f"F.dropout(h, 0.5)  {MARK}")),
        NETWORK,
    ),
    (
        "mode.functional_dropout",
        f"from torch.nn.functional import dropout\ndef f(x):\n    return dropout(x)  {MARK}",
        "def f(x): return self.dropout(x)",
    ),
    (
        "mode.functional_dropout",
        f"y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p)  {MARK}",
        "y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0)",
    ),
    ("sched.unit_mismatch", with_line(SCHED, "opt.step", f"sched.step()  {MARK}"), SCHED + "    sched.step()\n"),
    (
        "sched.unit_mismatch",
        here(METHOD, "self.scheduler.step()"),
        with_line(edit(SCHED, ("StepLR(opt, 10)", "OneCycleLR(opt, 1, 10)")), "opt.step", "sched.step()"),
    ),
    (
        "sched.unit_mismatch",
        with_line(WINDOW, "backward", f"lr_scheduler.step()  {MARK}"),
        WINDOW + "    lr_scheduler.step()",
    ),
    ("sched.never_stepped", here(SCHED, "StepLR(opt, 10)"), SCHED + "    sched.step()\n"),
    ("sched.never_stepped", here(SCHED, "StepLR(opt, 10)"), SCHED + "trainer.fit(model, sched)\n"),
    (
        "prec.autocast_stale_cache",
        f"with torch.autocast('cpu'):  {MARK}\n" + textwrap.indent(LOOP, "    "),
        AMP,
    ),
    (
        "prec.autocast_stale_cache",
        f"ctx = torch.amp.autocast('cpu')\nwith ctx:  {MARK}\n" + textwrap.indent(MICRO, "    "),
        edit(LOOP, ("loss = F", "with autocast():\n            for head in heads: loss = F")),
    ),
    (
        "mem.graph_retained_by_scalar",
        with_line(LOOP, "opt.step", f"total += loss  {MARK}"),
        with_line(LOOP, "opt.step", "total += loss.item()"),
    ),
    (
        "mem.graph_retained_by_scalar",
        with_line(LOOP, "opt.step", f"total = total + loss  {MARK}"),
        with_line(LOOP, "loss =", "loss += 0.1 * F.mse_loss(model(x), x)"),
    ),
    ("mem.graph_retained_by_scalar", with_line(LIGHTNING, "loss =", f"self.total += loss  {MARK}"), LIGHTNING),
    (
        "mem.graph_retained_by_scalar",
        with_line(LOOP, "opt.step", f"losses.append(loss)  {MARK}"),
        with_line(LOOP, "opt.step", "losses.append(float(loss))"),
    ),
    (
        "mem.outputs_accumulated",
        edit(
            LOOP,
            (
                "loss = F.cross_entropy(model(x), y)",
                f"z = model(x)\n        outs.append(z)  {MARK}\n        loss = F.cross_entropy(z, y)",
            ),
        ),
        edit(
            LOOP,
            (
                "loss = F.cross_entropy(model(x), y)",
                "z = model(x)\n        outs.append(z.detach().cpu())\n        loss = F.cross_entropy(z, y)",
            ),
        ),
    ),
    (
        "mem.outputs_accumulated",
        with_line(LIGHTNING, "z =", f"self.outs.append(z)  {MARK}"),
        edit(
            LOOP,
            (
                "loss = F.cross_entropy(model(x), y)",
                "outs = []\n        outs.append(model(x))\n        loss = F.cross_entropy(outs[0], y)",
            ),
        ),
    ),
    (
        "mem.model_copies",
        LOOP + f"    history.append(copy.deepcopy(model))  {MARK}",
        LOOP + "    best = copy.deepcopy(model)",
    ),
    (
        "mem.model_copies",
        LOOP + f"    history[epoch] = deepcopy(model.state_dict())  {MARK}",
        LOOP + "    history.append(epoch)",
    ),
    (
        "data.same_order_every_epoch",
        with_line(SEEDED, "for epoch", f"    g = torch.Generator().manual_seed(0)  {MARK}"),
        SEEDED,
    ),
    (
        "data.same_order_every_epoch",
        with_line(SEEDED, "for epoch", f"    torch.manual_seed(seed)  {MARK}"),
        with_line(SEEDED, "for epoch", "    g.manual_seed(seed + epoch)"),
    ),
    ("ckpt.reinitialised", edit(LOAD, ("m.apply(freeze)", f"m.apply(weights)  {MARK}")), LOAD),
    (
        "ckpt.reinitialised",
        edit(LOAD, ("m.apply(freeze)", f"m.apply(init_all)  {MARK}")),
        edit(LOAD, ("m = Net()", "m = Net()\nm.apply(weights)")),
    ),
    ("opt.stale_params", with_line(LOOP, "opt = ", f"model = copy.deepcopy(model)  {MARK}"), LOOP),
    (
        "opt.stale_params",
        with_line(LOOP, "opt = ", f"model.head = nn.Linear(8, 3)  {MARK}"),
        with_line(LOOP, "opt = ", "model = torch.compile(model)"),
    ),
    (
        "opt.stale_params",
        with_line(LOOP, "opt = ", f"model.load_state_dict(state, assign=True)  {MARK}"),
        with_line(LOOP, "opt = ", "model = model.to(device)"),
    ),
    ("grad.clip_empty_iterable", edit(EMPTY, ("[p for p in m.parameters()]", f"m.parameters()  {MARK}")), EMPTY),
]


def marked(source: str) -> int:
    lines = [number for number, line in enumerate(source.splitlines(), 1) if MARK in line]
    assert len(lines) == 1
    return lines[0]


def test_every_code_has_a_case() -> None:
    assert {code for code, _, _ in CASES} == set(CHECKS)


@each_row(("code", "faulty", "healthy"), CASES)
def test_points_at_the_fault_and_at_nothing_healthy(code: str, faulty: str, healthy: str) -> None:
    pointer = point_at(code, faulty)
    assert pointer is not None
    assert pointer.line == marked(faulty)
    assert pointer.text == faulty.splitlines()[pointer.line - 1].strip()
    assert point_at(code, healthy) is None


@each_row("code", CHECKS)
@each_row("source", [LOOP, AMP, MICRO, GAN, LIGHTNING, NETWORK, VALIDATE])
def test_no_code_finds_a_place_in_a_healthy_loop(code: str, source: str) -> None:
    assert point_at(code, source) is None


def wrapped(source: str, kind: str) -> str:
    body = textwrap.indent(source.strip("\n"), "    ")
    return {
        "function": f"def train(loader):\n{body}",
        "async": f"@app.command()\n@other\nasync def train(loader):\n{body.replace('for x', 'async for x')}",
        "method": "class T(Base):\n"
        + textwrap.indent(f"@torch.enable_grad()\ndef train(self, loader):\n{body}", "    "),
        "guards": f"if main:\n    try:\n{textwrap.indent(body, '    ')}\n    finally:\n        done()",
        "nested body": body,
        "with": f"with watch(model, opt) as w:\n{body}",
    }[kind]


@each_row("kind", ["function", "async", "method", "guards", "nested body", "with"])
@each_row("code", ["opt.missing_zero_grad", "opt.zero_grad_before_step", "loss.softmax_before_ce"])
def test_wherever_the_loop_stands(code: str, kind: str) -> None:
    faulty, healthy = next((faulty, healthy) for each, faulty, healthy in CASES if each == code)
    pointer = point_at(code, wrapped(faulty, kind), first_line=101)
    assert pointer is not None
    assert pointer.line == 100 + marked(wrapped(faulty, kind))
    assert point_at(code, wrapped(healthy, kind)) is None


def test_two_lines_that_fit_equally_are_no_answer() -> None:
    assert point_at("opt.missing_zero_grad", without(with_line(LOOP, "loss =", "aux.backward()"), "zero_grad")) is None
    assert point_at("loss.wrong_sign", edit(LOOP, ("loss.b", "loss = -loss\n        (-loss).b"))) is None


@each_row("code", [*CHECKS, "no.such_code"])
@each_row(
    "source",
    [
        "",
        "\n\n",
        "# nothing",
        "def f(:",
        "%matplotlib inline\nfor x in y: pass",
        "\0",
        "x",
        "lambda: loss.backward()",
        "        .step()",
        "def f(): return f()",
        "class A: forward = lambda self, x: x",
        "a, *b = c = d[0], e()()\n(x := y).z += w\n[a.b, c[1]] = f(*g, **h)",
        "match x:\n    case [a, b]: a.step()\n    case _: pass",
        "x = x\nx += x\nx.backward()\nx.step()\nx.zero_grad()",
        "@d\nasync def f(*, a, **k):\n    async with a as b, c:\n        await b.step()\n    return [i for i in k]",
        "try:\n    loss.backward()\nexcept* E as e:\n    raise\nelse:\n    opt.step(closure=f)",
        "backward()\nclip_grad_norm_()\nscaler.step()\nF.dropout()\ncross_entropy()\nm.append()\ng.manual_seed()\nx.div()",
        "x = " + "-" * 3000 + "1",
        "x = " + " + ".join(["y"] * 3000),
        "for i in x:\n" + "\n".join(f"    x{n} = x{n - 1} + x{n - 1}" for n in range(1, 60)) + "\n    x59.backward()",
        "s = '''\nnot indented\n'''\nr = '\\d'",
    ],
)
def test_odd_sources_are_no_trouble(code: str, source: str) -> None:
    pointer = point_at(code, source)
    assert pointer is None or source


def test_a_string_at_the_margin_of_an_indented_body() -> None:
    source = "        text = '''\nleft\n'''\n" + textwrap.indent(without(LOOP, "zero_grad"), "        ")
    pointer = point_at("opt.missing_zero_grad", source, first_line=10)
    assert pointer is not None
    assert source.splitlines()[pointer.line - 10].strip() == pointer.text == "loss.backward()"


def test_a_line_in_the_middle_of_a_chain() -> None:
    source = edit(
        LOOP,
        ("F.cross_entropy(model(x), y)", "(F.cross_entropy(model(x), y)\n            .mean()\n            .detach())"),
    )
    pointer = point_at("grad.graph_cut_at_loss", source)
    assert pointer is not None
    assert pointer.text == ".detach())"


def test_reading_runs_nothing_and_needs_no_torch() -> None:
    assert (
        point_at("opt.step_never_called", "raise SystemExit\nopt = 1 / 0\nfor x in y:\n    loss.backward()") is not None
    )
    import trainwright.doctor.source as module

    assert "import torch" not in inspect.getsource(module)
