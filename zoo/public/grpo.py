"""After small GRPO trainers around transformers: groups of completions, rewards, clipped ratio, KL to a reference."""

import copy
import json
import random
from dataclasses import asdict, dataclass

import numpy as np
import torch
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from zoo.public import Result

BOS, EOS, PAD, FIRST_DIGIT = 10, 11, 12, 0


@dataclass
class GRPOArgs:
    num_iterations: int = 80
    prompts_per_step: int = 10
    num_generations: int = 8
    max_completion_length: int = 6
    num_inner_updates: int = 2
    epsilon: float = 0.2
    beta: float = 0.01
    temperature: float = 1.0
    learning_rate: float = 4e-3
    max_grad_norm: float = 1.0
    eval_every: int = 40
    seed: int = 0


def copy_reward(prompts, completions):
    """The fraction of generated tokens that repeat the digit of the prompt."""
    return (completions == prompts[:, -1:]).float().mean(1)


def length_reward(prompts, completions):
    """A bonus for completions that do not end early."""
    return 0.2 * (completions != EOS).all(1).float()


def selective_log_softmax(logits, index):
    return logits.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def get_per_token_logps(model, input_ids, attention_mask, logits_to_keep):
    logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
    logits = logits[:, :-1, :][:, -logits_to_keep:]
    return selective_log_softmax(logits, input_ids[:, -logits_to_keep:])


class GRPOTrainer:
    def __init__(self, model, reward_funcs, args, watch, output_dir):
        self.model, self.reward_funcs, self.args, self.watch = model, reward_funcs, args, watch
        self.output_dir = output_dir
        self.ref_model = copy.deepcopy(model)
        self.ref_model.eval()
        for p in self.ref_model.parameters():
            p.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
        self.log_history, self.losses = [], []

    def generate(self, prompts, do_sample):
        self.model.eval()
        with torch.no_grad():
            output = self.model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                max_new_tokens=self.args.max_completion_length,
                min_new_tokens=self.args.max_completion_length,
                do_sample=do_sample,
                temperature=self.args.temperature if do_sample else None,
                pad_token_id=PAD,
            )
        self.model.train()
        return output

    def generate_and_score(self):
        args = self.args
        digits = torch.randint(FIRST_DIGIT, 10, (args.prompts_per_step, 1))
        prompts = torch.cat([torch.full_like(digits, BOS), digits], 1).repeat_interleave(args.num_generations, 0)
        prompt_completion_ids = self.generate(prompts, do_sample=True)
        completion_ids = prompt_completion_ids[:, prompts.size(1) :]
        is_eos = completion_ids == EOS
        eos_idx = torch.full((is_eos.size(0),), is_eos.size(1), dtype=torch.long)
        eos_idx[is_eos.any(1)] = is_eos.int().argmax(1)[is_eos.any(1)]
        completion_mask = (torch.arange(is_eos.size(1))[None] <= eos_idx[:, None]).int()
        attention_mask = torch.cat([torch.ones_like(prompts), completion_mask], 1)
        with torch.no_grad():
            old = get_per_token_logps(self.model, prompt_completion_ids, attention_mask, completion_ids.size(1))
            ref = get_per_token_logps(self.ref_model, prompt_completion_ids, attention_mask, completion_ids.size(1))
        rewards = sum(func(prompts, completion_ids) for func in self.reward_funcs)
        grouped = rewards.view(-1, args.num_generations)
        mean, std = grouped.mean(1).repeat_interleave(args.num_generations), grouped.std(1)
        advantages = (rewards - mean) / (std.repeat_interleave(args.num_generations) + 1e-4)
        return {
            "ids": prompt_completion_ids,
            "attention_mask": attention_mask,
            "completion_mask": completion_mask,
            "old": old,
            "ref": ref,
            "advantages": advantages,
            "reward": rewards.mean().item(),
            "reward_std": grouped.std(1).mean().item(),
        }

    def compute_loss(self, inputs):
        mask = inputs["completion_mask"]
        logps = get_per_token_logps(self.model, inputs["ids"], inputs["attention_mask"], mask.size(1))
        per_token_kl = torch.exp(inputs["ref"] - logps) - (inputs["ref"] - logps) - 1
        coef_1 = torch.exp(logps - inputs["old"])
        coef_2 = torch.clamp(coef_1, 1 - self.args.epsilon, 1 + self.args.epsilon)
        advantages = inputs["advantages"].unsqueeze(1)
        per_token_loss = -torch.min(coef_1 * advantages, coef_2 * advantages)
        per_token_loss = per_token_loss + self.args.beta * per_token_kl
        loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
        with torch.no_grad():
            kl = (per_token_kl * mask).sum() / mask.sum()
            clip_ratio = (((coef_1 < coef_2) | (coef_1 > coef_2)) * mask).sum() / mask.sum()
        return loss, kl.item(), clip_ratio.item()

    def evaluate(self):
        prompts = torch.stack([torch.tensor([BOS, d]) for d in range(10)])
        completions = self.generate(prompts, do_sample=False)[:, 2:]
        return copy_reward(prompts, completions).mean().item()

    def train(self):
        args = self.args
        with self.watch(self.model, self.optimizer):
            self.model.train()
            for step in tqdm(range(1, args.num_iterations + 1)):
                inputs = self.generate_and_score()
                for _ in range(args.num_inner_updates):
                    loss, kl, clip_ratio = self.compute_loss(inputs)
                    loss.backward()
                    grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), args.max_grad_norm)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.losses.append(loss.item())
                logs = {
                    "step": step,
                    "loss": round(loss.item(), 4),
                    "grad_norm": round(grad_norm.item(), 4),
                    "reward": round(inputs["reward"], 4),
                    "reward_std": round(inputs["reward_std"], 4),
                    "kl": round(kl, 5),
                    "clip_ratio": round(clip_ratio, 4),
                }
                self.log_history.append(logs)
                print(logs)
                if step % args.eval_every == 0:
                    print({"eval_reward": round(self.evaluate(), 4)})
                    self.model.save_pretrained(self.output_dir / f"checkpoint-{step}")
                    torch.save(self.optimizer.state_dict(), self.output_dir / f"checkpoint-{step}" / "optimizer.pt")


def main(watch, seed, folder):
    args = GRPOArgs(seed=seed)
    set_seed(args.seed)
    random.seed(args.seed)
    np.random.seed(args.seed)
    config = GPT2Config(
        vocab_size=13, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=BOS, eos_token_id=EOS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    trainer = GRPOTrainer(model, [copy_reward, length_reward], args, watch, folder)
    trainer.train()
    with open(folder / "log_history.json", "w") as f:
        json.dump({"args": asdict(args), "log_history": trainer.log_history}, f)
    objects = {"model": model, "optimizer": trainer.optimizer, "ref_model": trainer.ref_model}
    return Result("greedy reward", trainer.evaluate(), 0.5, trainer.losses, objects)
