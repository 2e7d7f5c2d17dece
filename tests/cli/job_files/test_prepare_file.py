from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sparkdl.cli.job_files.job_file import load_job
from sparkdl.cli.job_files.prepare_file import PrepareJob
from sparkdl.cli.job_files.toml_values import build
from sparkdl.errors import ConfigError

CONF = Path(__file__).parents[3] / "conf"


def job(**sections: Any) -> PrepareJob:
    return build(PrepareJob, {"data": {"path": "d"}, "output": {"path": "o"}} | sections)


def test_the_file_of_conf_can_be_read() -> None:
    loaded = load_job(
        PrepareJob, CONF / "prepare.toml", ["image.encoding=png", "image.size=[4, 6]"]
    )
    assert loaded.image.size == (4, 6)
    assert loaded.split.test == 0.2


def test_what_changes_no_row_is_not_among_the_options_of_the_result() -> None:
    before = job().result_options
    assert job(output={"path": "x", "on_error": "skip", "overwrite": True}).result_options == before
    assert job(output={"path": "o", "rows_per_file": 7}).result_options != before
    assert job(image={"encoding": "png"}).result_options != before
    assert job(split={"seed": 1}).result_options != before


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("data", {"path": "/"}, "name a folder of images"),
        ("data", {"path": "d", "extensions": ["jpg"]}, r"with their dot"),
        ("labels", {"source": "table"}, r"need each other"),
        ("labels", {"names": ["a", "a"]}, "names must differ"),
        ("labels", {"source": "none", "names": ["a"]}, "names can have no effect"),
        ("labels", {"label_col": "class"}, "path_col and label_col are for source = 'table'"),
        ("image", {"size": [4, 4]}, "keeps the files' bytes, so size can have no effect"),
        ("image", {"encoding": "png", "size": [4]}, r"\[height, width\]; received \[4\]"),
        ("image", {"encoding": "png", "size": [4, 4], "shorter_side": 4}, "not both"),
        ("image", {"encoding": "png", "shorter_side": -1}, "at least 1; received -1"),
        ("image", {"encoding": "jpeg", "mode": "RGBA"}, "JPEG has no transparency"),
        ("image", {"encoding": "jpeg", "quality": 0}, "between 1 and 100; received 0"),
        ("image", {"quality": 90}, "quality has no effect with encoding 'file'"),
        ("image", {"encoding": "png", "quality": 95}, "quality has no effect with encoding 'png'"),
        ("image", {"mode": "CMYK"}, r"image.mode must be one of 'RGB', 'L', 'RGBA'; received"),
        ("split", {"validation": 0.5, "test": 0.5}, "leave something for training"),
        ("output", {"path": "o", "rows_per_file": 0}, "at least 1; received 0"),
        ("output", {"path": "o", "on_error": "ignore"}, "must be one of 'fail', 'skip'"),
    ],
)
def test_what_makes_no_sense_is_refused(section: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job(**{section: values})
