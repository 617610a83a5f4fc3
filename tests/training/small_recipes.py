"""The recipes in the box, in forms that train in a second."""

from __future__ import annotations

from trainwright.recipe.load import box
from trainwright.verbs.verify.resume import ResumeTrial

SMALL = {
    "demo.yaml": ["evaluation.batches=1"],
    "demo-digits.yaml": [],
    "gpt-tiny.yaml": ["evaluation.batches=1"],
    "resnet-digits.yaml": ["evaluation.batches=1"],
    "lstm-text.yaml": ["evaluation.batches=1"],
    "gpt-lora.yaml": ["evaluation.batches=1"],
    "hf-lora.yaml": ["evaluation.batches=1"],
    "gpt2-124m.yaml": [
        "batch.size=2",
        "batch.micro=1",
        "model.args.layers=2",
        "model.args.heads=2",
        "model.args.d_model=64",
        "model.args.block_size=32",
        "data.train.args.block_size=32",
        "data.val.args.block_size=32",
        "evaluation.batches=1",
        "precision=fp32",
    ],
    "llama-7b.yaml": [
        "batch.size=2",
        "model.args.layers=2",
        "model.args.heads=2",
        "model.args.d_model=32",
        "model.args.block_size=64",
        "data.train.args.block_size=64",
        "data.val.args.block_size=64",
        "evaluation.batches=1",
    ],
}
PRECISIONS = ("fp32", "bf16", "fp16")
WORKERS = ((2, 3), (0, 0))
SMALLER = {"gpt2-124m.yaml": ["model.args.d_model=192", "model.args.vocab_size=2048"]}  # its checkpoints are written


def small_trial(name: str, precision: str, workers: tuple[int, int], steps: int) -> ResumeTrial:
    settings = ("evaluation.batch=4", *SMALL[name], *SMALLER.get(name, ()), f"precision={precision}")
    return ResumeTrial(box() / name, steps, *workers, settings)
