"""Settings with which the built-in recipes train in a second."""

from __future__ import annotations

from trainwright.commands.verify.resume import ResumeTrial
from trainwright.recipe.load import builtin_recipes

ONE = "evaluation.batches=1"
SMALL = {
    "demo.yaml": [ONE, "model.args.d_model=64", "model.args.bigram=512", "batch.size=4"],
    "demo-digits.yaml": [],
    "gpt-tiny.yaml": [ONE, "model.args.d_model=64", "batch.size=4"],
    "resnet-digits.yaml": [ONE, "model.args.depth=8", "batch.size=16"],
    "lstm-text.yaml": [ONE, "model.args.d_model=64", "batch.size=8", "batch.micro=4"],
    "gpt-lora.yaml": [ONE],
    "hf-lora.yaml": [ONE, "batch.size=4"],
    "bert-text.yaml": [ONE, "batch.size=4", "model.args.layers=1", "model.args.d_model=32"],
    "moe-text.yaml": [ONE, "batch.size=4", "model.args.layers=1", "model.args.d_model=32", "model.args.experts=4"],
    "reinforce-cartpole.yaml": [ONE, "batch.size=4", "data.val.args.count=4"],
    "unet-shapes.yaml": [ONE, "batch.size=4", "model.args.width=8", "data.train.args.count=64"],
    "vit-digits.yaml": [ONE, "batch.size=8", "model.args.layers=1"],
    "vit-shapes.yaml": [ONE, "batch.size=8", "model.args.layers=1", "data.train.args.count=64"],
    "gpt2-124m.yaml": [
        ONE,
        "batch.size=2",
        "batch.micro=1",
        "model.args.layers=2",
        "model.args.heads=2",
        "model.args.d_model=64",
        "model.args.vocab_size=2048",
        "model.args.block_size=32",
        "data.train.args.block_size=32",
        "data.val.args.block_size=32",
        "precision=fp32",
    ],
    "llama-7b.yaml": [
        ONE,
        "batch.size=2",
        "model.args.layers=2",
        "model.args.heads=2",
        "model.args.d_model=32",
        "model.args.block_size=64",
        "data.train.args.block_size=64",
        "data.val.args.block_size=64",
    ],
}
PRECISIONS = ("fp32", "bf16", "fp16")
WORKERS = ((2, 3), (0, 0))


def small_trial(name: str, precision: str, workers: tuple[int, int], steps: int) -> ResumeTrial:
    settings = ("evaluation.batch=4", *SMALL[name], f"precision={precision}")
    return ResumeTrial(builtin_recipes() / name, steps, *workers, settings)
