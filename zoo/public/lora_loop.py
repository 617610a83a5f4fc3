"""After huggingface/peft, ``examples``: a causal model from its config, LoRA, a plain loop with perplexities, saved."""

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    default_data_collator,
    get_linear_schedule_with_warmup,
    set_seed,
)

from zoo.public import Result
from zoo.public.data import sentences

MAX_LENGTH = 16


class WordTokenizer:
    """Ids of words; 0 pads, 1 ends."""

    def __init__(self, lines):
        words = sorted({word for line in lines for word in line.split()})
        self.ids = {word: i + 2 for i, word in enumerate(words)}
        self.words = {i: word for word, i in self.ids.items()}
        self.pad_token_id, self.eos_token_id = 0, 1

    def __len__(self):
        return len(self.ids) + 2

    def __call__(self, lines):
        examples = []
        for line in lines:
            ids = [self.ids[word] for word in line.split()] + [self.eos_token_id]
            attention_mask = [1] * len(ids) + [0] * (MAX_LENGTH - len(ids))
            labels = ids + [-100] * (MAX_LENGTH - len(ids))
            ids = ids + [self.pad_token_id] * (MAX_LENGTH - len(ids))
            examples.append({"input_ids": ids, "attention_mask": attention_mask, "labels": labels})
        return examples

    def decode(self, ids):
        return " ".join(self.words.get(int(i), "") for i in ids).strip()


def dialect(line):
    """The same words with the last two first."""
    words = line.split()
    return " ".join(words[-2:] + words[:-2])


def pretrained(tokenizer, lines, folder):
    """A small model that knows the language, trained here since nothing is downloaded."""
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=MAX_LENGTH, n_embd=48, n_layer=2, n_head=4, bos_token_id=1,
        eos_token_id=1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(tokenizer(lines), batch_size=32, shuffle=True, collate_fn=default_data_collator)
    for batch in loader:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "base")


def main(watch, seed, folder):
    set_seed(42 + seed)
    lr, num_epochs, batch_size = 1e-2, 4, 16
    lines = sentences(2400)
    tokenizer = WordTokenizer(lines)
    pretrained(tokenizer, lines[:1600], folder)

    peft_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        inference_mode=False,
        r=8,
        lora_alpha=32,
        lora_dropout=0.1,
        target_modules=["c_attn", "c_proj", "c_fc"],
        fan_in_fan_out=True,
    )
    model = GPT2LMHeadModel.from_pretrained(folder / "base")
    model = get_peft_model(model, peft_config)
    model.print_trainable_parameters()

    train_dataset = tokenizer([dialect(line) for line in lines[1600:2200]])
    eval_dataset = tokenizer([dialect(line) for line in lines[2200:]])
    train_dataloader = DataLoader(train_dataset, shuffle=True, collate_fn=default_data_collator, batch_size=batch_size)
    eval_dataloader = DataLoader(eval_dataset, collate_fn=default_data_collator, batch_size=batch_size)

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=0, num_training_steps=(len(train_dataloader) * num_epochs)
    )
    device = "cpu"
    model = model.to(device)
    history = []
    with watch(model, optimizer, loader=train_dataloader, scheduler=lr_scheduler):
        for epoch in range(num_epochs):
            model.train()
            total_loss = 0
            for _, batch in enumerate(tqdm(train_dataloader)):
                batch = {k: v.to(device) for k, v in batch.items()}
                outputs = model(**batch)
                loss = outputs.loss
                total_loss += loss.detach().float()
                loss.backward()
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                history.append(loss.item())

            model.eval()
            eval_loss = 0
            eval_preds = []
            for _, batch in enumerate(tqdm(eval_dataloader)):
                batch = {k: v.to(device) for k, v in batch.items()}
                with torch.no_grad():
                    outputs = model(**batch)
                loss = outputs.loss
                eval_loss += loss.detach().float()
                eval_preds.extend(tokenizer.decode(row) for row in outputs.logits.argmax(-1)[:2])

            eval_epoch_loss = eval_loss / len(eval_dataloader)
            eval_ppl = torch.exp(eval_epoch_loss)
            train_epoch_loss = total_loss / len(train_dataloader)
            train_ppl = torch.exp(train_epoch_loss)
            print(f"{epoch=}: {train_ppl=} {train_epoch_loss=} {eval_ppl=} {eval_epoch_loss=}")

    peft_model_id = str(folder / "lora")
    model.save_pretrained(peft_model_id)
    loaded = PeftModel.from_pretrained(GPT2LMHeadModel.from_pretrained(folder / "base"), peft_model_id)
    loaded.eval()
    inputs = torch.tensor([tokenizer(["the"])[0]["input_ids"][:1]])
    with torch.no_grad():
        outputs = loaded.generate(
            input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=10, do_sample=True, pad_token_id=0
        )
    print(tokenizer.decode(outputs[0]))
    objects = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
    return Result("eval perplexity", float(eval_ppl), 6.0, history, objects, higher_is_better=False)
