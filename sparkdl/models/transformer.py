"""A network of attention: the encoder half of a Transformer."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from sparkdl.config import require
from sparkdl.models.attention import Block, blocks_layout, check_sizes


class TransformerNet(nn.Module):
    """The encoder half of a Transformer, for whole sequences: texts, codes, time series in bins.

    Takes ``values``, token ids ``(batch, length)``, and ``mask``, bool ``(batch, length)``, True
    where a value is the row's own. Gives ``(batch, num_outputs)``: logits of classes, or numbers,
    from the mean over the row's places. What stands behind a row's end has no part in it; sequences
    may have any length, at a cost that grows with its square::

        inputs={"values": Sequence("words", mask="mask")}

    Source: Vaswani et al., "Attention Is All You Need" (arXiv 1706.03762), sections 3.1 and 3.5,
    with the layer norms first. A learnt token before the first place, as in BERT, gives rows
    without values something to attend to.
    """

    def __init__(
        self, *, num_outputs: int, num_tokens: int, width: int = 64, num_heads: int = 4,
        num_layers: int = 2, feedforward: int = 128, dropout: float = 0.1,
    ) -> None:  # fmt: skip
        """Make the layers.

        Args:
            num_outputs: classes, or numbers to predict.
            num_tokens: token ids are below this.
            width: of a place's vector, even and a multiple of ``num_heads``.
            num_heads: attentions of each layer.
            num_layers: layers on top of each other.
            feedforward: width inside a layer's fully connected part.
            dropout: part of the numbers that training leaves out, inside layers.
        """
        super().__init__()
        check_sizes(
            num_outputs=num_outputs, num_tokens=num_tokens, width=width, num_heads=num_heads,
            num_layers=num_layers, feedforward=feedforward,
        )  # fmt: skip
        require(width % 2 == 0, "width must be even", width)
        self.embedding = nn.Embedding(num_tokens, width)
        self.first = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(
            Block(width, num_heads, feedforward, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_outputs)

    def tensor_layout(self, tensor: int) -> dict[str, str]:
        """A `Mesh.layout` for ``tensor`` workers; what they cannot share evenly stays whole."""
        return blocks_layout(tensor, blocks=self.blocks)

    def forward(self, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits or numbers of a batch of sequences."""
        tokens = self.embedding(values)
        first = self.first.expand(values.shape[0], 1, -1)
        states = torch.cat([first, tokens + _positions(tokens)], 1)
        is_own = F.pad(mask, (1, 0), value=True)
        for block in self.blocks:
            states = block(states, mask=is_own[:, None, None, :])
        weights = is_own[:, :, None].to(states.dtype)
        outputs: torch.Tensor = self.head((self.norm(states) * weights).sum(1) / weights.sum(1))
        return outputs


def _positions(tokens: torch.Tensor) -> torch.Tensor:
    """Sines and cosines that tell places apart, ``(length, width)``; section 3.5."""
    _, length, width = tokens.shape
    place = torch.arange(length, dtype=torch.float32, device=tokens.device)[:, None]
    even = torch.arange(0, width, 2, dtype=torch.float32, device=tokens.device)
    angle = place * torch.exp(even * (-math.log(10000.0) / width))
    return torch.stack([angle.sin(), angle.cos()], 2).flatten(1).to(tokens.dtype)
