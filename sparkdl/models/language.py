"""Transformers that write sequences, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sparkdl.config import require
from sparkdl.errors import ConfigError
from sparkdl.models.attention import Block, blocks_layout, check_sizes


class LanguageModel(nn.Module):
    """A decoder-only Transformer: what comes next at each place of a text, from what is before it.

    Takes whole numbers ``(batch, length)``, token ids; bytes (uint8) of a text as they are. Gives
    logits ``(batch, num_tokens, length)``, with the classes where torch's cross entropy has them:
    those at place n are of the token at n + 1. Nothing behind a place has a part in its logits, so
    padding behind a row's end needs no mask, only labels that the loss ignores. Train it with
    ``TorchEstimator(loss="cross_entropy")``; ``docs/networks.md`` makes the rows of a text.

    Sources: Vaswani et al., "Attention Is All You Need" (arXiv 1706.03762); Radford et al.,
    "Language Models are Unsupervised Multitask Learners" (2019), for the decoder alone, the learnt
    positions and the norm before each part and at the end.
    """

    def __init__(
        self, *, num_tokens: int = 256, max_length: int = 256, width: int = 64, num_heads: int = 4,
        num_layers: int = 2, feedforward: int = 256, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        """Make the layers.

        Args:
            num_tokens: token ids are below this; 256 for bytes.
            max_length: places that the network can tell apart; no text may be longer.
            width: of a place's vector, a multiple of ``num_heads``.
            num_heads: attentions of each layer.
            num_layers: layers on top of each other.
            feedforward: width inside a layer's fully connected part.
            dropout: part of the numbers that training leaves out.
        """
        super().__init__()
        check_sizes(
            num_tokens=num_tokens, max_length=max_length, width=width, num_heads=num_heads,
            num_layers=num_layers, feedforward=feedforward,
        )  # fmt: skip
        self.embedding = nn.Embedding(num_tokens, width)
        self.positions = nn.Embedding(max_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, num_heads, feedforward, dropout, is_causal=True) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_tokens)

    def tensor_layout(self, tensor: int) -> dict[str, str]:
        """A `Mesh.layout` for ``tensor`` workers; what they cannot share evenly stays whole."""
        return blocks_layout(tensor, blocks=self.blocks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the token behind each place."""
        states = self.dropout(_embedded(tokens, self.embedding, self.positions))
        for block in self.blocks:
            states = block(states)
        logits: torch.Tensor = self.head(self.norm(states))
        return logits.transpose(1, 2)

    @torch.no_grad()
    def generate(
        self, prompt: Sequence[int], num_tokens: int, temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> list[int]:  # fmt: skip
        """The prompt and what the network writes behind it, ``bytes(net.generate(b"A ", 40))``.

        Args:
            prompt: at least one token; of the text, the network sees the last ``max_length``.
            num_tokens: tokens to write.
            temperature: below 1 prefers likely tokens, 0 takes the likeliest; above 1 evens out.
            generator: of random numbers; None: torch's.
        """
        require(len(prompt) > 0, "prompt must hold at least one token", prompt)
        require(temperature >= 0, "temperature must be at least 0", temperature)
        tokens, device = list(prompt), self.head.weight.device
        for _ in range(num_tokens):
            seen = torch.tensor([tokens[-self.positions.num_embeddings :]], device=device)
            logits = self(seen)[0, :, -1]
            if temperature == 0:
                chosen = logits.argmax()
            else:
                chosen = torch.multinomial(
                    (logits / temperature).softmax(0), 1, generator=generator
                )
            tokens.append(int(chosen))
        return tokens


class SequenceToSequence(nn.Module):
    """An encoder reads one sequence, a decoder writes another: translations, answers, programs.

    Takes ``source``, token ids ``(batch, source length)``; ``target``, those that are written
    already, ``(batch, target length)``, which begin with a token that stands for the beginning; and
    ``mask``, bool ``(batch, source length)``, True where a token is the row's own. Gives logits
    ``(batch, num_tokens, target length)``: those at place n are of the token that follows the
    target's n-th. What stands behind a row's end has no part in them; a source may be empty::

        inputs={"source": Sequence("question", mask="mask"), "target": Sequence("begun")},
        labels={"answer": Sequence("answer", padding_value=-100)},
        loss="cross_entropy",

    Source: Vaswani et al., "Attention Is All You Need" (arXiv 1706.03762), with one embedding of
    both sequences; norms, positions and dropout are those of `LanguageModel`.
    """

    def __init__(
        self, *, num_tokens: int = 256, max_length: int = 256, width: int = 64, num_heads: int = 4,
        num_layers: int = 2, feedforward: int = 256, dropout: float = 0.0,
    ) -> None:  # fmt: skip
        """Make the layers, ``num_layers`` in each half; the arguments are `LanguageModel`'s."""
        super().__init__()
        check_sizes(
            num_tokens=num_tokens, max_length=max_length, width=width, num_heads=num_heads,
            num_layers=num_layers, feedforward=feedforward,
        )  # fmt: skip
        self.embedding = nn.Embedding(num_tokens, width)
        self.positions = nn.Embedding(max_length, width)
        self.dropout = nn.Dropout(dropout)
        sizes = (width, num_heads, feedforward, dropout)
        self.encoder = nn.ModuleList(Block(*sizes) for _ in range(num_layers))
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(
            Block(*sizes, is_causal=True, has_source=True) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_tokens)

    def tensor_layout(self, tensor: int) -> dict[str, str]:
        """A `Mesh.layout` for ``tensor`` workers; what they cannot share evenly stays whole."""
        return blocks_layout(tensor, encoder=self.encoder, decoder=self.decoder)

    def forward(
        self, source: torch.Tensor, target: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of the token behind each place of the target."""
        can_see = None if mask is None else mask[:, None, None, :]
        read = self.dropout(_embedded(source, self.embedding, self.positions))
        for block in self.encoder:
            read = block(read, mask=can_see)
        read = self.encoder_norm(read)
        states = self.dropout(_embedded(target, self.embedding, self.positions))
        for block in self.decoder:
            states = block(states, source=read, mask=can_see)
        logits: torch.Tensor = self.head(self.norm(states))
        return logits.transpose(1, 2)


def _embedded(
    tokens: torch.Tensor, embedding: nn.Embedding, positions: nn.Embedding
) -> torch.Tensor:
    """A vector for each place ``(batch, length, width)``, of its token and of where it is."""
    length, longest = tokens.shape[1], positions.num_embeddings
    if length > longest:
        raise ConfigError(
            f"a text of {length} tokens is longer than max_length={longest}; cut it into shorter "
            "rows, or make the network with a larger max_length"
        )
    places = torch.arange(length, device=tokens.device)
    vectors: torch.Tensor = embedding(tokens.long()) + positions(places)
    return vectors
