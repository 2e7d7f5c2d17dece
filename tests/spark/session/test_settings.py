"""Entries spark.sparkdl.* become checked values."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from sparkdl.errors import ConfigError
from sparkdl.spark.session.settings import Settings, read_settings, session_settings


def read(**entries: str) -> Settings:
    texts = {f"spark.sparkdl.{name.replace('_', '.')}": text for name, text in entries.items()}
    return read_settings(texts.get)


def test_defaults() -> None:
    assert read() == Settings()


def test_every_entry_has_an_effect() -> None:
    found = read(
        heartbeatTimeout="2.5", startTimeout="30", collectiveTimeout="60", channel="workers",
        queueTimeout="90", elasticWait="3", cacheBytes="9g",
        channel_port="7077", allowUnencrypted=" True ", trustedPackages="mine, timm.models",
    )  # fmt: skip
    assert found == Settings(
        heartbeat_timeout_seconds=2.5,
        start_timeout_seconds=30.0,
        collective_timeout_seconds=60.0,
        queue_timeout_seconds=90.0,
        elastic_wait_seconds=3.0,
        cache_bytes="9g",
        channel="workers",
        channel_port=7077,
        allow_unencrypted=True,
        trusted_packages=("mine", "timm.models"),
    )
    changed = [
        field.name
        for field in dataclasses.fields(Settings)
        if getattr(found, field.name) != getattr(Settings(), field.name)
    ]
    assert len(changed) == len(dataclasses.fields(Settings))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"heartbeatTimeout": "10s"}, "heartbeatTimeout has a wrong value: '10s'; write a number"),
        ({"heartbeatTimeout": "0"}, "spark.sparkdl.heartbeatTimeout must be .* received 0"),
        ({"queueTimeout": "0"}, "spark.sparkdl.queueTimeout must be .* received 0"),
        ({"queueTimeout": "nan"}, "spark.sparkdl.queueTimeout must be .* received nan"),
        ({"startTimeout": "-1"}, "spark.sparkdl.startTimeout must be .* received -1"),
        ({"collectiveTimeout": "nan"}, "spark.sparkdl.collectiveTimeout must be .* received nan"),
        ({"channel": "rank0"}, "spark.sparkdl.channel must be one of .* received 'rank0'"),
        ({"channel_port": "http"}, "channel.port has a wrong value: 'http'; write a port"),
        ({"channel_port": "70000"}, "spark.sparkdl.channel.port must be .* received 70000"),
        (
            {"allowUnencrypted": "yes"},
            "spark.sparkdl.allowUnencrypted has a wrong value: .*'yes'; write true or false",
        ),
    ],
)
def test_wrong_values_name_the_entry(entries: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**entries)


def test_an_entry_that_is_none_gets_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    entries = {"spark.sparkdl.elasticWait": "3", "spark.sparkdl.elasticwait": "4", "spark.x": "1"}
    spark: Any = SimpleNamespace(conf=SimpleNamespace(getAll=entries, get=entries.get))
    for _ in range(2):
        assert session_settings(spark).elastic_wait_seconds == 3
    (said,) = caplog.messages
    assert said == (
        "spark.sparkdl.elasticwait has no effect: sparkdl has no such entry; did you mean "
        "'elasticWait'?"
    )
