"""Zoo, group L: faults of the labels and of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from zoo.data import one_of_batch
from zoo.host import TinyGPT, Watch, fault, host, loader, mlp, next_token_loss, sequences, table, train


@fault("L01", "loss.softmax_before_cross_entropy", delay="S")
def softmax_before_cross_entropy(watch: Watch, seed: int) -> None:
    """The model ends in a softmax, and cross_entropy applies another."""
    torch.manual_seed(seed)
    batches = loader(*table(seed), seed)
    model = nn.Sequential(mlp(), nn.Softmax(1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    train(watch, model, optimizer, batches, epochs=7)


@fault("L03", "loss.nll_without_log_softmax", delay="S")
def likelihood_of_probabilities(watch: Watch, seed: int) -> None:
    """``nll_loss`` is given probabilities instead of log-probabilities."""
    model, optimizer, batches = host(seed, torch.optim.AdamW, lr=1e-3)

    def loss_of(x: Tensor, t: Tensor) -> Tensor:
        z = model(x)
        return F.nll_loss(z.softmax(1), t)

    train(watch, model, optimizer, batches, loss_of, epochs=4)


@fault("L04", "precision.log_of_zero", delay="N")
def log_of_softmax(watch: Watch, seed: int) -> Mapping[str, Any]:
    """Large logits: some probabilities underflow to 0. Where the one-hot target is 0 as well, 0 * log(0) is NaN."""
    torch.manual_seed(seed)
    batches = loader(*table(seed), seed)
    model = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def loss_of(x: Tensor, t: Tensor) -> Tensor:
        p = (60 * model(x)).softmax(1)
        one_hot = F.one_hot(t, 10).float()
        return -(one_hot * torch.log(p)).sum(1).mean()

    train(watch, model, optimizer, batches, loss_of, epochs=2)
    return {"op": "log", "module": None, "dtype": "float32"}


@fault("L05", "loss.no_valid_target", delay="N", active=5)
def micro_batch_without_a_label(watch: Watch, seed: int) -> Mapping[str, Any]:
    """All targets of one micro-batch are -100, which is ignored: its gradient is 0, its loss NaN.

    All other samples have labels, so that ``gradient.accumulation_token_weighting`` is not a second fault.
    """
    torch.manual_seed(seed)
    x, y = table(seed)
    micro_batch = seed % 4
    unlabelled = [ids for ids, _, _ in loader(x, y, seed, batch=8)][4 * 4 + micro_batch]
    y[unlabelled] = -100
    batches = loader(x, y, seed, batch=8)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watch(model, optimizer, loader=batches):
        for i, (_, x, t) in enumerate(batches):
            loss = F.cross_entropy(model(x), t)
            (loss / 4).backward()
            if (i + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
    found = {"sample_ids": sorted(unlabelled.tolist()), "micro_batch": micro_batch}
    return {**found, "op": "cross_entropy", "module": None, "dtype": "float32"}


def prices(seed: int) -> tuple[Tensor, Tensor]:
    """A linear regression with noise: x (1024, 20), y (1024,)."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(1024, 20, generator=g)
    weight = torch.randn(20, generator=g)
    return x, x @ weight / 20**0.5 + 0.1 * torch.randn(1024, generator=g)


@fault("L06", "loss.broadcast_target", delay="S")
def column_minus_row(watch: Watch, seed: int) -> None:
    """(B, 1) - (B,) broadcasts to (B, B): each prediction is compared with all targets of the batch."""
    torch.manual_seed(seed)
    batches = loader(*prices(seed), seed)
    model = mlp(classes=1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train(watch, model, optimizer, batches, lambda x, t: ((model(x) - t) ** 2).mean(), epochs=6)


@fault("L07", "loss.wrong_sign", delay="D")
def uphill(watch: Watch, seed: int) -> None:
    model, optimizer, batches = host(seed, torch.optim.AdamW, lr=1e-3)
    with watch(model, optimizer, loader=batches):
        for _ in range(4):
            for _, x, t in batches:
                loss = F.cross_entropy(model(x), t)
                optimizer.zero_grad()
                (-loss).backward()
                optimizer.step()


@fault("L10", "loss.no_shift", delay="S")
def targets_not_shifted(watch: Watch, seed: int) -> None:
    """The target at each position is its own input token, not the next one."""
    torch.manual_seed(seed)
    ids = sequences(seed)
    batches = loader(ids, ids, seed, batch=32)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def loss_of(x: Tensor, labels: Tensor) -> Tensor:
        logits = model(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    train(watch, model, optimizer, batches, loss_of, epochs=4)


@fault("L11", "model.future_leak", delay="S")
def attention_without_a_mask(watch: Watch, seed: int) -> None:
    """A language model without a causal mask: attention reads the token to be predicted."""
    torch.manual_seed(seed)
    ids = torch.randint(1, 33, (1024, 16))
    batches = loader(ids, ids, seed)
    model = TinyGPT(causal=False)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    train(watch, model, optimizer, batches, lambda x, _: next_token_loss(model(x), x), epochs=6)


def dialogues(seed: int, n: int = 512) -> Tensor:
    """Two turns of 3 to 7 tokens, each followed by 0 as its end, then padded with 0: shape (n, 16)."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.zeros(n, 16, dtype=torch.int64)
    for row, ids in zip(rows, sequences(seed, n)):
        first, second = torch.randint(3, 8, (2,), generator=g).tolist()
        row[:first], row[first + 1 : first + 1 + second] = ids[:first], ids[first : first + second]
    return rows


@fault("L12", "loss.eos_ignored", delay="S")
def end_of_turn_taken_for_padding(watch: Watch, seed: int) -> None:
    """The end of a turn and the padding are the same token, which the loss ignores: the model never learns to stop."""
    torch.manual_seed(seed)
    pad = 0
    ids = dialogues(seed)
    labels = ids.clone()
    labels[labels == pad] = -100
    batches = loader(ids, labels, seed, batch=32)
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def loss_of(x: Tensor, t: Tensor) -> Tensor:
        logits = model(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), t[:, 1:].flatten())

    train(watch, model, optimizer, batches, loss_of, epochs=3)


@fault("L13", "data.label_out_of_range", delay="S")
def labels_counted_from_one(watch: Watch, seed: int) -> None:
    """Classes 1 to 10 for 10 logits: IndexError on the CPU, a device-side assert on CUDA."""
    torch.manual_seed(seed)
    x, y = table(seed)
    batches = loader(x, y + 1, seed)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    train(watch, model, optimizer, batches, epochs=1)


@fault("L15", "loss.detached_from_model", delay="S")
def loss_made_anew(watch: Watch, seed: int) -> None:
    """The loss is a new tensor made from its value: backward reaches no parameter."""
    model, optimizer, batches = host(seed, torch.optim.AdamW, lr=1e-3)
    train(
        watch,
        model,
        optimizer,
        batches,
        lambda x, t: torch.tensor(F.cross_entropy(model(x), t).item(), requires_grad=True),
        epochs=2,
    )


@fault("L16", "loss.smoothing_over_masked_class", delay="N")
def smoothing_over_a_forbidden_class(watch: Watch, seed: int) -> Mapping[str, Any]:
    """An impossible class has the logit -inf, and label smoothing a target above 0 for it: the loss is infinite."""
    torch.manual_seed(seed)
    x, y = table(seed)
    forbidden = torch.arange(10) == 9 - seed % 10
    x, y = x[~forbidden[y]], y[~forbidden[y]]
    batches = loader(x, y, seed)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def loss_of(x: Tensor, t: Tensor) -> Tensor:
        z = model(x).masked_fill(forbidden, -torch.inf)
        return F.cross_entropy(z, t, label_smoothing=0.1)

    train(watch, model, optimizer, batches, loss_of, epochs=2)
    return {"op": "cross_entropy", "module": None, "dtype": "float32"}


class TwoHeads(nn.Module):
    """Classifies x and reconstructs it, both from the same hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 12), nn.ReLU())
        self.classifier, self.decoder = nn.Linear(12, 10), nn.Linear(12, 20)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.classifier(h), self.decoder(h)


@fault("L17", "loss.term_dominates", delay="B")
def auxiliary_term_dominates(watch: Watch, seed: int) -> None:
    """The reconstruction loss has weight 1e4: after clipping, next to nothing of the classifier's gradient is left."""
    torch.manual_seed(seed)
    batches = loader(*table(seed), seed)
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with watch(model, optimizer, loader=batches):
        for _ in range(6):
            for _, x, t in batches:
                logits, rebuilt = model(x)
                loss = F.cross_entropy(logits, t) + 1e4 * F.mse_loss(rebuilt, x)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()


@fault("L20", "loss.ctc_infeasible", delay="N", active=4)
def transcript_longer_than_its_audio(watch: Watch, seed: int) -> Mapping[str, Any]:
    """One utterance was cut to three frames; its transcript of six letters was not."""
    torch.manual_seed(seed)
    letters = torch.randint(1, 12, (512, 6))
    frames = F.one_hot(letters, 12).repeat_interleave(4, 1) + 0.3 * torch.randn(512, 24, 12)
    lengths, letters_used = torch.randint(16, 25, (512,)), torch.randint(3, 7, (512,))
    row = one_of_batch(4, frames, letters, seed)
    lengths[row], letters_used[row] = 3, 6
    data = TensorDataset(torch.arange(512), frames, letters, lengths, letters_used)
    batches = DataLoader(data, batch_size=64, shuffle=True, generator=torch.Generator().manual_seed(seed))
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 12), nn.LogSoftmax(-1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with watch(model, optimizer, loader=batches):
        for _ in range(3):
            for _, x, t, x_lengths, t_lengths in batches:
                loss = F.ctc_loss(model(x).transpose(0, 1), t, x_lengths, t_lengths)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return {"sample_ids": [row], "op": "ctc_loss", "module": None, "dtype": "float32"}


class Experts(nn.Module):
    """Top-1 of four experts. Returns (output, "router_logits"), the latter really probabilities: the fault."""

    def __init__(self, d: int = 32) -> None:
        super().__init__()
        self.router = nn.Linear(d, 4)
        self.experts = nn.ModuleList([nn.Linear(d, d) for _ in range(4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        router_logits = self.router(x).softmax(-1)
        gate, chosen = router_logits.max(-1)
        answers = torch.stack([expert(x) for expert in self.experts], 1)
        return gate[:, None] * answers[torch.arange(len(x)), chosen], router_logits


class MixtureOfExperts(nn.Module):
    """``Experts`` between two linear layers: ``x -> (logits, router_logits)``."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.moe, self.head = nn.Linear(20, 32), Experts(), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, router_logits = self.moe(F.relu(self.inlet(x)))
        return self.head(F.relu(h)), router_logits


def balance_loss(router_logits: Tensor) -> Tensor:
    """Load balancing loss of Switch Transformers (arXiv 2101.03961, eq. 4), without its coefficient."""
    p = router_logits.softmax(-1)
    load = F.one_hot(p.argmax(-1), p.shape[1]).float().mean(0)
    return p.shape[1] * (load * p.mean(0)).sum()


@fault("L21", "loss.softmax_applied_twice", delay="B")
def balance_of_a_softmaxed_router(watch: Watch, seed: int) -> None:
    """The balance loss applies softmax to probabilities: its gradient becomes weak."""
    torch.manual_seed(seed)
    batches = loader(*table(seed), seed)
    model = MixtureOfExperts()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def loss_of(x: Tensor, t: Tensor) -> Tensor:
        logits, router_logits = model(x)
        return F.cross_entropy(logits, t) + 0.1 * balance_loss(router_logits)

    train(watch, model, optimizer, batches, loss_of, epochs=6)
