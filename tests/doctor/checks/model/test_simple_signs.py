"""Signs that listeners see in the first steps of a loop: a faulty program is found, its repaired twin is quiet."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.doctor.checks.loops import CLASSES, WIDTH, alarms, found, mlp, watched

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


class Tokens(nn.Module):
    def __init__(self, padding_idx: int | None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 16, padding_idx=padding_idx), nn.Linear(16, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).mean(1))


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


def copies(*, redrawn: bool) -> nn.Module:
    first = nn.Linear(32, 32)
    others = [nn.Linear(32, 32) for _ in range(2)]
    for each in others if not redrawn else ():
        each.load_state_dict(first.state_dict())
    return Stacked([first, *others])


def as_ids(x: Tensor) -> Tensor:
    return (x * 3).long().clamp(-4, 4) + 4


def padded(x: Tensor) -> Tensor:
    ids = as_ids(x).clamp(min=1)
    lengths = torch.arange(len(ids)) % 5 + 4
    return torch.where(torch.arange(WIDTH) < lengths[:, None], ids, 0)


ONE = nn.Linear(32, 32)
PROGRAMS: list[tuple[str, Callable[[], nn.Module], Callable[[], nn.Module]]] = [
    ("model.layers_share_weights", lambda: Stacked([ONE] * 3), lambda: Heads()),
    ("model.layers_start_equal", lambda: copies(redrawn=False), lambda: copies(redrawn=True)),
    ("model.init_both_factors_zero", lambda: Adapted(both_zero=True), lambda: Adapted(both_zero=False)),
    ("model.output_same_for_all_samples", lambda: mlp(nn.GroupNorm(32, 32)), lambda: mlp(nn.GroupNorm(4, 32))),
    ("model.teacher_in_train_mode", lambda: Distiller(0.5, evaluates=False), lambda: Distiller(0.5, evaluates=True)),
    ("model.frozen_statistics_drift", lambda: Backbone(evaluates=False), lambda: Backbone(evaluates=True)),
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


def test_padding_idx_of_a_token() -> None:
    torch.manual_seed(0)
    assert "model.padding_idx_is_token" in alarms(watched(Tokens(4), inputs=as_ids))
    assert "model.padding_idx_is_token" not in alarms(watched(Tokens(0), inputs=padded))
    assert "model.padding_idx_is_token" not in alarms(watched(Tokens(None), inputs=as_ids))


def test_rows_without_a_gradient_that_decay() -> None:
    def run(weight_decay: float) -> list[str]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(48, 16), nn.Linear(16, CLASSES))
        table = model[0].weight
        optimizer = torch.optim.AdamW([table], lr=1e-2, weight_decay=weight_decay)

        def freeze_old_rows() -> None:
            assert table.grad is not None
            table.grad[:40] = 0

        ids = torch.randint(48, (128, WIDTH))
        return alarms(watched(model, inputs=lambda x: ids, before_update=freeze_old_rows, optimizer=optimizer))

    assert "optim.frozen_rows_decay" in run(0.1)
    assert "optim.frozen_rows_decay" not in run(0.0)
