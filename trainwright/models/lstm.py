"""A recurrent language model. Shapes: B batch, T positions, D d_model, V vocabulary."""

from __future__ import annotations

from torch import Tensor, nn

from trainwright.models.options import require_count, require_dropout


class LSTM(nn.Module):
    """ids_BT -> logits_BTV, each sequence from a zero state. Accepts any length: it has no ``block_size``.

    With ``hidden=True`` -> hidden_BTD, the input of ``head``.
    """

    def __init__(self, vocab_size: int, d_model: int, layers: int, dropout: float, tied: bool) -> None:
        super().__init__()
        require_count("vocab_size", vocab_size)
        require_count("d_model", d_model)
        require_count("layers", layers)
        require_dropout(dropout)
        self.tokens = nn.Embedding(vocab_size, d_model)
        self.dropout = nn.Dropout(dropout)
        between = dropout if layers > 1 else 0.0  # torch warns of dropout with a single layer
        self.recurrent = nn.LSTM(d_model, d_model, layers, dropout=between, batch_first=True)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)  # the loss starts at ln V
        if tied:
            self.tokens.weight = self.head.weight

    def forward(self, ids_BT: Tensor, *, hidden: bool = False) -> Tensor:
        out_BTD, _ = self.recurrent(self.dropout(self.tokens(ids_BT)))
        out_BTD = self.dropout(out_BTD)
        logits_BTV: Tensor = out_BTD if hidden else self.head(out_BTD)
        return logits_BTV


def lstm(*, vocab_size: int, d_model: int = 128, layers: int = 2, dropout: float = 0.0, tied: bool = True) -> LSTM:
    """An LSTM language model: ids_BT -> logits_BTV.

    Args:
        vocab_size: Number of ids. Taken from the training set where a recipe leaves it out.
        d_model: Width of embedding and hidden state.
        layers: Number of LSTM layers.
        dropout: Dropout of the embeddings, between the layers, and before the head.
        tied: The output head shares the weights of the embedding.

    Raises UsageError for a value that cannot be used.
    """
    return LSTM(vocab_size, d_model, layers, dropout, tied)
