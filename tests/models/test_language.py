"""The Transformers that write: what they see, what they learn, and how they can be cut and made."""

from __future__ import annotations

import copy
import math
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.config import TrainConfig
from sparkdl.data.plan import Column, Shard, make_plan
from sparkdl.data.spool.mapped import ShardData
from sparkdl.errors import ConfigError
from sparkdl.models import LanguageModel, SequenceToSequence, TransformerNet
from sparkdl.models.attention import Attention, Block
from tests.train.runs import run, weights

NETWORKS = {
    "language": (LanguageModel, {"num_tokens": 9}),
    "sequence": (SequenceToSequence, {"num_tokens": 9}),
    "encoder": (TransformerNet, {"num_tokens": 9, "num_outputs": 3}),
}
every = pytest.mark.parametrize("name", NETWORKS)


def make(kind: type[nn.Module], **more: Any) -> Any:
    torch.manual_seed(1)
    return kind(**{"num_tokens": 9, "width": 16, "feedforward": 20, **more}).eval()


def own(lengths: list[int]) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def train(module: nn.Module, config: TrainConfig, *parts: dict[str, torch.Tensor]) -> Any:
    """Train on the first part, and measure the loss on the second, if there is one."""
    columns = [
        Column(
            name=name.split()[1], role="label" if name.startswith("label") else "feature",
            dtype=str(values.dtype).removeprefix("torch."), shape=tuple(values.shape[1:]),
            argument=name.split()[1] if name.startswith("feature") else None,
        )
        for name, values in parts[0].items()
    ]  # fmt: skip
    data = [ShardData(f"part {number}", part) for number, part in enumerate(parts)]
    counts = [part.num_rows for part in data]
    shard = Shard(
        shard_id=0, host="", path="", num_rows=counts[0], num_validation_rows=sum(counts[1:]),
        fingerprint="text", num_bytes=0,
    )  # fmt: skip
    plan = make_plan(
        columns=columns, shards=[shard], world_size=1, batch_size=config.batch_size,
        epochs=config.epochs, max_steps=config.max_steps,
    )  # fmt: skip
    return run(module, config, data[:1], validation=data[1:], plan=plan).history


# --- what a place sees --------------------------------------------------------------------------


def test_a_token_changes_its_own_place_and_later_ones_only() -> None:
    net, tokens = make(LanguageModel), torch.randint(0, 9, (2, 7))
    logits = net(tokens)
    for place in range(7):
        other = tokens.clone()
        other[:, place] = (other[:, place] + 1) % 9
        changed = (net(other) != logits).any(1)
        assert not changed[:, :place].any()
        assert changed[:, place:].all()


def test_padding_behind_a_text_changes_nothing() -> None:
    net, tokens = make(LanguageModel), torch.randint(0, 9, (2, 7))
    padded = nn.functional.pad(tokens, (0, 3), value=5)
    torch.testing.assert_close(net(padded)[..., :7], net(tokens))


def test_what_is_written_sees_the_source_and_what_was_written_before() -> None:
    net, source, target = make(SequenceToSequence), torch.randint(0, 9, (1, 4)), own([5]).long()
    logits = net(source, target)
    for place in range(4):
        other = source.clone()
        other[:, place] = (other[:, place] + 1) % 9
        assert (net(other, target) != logits).any(1).all()
    later = target.clone()
    later[:, 3] = 7
    assert ((net(source, later) != logits).any(1)).tolist() == [[False, False, False, True, True]]


def test_padding_of_a_source_changes_nothing_and_it_may_be_empty() -> None:
    net, lengths = make(SequenceToSequence), [5, 0, 2]
    source, target = torch.randint(0, 9, (3, 5)), torch.randint(0, 9, (3, 4))
    together = net(source, target, own(lengths))
    together.sum().backward()
    assert all(p.grad.isfinite().all() for p in net.parameters())
    for row, length in enumerate(lengths):
        short = max(length, 1)
        alone = net(source[[row], :short], target[[row]], own(lengths)[[row], :short])
        torch.testing.assert_close(together[[row]], alone)


# --- how they are made --------------------------------------------------------------------------


@every
def test_half_of_the_heads_is_half_of_what_an_attention_adds(name: str) -> None:
    """Names alone say what a tensor-parallel layout cuts, and no layer keeps a number of heads."""
    kind, arguments = NETWORKS[name]
    modules = dict(make(kind, **arguments).named_modules())
    states = torch.randn(2, 5, 16)

    def half(name: str, rank: int) -> nn.Module:
        part = copy.deepcopy(modules[name])
        for below, layer in part.named_modules():
            if below in ("q", "k", "v", "0"):
                layer.weight = nn.Parameter(layer.weight.chunk(2, 0)[rank])
                if layer.bias is not None:
                    layer.bias = nn.Parameter(layer.bias.chunk(2)[rank])
            if below in ("out", "2"):
                layer.weight = nn.Parameter(layer.weight.chunk(2, 1)[rank])
                layer.bias = nn.Parameter(layer.bias / 2)
        return part

    cut = 0
    for name, module in modules.items():
        if name.endswith((".attention", ".mlp")):
            more = (states.flip(1), None, False) if isinstance(module, Attention) else ()
            parts = [half(name, rank)(states, *more) for rank in range(2)]
            torch.testing.assert_close(parts[0] + parts[1], module(states, *more))
            cut += sum(isinstance(layer, nn.Linear) for layer in module.modules())
    blocks = [module for module in modules.values() if isinstance(module, Block)]
    assert cut == sum(isinstance(m, nn.Linear) for block in blocks for m in block.modules())


@pytest.mark.parametrize("kind", [LanguageModel, SequenceToSequence])
def test_one_made_without_memory_begins_with_the_same_bits(kind: type[nn.Module]) -> None:
    wanted = make(kind).state_dict()
    with torch.device("meta"):
        net = make(kind)
    net.to_empty(device="cpu")
    torch.manual_seed(1)
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            module.reset_parameters()
    assert all(torch.equal(value, wanted[name]) for name, value in net.state_dict().items())


@every
def test_a_batch_may_have_no_rows(name: str) -> None:
    kind, arguments = NETWORKS[name]
    values = torch.zeros(0, 5, dtype=torch.int64)
    rows = {"language": (values,), "sequence": (values, values), "encoder": (values, values > 0)}
    assert len(make(kind, **arguments)(*rows[name])) == 0


def test_dropout_acts_in_training_only() -> None:
    net, tokens = make(LanguageModel, dropout=0.5), torch.randint(0, 9, (2, 7))
    assert torch.equal(net(tokens), net(tokens))
    net.train()
    assert not torch.equal(net(tokens), net(tokens))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="multiple of num_heads; received 15 and 4"):
        LanguageModel(width=15)
    with pytest.raises(ConfigError, match="max_length must be at least 1"):
        SequenceToSequence(max_length=0)
    with pytest.raises(ConfigError, match="9 tokens is longer than max_length=8; cut it"):
        LanguageModel(max_length=8)(torch.zeros(1, 9, dtype=torch.uint8))


# --- what they write ----------------------------------------------------------------------------


def test_a_text_goes_on_with_what_is_likely() -> None:
    net = make(LanguageModel, max_length=4)
    with torch.no_grad():
        for parameter in net.blocks.parameters():
            parameter.zero_()
        net.positions.weight.zero_()
        net.head.bias.zero_()
        after = (torch.arange(9) + 1) % 9  # each token is followed by the next number
        net.head.weight[after] = 3 * net.norm(net.embedding.weight)
    assert net.generate([7], 5, temperature=0) == [7, 8, 0, 1, 2, 3]
    draws = [net.generate([2, 3], 40, temperature, seed(1)) for temperature in (0.1, 1.0, 50.0)]
    odds = [sum(b == (a + 1) % 9 for a, b in pairwise(d[1:])) for d in draws]
    assert odds[0] == 40 and odds[2] < 20
    assert net.generate([2, 3], 40, 50.0, seed(1)) == draws[2]
    with pytest.raises(ConfigError, match="prompt must hold at least one token"):
        net.generate([], 5)
    with pytest.raises(ConfigError, match="temperature must be at least 0"):
        net.generate([1], 5, temperature=-1)


def seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


# --- what they learn ----------------------------------------------------------------------------

SEED = 1
NAMES = ["ann", "bob", "cat", "dan", "eve", "fay", "gus", "hal"]
THINGS = ["map", "nut", "oar", "pen", "rug", "saw", "tub", "urn"]


def stories(num_rows: int) -> torch.Tensor:
    """A sentence each, of a name and a thing that are drawn once and said twice; bytes."""
    draw, rows = random.Random(0), []
    for _ in range(num_rows):
        name, thing = draw.choice(NAMES), draw.choice(THINGS)
        rows.append(f"\n{name} has a {thing} and {name} likes the {thing}. ")
    return torch.tensor([list(row.encode()) for row in rows], dtype=torch.uint8)


def told(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"feature tokens": rows[:, :-1], "label next": rows[:, 1:].long()}


@pytest.mark.slow
def test_a_language_model_comes_close_to_the_entropy_of_a_text() -> None:
    """Nobody can guess names and things; whoever looks back knows all the rest."""
    rows = stories(768)
    entropy = 2 * math.log(8) / (rows.shape[1] - 1)  # 0.1124 a byte: two draws out of 8 in 37
    torch.manual_seed(SEED)
    net = LanguageModel(max_length=37, width=32, feedforward=128)
    config = TrainConfig(
        loss="cross_entropy", optimizer="adam", learning_rate=0.01, epochs=6, batch_size=16
    )
    history = train(net, config, told(rows[:512]), told(rows[512:]))
    # Without looking back, what is said again would be drawn again: twice the entropy.
    assert entropy < history[-1]["val_loss"] < 1.1 * entropy
    said = bytes(net.eval().generate(b"\nfay has a", 26, temperature=0)).decode()
    thing = said[11:14]
    assert said == f"\nfay has a {thing} and fay likes the {thing}"


def test_the_same_steps_give_the_same_bits() -> None:
    config = TrainConfig(
        loss="cross_entropy", optimizer="adam", learning_rate=0.005, epochs=1, batch_size=8
    )
    nets = [make(LanguageModel, num_tokens=256).double() for _ in range(2)]
    losses = [[r["loss"] for r in train(net, config, told(stories(32)))] for net in nets]
    assert losses[0] == losses[1]
    assert torch.equal(weights(nets[0]), weights(nets[1]))


BEGIN, END = 8, 9


def words(num_rows: int) -> dict[str, torch.Tensor]:
    """Words of 1 to 6 of 8 letters, and as labels the same backwards, with an end."""
    draw = random.Random(0)
    found = [[draw.randrange(8) for _ in range(draw.randint(1, 6))] for _ in range(num_rows)]

    def padded(rows: list[list[int]], value: int, width: int) -> torch.Tensor:
        return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])

    return {
        "feature source": padded(found, 0, 6),
        "feature target": padded([[BEGIN, *word[::-1]] for word in found], 0, 7),
        "feature mask": padded([[1] * len(word) for word in found], 0, 6).bool(),
        "label answer": padded([[*word[::-1], END] for word in found], -100, 7),
    }


@pytest.mark.slow
def test_words_are_written_backwards() -> None:
    rows = words(2304)
    first, last = ({name: v[part] for name, v in rows.items()}
                   for part in (slice(2048), slice(2048, None)))  # fmt: skip
    torch.manual_seed(SEED)
    net = SequenceToSequence(num_tokens=10, max_length=7, width=32, num_layers=1, feedforward=64)
    config = TrainConfig(
        loss="cross_entropy", optimizer="adam", learning_rate=0.005, epochs=8, batch_size=64
    )
    train(net, config, first)
    written = torch.full((256, 1), BEGIN)
    with torch.no_grad():
        for _ in range(7):  # each token from those that the network has written itself
            logits = net.eval()(last["feature source"], written, last["feature mask"])
            written = torch.cat([written, logits[..., -1:].argmax(1)], 1)
    answer = last["label answer"]
    right = ((written[:, 1:] == answer) | (answer == -100)).all(1)
    assert right.float().mean() > 0.9
