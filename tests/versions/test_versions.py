"""sparkdl works with the oldest and with the newest packages of its ranges (``make versions``)."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkdl.runtime.versions import TESTED, numbers
from tests.docs.commands import pip_lines
from tests.packaging.archives import copy_sources, run
from tests.versions import program
from tests.versions.conftest import (
    FOLDER,
    PROGRAM,
    RESOLUTIONS,
    UV,
    Environment,
    install,
    make_environment,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

Environments = Callable[[str], Environment]
IS_WHOLE = {"CUDA", "NEWEST_PYTHON"} <= os.environ.keys()
"""Whether the environments have the ends of all ranges; else torch and Python are those here."""


def descend() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Weights and probabilities of class 1 after gradient descent on the program's rows."""
    ids = np.arange(program.ROWS)[:, None]
    features = np.hstack([(ids * np.array([1, 5, 7])) % 17 / 8 - 1, np.ones_like(ids)])
    labels = (features[:, 0] + features[:, 1] > 0).astype(int)
    weights = np.zeros((2, 4))
    for _ in range(program.EPOCHS):
        errors = softmax(features @ weights.T) - np.eye(2)[labels]
        weights -= program.LEARNING_RATE * errors.T @ features / program.ROWS
    return weights, softmax(features @ weights.T)[:, 1]


def softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    powers = np.exp(logits)
    return powers / powers.sum(axis=1, keepdims=True)


def require_equal(printed: str) -> None:
    """What a program has printed of its models is what `descend` computes."""
    weights, probabilities = descend()
    assert len(set(np.round(probabilities, 3))) > 10
    found = json.loads(printed)
    assert found.keys() == program.STRATEGIES.keys()
    for model in found.values():
        layer = np.column_stack([model["weights"]["0.weight"], model["weights"]["0.bias"]])
        np.testing.assert_allclose(layer, weights, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(model["probabilities"], probabilities, rtol=1e-5)


@pytest.mark.parametrize("name", RESOLUTIONS)
def test_trains_in_a_gang_and_in_rounds_and_applies_what_it_has_saved(
    name: str, environments: Environments
) -> None:
    environment = environments(name)
    require_equal(environment.run("python", str(PROGRAM), "apply", str(environment.models)))


def test_the_newest_applies_what_the_oldest_has_saved(environments: Environments) -> None:
    models = environments("oldest").models
    require_equal(environments("newest").run("python", str(PROGRAM), "apply", str(models)))


@pytest.mark.parametrize("name", RESOLUTIONS)
def test_the_doctor_has_nothing_to_say(name: str, environments: Environments) -> None:
    """Of versions above all: those that are here are tested now."""
    said = environments(name).run("sparkdl", "doctor", "--master", "local[2]")
    assert said.endswith("nothing is wrong\n")
    assert "tested" not in said


def test_the_package_knows_what_was_tested(environments: Environments) -> None:
    ran = {name: environments(name).versions() for name in RESOLUTIONS}
    for package, known in TESTED.items():
        found = tuple(short(ran[name][package]) for name in RESOLUTIONS)
        print(f"{package} {' to '.join(ran[name][package] for name in RESOLUTIONS)}")
        are_within = all(numbers(known[0]) <= numbers(one) <= numbers(known[1]) for one in found)
        assert found == known or (are_within and not IS_WHOLE), (
            f"write {found} into TESTED[{package!r}], sparkdl/runtime/versions.py"
        )


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("clone"))


@pytest.mark.parametrize("line", pip_lines())
def test_what_the_pages_say_to_install_fits_together(line: str, clone: Path) -> None:
    python = make_environment(FOLDER / "line")
    install(python, *shlex.split(line)[2:], folder=clone)
    if "--no-deps" not in line:
        run([UV, "pip", "check", "--python", str(python)])


def short(version: str) -> str:
    """The first two numbers of a version."""
    return ".".join(map(str, numbers(version)[:2]))
