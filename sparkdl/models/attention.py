"""The layer of which all Transformers here are made."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from sparkdl.errors import ConfigError
from sparkdl.mesh import paired
from sparkdl.models.layers import check_positive


class Block(nn.Module):
    """A layer of a Transformer: attention to its own places, and a fully connected part.

    With ``has_source`` there is attention to the places of ``source`` between the two. Norms come
    first, as Xiong et al. (arXiv 2002.04745) advise: it needs no warm-up. Weights begin as torch's
    layers do. Dropout acts on what each part adds, not on the attention's weights.
    """

    def __init__(
        self, width: int, num_heads: int, feedforward: int, dropout: float, *,
        is_causal: bool = False, has_source: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.is_causal = is_causal
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.source: nn.ModuleDict | None = None
        if has_source:
            self.source = nn.ModuleDict(
                {"norm": nn.LayerNorm(width), "attention": Attention(width, num_heads)}
            )
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, feedforward), nn.GELU(), nn.Linear(feedforward, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, states: torch.Tensor, *, source: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The states ``(batch, length, width)``, and what each part has added to them.

        ``mask`` is True where a place may be seen, of ``source`` where there is one, else of
        ``states``; it broadcasts to ``(batch, heads, length, places that may be seen)``. A row that
        may see nothing gets zeros of torch's attention (pytorch/pytorch pull request 133882).
        """
        own = self.attention_norm(states)
        own_mask = mask if self.source is None else None
        states = states + self.dropout(self.attention(own, own, own_mask, self.is_causal))
        if self.source is not None:
            asked = self.source["norm"](states)
            states = states + self.dropout(self.source["attention"](asked, source, mask, False))
        result: torch.Tensor = states + self.dropout(self.mlp(self.mlp_norm(states)))
        return result


def blocks_layout(tensor: int, **stacks: nn.ModuleList) -> dict[str, str]:
    """A `Mesh.layout` of stacks of equal blocks, by the names of the stacks.

    Attention is divided by heads. What ``tensor`` workers cannot share evenly stays whole.
    """
    found: dict[str, str] = {}
    for name, stack in stacks.items():
        block = stack[0]
        assert isinstance(block, Block)
        attention = block.attention
        if attention.q.out_features // attention.head_size % tensor == 0:
            found[f"{name}.*.attention.q|k|v"] = "columns"
            found[f"{name}.*.attention.out"] = "rows"
        into = block.mlp[0]
        assert isinstance(into, nn.Linear)
        width, feedforward = into.in_features, into.out_features
        mlp = [("0", width, feedforward), ("2", feedforward, width)]
        found |= {f"{name}.*.mlp.{part}": cut for part, cut in paired(mlp, tensor).items()}
    return found


class Attention(nn.Module):
    """Attention of several heads, with a layer each for queries, keys, values and the output.

    The number of heads follows from the width of what ``q``, ``k`` and ``v`` give. So with some of
    their rows, and the same columns of ``out``, it computes what some of the heads add.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_size = width // num_heads
        self.q = nn.Linear(width, width)
        # A bias would move all scores of a place alike: softmax does not see it, and optimizers
        # would make steps of its gradient's rounding errors.
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(
        self, states: torch.Tensor, source: torch.Tensor, mask: torch.Tensor | None,
        is_causal: bool,
    ) -> torch.Tensor:  # fmt: skip
        q = self._heads(self.q(states))
        k, v = (self._heads(layer(source)) for layer in (self.k, self.v))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        out: torch.Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return out

    def _heads(self, values: torch.Tensor) -> torch.Tensor:
        """``(batch, length, width)`` as ``(batch, heads, length, head_size)``."""
        batch, length, width = values.shape
        heads = width // self.head_size  # -1 in its place fails without rows
        return values.view(batch, length, heads, self.head_size).transpose(1, 2)


def check_sizes(*, width: int, num_heads: int, **sizes: int) -> None:
    """Raise ConfigError for sizes below 1, and for a width that the heads cannot share."""
    check_positive(width=width, num_heads=num_heads, **sizes)
    if width % num_heads:
        raise ConfigError(
            f"width must be a multiple of num_heads; received {width} and {num_heads}"
        )
