"""A recurrent language model. Shapes: B batch, T positions, D d_model, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from trainwright.models.options import require_counts, require_dropout


@dataclass(frozen=True)
class LSTMConfig:
    """The options of ``lstm``. ``tied`` shares the token embedding with the head."""

    vocab_size: int
    d_model: int = 128
    layers: int = 2
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        require_counts(self, {"vocab_size": 1, "d_model": 1, "layers": 1})
        require_dropout(self.dropout)


class LSTM(nn.Module):
    """ids_BT -> logits_BTV, each sequence from a zero state. Accepts any length: it has no ``block_size``.

    With ``hidden=True`` -> hidden_BTD, the input of ``head``.
    """

    def __init__(self, options: LSTMConfig) -> None:
        super().__init__()
        self.options = options
        width, dropout = options.d_model, options.dropout
        self.tokens = nn.Embedding(options.vocab_size, width)
        self.dropout = nn.Dropout(dropout)
        between = dropout if options.layers > 1 else 0.0  # torch warns of dropout with a single layer
        self.recurrent = nn.LSTM(width, width, options.layers, dropout=between, batch_first=True)
        self.head = nn.Linear(width, options.vocab_size, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)  # the loss starts at ln V
        if options.tied:
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
    return LSTM(LSTMConfig(vocab_size, d_model, layers, dropout, tied))
