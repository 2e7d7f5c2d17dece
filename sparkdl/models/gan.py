"""A generative adversarial network that one loop and one optimizer can train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus

from sparkdl.models.layers import as_floats, check_positive, hidden_layers


class GAN(nn.Module):
    """A generator that makes rows out of noise, and a critic that tells them from real ones.

    ``forward`` is the critic: it takes ``(batch, num_features)`` and gives logits ``(batch, 1)`` of
    being real. `generate` makes rows. Train it with ``trainingStep=gan_step``, without a label
    column; ``parameterGroups={"critic": {...}}`` gives the critic a learning rate of its own.

    Source: Goodfellow et al. 2014 (arXiv 1406.2661), with the generator's loss that does not
    saturate (section 3).
    """

    def __init__(
        self, *, num_features: int, noise: int = 8, widths: Sequence[int] = (32, 32)
    ) -> None:
        """Make the two players.

        Args:
            num_features: numbers of a row.
            noise: numbers of which a row is made.
            widths: of the hidden layers of each player.
        """
        super().__init__()
        check_positive(num_features=num_features, noise=noise)
        self.noise = noise
        self.generator = _network((noise, *widths), num_features)
        self.critic = _network((num_features, *widths), 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Logits of being real."""
        weight = next(self.critic.parameters())
        logits: torch.Tensor = self.critic(as_floats(features, weight).flatten(1))
        return logits

    def generate(self, num_rows: int, generator: torch.Generator | None = None) -> torch.Tensor:
        """Rows ``(num_rows, num_features)`` made of fresh noise."""
        weight = next(self.generator.parameters())
        shape = (num_rows, self.noise)
        noise = torch.randn(shape, generator=generator, dtype=weight.dtype, device=weight.device)
        made: torch.Tensor = self.generator(noise)
        return made


def gan_step(gan: Any, real: torch.Tensor, target: Any) -> torch.Tensor:
    """Both players' losses for each row ``(batch,)``; a training step for a `GAN`.

    One backward pass moves each player by its own loss: the critic sees what was made as
    constants, and the generator sees the critic's weights as constants. So both take their steps
    at the same time, by gradients of the same moment.
    """
    made = gan.generate(len(real))
    still = {name: value.detach() for name, value in gan.critic.named_parameters()}
    fooled = softplus(-torch.func.functional_call(gan.critic, still, (made,)))
    judged = softplus(-gan(real)) + softplus(gan(made.detach()))
    return (judged + fooled).squeeze(1)


def _network(sizes: Sequence[int], num_outputs: int) -> nn.Sequential:
    return nn.Sequential(*hidden_layers(sizes, "relu"), nn.Linear(sizes[-1], num_outputs))
