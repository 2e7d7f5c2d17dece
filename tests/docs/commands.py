"""What is wrong with a shell command of the pages, as far as can be told without running it."""

from __future__ import annotations

import itertools
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

from sparkdl.cli.job_files.job_file import EvaluateJob, PredictJob, TrainJob, load_job
from sparkdl.cli.job_files.prepare_file import PrepareJob
from sparkdl.cli.job_files.study_file import TuneJob
from sparkdl.errors import ConfigError
from tests.docs.blocks import ROOT, Block, pages

KINDS = {
    "train": TrainJob,
    "evaluate": EvaluateJob,
    "predict": PredictJob,
    "prepare": PrepareJob,
    "tune": TuneJob,
}
"""Job -> class of its file."""

_COMMENT = re.compile(r"(^|\s)#\s.*$")
_IN_IMAGES = "/opt/sparkdl/"
"""Where the images of docker/ have the repository's files."""
_FILES = ("--file", "--filename", "--properties-file")
"""Options of several programs whose values are files."""
_OF_THE_SHELL = {"cd", "export", "mkdir", "source", "deactivate"}
_TAKES_A_VALUE = re.compile(r"--[\w-]+$")


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of each command; comments are left out, continued lines joined."""
    for words in _lines_of(block.text.replace("\\\n", " ")):
        command: list[str] = []
        for word in [*words, "&&"]:
            if word in ("&&", "||", "|", ";"):
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def _lines_of(text: str) -> Iterator[list[str]]:
    """The words of each line; a line goes on where a quotation does."""
    line = ""
    for part in text.splitlines():
        part = _COMMENT.sub("", part)
        line = f"{line}\n{part}" if line else part
        try:
            words = shlex.split(line)
        except ValueError:  # a quotation that is still open
            continue
        yield words
        line = ""
    if line:
        raise ValueError(f"a quotation is never closed: {line}")


def pip_lines() -> list[str]:
    """Every command with which a page or a notebook installs something, once."""
    files = [*(ROOT / page for page in pages()), *sorted((ROOT / "notebooks").glob("*.ipynb"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    found = re.findall(r"\bpip install [^`\n#\"&]+", text)
    return sorted({line.strip() for line in found if line.strip() != "pip install"})


def without_variables(command: Sequence[str]) -> list[str]:
    """The command after what it sets for its environment, ``A=b command``."""
    words = list(command)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    return words


def problem(command: Sequence[str]) -> str | None:
    """What is wrong; None if nothing is, or if only running would tell."""
    words = without_variables(command)
    if not words or words[0] in _OF_THE_SHELL:
        return None
    program = words[0].removeprefix(".venv/bin/")
    if "/" in program and (ROOT / program).is_file():
        return _of_files(words)
    checks: dict[str, Callable[[list[str]], str | None]] = {
        "docker": _of_files,
        "kubectl": _of_files,
        "make": _of_make,
        "pip": _of_pip,
        "python": _of_python,
        "spark-class": _of_files,
        "spark-submit": _of_spark_submit,
        "sparkdl": _of_sparkdl,
    }
    if program not in checks:
        return f"nobody knows {program!r} here; name the reason in a comment <!-- not run: ... -->"
    return checks[program](words[1:])


def _of_make(words: list[str]) -> str | None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", text, re.MULTILINE))
    wrong = [word for word in words if "=" not in word and word not in targets]
    return f"make has no target {wrong}" if wrong else None


def _of_pip(words: list[str]) -> str | None:
    text = (ROOT / "setup.py").read_text(encoding="utf-8")
    known = set(re.findall(r'^    "(\w+)": \[', text, re.MULTILINE)) | {"all", "dev"}
    for word in words:
        match = re.fullmatch(r"(?:sparkdl-torch|\.)\[([\w,]+)\]", word)
        wrong = set(match[1].split(",")) - known if match else set()
        if wrong:
            return f"there are no extras {sorted(wrong)}"
    return _first_missing(
        [f"./{after}" for word, after in itertools.pairwise(words) if word == "-r"]
    )


def _of_python(words: list[str]) -> str | None:
    if not words or words[0].startswith("-"):
        return None
    if words[0].startswith("jobs/"):
        return _of_job(words)
    return _first_missing(words[:1])


def _of_files(words: list[str]) -> str | None:
    """The files that the options of any program name."""
    return _first_missing([value for name, value in itertools.pairwise(words) if name in _FILES])


def _of_spark_submit(words: list[str]) -> str | None:
    if (missing := _of_files(words)) is not None:
        return missing
    while words and words[0].startswith("-"):
        has_value = bool(_TAKES_A_VALUE.match(words[0])) and words[0] not in ("--verbose",)
        words = words[2 if has_value else 1 :]
    return _of_job(words) if words else "spark-submit needs a program"


def _of_job(words: list[str]) -> str | None:
    script, options = words[0].removeprefix("local://"), words[1:]
    if not is_ours(script):
        return None
    script = script.removeprefix(_IN_IMAGES)
    if (missing := _first_missing([script])) or "--config" not in options:
        return missing
    kind = KINDS[script.removeprefix("jobs/").removesuffix(".py")]
    return _of_options(kind, options)


def _of_options(kind: type, options: Sequence[str]) -> str | None:
    """The job file and the settings of ``--config FILE --set KEY=VALUE ...``."""
    pairs = list(itertools.pairwise(options))
    config = next((value for name, value in pairs if name == "--config"), None)
    if config is None:
        return "--config is missing"
    if not is_ours(config):
        return None
    try:
        load_job(
            kind,
            ROOT / config.removeprefix(_IN_IMAGES),
            [value for name, value in pairs if name == "--set"],
        )
    except ConfigError as error:
        return str(error)
    return None


def _of_sparkdl(words: list[str]) -> str | None:
    """The job file and settings, where the command takes them; that there is such a command."""
    if find_spec("sparkdl.cli") is None:
        return "the package has no command sparkdl"
    if words[:1] and words[0] in KINDS and "--config" in words:
        return _of_options(KINDS[words[0]], words[1:])
    return None


def is_ours(path: str) -> bool:
    """Whether a path means a file of the repository; a name without a folder is the reader's."""
    return path.startswith(_IN_IMAGES) or ("/" in path and not re.match(r"/|\w+:|~", path))


def _first_missing(paths: Sequence[str]) -> str | None:
    ours = [path.removeprefix(_IN_IMAGES) for path in paths if is_ours(path)]
    missing = [path for path in ours if not (ROOT / path).exists()]
    return f"there is no {missing[0]}" if missing else None


def runnable(command: Sequence[str]) -> list[str] | None:
    """The command as the tests run it, with little work to do; None: it is only looked at."""
    words = without_variables(command)
    if words[:2] == ["python", "jobs/digits.py"]:
        return [sys.executable, *words[1:]]
    if words[0] != "spark-submit" or not words[1].startswith("jobs/"):
        return None
    short = {"train": ["estimator.epochs=1"], "tune": ["estimator.epochs=1", "study.trials=1"]}
    job = words[1].removeprefix("jobs/").removesuffix(".py")
    return [*words, *(word for key in short.get(job, []) for word in ("--set", key))]
