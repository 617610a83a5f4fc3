"""The model that is fine-tuned, from the library transformers."""

from transformers import GPT2Config, GPT2LMHeadModel


def base(vocabulary: int, block_size: int) -> GPT2LMHeadModel:
    """Build a small GPT-2 with new weights, so that nothing is downloaded.

    For a model that has learned something already, return
    ``AutoModelForCausalLM.from_pretrained(FOLDER)`` and encode with its tokenizer.
    """
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=block_size,
        n_layer=2,
        n_head=4,
        n_embd=96,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return GPT2LMHeadModel(config)
