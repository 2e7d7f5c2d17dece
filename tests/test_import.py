from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparkdl
from sparkdl.errors import SparkDLError
from sparkdl.runtime import installation

ROOT = Path(__file__).parent.parent
MOST_MODULES = 40
"""That the import may bring along; numpy alone would bring hundreds. Each costs time, which
`benchmarks/importing.py` measures."""


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_import_takes_neither_torch_nor_pyspark() -> None:
    heavy = run_python(
        "import sys, sparkdl\n"
        "print(sorted({'torch', 'pyspark', 'pyarrow', 'numpy', 'pandas'} & set(sys.modules)))"
    )
    assert heavy.strip() == "[]"


def test_a_folder_of_this_name_without_code_is_not_imported(tmp_path: Path) -> None:
    """Such as a clone, from the folder above it; its data is no package of this one either."""
    (tmp_path / "sparkdl" / "data").mkdir(parents=True)
    code = "import sparkdl.data.plan as plan, sparkdl; print(sparkdl.__file__, plan.__file__)"
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, cwd=tmp_path, env=others, check=True, capture_output=True)
    assert told.stdout.count(b"__init__.py") == 1
    assert str(tmp_path).encode() not in told.stdout


def test_import_brings_few_modules() -> None:
    code = (
        "import json, sys; before = set(sys.modules); import sparkdl\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    modules = json.loads(run_python(code))
    assert "sparkdl.errors" in modules
    assert len(modules) <= MOST_MODULES, modules


@pytest.mark.slow
def test_a_fit_without_a_mesh_imports_no_compiler_on_the_driver() -> None:
    """Which would take 2 s; it serves torch.compile and torch's own division of models."""
    code = (
        "import sys; from tests.spark.fit.requests import request\n"
        "import sparkdl.estimator, sparkdl.spark.fit.fit, sparkdl.spark.fit.gang_fit\n"
        "import sparkdl.spark.rounds.round_driver, sparkdl.worker.training, sparkdl.train.loop\n"
        "from sparkdl.spark.fit.check_request import check_values\n"
        "check_values(request(optimizer='adam', optimizer_params={'weight_decay': 0.1}))\n"
        "from sparkdl.train.optimizers import check_optimizer\n"
        "from sparkdl.train.optimizers.without_compiler import without_compiler\n"
        "from torch import nn, ones, optim\n"
        "with without_compiler():\n"
        "    check_optimizer.check_kept('optimizer', optim.SGD([nn.Parameter(ones(1))], lr=0.1))\n"
        "print(sorted({'torch._dynamo', 'sympy', 'torch.distributed.fsdp'} & set(sys.modules)))\n"
        "import torch; torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)\n"
        "print('torch._dynamo' in sys.modules)"
    )
    assert run_python(code).splitlines() == ["[]", "True"]


EVERY_OPTIMIZER = """
import copy, sys, torch
from torch import nn, optim
from sparkdl.train.optimizers.without_compiler import without_compiler

def trained(kind):
    torch.manual_seed(0)
    net = nn.Linear(3, 4, bias=False)
    made = kind(net.parameters(), lr=0.01)
    for _ in range(3):
        made.zero_grad()
        net(torch.ones(2, 3)).square().sum().backward()
        made.step()
    made.load_state_dict(copy.deepcopy(made.state_dict()))
    return [net.weight.tolist(), torch.is_grad_enabled()]

kinds = [kind for kind in vars(optim).values() if isinstance(kind, type)]
odd = (optim.Optimizer, optim.LBFGS, optim.SparseAdam)
kinds = [kind for kind in kinds if issubclass(kind, optim.Optimizer) and kind not in odd]
with without_compiler(in_steps=True), without_compiler():
    without = [trained(kind) for kind in kinds]
found = "torch._dynamo" in sys.modules
usual = [trained(kind) for kind in kinds]
print(len(kinds) > 10, found, "torch._dynamo" in sys.modules, without == usual)
"""


@pytest.mark.slow
def test_every_optimizer_of_torch_takes_the_same_steps_without_the_compiler() -> None:
    assert run_python(EVERY_OPTIMIZER).split() == ["True", "False", "True", "True"]


@pytest.mark.slow
def test_what_a_worker_imports_to_train_brings_no_compiler() -> None:
    code = (
        "import sys; from sparkdl.spark.daemon import preload; preload()\n"
        "import sparkdl.worker.divided.sent_weights, sparkdl.worker.divided.stored_weights\n"
        "import sparkdl.worker.round_task, sparkdl.train.round_replica\n"
        "print(sorted({'torch._dynamo', 'sympy', 'torch.distributed.fsdp'} & set(sys.modules)))"
    )
    assert run_python(code).strip() == "[]"


@pytest.mark.slow
def test_workers_import_no_templates() -> None:
    """Pages are made on the driver, and what shows them takes long to import."""
    code = (
        "import sys, sparkdl.estimator, sparkdl.model, sparkdl.runner\n"
        "import sparkdl.worker.training, sparkdl.worker.round_task, sparkdl.worker.function_rank\n"
        "print('jinja2' in sys.modules)\n"
        "from sparkdl.report.page.render import render; render('unreadable.html', text='')\n"
        "print('jinja2' in sys.modules)"
    )
    assert run_python(code).splitlines() == ["False", "True"]


def test_import_adds_no_log_handler() -> None:
    code = "import logging, sparkdl; print(len(logging.getLogger('sparkdl').handlers))"
    assert run_python(code).strip() == "0"
    assert logging.getLogger("sparkdl.any").parent is not None


@pytest.mark.parametrize("name", sparkdl.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(sparkdl, name) is not None
    assert name in dir(sparkdl)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'TorchClasifier'"):
        _ = sparkdl.TorchClasifier


@pytest.mark.parametrize("metadata", ["sparkdl-0.2.2.dist-info", "sparkdl-1.0.egg-info"])
def test_a_mixed_installation_is_refused(tmp_path: Path, metadata: str) -> None:
    package_file = tmp_path / "sparkdl" / "__init__.py"
    (tmp_path / "sparkdl_torch-0.1.dist-info").mkdir()
    installation.refuse_mixed_installation(str(package_file))
    (tmp_path / metadata).mkdir()
    with pytest.raises(SparkDLError, match="pip uninstall -y sparkdl sparkdl-torch"):
        installation.refuse_mixed_installation(str(package_file))
