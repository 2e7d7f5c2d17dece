"""What the doctor makes of what the workers have seen."""

from __future__ import annotations

from typing import Any

from sparkdl.cli.doctor.trial_gang import (
    bytecode_findings,
    disk_finding,
    gpus_finding,
    workers_finding,
)


def rank(host: str = "a", gpu: str | None = None, device: str = "cpu", **values: Any) -> Any:
    return {
        "host": host,
        "device": device,
        "gpu": gpu,
        "has_cuda_build": False,
        "seconds": 0.004,
        "is_right": True,
        "folder": "/spark",
        "free_bytes": 50 * 10**9,
        "keeps_bytecode": True,
        **values,
    }


def test_the_gang_shows_its_hosts_and_the_slowest() -> None:
    found = workers_finding([rank("b"), rank("a", seconds=0.012)], 1.26)
    assert found.state == "ok"
    assert found.text == (
        "2 on 2 hosts (a, b), together after 1.3 s; an all-reduce of 4 MB takes 12 ms"
    )


def test_many_hosts_are_cut_short() -> None:
    assert "(h0, h1, h2, h3, ...)" in workers_finding([rank(f"h{n}") for n in range(9)], 1).text


def test_a_wrong_sum_is_wrong() -> None:
    assert workers_finding([rank(), rank(is_right=False)], 1).state == "wrong"


def test_no_gpus_are_fine_unless_spark_schedules_some() -> None:
    assert gpus_finding([rank()], 0).state == "ok"
    without = gpus_finding([rank()], 2)
    assert without.state == "wrong"
    assert "schedules 2 per executor, but torch there is a build without CUDA" in without.text
    assert "finds no CUDA device" in gpus_finding([rank(has_cuda_build=True)], 2).text


def test_a_gpu_for_each_worker() -> None:
    seen = [rank("a", "H100", "cuda:0"), rank("b", "H100", "cuda:0"), rank("b", "L4", "cuda:1")]
    found = gpus_finding(seen, 1)
    assert (found.state, found.text) == ("ok", "one for each worker: 2 x H100, 1 x L4")


def test_workers_that_share_a_gpu_are_noted() -> None:
    found = gpus_finding([rank("a", "L4", "cuda:0"), rank("a", "L4", "cuda:0")], 1)
    assert found.state == "note"
    assert "2 workers share 1 of" in found.text


def test_some_without_a_gpu_are_wrong() -> None:
    found = gpus_finding([rank("a", "L4", "cuda:0"), rank("b")], 1)
    assert found.state == "wrong"
    assert found.text.startswith("1 of 2 workers have one")


def test_the_fullest_disk_is_shown() -> None:
    found = disk_finding([rank("a"), rank("b", free_bytes=2 * 10**9)])
    assert (found.state, found.text) == ("ok", "2.0 GB free for spools in /spark on b")
    little = disk_finding([rank("a", free_bytes=10**8)])
    assert little.state == "note"
    assert "spark.local.dir" in little.text


def test_workers_that_compile_each_time_are_noted() -> None:
    assert list(bytecode_findings([rank("a"), rank("b")])) == []
    (found,) = bytecode_findings([rank("a"), rank("b", keeps_bytecode=False)])
    assert found.state == "note"
    assert "the workers on b; each new Python worker compiles" in found.text
