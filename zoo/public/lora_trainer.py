"""After transformers, ``run_glue.py``, with huggingface/peft: LoRA under Trainer, interrupted, resumed, best loaded."""

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from zoo.public import Result
from zoo.public.data import VERBS, sentences

LABELS = {verb: int(verb in ("loves", "follows", "serves", "forgives", "remembers")) for verb in VERBS.split("|")}


def tokenize(lines):
    words = sorted({word for line in lines for word in line.split()})
    ids = {word: i + 2 for i, word in enumerate(words)}
    rows = {"input_ids": [], "attention_mask": [], "labels": []}
    for line in lines:
        row = [1] + [ids[word] for word in line.split()]
        rows["input_ids"].append(row + [0] * (16 - len(row)))
        rows["attention_mask"].append([1] * len(row) + [0] * (16 - len(row)))
        rows["labels"].append(next(LABELS[word] for word in line.split() if word in LABELS))
    return Dataset.from_dict(rows).with_format("torch"), len(ids) + 2


def compute_metrics(eval_pred):
    predictions, labels = eval_pred
    predictions = np.argmax(predictions, axis=1)
    hits = predictions == labels
    precision = hits[predictions == 1].mean() if (predictions == 1).any() else 0.0
    recall = hits[labels == 1].mean()
    f1 = 2 * precision * recall / max(precision + recall, 1e-9)
    return {"accuracy": float(hits.mean()), "f1": float(f1)}


class TimeLimit(TrainerCallback):
    """Stops the training after ``epochs`` epochs, like the time limit of a cluster's queue."""

    def __init__(self, epochs):
        self.epochs = epochs

    def on_epoch_end(self, args, state, control, **kwargs):
        if round(state.epoch) == self.epochs:
            control.should_training_stop = True


def make_trainer(watch, seed, folder, limit):
    set_seed(seed)
    dataset, vocab_size = tokenize(sentences(800))
    splits = dataset.train_test_split(test_size=0.2, seed=0)
    config = BertConfig(
        vocab_size=vocab_size, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=16, num_labels=2, initializer_range=0.1, attn_implementation="eager",
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    peft_config = LoraConfig(
        task_type=TaskType.SEQ_CLS,
        r=8,
        lora_alpha=16,
        lora_dropout=0.05,
        target_modules=["query", "key", "value", "dense"],
        modules_to_save=["classifier"],
    )
    model = get_peft_model(model, peft_config)
    model.print_trainable_parameters()
    training_args = TrainingArguments(
        output_dir=str(folder / "bert-lora"),
        learning_rate=8e-3,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=64,
        num_train_epochs=6,
        weight_decay=0.01,
        warmup_steps=10,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to=[],
        use_cpu=True,
        seed=42 + seed,
        dataloader_pin_memory=False,
    )
    return Trainer(
        model=model,
        args=training_args,
        train_dataset=splits["train"],
        eval_dataset=splits["test"],
        compute_metrics=compute_metrics,
        callbacks=[TimeLimit(limit), *watch.transformers()],
    )


def main(watch, seed, folder):
    trainer = make_trainer(watch, seed, folder, limit=3)
    trainer.train()
    first = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    trainer = make_trainer(watch, seed, folder, limit=6)
    result = trainer.train(resume_from_checkpoint=True)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[: len(first)] == first
    trainer.log_metrics("train", {"train_loss": result.training_loss})
    metrics = trainer.evaluate()
    print(metrics)
    trainer.save_model(str(folder / "final"))
    objects = {"model": trainer.model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
    with torch.no_grad():
        logits = trainer.predict(trainer.eval_dataset).predictions
    print(logits[:2].round(2).tolist())
    return Result("eval accuracy", metrics["eval_accuracy"], 0.9, losses, objects)
