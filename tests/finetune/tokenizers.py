"""Tokenizers that need no download: byte-level BPE trained on a few sentences, with special tokens of real models."""

from __future__ import annotations

import string
from functools import cache
from typing import Any

SENTENCES = (
    "The quick brown fox jumps over the lazy dog while the seven wizards watch from the hill.",
    "Please tell me how to boil an egg, and what the capital of France is.",
    "You are a helpful assistant. Answer the question of the user in one short sentence.",
    "A list of numbers: 0 1 2 3 4 5 6 7 8 9 10 11 12. Sorting them takes n log n comparisons.",
    "def add(a, b): return a + b  # a function of two arguments, its result is their sum",
)
CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<|begin_of_text|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
    *("<start_of_turn>", "<end_of_turn>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"),
    *("<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<BOS_TOKEN>", "<think>", "</think>", "<|startoftext|>"),
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def _backend(control: tuple[str, ...], unknown: str | None) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(unk_token=unknown) if unknown else models.BPE())
    special = [*control, *([unknown] if unknown else [])]
    if unknown:  # no byte alphabet, so that other characters become the unknown token
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=special, initial_alphabet=list(string.printable), show_progress=False
        )
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    made.train_from_iterator(SENTENCES, trainer)
    return str(made.to_str())


def make_tokenizer(
    template: str | None = CHATML,
    *,
    bos: str | None = None,
    eos: str = "<|im_end|>",
    pad: str | None = "<pad>",
    adds_bos: bool = False,
    adds_eos: bool = False,
    control: tuple[str, ...] = CONTROL,
    unknown: str | None = None,
) -> Any:
    """Return a fast tokenizer with a chat template. ``adds_bos`` and ``adds_eos``: it adds the token to every text."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(_backend(control, unknown))
    added = [*([bos] if adds_bos and bos else []), *([eos] if adds_eos else [])]
    if added:
        single = " ".join([*([bos] if adds_bos and bos else []), "$A", *([eos] if adds_eos else [])])
        ids = [(token, backend.token_to_id(token)) for token in added]
        backend.post_processor = TemplateProcessing(single=single, special_tokens=ids)
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad, unk_token=unknown
    )
    made.chat_template = template
    return made
