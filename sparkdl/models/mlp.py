"""Fully connected networks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sparkdl.mesh import paired
from sparkdl.models.layers import as_floats, check_positive, hidden_layers


class MLP(nn.Module):
    """A multilayer perceptron: fully connected hidden layers, and a linear one on top.

    Takes ``(batch, ...)`` of any numeric dtype, flattened to ``sizes[0]`` features; gives
    ``(batch, num_outputs)``: logits of classes, or numbers.

    The hidden layers are called ``encoder`` as those of an `Autoencoder`, the last one ``head``, so
    that pre-trained weights fit by their names (``docs/networks.md`` shows it).
    """

    def __init__(
        self, *, sizes: Sequence[int], num_outputs: int, activation: str = "relu",
        dropout: float = 0.0,
    ) -> None:  # fmt: skip
        """Make the layers.

        Args:
            sizes: number of features, then the width of each hidden layer.
            num_outputs: classes, or numbers to predict.
            activation: a name in `sparkdl.models.layers.ACTIVATIONS`.
            dropout: part of each hidden layer's outputs that training leaves out.
        """
        super().__init__()
        check_positive(num_outputs=num_outputs)
        self.encoder = hidden_layers(sizes, activation, dropout)
        self.head = nn.Linear(sizes[-1], num_outputs)

    def tensor_layout(self, tensor: int) -> dict[str, str]:
        """A `Mesh.layout` for ``tensor`` workers; what they cannot share evenly stays whole."""
        layers = [
            (name, part) for name, part in self.named_modules() if isinstance(part, nn.Linear)
        ]
        return paired([(name, one.in_features, one.out_features) for name, one in layers], tensor)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Logits or numbers of a batch."""
        hidden = self.encoder(as_floats(features, self.head.weight).flatten(1))
        outputs: torch.Tensor = self.head(hidden)
        return outputs


class FCNR(MLP):
    """FCN-R, the fully connected network of benchmarks on MNIST: 784-2048-4096-1024-10, sigmoids.

    Takes images ``(batch, 1, 28, 28)``, or ``(batch, ...)`` of ``sizes[0]`` values; gives logits
    ``(batch, num_classes)``. 14,205,962 parameters. Weights begin by Glorot and Bengio's rule, and
    biases at 0, as they did there.

    Source: Shi, Wang, Xu and Chu, "Benchmarking State-of-the-Art Deep Learning Software Tools"
    (arXiv 1608.07249), whose programs (github.com/hclhkbu/dlbench, ``tools/torch/Models/ffn5.lua``)
    have the sizes.
    """

    def __init__(
        self, *, sizes: Sequence[int] = (784, 2048, 4096, 1024), num_classes: int = 10
    ) -> None:
        super().__init__(sizes=sizes, num_outputs=num_classes, activation="sigmoid")
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
