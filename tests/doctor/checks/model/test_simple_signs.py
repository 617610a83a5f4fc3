"""Signs that listeners see in the first steps of a loop: a faulty program is found, its repaired twin is quiet."""

from __future__ import annotations

import linecache
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trainwright as tw
from tests.doctor.checks.loops import CLASSES, WIDTH, alarms, found, mlp, watched
from trainwright.doctor.measure.tensors import is_reordered

pytestmark = pytest.mark.slow


class Stacked(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(WIDTH, 32), nn.ModuleList(blocks), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x).relu() if len({id(b) for b in self.blocks}) > 1 else block(x).relu()
        return self.head(x)


class Heads(nn.Module):
    """Heads that share one layer, each for features of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stems = nn.ModuleList([nn.Linear(WIDTH, 32) for _ in range(2)])
        self.heads = nn.ModuleList([nn.Linear(32, CLASSES)] * 2)

    def forward(self, x: Tensor) -> Tensor:
        return sum(head(stem(x).relu()) for stem, head in zip(self.stems, self.heads))


class Distiller(nn.Module):
    def __init__(self, dropout: float, *, evaluates: bool) -> None:
        super().__init__()
        self.teacher, self.student = mlp(nn.Dropout(dropout)).requires_grad_(False), mlp(nn.Dropout(0.1))
        if evaluates:
            self.teacher.eval()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x) + 0.0 * wanted


class Backbone(nn.Module):
    def __init__(self, *, evaluates: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU()).requires_grad_(False)
        self.head = nn.Linear(32, CLASSES)
        if evaluates:
            self.body.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Rounded(nn.Module):
    def __init__(self, *, straight_through: bool) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES)
        self.straight_through = straight_through

    def forward(self, x: Tensor) -> Tensor:
        z = 4 * self.encoder(x)
        code = z.round()
        return self.decoder(z + (code - z).detach() if self.straight_through else code)


class Adapted(nn.Module):
    def __init__(self, *, both_zero: bool) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, CLASSES).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Parameter(torch.zeros(2, WIDTH)), nn.Parameter(torch.zeros(CLASSES, 2))
        if not both_zero:
            nn.init.normal_(self.lora_A)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_A.t() @ self.lora_B.t()


class Reader(nn.Module):
    """Reads the columns one by one, in both directions."""

    def __init__(self, *, last_output: bool) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(1, 8, batch_first=True, bidirectional=True), nn.Linear(16, CLASSES)
        self.last_output = last_output

    def forward(self, x: Tensor) -> Tensor:
        outputs, states = self.rnn(x[..., None])
        return self.head(outputs[:, -1] if self.last_output else torch.cat([states[0], states[1]], dim=1))


class Turned(nn.Module):
    """A convolution over four features, which are the last axis of what it is given."""

    def __init__(self, *, reshapes: bool) -> None:
        super().__init__()
        self.stem, self.conv, self.head = nn.Linear(1, 4), nn.Conv1d(4, 8, 3), nn.Linear(8, CLASSES)
        self.reshapes = reshapes

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x[..., None])
        h = h.reshape(len(h), 4, -1) if self.reshapes else h.transpose(1, 2)
        return self.head(self.conv(h).relu().mean(2))


class Attends(nn.Module):
    """Attention whose key_padding_mask is what ``mask`` makes of where the padding is."""

    def __init__(self, mask: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mask, self.embedding = mask, nn.Embedding(9, 16)
        self.attention, self.head = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        seen, _ = self.attention(h, h, h, key_padding_mask=self.mask(ids == 0))
        return self.head((h + seen).mean(1))


class Numbered(nn.Module):
    """Adds positions, counted along an axis."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis, self.embedding, self.position = axis, nn.Embedding(9, 16), nn.Embedding(64, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[self.axis])
        positions = self.position(places[:, None] if self.axis == 0 else places)
        return self.head((self.embedding(ids) + positions).relu().mean(1))


def as_ids(x: Tensor) -> Tensor:
    return (x * 3).long().clamp(-4, 4) + 4


def padded(x: Tensor) -> Tensor:
    ids = as_ids(x).clamp(min=1)
    lengths = torch.arange(len(ids)) % 5 + 4
    return torch.where(torch.arange(WIDTH) < lengths[:, None], ids, 0)


ONE = nn.Linear(32, 32)
PROGRAMS: list[tuple[str, Callable[[], nn.Module], Callable[[], nn.Module]]] = [
    ("model.layers_share_weights", lambda: Stacked([ONE] * 3), lambda: Heads()),
    ("model.init_both_factors_zero", lambda: Adapted(both_zero=True), lambda: Adapted(both_zero=False)),
    ("model.output_same_for_all_samples", lambda: mlp(nn.GroupNorm(32, 32)), lambda: mlp(nn.GroupNorm(4, 32))),
    ("model.frozen_in_train_mode", lambda: Distiller(0.5, evaluates=False), lambda: Distiller(0.5, evaluates=True)),
    ("model.frozen_in_train_mode", lambda: Backbone(evaluates=False), lambda: Backbone(evaluates=True)),
    ("model.recurrence_unused", lambda: Reader(last_output=True), lambda: Reader(last_output=False)),
    ("model.view_reorders_axes", lambda: Turned(reshapes=True), lambda: Turned(reshapes=False)),
    ("gradient.zero_behind_rounding", lambda: Rounded(straight_through=False), lambda: Rounded(straight_through=True)),
]


@pytest.mark.parametrize(("code", "faulty", "healthy"), PROGRAMS, ids=[code for code, *_ in PROGRAMS])
def test_a_fault_is_first_and_its_twin_is_quiet(
    code: str, faulty: Callable[[], nn.Module], healthy: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    assert alarms(watched(faulty()))[:1] == [code]
    assert alarms(watched(healthy())) == []


def test_a_norm_over_one_value_is_named() -> None:
    torch.manual_seed(0)
    watch = watched(mlp(nn.GroupNorm(32, 32)))
    assert found(watch, "model.output_same_for_all_samples").where.module == "2"


@pytest.mark.parametrize(("mask", "found"), [(torch.logical_not, True), (torch.clone, False)])
def test_a_mask_that_is_inverted(mask: Callable[[Tensor], Tensor], found: bool) -> None:
    torch.manual_seed(0)
    assert ("model.attention_mask_inverted" in alarms(watched(Attends(mask), inputs=padded))) == found


class Recurrent(nn.Module):
    """An LSTM over the places of ids; ``merge`` makes of its last states what the classifier gets."""

    def __init__(self, *, batch_first: bool = True, merges_by_view: bool = False, softmax: int | None = None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 16), nn.Linear(12, CLASSES)
        self.rnn = nn.GRU(16, 6, batch_first=batch_first, bidirectional=True)
        self.merges_by_view, self.softmax = merges_by_view, softmax

    def forward(self, ids: Tensor) -> Tensor:
        outputs, states = self.rnn(self.embedding(ids))
        merged = states.view(len(ids), -1) if self.merges_by_view else outputs.mean(1)
        scores = self.head(merged)
        return scores if self.softmax is None else scores.log_softmax(self.softmax)


class Packed(nn.Module):
    """Sorts the rows by their lengths, as for packing, and restores their order or not."""

    def __init__(self, *, restores: bool) -> None:
        super().__init__()
        self.restores, self.embedding, self.head = restores, nn.Embedding(9, 16), nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        order = (ids != 0).sum(1).argsort(descending=True, stable=True)
        out: Tensor = self.head(self.embedding(ids[order]).mean(1))
        return out[order.argsort()] if self.restores else out


@pytest.mark.parametrize(
    ("code", "faulty", "healthy", "line"),
    [
        ("model.depends_on_batch_position", lambda: Packed(restores=False), lambda: Packed(restores=True), "[order]"),
        ("model.depends_on_batch_position", lambda: Numbered(0), lambda: Numbered(1), "+ positions"),
        ("model.mixes_samples", lambda: Recurrent(batch_first=False), lambda: Recurrent(), "self.rnn("),
        ("model.mixes_samples", lambda: Recurrent(merges_by_view=True), lambda: Recurrent(), "states.view"),
        ("model.mixes_samples", lambda: Recurrent(softmax=0), lambda: Recurrent(softmax=1), "log_softmax"),
    ],
)
def test_samples_of_a_loader(
    code: str, faulty: Callable[[], nn.Module], healthy: Callable[[], nn.Module], line: str
) -> None:
    for make, expected in ((faulty, True), (healthy, False)):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        ids, labels = torch.randint(9, (256, WIDTH)), torch.randint(CLASSES, (256,))
        loader = DataLoader(TensorDataset(ids, labels), batch_size=16, shuffle=True)
        with tw.watch(model, optimizer, out=None, quiet=True, checks=["model"]) as watch:
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        assert (code in alarms(watch)[:1]) == expected, alarms(watch)
        is_reordered = any("in another order" in each.symptom for each in watch.findings())
        assert is_reordered == (isinstance(model, Packed) and expected)
        source = next((each.where.source or "" for each in watch.findings() if each.code == code), "")
        assert not expected or line in linecache.getline(__file__, int(source.rpartition(":")[2]))


class TimeMajor(Recurrent):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.embedding(ids))[0].mean(0))


def test_a_loader_may_put_the_steps_first() -> None:
    torch.manual_seed(0)
    model = TimeMajor(batch_first=False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    rows = TensorDataset(torch.randint(9, (256, WIDTH)), torch.randint(CLASSES, (256,)))
    loader = DataLoader(rows, 16, collate_fn=lambda some: (torch.stack([x for x, _ in some], 1), [y for _, y in some]))
    with tw.watch(model, optimizer, out=None, quiet=True, checks=["model"]) as watch:
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), torch.stack(y)).backward()
            optimizer.step()
    assert alarms(watch) == []


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ((32, 1, 16, 16, 3), (32, 3, 16, 16), True),
        ((8, 20, 32), (8, 32, 20), True),
        ((20, 8, 32), (8, 20, 32), True),
        ((8, 20, 32), (8, 20, 4, 8), False),  # heads
        ((8, 20, 32), (8, 4, 20, 8), True),
        ((8, 20, 32), (32, 20, 8), True),
        ((8, 4, 20, 8), (8, 20, 32), True),
        ((8, 20, 4, 8), (8, 20, 32), False),
        ((2, 3, 16, 20), (2, 3, 4, 4, 4, 5), False),  # patches
        ((8, 4, 9, 10), (8, 4, 10, 9), False),  # the shift of relative attention
        ((8, 1, 32), (8, 32, 1), False),
        ((4, 8, 7, 8, 7, 32), (4, 56, 56, 32), False),  # windows
    ],
)
def test_views_in_another_order(old: tuple[int, ...], new: tuple[int, ...], found: bool) -> None:
    assert is_reordered(old, new) == found


class Encoder(nn.Module):
    """Attention over tokens with a mask that the loop makes; 0 pads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 16), nn.Linear(16, CLASSES)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.embedding(ids)
        last = torch.arange(len(ids)), mask.shape[1] - 1 - ids.flip(1).ne(0).long().argmax(1)
        seen, _ = self.attention(h[last][:, None], h, h, key_padding_mask=mask == 0)
        made: Tensor = self.head(seen[:, 0])
        return made


@pytest.mark.parametrize("is_left", [True, False])
@pytest.mark.parametrize("of_ones", [True, False])
def test_an_attention_mask_of_ones(of_ones: bool, is_left: bool) -> None:
    def loss(model: nn.Module, ids: Tensor, y: Tensor) -> Tensor:
        ids = ids.flip(1) if is_left else ids
        return F.cross_entropy(model(ids, torch.ones_like(ids) if of_ones else (ids != 0).long()), y)

    watch = watched(Encoder(), loss=loss, inputs=padded)
    found = [each for each in watch.findings() if each.code == "model.padding_changes_output"]
    assert [each.severity for each in found] == (["warning"] if of_ones else [])
    assert all("attention mask is 1" in (each.cause or "") for each in found)


@pytest.mark.parametrize("how", ["frozen", "trained", "random features"])
def test_a_new_head_that_is_frozen(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    if how != "random features":
        for layer in (model[0], model[2]):
            assert isinstance(layer, nn.Linear)
            nn.init.normal_(layer.weight, std=0.2)  # pretrained weights are not within the bounds of an initialisation
    for p in (*model[2].parameters(), *(model[4].parameters() if how != "trained" else ())):
        p.requires_grad_(False)
    assert ("model.new_head_frozen" in alarms(watched(model))) == (how == "frozen")


class WithMore(nn.Module):
    """A classifier with another layer, which ``use`` calls."""

    def __init__(self, more: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.more, self.head, self._use = nn.Linear(WIDTH, 32), more, nn.Linear(32, CLASSES), use
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self._use(self.more, self.stem(x).relu()))


def in_turn(more: nn.Module, x: Tensor) -> Tensor:
    """Uses the layer in every other call."""
    more.calls = getattr(more, "calls", 0) + 1  # type: ignore[assignment]
    return more(x) if more.calls % 2 == 0 else x


def beside(more: nn.Module, x: Tensor) -> Tensor:
    more(x)
    return x


@pytest.mark.parametrize(
    ("use", "is_unused"),
    [(lambda more, x: x, True), (beside, True), (lambda more, x: more(x), False), (in_turn, False)],
    ids=["not called", "output dropped", "used", "in turn"],
)
def test_a_layer_that_is_never_used(use: Callable[[nn.Module, Tensor], Tensor], is_unused: bool) -> None:
    watch = watched(WithMore(nn.Linear(32, 32), use))
    assert ("model.layer_unused" in alarms(watch)) == is_unused
    if is_unused:
        assert found(watch, "model.layer_unused").where.module == "more"


def test_one_of_several_experts_may_be_idle() -> None:
    experts = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
    assert "model.layer_unused" not in alarms(watched(WithMore(experts, lambda more, x: more[0](x))))  # type: ignore[index]


@pytest.mark.parametrize("training", [None, False, True])
def test_a_dropout_function_that_is_off(training: bool | None) -> None:
    def use(more: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(more(x), 0.5, more.training if training is None else training)

    assert ("loop.trains_in_eval_mode" in alarms(watched(WithMore(nn.Linear(32, 32), use)))) == (training is False)


@pytest.mark.parametrize("axis", [0, -1])
def test_attention_over_the_samples(axis: int) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.place, self.out = nn.Embedding(9, 32), nn.Embedding(WIDTH, 32), nn.Linear(32, CLASSES)

        def forward(self, ids: Tensor) -> Tensor:
            h = self.embedding(ids) + self.place.weight
            mixed: Tensor = self.out((h + 0.02 * (h @ h.mT).softmax(axis) @ h).mean(1))
            return mixed

    found = [each for each in watched(Attention(), inputs=as_ids).findings() if each.code == "model.mixes_samples"]
    assert [each.severity for each in found] == (["warning"] if axis == 0 else [])


@pytest.mark.parametrize(
    ("freeze", "is_found"),
    [
        (lambda m: setattr(m[0], "requires_grad", False), True),
        (lambda m: setattr(m[0].weight, "require_grad", False), True),
        (lambda m: setattr(m[0].weight, "requires_grad", False), False),
        (lambda m: setattr(m[0].requires_grad_(False), "requires_grad", False), False),
    ],
    ids=["a module", "misspelled", "a parameter", "both"],
)
def test_a_part_that_is_not_frozen(freeze: Callable[[nn.Module], object], is_found: bool) -> None:
    model = mlp()
    freeze(model)
    watch = watched(model)
    assert ("optim.freeze_without_effect" in alarms(watch)) == is_found
    if is_found:
        assert found(watch, "optim.freeze_without_effect").where.module == "0"


@pytest.mark.parametrize("how", ["not loaded", "loaded", "trained", "random features"])
def test_frozen_layers_that_were_not_loaded(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, CLASSES))
    for n in {"random features": (), "loaded": (0, 2, 3)}.get(how, (0,)):
        nn.init.normal_(model[n].weight, std=0.2)  # type: ignore[arg-type]
    for n in (0, 2, 3) if how != "trained" else (0,):
        model[n].requires_grad_(False)
    assert ("model.pretrained_weights_missing" in alarms(watched(model))) == (how == "not loaded")
