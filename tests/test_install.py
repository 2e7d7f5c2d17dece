"""The locks agree with setup.py and with each other; uv takes what pip would, or pip does."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def declared() -> dict[str, list[str]]:
    """What setup.py asks for: the core, each extra, and the tools of development."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    values = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("CORE", "EXTRAS", "TOOLS")
    }
    return {"core": values["CORE"], "tools": values["TOOLS"], **values["EXTRAS"]}


def test_a_lock_leaves_out_local_versions_and_what_torch_pins() -> None:
    versions = {"torch": "2.13.0+cpu", "nvidia-nccl-cu13": "2", "triton": "3", "numpy": "2.4.6"}
    text = load("lock").lock_text({**versions, "sparkdl-torch": "0.1"}, "somebody installs")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert lines == ["numpy==2.4.6", "torch==2.13.0"]
    assert text.startswith("# Every version that somebody installs.")


def test_the_lock_of_training_is_a_small_part_of_the_other() -> None:
    training, development = pins("requirements.lock"), pins("requirements-dev.lock")
    assert training.items() < development.items()
    assert len(training) <= 31
    assert not training.keys() & {"pytest", "mypy", "sphinx", "onnx", "transformers", "uv"}


@pytest.mark.parametrize(
    ("lock", "extras"),
    [
        ("requirements.lock", ["core", "spark", "torch", "demo"]),
        ("requirements-dev.lock", list(declared())),
    ],
)
def test_locked_versions_are_in_the_ranges_of_setup_py(lock: str, extras: list[str]) -> None:
    versions = pins(lock)
    asked_for = declared()
    for requirement in (Requirement(line) for extra in extras for line in asked_for[extra]):
        name = requirement.name.lower().replace("_", "-")
        assert requirement.specifier.contains(versions[name]), f"{requirement}, {versions[name]}"


def test_uv_is_given_pips_settings() -> None:
    install = load("install")
    settings = install.settings_of(
        "global.index-url='https://one.example/simple'\n"
        "install.index-url='https://two.example/simple'\n"
        "global.extra-index-url='file:///a/simple\\nfile:///b/simple'\n"
        "global.find-links='/wheels'\n"
        ":env:.find-links='/other wheels=1'\n"
        ":env:.default-timeout='180'\n"
        "global.constraint='/limits.txt'\n"
        "download.no-binary=':all:'\n"
    )
    assert install.uv_options(settings) == [
        "--index-strategy", "unsafe-best-match", "--default-index", "https://two.example/simple",
        "--index", "file:///a/simple", "--index", "file:///b/simple",
        "--find-links", "/other", "--find-links", "wheels=1", "--constraints", "/limits.txt",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no-binary"):
        install.uv_options({"no-binary": ":all:"})


class Environment:
    """A virtual environment of which Python and uv are scripts that write down their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = folder / "calls"
        self.settings = folder / "settings"
        self.settings.write_text("global.find-links='/wheels'\n", encoding="utf-8")
        # -m pip config list: the settings; -m pip install ... uv: an executable uv.
        self.write(
            "python",
            f'echo "$*" >> {self.calls}\n'
            f'if [ "$3" = config ]; then cat {self.settings}; exit; fi\n'
            f'for last; do :; done; [ "$last" != uv ] || cp {folder}/new-uv {folder}/bin/uv',
        )
        self.uv_ends_with(0)

    def write(self, name: str, body: str) -> Path:
        path = self.folder / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    def uv_ends_with(self, status: int) -> None:
        self.write("uv", f'echo "uv $*" >> {self.calls}; exit {status}').rename(
            self.folder / "new-uv"
        )

    def said(self) -> list[str]:
        return self.calls.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


@pytest.fixture
def install(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delenv("INSTALLER", raising=False)
    monkeypatch.setattr(sys, "executable", str(environment.folder / "bin" / "python"))
    return load("install")


PIP = "-m pip install --quiet --disable-pip-version-check"


def test_uv_is_fetched_once_and_installs(environment: Environment, install: ModuleType) -> None:
    for _ in range(2):
        assert install.main(["-r", "some.lock"]) == 0
    said = environment.said()
    assert said.count("-m pip config list") == 2
    assert said.count(f"{PIP} --constraint {ROOT}/requirements-dev.lock uv") == 1
    rest = [line for line in said if line.startswith("uv ")]
    assert len(rest) == 4
    for line in rest:
        assert line.startswith("uv pip install --quiet --python ")
        assert " --find-links /wheels " in line
        assert " -r some.lock" in line
    assert [line.endswith(" --no-deps") for line in rest] == [True, False, True, False]


def test_packages_without_their_dependencies(environment: Environment, install: ModuleType) -> None:
    assert install.main(["--no-deps", "petastorm"]) == 0
    assert sum(line.startswith("uv ") for line in environment.said()) == 1


def test_pip_installs_where_uv_fails(
    environment: Environment, install: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.uv_ends_with(2)
    assert install.main(["-r", "some.lock"]) == 0
    assert environment.said()[-1] == f"{PIP} --no-compile -r some.lock"
    assert "installing with pip, since uv ended with status 2" in capsys.readouterr().err


def test_pip_installs_where_uv_cannot_be_fetched(
    environment: Environment, install: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    (environment.folder / "new-uv").unlink()
    assert install.main(["-r", "some.lock"]) == 0
    assert environment.said()[-1] == f"{PIP} --no-compile -r some.lock"
    assert "installing with pip, since python ended with status 1" in capsys.readouterr().err


def test_pip_installs_with_settings_that_uv_does_not_know(
    environment: Environment, install: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.settings.write_text("install.no-binary=':all:'\n", encoding="utf-8")
    assert install.main(["-r", "some.lock"]) == 0
    assert environment.said()[-1] == f"{PIP} --no-compile -r some.lock"
    assert "no counterpart of pip's setting 'no-binary'" in capsys.readouterr().err


def test_pip_installs_if_asked_for(
    environment: Environment, install: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INSTALLER", "pip")
    assert install.main(["-r", "some.lock"]) == 0
    assert environment.said() == [f"{PIP} --no-compile -r some.lock"]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with an environment that is complete, whose Python writes down its arguments."""
    copy = tmp_path / "clone"
    shutil.copytree(ROOT / ".ci", copy / ".ci")
    for name in ("Makefile", "setup.py", "requirements.lock", "requirements-dev.lock"):
        shutil.copy(ROOT / name, copy)
    (copy / ".venv").mkdir()
    Environment(copy / ".venv").write("python", f'echo "$*" >> {copy}/calls')
    (copy / "calls").touch()
    shutil.copy(copy / "setup.py", copy / ".venv" / "installed.setup")
    shutil.copy(copy / "requirements.lock", copy / ".venv" / "installed.lock")
    shutil.copy(copy / "requirements-dev.lock", copy / ".venv" / "installed-dev.lock")
    return copy


def make(clone: Path, target: str) -> list[str]:
    """Run it; the last arguments of each call of the environment's Python."""
    program = shutil.which("make")
    assert program is not None
    # check_prerequisites.sh is tested elsewhere; here no Java is needed.
    (clone / ".ci" / "check_prerequisites.sh").write_text("#!/bin/sh\necho python3\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        [program, target], cwd=clone, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [line.rpartition(" ")[2] for line in (clone / "calls").read_text().splitlines()]


def test_a_complete_environment_is_left_alone(clone: Path) -> None:
    assert make(clone, "tools") == []


def test_a_lock_that_has_changed_is_installed(clone: Path) -> None:
    (clone / "requirements-dev.lock").write_text("pytest==1.0\n", encoding="utf-8")
    assert make(clone, "setup") == []
    assert make(clone, "tools") == ["requirements-dev.lock"]
    assert make(clone, "tools") == ["requirements-dev.lock"]  # not again


def test_a_new_environment_gets_no_tools_for_training(clone: Path) -> None:
    for record in (clone / ".venv").glob("installed*"):
        record.unlink()
    assert make(clone, "setup") == ["requirements.lock", "."]
    assert make(clone, "tools") == ["requirements.lock", ".", "requirements-dev.lock"]
