"""After Lightning-AI/litgpt, ``pretrain.py``: Fabric, accumulation, validation on a few batches, saved and resumed."""

import math
import pprint
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

import lightning as L
import torch
import torch.nn as nn
from lightning.fabric.loggers import CSVLogger
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.aggregation import RunningMean

from zoo.public import Result
from zoo.public.data import text


@dataclass
class Config:
    name: str = "pico-llama"
    block_size: int = 32
    padded_vocab_size: int = 32
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 48
    intermediate_size: int = 128


@dataclass
class TrainArgs:
    save_interval: int = 70
    log_interval: int = 5
    global_batch_size: int = 24
    micro_batch_size: int = 12
    max_steps: int = 210
    max_norm: float = 1.0
    learning_rate: float = 4e-3
    min_lr: float = 4e-4
    lr_warmup_steps: int = 20

    @property
    def gradient_accumulation_iters(self):
        return self.global_batch_size // self.micro_batch_size


@dataclass
class EvalArgs:
    interval: int = 30
    max_iters: int = 5


class RMSNorm(nn.Module):
    def __init__(self, size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def apply_rope(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        d = config.n_embd
        self.norm_1, self.norm_2 = RMSNorm(d), RMSNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.fc_1 = nn.Linear(d, config.intermediate_size, bias=False)
        self.fc_2 = nn.Linear(d, config.intermediate_size, bias=False)
        self.mlp_proj = nn.Linear(config.intermediate_size, d, bias=False)

    def forward(self, x, cos, sin):
        B, T, C = x.size()
        q, k, v = self.qkv(self.norm_1(x)).view(B, T, 3, self.config.n_head, -1).permute(2, 0, 3, 1, 4)
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        h = self.norm_2(x)
        return x + self.mlp_proj(F.silu(self.fc_1(h)) * self.fc_2(h))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.max_seq_length = config.block_size
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=False)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": RMSNorm(config.n_embd),
            }
        )
        size = config.n_embd // config.n_head
        theta = 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(config.block_size).float(), theta).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, idx):
        T = idx.size(1)
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = block(x, self.cos[:T], self.sin[:T])
        return self.lm_head(self.transformer.ln_f(x))


def initialize_weights(model):
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.Linear)):
            std = math.sqrt(2.0 / 5 / model.config.n_embd)
            nn.init.normal_(module.weight, mean=0.0, std=std)
    for block in model.transformer.h:
        for proj in (block.proj, block.mlp_proj):
            nn.init.normal_(proj.weight, mean=0.0, std=1 / math.sqrt(model.config.n_embd) / model.config.n_layer)


def chunked_cross_entropy(logits, targets, ignore_index=-100):
    return F.cross_entropy(logits.reshape(-1, logits.size(-1)), targets.reshape(-1), ignore_index=ignore_index)


class CycleIterator:
    """Begins again when its iterable ends, and counts the epochs."""

    def __init__(self, iterable):
        self.iterable, self.epoch, self._iterator = iterable, 0, None

    def __iter__(self):
        return self

    def __next__(self):
        if self._iterator is None:
            self._iterator = iter(self.iterable)
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self.iterable)
            self.epoch += 1
            return next(self._iterator)


def get_dataloaders(fabric, train, block_size):
    data = text(1200)
    stoi = {c: i for i, c in enumerate(sorted(set(data)))}
    ids = torch.tensor([stoi[c] for c in data], dtype=torch.int32)
    rows = ids[: len(ids) // (block_size + 1) * (block_size + 1)].view(-1, block_size + 1)
    cut = int(0.9 * len(rows))
    loaders = [
        DataLoader(TensorDataset(rows[:cut]), batch_size=train.micro_batch_size, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(rows[cut:]), batch_size=train.micro_batch_size, drop_last=True),
    ]
    return fabric.setup_dataloaders(*loaders)


def get_lr(learning_rate, it, warmup_iters, max_iters, min_lr):
    if it < warmup_iters:
        return learning_rate * it / warmup_iters
    if it > max_iters:
        return min_lr
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def validate(fabric, model, val_dataloader, max_iters, verbose=True):
    fabric.barrier()
    if verbose:
        fabric.print("Validating ...")
    model.eval()
    losses = []
    for k, (batch,) in enumerate(val_dataloader):
        if k >= max_iters:
            break
        input_ids = batch[:, : model.max_seq_length].contiguous().long()
        targets = batch[:, 1 : model.max_seq_length + 1].contiguous().long()
        losses.append(chunked_cross_entropy(model(input_ids), targets))
    val_loss = torch.stack(losses).mean()
    model.train()
    fabric.barrier()
    return val_loss


def save_checkpoint(fabric, state, checkpoint_file):
    checkpoint_file.parent.mkdir(parents=True, exist_ok=True)
    fabric.print(f"Saving checkpoint to {str(checkpoint_file)!r}")
    fabric.save(checkpoint_file, state)


def fit(fabric, state, train_dataloader, val_dataloader, out_dir, train, eval, stop_after):
    model, optimizer = state["model"], state["optimizer"]
    validate(fabric, model, val_dataloader, max_iters=2, verbose=False)  # sanity check
    val_loss = "n/a"
    accumulation = train.gradient_accumulation_iters
    max_iters = train.max_steps * accumulation
    warmup_iters = train.lr_warmup_steps * accumulation
    log_iter_interval = train.log_interval * accumulation
    initial_iter = state["iter_num"]
    train_iterator = CycleIterator(train_dataloader)
    running_loss = RunningMean(window=accumulation, sync_on_compute=False).to(fabric.device)
    fabric.barrier()
    total_t0 = time.perf_counter()
    losses = []

    for (train_data,) in train_iterator:
        if state["iter_num"] >= max_iters or state["step_count"] >= stop_after:
            break
        lr = get_lr(optimizer.defaults["lr"], state["iter_num"], warmup_iters, max_iters, train.min_lr)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr

        state["iter_num"] += 1
        iter_t0 = time.perf_counter()
        input_ids = train_data[:, : model.max_seq_length].contiguous().long()
        targets = train_data[:, 1 : model.max_seq_length + 1].contiguous().long()

        is_accumulating = state["iter_num"] % accumulation != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            logits = model(input_ids)
            loss = chunked_cross_entropy(logits, targets)
            fabric.backward(loss / accumulation)
        running_loss.update(loss.detach())

        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=train.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            state["step_count"] += 1

        if state["iter_num"] % log_iter_interval == 0:
            loss = running_loss.compute().item()
            losses.append(loss)
            t1 = time.perf_counter()
            remaining = (t1 - total_t0) / (state["iter_num"] - initial_iter) * (max_iters - state["iter_num"])
            metrics = {
                "loss": loss,
                "iter": state["iter_num"],
                "step": state["step_count"],
                "epoch": train_iterator.epoch,
                "tokens": state["iter_num"] * train.micro_batch_size * model.max_seq_length,
                "learning_rate": lr,
            }
            if isinstance(val_loss, float):
                val_loss = f"{val_loss:.3f}"
            fabric.print(
                f"Epoch {metrics['epoch'] + 1} | iter {metrics['iter']} step {metrics['step']} |"
                f" loss train: {metrics['loss']:.3f}, val: {val_loss} |"
                f" iter time: {(t1 - iter_t0) * 1000:.2f} ms{' (step)' if not is_accumulating else ''}"
                f" remaining time: {timedelta(seconds=int(remaining))!s}"
            )
            fabric.log_dict(metrics, step=state["iter_num"] - 1)

        if not is_accumulating and state["step_count"] % eval.interval == 0:
            t0 = time.perf_counter()
            val_loss = validate(fabric, model, val_dataloader, max_iters=eval.max_iters).item()
            td = time.perf_counter() - t0
            fabric.print(f"iter {state['iter_num']}: val loss {val_loss:.4f}, val time: {td * 1000:.2f} ms")
            fabric.log_dict({"val_loss": val_loss, "val_ppl": math.exp(val_loss)}, step=state["iter_num"] - 1)
            fabric.barrier()

        if not is_accumulating and state["step_count"] % train.save_interval == 0:
            save_checkpoint(fabric, state, out_dir / f"step-{state['step_count']:08d}" / "lit_model.pth")
    return losses


def pretrain(watch, seed, out_dir, resume, stop_after):
    config, train, eval = Config(), TrainArgs(), EvalArgs()
    logger = CSVLogger(out_dir / "logs", name=f"pretrain-{config.name}", flush_logs_every_n_steps=1)
    fabric = L.Fabric(devices=1, accelerator="cpu", precision="32-true", loggers=[logger])
    fabric.launch()
    fabric.print(pprint.pformat({"train": asdict(train), "eval": asdict(eval)}))

    fabric.seed_everything(42 + seed, verbose=False)
    t0 = time.perf_counter()
    with fabric.init_module(empty_init=False):
        model = GPT(config)
    initialize_weights(model)
    fabric.print(f"Time to instantiate model: {time.perf_counter() - t0:.02f} seconds.")
    fabric.print(f"Total parameters: {sum(p.numel() for p in model.parameters()):,}")

    model = fabric.setup(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=train.learning_rate, weight_decay=0.1, betas=(0.9, 0.95))
    optimizer = fabric.setup_optimizers(optimizer)
    train_dataloader, val_dataloader = get_dataloaders(fabric, train, config.block_size)
    state = {"model": model, "optimizer": optimizer, "hparams": asdict(train), "iter_num": 0, "step_count": 0}
    if resume:
        path = max(out_dir.rglob("step-*/*.pth"), key=lambda p: int(p.parent.name.split("-")[1]))
        fabric.print(f"Resuming training from {path}")
        fabric.load(path, state)

    train_time = time.perf_counter()
    with watch(model, optimizer, loader=train_dataloader, accumulation=train.gradient_accumulation_iters):
        losses = fit(fabric, state, train_dataloader, val_dataloader, out_dir, train, eval, stop_after)
    val_loss = validate(fabric, model, val_dataloader, max_iters=20).item()
    fabric.print(f"Final evaluation | val loss: {val_loss:.3f} | val ppl: {math.exp(val_loss):.3f}")
    save_checkpoint(fabric, state, out_dir / "final" / "lit_model.pth")
    fabric.print(f"Training time: {time.perf_counter() - train_time:.2f}s")
    return state, losses, val_loss


def main(watch, seed, folder):
    _, losses, _ = pretrain(watch, seed, folder, resume=False, stop_after=140)
    state, more, val_loss = pretrain(watch, seed, folder, resume=True, stop_after=210)
    objects = {"model": state["model"], "optimizer": state["optimizer"]}
    return Result("val loss", val_loss, 1.4, losses + more, objects, higher_is_better=False)
