"""After karpathy/nanoGPT: a character GPT on a memory-mapped file, trained from scratch, resumed, and sampled from."""

import math
import os
import pickle
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

from zoo.public import Result
from zoo.public.data import text


@dataclass
class GPTConfig:
    block_size: int = 32
    vocab_size: int = 64
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 48
    dropout: float = 0.0
    bias: bool = False


class LayerNorm(nn.Module):
    def __init__(self, ndim, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(ndim))
        self.bias = nn.Parameter(torch.zeros(ndim)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        d, bias = config.n_embd, config.bias
        self.config = config
        self.ln_1, self.ln_2 = LayerNorm(d, bias), LayerNorm(d, bias)
        self.c_attn = nn.Linear(d, 3 * d, bias=bias)
        self.attn_proj = nn.Linear(d, d, bias=bias)
        self.c_fc = nn.Linear(d, 4 * d, bias=bias)
        self.mlp_proj = nn.Linear(4 * d, d, bias=bias)
        self.dropout = nn.Dropout(config.dropout)

    def attend(self, x):
        B, T, C = x.size()
        split = [each.view(B, T, self.config.n_head, -1).transpose(1, 2) for each in self.c_attn(x).split(C, dim=2)]
        dropout_p = self.config.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(*split, dropout_p=dropout_p, is_causal=True)
        return self.dropout(self.attn_proj(y.transpose(1, 2).reshape(B, T, C)))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.dropout(self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)))))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": LayerNorm(config.n_embd, config.bias),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if p.dim() == 2:
                scale = math.sqrt(2 * config.n_layer) if name.endswith("_proj.weight") else 1.0
                nn.init.normal_(p, std=0.02 / scale)
        print(f"number of parameters: {sum(p.numel() for p in self.parameters()) / 1e6:.2f}M")

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None  # only the last position is needed to generate
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        params = [p for p in self.parameters() if p.requires_grad]
        decay, nodecay = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
        print(f"decayed tensors: {len(decay)}, non-decayed tensors: {len(nodecay)}")
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)

    def estimate_mfu(self, fwdbwd_per_iter, dt):
        flops_per_token = 6 * sum(p.numel() for p in self.parameters())
        return flops_per_token * self.config.block_size * fwdbwd_per_iter / dt / 312e12

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None):
        for _ in range(max_new_tokens):
            logits, _ = self(idx[:, -self.config.block_size :])
            logits = logits[:, -1, :] / temperature
            if top_k is not None:
                smallest = logits.topk(top_k).values[:, [-1]]
                logits[logits < smallest] = -float("inf")
            idx_next = torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)
            idx = torch.cat((idx, idx_next), dim=1)
        return idx


def prepare(data_dir):
    data = text(2000)
    chars = sorted(set(data))
    stoi = {ch: i for i, ch in enumerate(chars)}
    ids = np.array([stoi[c] for c in data], dtype=np.uint16)
    n = int(0.9 * len(ids))
    print(f"length of dataset in characters: {len(data):,}, vocab size: {len(chars)}")
    ids[:n].tofile(os.path.join(data_dir, "train.bin"))
    ids[n:].tofile(os.path.join(data_dir, "val.bin"))
    with open(os.path.join(data_dir, "meta.pkl"), "wb") as f:
        pickle.dump({"vocab_size": len(chars), "itos": chars, "stoi": stoi}, f)


def train(watch, seed, out_dir, init_from, max_iters):
    eval_interval, log_interval, eval_iters = 50, 10, 15
    gradient_accumulation_steps, batch_size, block_size = 2, 12, 32
    learning_rate, weight_decay, beta1, beta2, grad_clip = 3e-3, 1e-1, 0.9, 0.99, 1.0
    warmup_iters, lr_decay_iters, min_lr = 20, 240, 3e-4
    device_type, dtype = "cpu", "float32"
    config = {k: v for k, v in locals().items() if isinstance(v, (int, float, str))}

    torch.manual_seed(1337 + seed)
    ctx = nullcontext() if device_type == "cpu" else torch.autocast(device_type, getattr(torch, dtype))
    scaler = torch.amp.GradScaler(device_type, enabled=(dtype == "float16"))

    def get_batch(split):
        data = np.memmap(os.path.join(out_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
        ix = torch.randint(len(data) - block_size, (batch_size,))
        x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
        return x, y

    iter_num, best_val_loss = 0, 1e9
    if init_from == "resume":
        print(f"Resuming training from {out_dir}")
        checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location=device_type)
        model = GPT(GPTConfig(**checkpoint["model_args"]))
        model.load_state_dict(checkpoint["model"])
        iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
    else:
        print("Initializing a new model from scratch")
        with open(os.path.join(out_dir, "meta.pkl"), "rb") as f:
            model = GPT(GPTConfig(block_size=block_size, vocab_size=pickle.load(f)["vocab_size"]))
    model.to(device_type)
    optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2))
    if init_from == "resume":
        optimizer.load_state_dict(checkpoint["optimizer"])
        checkpoint = None

    @torch.no_grad()
    def estimate_loss():
        out = {}
        model.eval()
        for split in ["train", "val"]:
            losses = torch.zeros(eval_iters)
            for k in range(eval_iters):
                X, Y = get_batch(split)
                with ctx:
                    _, loss = model(X, Y)
                losses[k] = loss.item()
            out[split] = losses.mean()
        model.train()
        return out

    def get_lr(it):
        if it < warmup_iters:
            return learning_rate * (it + 1) / (warmup_iters + 1)
        if it > lr_decay_iters:
            return min_lr
        decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
        return min_lr + 0.5 * (1.0 + math.cos(math.pi * decay_ratio)) * (learning_rate - min_lr)

    history = []
    with watch(model, optimizer, scaler=scaler, accumulation=gradient_accumulation_steps):
        X, Y = get_batch("train")
        t0, local_iter_num, running_mfu = time.time(), 0, -1.0
        while True:
            lr = get_lr(iter_num)
            for param_group in optimizer.param_groups:
                param_group["lr"] = lr

            if iter_num % eval_interval == 0:
                losses = estimate_loss()
                print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
                if losses["val"] < best_val_loss:
                    best_val_loss = losses["val"]
                    if iter_num > 0:
                        checkpoint = {
                            "model": model.state_dict(),
                            "optimizer": optimizer.state_dict(),
                            "model_args": asdict(model.config),
                            "iter_num": iter_num,
                            "best_val_loss": best_val_loss,
                            "config": config,
                        }
                        print(f"saving checkpoint to {out_dir}")
                        torch.save(checkpoint, os.path.join(out_dir, "ckpt.pt"))

            for _ in range(gradient_accumulation_steps):
                with ctx:
                    _, loss = model(X, Y)
                    loss = loss / gradient_accumulation_steps
                X, Y = get_batch("train")  # prefetch the next batch
                scaler.scale(loss).backward()
            if grad_clip != 0.0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

            t1 = time.time()
            dt, t0 = t1 - t0, t1
            if iter_num % log_interval == 0:
                lossf = loss.item() * gradient_accumulation_steps
                history.append(lossf)
                if local_iter_num >= 5:
                    mfu = model.estimate_mfu(batch_size * gradient_accumulation_steps, dt)
                    running_mfu = mfu if running_mfu == -1.0 else 0.9 * running_mfu + 0.1 * mfu
                print(f"iter {iter_num}: loss {lossf:.4f}, time {dt * 1000:.2f}ms, mfu {running_mfu * 100:.2f}%")
            iter_num += 1
            local_iter_num += 1
            if iter_num > max_iters:
                break
    return model, optimizer, history, best_val_loss


def sample(seed, out_dir, start="\n", num_samples=2, max_new_tokens=50, temperature=0.8, top_k=10):
    torch.manual_seed(1337 + seed)
    checkpoint = torch.load(os.path.join(out_dir, "ckpt.pt"), map_location="cpu")
    model = GPT(GPTConfig(**checkpoint["model_args"]))
    model.load_state_dict(checkpoint["model"])
    model.eval()
    with open(os.path.join(out_dir, "meta.pkl"), "rb") as f:
        meta = pickle.load(f)
    x = torch.tensor([[meta["stoi"][c] for c in start]])
    with torch.no_grad():
        for _ in range(num_samples):
            y = model.generate(x, max_new_tokens, temperature=temperature, top_k=top_k)
            print("".join(meta["itos"][i] for i in y[0].tolist()))
            print("---------------")


def main(watch, seed, folder):
    out_dir = str(folder)
    prepare(out_dir)
    _, _, losses, _ = train(watch, seed, out_dir, "scratch", max_iters=120)
    model, optimizer, more, best_val_loss = train(watch, seed, out_dir, "resume", max_iters=240)
    sample(seed, out_dir)
    objects = {"model": model, "optimizer": optimizer}
    return Result("val loss", float(best_val_loss), 1.3, losses + more, objects, higher_is_better=False)
