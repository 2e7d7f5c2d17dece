"""A recurrent network of LSTM layers."""

from __future__ import annotations

import torch
from torch import nn

from sparkdl.models.layers import as_floats, check_positive


class LSTMNet(nn.Module):
    """Reads a sequence with LSTM layers and looks at the state behind its last value.

    Takes ``values``: with ``num_tokens`` token ids ``(batch, length)``, else numbers ``(batch,
    length, num_features)``, or ``(batch, length)`` of one feature; and ``mask``, bool ``(batch,
    length)``, True where a value is the row's own; these come first. Gives ``(batch,
    num_outputs)``: logits of classes, or numbers. What stands behind a row's end has no part in
    them; a row without values is looked at as a state of zeros::

        inputs={"values": Sequence("words", mask="mask")}

    torch exports LSTM layers for sequences of one length only: give `sparkdl.export_onnx`
    ``example_inputs`` of the length that is wanted.

    Source: Hochreiter and Schmidhuber, "Long Short-Term Memory" (1997), with the forget gates of
    Gers et al. (2000), as `torch.nn.LSTM` computes it.
    """

    def __init__(
        self, *, num_outputs: int, num_features: int = 32, num_tokens: int | None = None,
        width: int = 64, num_layers: int = 1, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        """Make the layers.

        Args:
            num_outputs: classes, or numbers to predict.
            num_features: numbers at each place of a sequence; of tokens, the width of their
                embedding.
            num_tokens: token ids are below this; None: sequences are of numbers.
            width: of the hidden state.
            num_layers: LSTM layers on top of each other.
            dropout: part of each layer's outputs that training leaves out.
        """
        super().__init__()
        check_positive(
            num_outputs=num_outputs, num_features=num_features, width=width, num_layers=num_layers
        )
        self.embedding: nn.Module | None = None
        if num_tokens is not None:
            check_positive(num_tokens=num_tokens)
            self.embedding = nn.Embedding(num_tokens, num_features)
        between = dropout if num_layers > 1 else 0.0  # torch warns of what has no effect
        self.lstm = nn.LSTM(num_features, width, num_layers, batch_first=True, dropout=between)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, num_outputs)

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits or numbers of a batch of sequences."""
        if self.embedding is None:
            steps = as_floats(values, self.head.weight)
            steps = steps[:, :, None] if steps.dim() == 2 else steps
        else:
            steps = self.embedding(values)
        states, _ = self.lstm(steps)
        lengths = mask.sum(1)
        last = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, states.shape[2])
        state = states.gather(1, last).squeeze(1) * (lengths > 0)[:, None]
        outputs: torch.Tensor = self.head(self.dropout(state))
        return outputs
