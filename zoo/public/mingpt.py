"""After karpathy/minGPT: a Trainer class with callbacks teaches a GPT to add, scored by generating the sums."""

import json
import random
import time
from collections import defaultdict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

from zoo.public import Result


class CfgNode:
    """A tree of settings."""

    def __init__(self, **settings):
        self.__dict__.update(settings)

    def to_dict(self):
        return {key: each.to_dict() if isinstance(each, CfgNode) else each for key, each in vars(self).items()}

    def __str__(self):
        return json.dumps(self.to_dict(), indent=4)


CN = CfgNode


class Block(nn.Module):
    """Causal attention with a mask in a buffer, and an MLP, each after a norm."""

    def __init__(self, config):
        super().__init__()
        d, self.n_head = config.n_embd, config.n_head
        self.norms = nn.ModuleList([nn.LayerNorm(d), nn.LayerNorm(d)])
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(
            nn.Linear(d, 4 * d), nn.GELU("tanh"), nn.Linear(4 * d, d), nn.Dropout(config.resid_pdrop)
        )
        self.att_drop, self.res_drop = nn.Dropout(config.attn_pdrop), nn.Dropout(config.resid_pdrop)
        self.register_buffer("bias", torch.ones(config.block_size, config.block_size).tril()[None, None])

    def attend(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        att = q @ k.mT / (C // self.n_head) ** 0.5
        att = att.masked_fill(self.bias[..., :T, :T] == 0, -torch.inf).softmax(-1)
        out = self.att_drop(att) @ v
        return self.res_drop(self.proj(out.transpose(1, 2).reshape(B, T, C)))

    def forward(self, x):
        x = x + self.attend(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.block_size = config.block_size
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.n_layer)))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None and isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        print(f"number of parameters: {sum(p.numel() for p in self.parameters()) / 1e6:.2f}M")

    def configure_optimizers(self, train_config):
        """Decay for the weights of linear layers alone."""
        decayed = [m.weight for m in self.modules() if isinstance(m, nn.Linear)]
        known = {id(p) for p in decayed}
        rest = [p for p in self.parameters() if id(p) not in known]
        decay = train_config.weight_decay
        groups = [{"params": decayed, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=train_config.learning_rate, betas=train_config.betas)

    def forward(self, idx, targets=None):
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(positions))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, do_sample=False):
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.block_size :])[0][:, -1] / temperature
            chosen = torch.multinomial(logits.softmax(-1), 1) if do_sample else logits.argmax(-1, keepdim=True)
            idx = torch.cat([idx, chosen], dim=1)
        return idx


class Trainer:
    """The loop, for any network that returns logits and a loss; the rest is in callbacks."""

    def __init__(self, config, model, train_dataset, watch):
        self.config, self.train_dataset, self.watch = config, train_dataset, watch
        self.device = config.device
        self.model = model.to(self.device)
        self.callbacks = defaultdict(list)
        self.iter_num = self.iter_dt = 0
        print("running on device", self.device)

    def add_callback(self, event, callback):
        self.callbacks[event].append(callback)

    def trigger(self, event):
        for callback in self.callbacks[event]:
            callback(self)

    def batches(self, loader):
        """Goes through the loader again and again."""
        data_iter = iter(loader)
        while True:
            batch = next(data_iter, None)
            if batch is None:
                data_iter = iter(loader)
                batch = next(data_iter)
            yield [part.to(self.device) for part in batch]

    def run(self):
        model, config = self.model, self.config
        self.optimizer = model.configure_optimizers(config)
        endless = RandomSampler(self.train_dataset, replacement=True, num_samples=10**10)
        train_loader = DataLoader(
            self.train_dataset, sampler=endless, batch_size=config.batch_size, num_workers=config.num_workers
        )
        with self.watch(model, self.optimizer, loader=train_loader):
            model.train()
            before = time.time()
            for x, y in self.batches(train_loader):
                _, self.loss = model(x, y)
                model.zero_grad(set_to_none=True)
                self.loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), config.grad_norm_clip)
                self.optimizer.step()

                self.trigger("on_batch_end")
                self.iter_num += 1
                now = time.time()
                self.iter_dt, before = now - before, now
                if config.max_iters is not None and self.iter_num >= config.max_iters:
                    break


class AdditionDataset(Dataset):
    """``a + b`` as the digits of a, of b, and of the sum from its last digit to its first; only the sum is scored."""

    def __init__(self, config, split):
        self.ndigit = config.ndigit
        problems = 100**self.ndigit
        order = torch.randperm(problems, generator=torch.Generator().manual_seed(1337))
        for_test = min(problems // 5, 500)
        self.problems = order[:for_test] if split == "test" else order[for_test:]
        self.vocab_size, self.block_size = 10, 3 * self.ndigit

    def __len__(self):
        return len(self.problems)

    def __getitem__(self, idx):
        n = self.ndigit
        a, b = divmod(int(self.problems[idx]), 10**n)
        digits = f"{a:0{n}d}{b:0{n}d}" + f"{a + b:0{n + 1}d}"[::-1]
        tokens = torch.tensor([int(each) for each in digits])
        x, y = tokens[:-1], tokens[1:].clone()
        y[: 2 * n - 1] = -1  # no loss where the problem itself is read
        return x, y


def get_config(seed, folder):
    C = CN()
    C.system = CN(seed=1337 + seed, work_dir=str(folder))
    C.data = CN(ndigit=1)
    C.model = CN(n_layer=3, n_head=3, n_embd=48, embd_pdrop=0.1, resid_pdrop=0.1, attn_pdrop=0.1)
    C.trainer = CN(
        device="cpu", num_workers=0, max_iters=501, batch_size=64, learning_rate=3e-3, betas=(0.9, 0.95),
        weight_decay=0.1, grad_norm_clip=1.0,
    )  # fmt: skip
    return C


def main(watch, seed, folder):
    config = get_config(seed, folder)
    print(config)
    (folder / "config.json").write_text(str(config))
    random.seed(config.system.seed)
    np.random.seed(config.system.seed)
    torch.manual_seed(config.system.seed)

    datasets = {split: AdditionDataset(config.data, split) for split in ("train", "test")}
    config.model.vocab_size = datasets["train"].vocab_size
    config.model.block_size = datasets["train"].block_size
    model = GPT(config.model)
    trainer = Trainer(config.trainer, model, datasets["train"], watch)

    def eval_split(trainer, split, max_batches=None):
        ndigit = config.data.ndigit
        results, shown = [], 0
        powers = torch.tensor([10**i for i in reversed(range(ndigit + 1))]).to(trainer.device)
        for b, (x, _) in enumerate(DataLoader(datasets[split], batch_size=100)):
            problem = x.to(trainer.device)[:, : 2 * ndigit]
            answer = model.generate(problem, ndigit + 1)[:, -(ndigit + 1) :].flip(1)
            first, second = ((part * powers[1:]).sum(1) for part in problem.split(ndigit, dim=1))
            claimed, right = (answer * powers).sum(1), first + second
            correct = (claimed == right).cpu()
            results += correct.int().tolist()
            for i in torch.nonzero(~correct).flatten().tolist()[: 5 - shown]:
                shown += 1
                print(f"GPT claims that {first[i]} + {second[i]} = {claimed[i]} but it is {right[i]}")
            if max_batches is not None and b + 1 >= max_batches:
                break
        rt = torch.tensor(results, dtype=torch.float)
        print(f"{split} final score: {int(rt.sum())}/{len(results)} = {100 * rt.mean():.2f}% correct")
        return rt.sum()

    top_score, losses = 0, []

    def batch_end_callback(trainer):
        nonlocal top_score
        losses.append(trainer.loss.item())
        if trainer.iter_num % 10 == 0:
            print(f"iter_dt {trainer.iter_dt * 1000:.2f}ms; iter {trainer.iter_num}: train loss {losses[-1]:.5f}")
        if trainer.iter_num % 100 == 0:
            model.eval()
            with torch.no_grad():
                score = eval_split(trainer, "train") + eval_split(trainer, "test")
            if score > top_score:
                top_score = score
                print(f"saving model with new top score of {score}")
                torch.save(model.state_dict(), folder / "model.pt")
            model.train()

    trainer.add_callback("on_batch_end", batch_end_callback)
    trainer.run()
    objects = {"model": model, "optimizer": trainer.optimizer}
    return Result("correct sums of 100", float(top_score), 65, losses, objects)
