"""Models that were not used to develop the simulator: other widths, kernels, layers and families.

Each is a function that creates TracedObjects on a device. ``plan_accuracy.py --held-out`` measures them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainwright.engine.losses import cross_entropy, language_model
from trainwright.models.gpt import gpt
from trainwright.models.hf import hf_model
from trainwright.models.lora import add_lora
from trainwright.plan.trace.traced_step import TracedObjects

Make = Callable[[torch.device], TracedObjects]


def _trained(model: nn.Module, loss: Any, micro: Any) -> TracedObjects:
    return TracedObjects(
        model, loss, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4), micro
    )


def _ids(rows: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ids = torch.zeros(rows, length, dtype=torch.int64, device=device)
    return ids, ids.clone()


def _classes(rows: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, dtype=torch.int64, device=device)


class Pooled(nn.Module):
    """A network for images or signals (``body``), followed by a spatial mean and a linear head."""

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).flatten(2).mean(2))
        return out


def make_signals(
    device: torch.device, body: Callable[[], nn.Module], width: int, shape: tuple[int, ...]
) -> TracedObjects:
    return _trained(
        Pooled(body(), width), cross_entropy, (torch.zeros(shape, device=device), _classes(shape[0], device))
    )


def _stack(conv: Any, norm: Any, widths: tuple[int, ...], **how: Any) -> nn.Module:
    layers: list[nn.Module] = []
    for wide, wider in pairwise(widths):
        layers += [conv(wide, wider, **how), norm(wider), nn.ReLU()]
    return nn.Sequential(*layers)


def _groups(count: int) -> Callable[[int], nn.Module]:
    return lambda width: nn.GroupNorm(count, width)


def _plain(width: int) -> nn.Module:
    return nn.Identity()


def _separable() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 24, 3, stride=2, padding=1), nn.BatchNorm2d(24), nn.SiLU()]
    for stride in (1, 2, 1):
        layers += [nn.Conv2d(24, 24, 5, stride, 2, groups=24), nn.BatchNorm2d(24), nn.SiLU()]
        layers += [nn.Conv2d(24, 24, 1), nn.BatchNorm2d(24), nn.SiLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        block = partial(_stack, nn.Conv2d, _groups(4), kernel_size=3, padding=1)
        self.first, self.second = block((3, width, width)), block((width, 2 * width, 2 * width))
        self.third = block((2 * width, 4 * width, 4 * width))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * n * width, n * width, 2, stride=2) for n in (2, 1))
        self.join = nn.ModuleList([block((4 * width, 2 * width)), block((2 * width, width))])
        self.head = nn.Conv2d(width, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.first(x)
        two = self.second(F.max_pool2d(one, 2))
        three = self.third(F.max_pool2d(two, 2))
        two = self.join[0](torch.cat([self.up[0](three), two], 1))
        one = self.join[1](torch.cat([self.up[1](two), one], 1))
        out: Tensor = self.head(one)
        return out


def make_unet(device: torch.device, rows: int = 5, width: int = 20) -> TracedObjects:
    target = torch.zeros(rows, 48, 48, dtype=torch.int64, device=device)
    return _trained(UNet(width), nn.CrossEntropyLoss(), (torch.zeros(rows, 3, 48, 48, device=device), target))


class ViT(nn.Module):
    """A vision transformer with patches of 4 x 4 and torch's encoder layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.places = nn.Parameter(torch.zeros(1, 64, width))
        block = nn.TransformerEncoderLayer(width, 3, 3 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        out: Tensor = self.head(self.blocks(tokens).mean(1))
        return out


def make_vit(device: torch.device) -> TracedObjects:
    return _trained(ViT(96, 5), cross_entropy, (torch.zeros(13, 3, 32, 32, device=device), _classes(13, device)))


class Recurrent(nn.Module):
    """Embedding -> recurrent layer of class ``kind`` -> a tag for each position. ``first``: batch first."""

    def __init__(self, kind: type[nn.Module], width: int, first: bool, **how: Any) -> None:
        super().__init__()
        self.tokens, self.first = nn.Embedding(1000, width), first
        self.recurrent = kind(width, batch_first=first, **how)
        wide = how.get("proj_size") or how["hidden_size"]
        self.head = nn.Linear(wide * (2 if how.get("bidirectional") else 1), 50)

    def forward(self, ids_BT: Tensor) -> Tensor:
        given = self.tokens(ids_BT if self.first else ids_BT.T)
        out, _ = self.recurrent(given)
        tags: Tensor = self.head(out if self.first else out.transpose(0, 1))
        return tags


def make_recurrent(
    device: torch.device, kind: Any = nn.LSTM, rows: int = 11, length: int = 70, first: bool = True, **how: Any
) -> TracedObjects:
    shape = {"width": 96, "hidden_size": 160, **how}
    return _trained(Recurrent(kind, first=first, **shape), language_model, _ids(rows, length, device))


def make_gpt(device: torch.device, rows: int = 3, length: int = 96, lora: Any = None, **options: Any) -> TracedObjects:
    shape = {"vocab_size": 1111, "block_size": length, "layers": 4, "heads": 3, "d_model": 144, **options}
    model: nn.Module = gpt(**shape)
    if lora is not None:
        model = add_lora(model, **lora)
    return _trained(model, language_model, _ids(rows, length, device))


def make_hf(device: torch.device, architecture: str, rows: int = 6, length: int = 80, **shape: Any) -> TracedObjects:
    """Creates a model of transformers, with an attention mask that hides the last third of each sequence."""
    model = hf_model(architecture=architecture, vocab_size=2000, **shape)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        ids_BT, target_BT, mask_BT = batch
        more = {"decoder_input_ids": target_BT} if architecture.startswith("T5") else {}
        logits_BTV = model(input_ids=ids_BT, attention_mask=mask_BT, **more).logits
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), target_BT.flatten())

    mask_BT = (torch.arange(length, device=device) < 2 * length // 3).long().expand(rows, -1).contiguous()
    return _trained(model, loss, (*_ids(rows, length, device), mask_BT))


BERT: dict[str, Any] = {"hidden_size": 132, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 300}
T5: dict[str, Any] = {"d_model": 128, "d_kv": 32, "d_ff": 320, "num_layers": 3, "num_heads": 4}
C1, C2, C3 = nn.Conv1d, nn.Conv2d, nn.Conv3d
B1, B2, B3 = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d


def _signals(width: int, shape: tuple[int, ...], body: Callable[[], nn.Module]) -> Make:
    return partial(make_signals, body=body, width=width, shape=shape)


def _convs(conv: Any, norm: Any, widths: tuple[int, ...], rows: int, side: int, **how: Any) -> Make:
    dims = {C1: 1, nn.ConvTranspose1d: 1, C3: 3}.get(conv, 2)
    return _signals(widths[-1], (rows, widths[0], *(side,) * dims), partial(_stack, conv, norm, widths, **how))


CONVOLUTIONS: dict[str, Make] = {
    "conv1x1": _convs(C2, B2, (17, 40, 33, 64), 9, 28, kernel_size=1),
    "conv5x5_odd": _convs(C2, B2, (3, 19, 37, 45), 7, 33, kernel_size=5, padding=2),
    "conv7x7_stride2": _convs(C2, B2, (3, 48, 48), 33, 40, kernel_size=7, stride=2, padding=3),
    "conv3x3_stride2_no_bias": _convs(C2, B2, (16, 50, 70), 5, 40, kernel_size=3, stride=2, padding=1, bias=False),
    "conv3x3_wide_small": _convs(C2, B2, (64, 256, 256, 256), 3, 7, kernel_size=3, padding=1),
    "conv3x3_one_row": _convs(C2, _plain, (3, 32, 32, 32), 1, 64, kernel_size=3, padding=1),
    "conv_dilated": _convs(C2, B2, (12, 32, 32, 32), 6, 32, kernel_size=3, padding=2, dilation=2),
    "conv_groups": _convs(C2, _groups(4), (16, 32, 64, 64), 10, 24, kernel_size=3, padding=1, groups=4),
    "conv_valid_padding": _convs(C2, B2, (5, 30, 30, 30), 8, 36, kernel_size=5),
    "depthwise_separable": _signals(24, (15, 3, 64, 64), _separable),
    "conv1d": _convs(C1, B1, (6, 40, 72, 72), 12, 500, kernel_size=7, padding=3),
    "conv1d_stride": _convs(C1, B1, (6, 40, 72), 12, 800, kernel_size=5, stride=3),
    "conv3d": _convs(C3, B3, (2, 12, 24), 4, 16, kernel_size=3, padding=1),
    "transposed_stride2": _convs(nn.ConvTranspose2d, B2, (64, 40, 24), 6, 12, kernel_size=4, stride=2, padding=1),
    "transposed_1d": _convs(nn.ConvTranspose1d, B1, (64, 40, 24), 6, 90, kernel_size=3),
    "unet": make_unet,
    "unet_wide": partial(make_unet, rows=3, width=32),
}
SEQUENCES: dict[str, Make] = {
    "lstm_layers3": partial(make_recurrent, num_layers=3),
    "lstm_bidirectional": partial(make_recurrent, bidirectional=True),
    "lstm_bidirectional_layers2": partial(make_recurrent, bidirectional=True, num_layers=2, dropout=0.2),
    "lstm_time_first": partial(make_recurrent, first=False, rows=33, length=40),
    "lstm_no_bias_odd": partial(make_recurrent, bias=False, hidden_size=101, width=77),
    "lstm_projected": partial(make_recurrent, proj_size=48),
    "lstm_long": partial(make_recurrent, rows=3, length=301),
    "gru": partial(make_recurrent, kind=nn.GRU),
    "gru_bidirectional_layers2": partial(make_recurrent, kind=nn.GRU, num_layers=2, bidirectional=True),
    "rnn_tanh": partial(make_recurrent, kind=nn.RNN, num_layers=2),
}
TRANSFORMERS: dict[str, Make] = {
    "gpt_dropout_qk_norm": partial(make_gpt, dropout=0.15, qk_norm=True),
    "gpt_swiglu_rope": partial(make_gpt, rows=7, activation="swiglu", norm="rms", positions="rope", bias=False),
    "gpt_untied_relu2_ngram": partial(make_gpt, tied=False, activation="relu2", bigram=500, ngram=3),
    "gpt_softcap_odd": partial(make_gpt, rows=5, length=77, logit_softcap=15.0, heads=4, d_model=100),
    "gpt_lora_query": partial(make_gpt, rows=9, lora={"rank": 5, "targets": ["query", "value"]}),
    "gpt_lora_dropout": partial(make_gpt, rows=9, lora={"rank": 3, "targets": ["mlp.up"], "dropout": 0.1}),
    "vit": make_vit,
    "bert_masked": partial(make_hf, architecture="BertForMaskedLM", **BERT),
    "t5": partial(make_hf, architecture="T5ForConditionalGeneration", **T5),
}
FAMILIES = {"convolution": CONVOLUTIONS, "sequence": SEQUENCES, "transformer": TRANSFORMERS}
MODELS: dict[str, Make] = {name: make for family in FAMILIES.values() for name, make in family.items()}
