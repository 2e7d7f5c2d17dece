from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from sparkdl.errors import CommunicationError
from sparkdl.storage.tensor_tree import unpack
from sparkdl.sync.asynchronous.parameter_server import Push, ServerRules, ServerSlice, merge_states

RATE = 0.1
OPTIONS = [{"lr": RATE}]


def make_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for shape in ((3, 2), (4,))
    ]


def rules(world_size: int = 2, **changes: Any) -> ServerRules:
    options = {"world_size": world_size, "is_bulk": False, "timeout_seconds": 20.0, **changes}
    return ServerRules(**options)


def serve(
    given: ServerRules,
    places: Sequence[int] = (0, 1),
    *,
    kind: Any = torch.optim.SGD,
    parameters: Sequence[nn.Parameter] | None = None,
    **options: Any,
) -> ServerSlice:
    model = parameters or make_parameters()
    return ServerSlice(model, places, lambda p: kind(p, lr=9.0, **options), given)


def gradient(number: int) -> torch.Tensor:
    return torch.randn(10, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


def push(served: ServerSlice, rank: int, number: int, share: float = 0.5) -> None:
    (box,) = served.inbox(rank)
    box.flat.copy_(gradient(number))
    served.push(rank, Push(share, OPTIONS))


def pull(served: ServerSlice, rank: int) -> torch.Tensor:
    (box,) = served.pull(rank)
    return box.flat.clone()


def start() -> torch.Tensor:
    (box,) = serve(rules()).pull(0)
    return box.flat


SCRIPT = [("push", 0), ("pull", 0), ("push", 0), ("push", 1), ("push", 1), ("pull", 1), ("push", 0)]


@pytest.mark.parametrize(
    ("strength", "decay"), [(0.0, None), (0.3, None), (0.3, 0.9)], ids=["plain", "DC-c", "DC-a"]
)
def test_pushes_follow_the_formula(strength: float, decay: float | None) -> None:
    served = serve(rules(delay_compensation=strength, compensation_decay=decay))
    expected = start()
    old = {0: expected, 1: expected}
    mean_square = torch.zeros_like(expected)
    for number, (what, rank) in enumerate(SCRIPT):
        if what == "pull":
            torch.testing.assert_close(pull(served, rank), expected, rtol=0, atol=1e-12)
            old[rank] = expected
            continue
        share = 0.25 if rank == 0 else 0.75
        push(served, rank, number, share)
        g = gradient(number)
        strength_now = torch.tensor(strength, dtype=torch.float64)
        if decay is not None:
            mean_square = decay * mean_square + (1 - decay) * g * g
            strength_now = strength / (mean_square + 1e-7).sqrt()
        g = g + strength_now * g * g * (expected - old[rank])
        expected = expected - RATE * share * g
    torch.testing.assert_close(pull(served, 0), expected, rtol=0, atol=1e-12)


def test_what_was_pulled_does_not_change_any_more() -> None:
    served = serve(rules())
    (box,) = served.pull(0)
    before = box.flat.clone()
    push(served, 1, 1)
    assert torch.equal(box.flat, before)
    assert not torch.equal(pull(served, 0), before)


def test_a_rank_ahead_of_the_bound_waits_for_the_slowest() -> None:
    served = serve(rules(lead=1))
    push(served, 0, 1)
    pull(served, 0)  # one step ahead is allowed
    push(served, 0, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pull, served, 0)
        time.sleep(0.3)
        assert not waiting.done()
        began = time.monotonic()
        served.push(1, None)  # an empty batch counts as a step
        fresh = waiting.result(10)
    assert time.monotonic() - began < 5
    expected = start() - RATE * 0.5 * (gradient(1) + gradient(2))
    torch.testing.assert_close(fresh, expected, rtol=0, atol=1e-12)
    push(served, 1, 3)
    pull(served, 1)  # the slowest never waits


def test_without_a_bound_nobody_waits() -> None:
    served = serve(rules(timeout_seconds=0.01))
    for number in range(20):
        push(served, 0, number)
        pull(served, 0)


def test_who_closes_the_round_holds_up_nobody_and_all_end_with_the_same() -> None:
    served = serve(rules(lead=0), kind=torch.optim.Adam)
    push(served, 0, 1)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(served.close_round, 0)
        for number in range(3):
            push(served, 1, number)
            pull(served, 1)
        assert not closing.done()
        (mine,), state = served.close_round(1)
        (theirs,), same_state = closing.result(10)
    assert torch.equal(mine.flat, theirs.flat)
    assert state is same_state
    assert unpack(state.value, state.tensors)["optimizer"][1]["step"] == 4
    before = mine.flat.clone()
    push(served, 0, 5)  # the next round may begin while a peer still reads what this ended with
    assert torch.equal(theirs.flat, before)
    assert torch.equal(mine.flat, before)


def test_in_bulk_the_order_of_arrival_does_not_matter() -> None:
    results = []
    for order in ([0, 1, 2], [2, 0, 1]):
        served = serve(rules(3, is_bulk=True), momentum=0.9)
        for clock in range(3):
            for rank in order:
                push(served, rank, 10 * clock + rank, share=rank + 1)
            for rank in order:
                fresh = pull(served, rank)
        results.append(fresh)
    assert torch.equal(*results)
    expected, velocity = start(), torch.zeros(10, dtype=torch.float64)
    for clock in range(3):
        mean = sum((rank + 1) / 6 * gradient(10 * clock + rank) for rank in range(3))
        velocity = 0.9 * velocity + mean
        expected = expected - RATE * velocity
    torch.testing.assert_close(results[0], expected, rtol=0, atol=1e-12)


def test_in_bulk_nobody_reads_before_all_have_pushed() -> None:
    served = serve(rules(is_bulk=True))
    push(served, 0, 1, share=3.0)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pull, served, 0)
        time.sleep(0.2)
        assert not waiting.done()
        served.push(1, None)
        fresh = waiting.result(10)
    torch.testing.assert_close(fresh, start() - RATE * gradient(1), rtol=0, atol=1e-12)


def test_in_bulk_a_step_without_samples_leaves_the_weights() -> None:
    served = serve(rules(is_bulk=True), momentum=0.9)
    for share in (1.0, None):
        for rank in (0, 1):
            push(served, rank, rank) if share else served.push(rank, None)
        after = pull(served, 0)
        if share:
            before = after
    assert torch.equal(after, before)


def test_the_end_of_a_rank_wakes_who_waits_for_it() -> None:
    served = serve(rules(3, lead=0))
    push(served, 0, 1)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(pull, served, 0), pool.submit(served.close_round, 1)]
        time.sleep(0.1)
        served.leave(2)
        for future in waiting:
            with pytest.raises(CommunicationError, match=r"ranks \[2\] have left"):
                future.result(10)
    with pytest.raises(CommunicationError, match="have left"):
        served.push(0, None)


def test_a_wait_has_an_end() -> None:
    served = serve(rules(lead=0, timeout_seconds=0.2))
    push(served, 0, 1)
    with pytest.raises(CommunicationError, match=r"no answer from the slowest rank for 0.2 s"):
        served.pull(0)


def test_an_error_of_the_optimizer_ends_it_for_all() -> None:
    class Faulty(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ZeroDivisionError("the user's mistake")

    served = serve(rules(lead=0), kind=Faulty)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.close_round, 1)
        with pytest.raises(CommunicationError, match="ZeroDivisionError"):
            push(served, 0, 1)
        with pytest.raises(CommunicationError, match="ZeroDivisionError"):
            waiting.result(10)
    assert isinstance(served.failure, ZeroDivisionError)


def test_state_outlives_a_change_of_slices() -> None:
    given = rules(1, delay_compensation=0.5, compensation_decay=0.9)
    whole = serve(given, kind=torch.optim.Adam)
    push(whole, 0, 1)
    (weights,), agreed = whole.close_round(0)
    sizes = [p.numel() for p in make_parameters()]
    pieces = torch.split(weights.flat, sizes[::-1])[::-1]  # buckets begin with the last parameter
    model = [
        nn.Parameter(piece.clone().view(parameter.shape))
        for piece, parameter in zip(pieces, make_parameters(), strict=True)
    ]
    states = []
    for place in (0, 1):
        part = serve(given, [place], kind=torch.optim.Adam, parameters=model)
        part.load_state(unpack(agreed.value, agreed.tensors))
        _, state = part.close_round(0)
        states.append(unpack(state.value, state.tensors))
    again = serve(given, kind=torch.optim.Adam, parameters=model)
    again.load_state(merge_states(states))
    for served in (whole, again):
        push(served, 0, 2)
        push(served, 0, 3)  # late
    assert torch.equal(pull(whole, 0), pull(again, 0))


def test_a_slice_may_be_empty() -> None:
    served = serve(rules(1), [])
    assert served.pull(0) == []
    _, state = served.close_round(0)
    assert unpack(state.value, state.tensors) == {"optimizer": {}, "mean_squares": {}}


def test_many_ranks_at_once_lose_nothing() -> None:
    served = serve(rules(8, lead=2))

    def train(rank: int) -> None:
        for number in range(20):
            push(served, rank, 100 * rank + number, share=0.125)
            served.pull(rank)
        served.close_round(rank)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    total = sum(gradient(100 * rank + number) for rank in range(8) for number in range(20))
    torch.testing.assert_close(pull(served, 0), start() - RATE / 8 * total, rtol=0, atol=1e-12)
