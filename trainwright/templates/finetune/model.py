"""The model that is fine-tuned, from the library transformers."""

from transformers import LlamaConfig, LlamaForCausalLM


def base(vocabulary: int, block_size: int) -> LlamaForCausalLM:
    """Build a small Llama with new weights, so that nothing is downloaded.

    For a model that has learned something already, return
    ``AutoModelForCausalLM.from_pretrained(FOLDER)`` and encode with its tokenizer.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=block_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_size=96,
        intermediate_size=256,
        initializer_range=0.2,  # 0.02 is too little for embeddings that stay frozen
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return LlamaForCausalLM(config)
