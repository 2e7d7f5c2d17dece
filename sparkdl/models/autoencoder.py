"""An autoencoder: a network that learns without labels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from sparkdl.config import require
from sparkdl.models.layers import hidden_layers


class Autoencoder(nn.Module):
    """Narrows its inputs to a code and restores them; a denoising one with ``corruption``.

    Takes floating ``(batch, ...)`` with ``sizes[0]`` values each; gives the same shape. The layer
    ``encoder`` gives the code, ``(batch, sizes[-1])``. Train it with
    ``TorchEstimator(loss="mse")`` without a label column: the inputs are the targets then. They
    should be of the order of 1, since restored values are compared with them as they are.

    ``encoder.k`` and ``decoder.k`` are counted from the outside, and lead from ``sizes[k]`` values
    to ``sizes[k + 1]`` and back. So a deeper one keeps the names of a shallower one's weights,
    which is what training it layer by layer needs; ``docs/networks.md`` shows how. An `MLP` of the
    same sizes has the same ``encoder``.

    Sources: Bengio, Lamblin, Popovici and Larochelle, "Greedy Layer-Wise Training of Deep Networks"
    (2006); Vincent, Larochelle, Lajoie, Bengio and Manzagol, "Stacked Denoising Autoencoders"
    (2010), whose masking noise ``corruption`` is.
    """

    def __init__(
        self, *, sizes: Sequence[int], activation: str = "sigmoid", corruption: float = 0.0
    ) -> None:
        """Make the layers.

        Args:
            sizes: number of features, then the width of each layer down to the code.
            activation: a name in `sparkdl.models.layers.ACTIVATIONS`; the last layer of the decoder
                is linear.
            corruption: part of the input values that training sets to zero, 0 to less than 1.
        """
        super().__init__()
        require(0 <= corruption < 1, "corruption must be at least 0 and less than 1", corruption)
        self.corruption = corruption
        self.encoder = hidden_layers(sizes, activation)
        outermost = nn.Sequential(nn.Linear(sizes[1], sizes[0]))
        others = [hidden_layers((n, m), activation)[0] for m, n in pairwise(sizes[1:])]
        self.decoder = nn.ModuleList([outermost, *others])

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The batch, restored from its code."""
        values = features.flatten(1)
        if self.training and self.corruption:
            values = values * torch.empty_like(values).bernoulli_(1 - self.corruption)
        values = self.encoder(values)
        for layer in reversed(self.decoder):
            values = layer(values)
        restored: torch.Tensor = values.reshape(features.shape)
        return restored
