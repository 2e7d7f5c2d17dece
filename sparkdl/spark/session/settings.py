"""The entries ``spark.sparkdl.*`` of the session: what belongs to a cluster, not to a model."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from pyspark.sql import SparkSession

from sparkdl.config import require
from sparkdl.errors import ConfigError, did_you_mean
from sparkdl.spark.session.compat import conf

logger = logging.getLogger(__name__)

_PREFIX = "spark.sparkdl."
CHANNEL_MODES = ("auto", "driver", "workers")


def _boolean(text: str) -> bool:
    values = {"true": True, "false": False}
    if text.strip().lower() not in values:
        raise ValueError(f"{text!r}; write true or false")
    return values[text.strip().lower()]


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text!r}; write a number of seconds, such as 10") from None


def _port(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r}; write a port number, or 0 for any") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _entry(name: str, convert: Callable[[str], object], default: object) -> Any:
    """The field that ``spark.sparkdl.<name>`` fills."""
    metadata = {"entry": f"{_PREFIX}{name}", "convert": convert}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time-outs and addresses. Read with `read_settings`."""

    heartbeat_timeout_seconds: float = _entry("heartbeatTimeout", _seconds, 60.0)
    """Silence after which a worker counts as hung, if its process does not use the CPU either."""
    start_timeout_seconds: float = _entry("startTimeout", _seconds, 120.0)
    """Longest wait for executors to register, and for the others once one worker has started."""
    queue_timeout_seconds: float = _entry("queueTimeout", _seconds, 3600.0)
    """Longest wait for slots that other jobs hold, and for other executors after a loss."""
    elastic_wait_seconds: float = _entry("elasticWait", _seconds, 10.0)
    """Time for which a gang that may have fewer workers waits for the others before it starts, and
    for which new slots must have been there before it starts again with more."""
    cache_bytes: str | None = _entry("cacheBytes", str, None)
    """Size of all spools that are kept in a host's ``cacheDir``, such as 100g; None: a quarter of
    its disk."""
    collective_timeout_seconds: float = _entry("collectiveTimeout", _seconds, 600.0)
    """Longest wait for the peers in one collective."""
    channel: str = _entry("channel", str, "auto")
    """Host of the channel: ``driver``, ``workers``, or ``auto``: the driver unless out of reach."""
    channel_port: int = _entry("channel.port", _port, 0)
    """Port of the driver's channel; 0 takes a free one."""
    allow_unencrypted: bool = _entry("allowUnencrypted", _boolean, False)
    """Train although Spark encrypts its traffic or files, as gangs and spools do not."""
    trusted_packages: tuple[str, ...] = _entry("trustedPackages", _names, ())
    """Packages whose code saved models may name, with commas between; see `serialization.trust`."""

    def __post_init__(self) -> None:
        is_mode = self.channel in CHANNEL_MODES
        require(is_mode, f"spark.sparkdl.channel must be one of {CHANNEL_MODES}", self.channel)
        for one in fields(self):
            value, rule = getattr(self, one.name), "must be a positive number of seconds"
            if one.name.endswith("_seconds"):
                require(value > 0, f"{one.metadata['entry']} {rule}", value)
        rule = "spark.sparkdl.channel.port must be a port number, or 0 for any"
        require(0 <= self.channel_port < 2**16, rule, self.channel_port)


def session_settings(spark: SparkSession) -> Settings:
    """Return the settings of a session; warns of unknown entries. Raises ConfigError."""
    for name in spark.conf.getAll:
        if name.startswith(_PREFIX):
            _warn_if_unknown(name)
    return read_settings(partial(conf, spark))


@functools.cache  # once in a process
def _warn_if_unknown(name: str) -> None:
    known = [one.metadata["entry"] for one in fields(Settings)]
    if name not in known:
        hint = did_you_mean(name.removeprefix(_PREFIX), [n.removeprefix(_PREFIX) for n in known])
        logger.warning("%s has no effect: sparkdl has no such entry%s", name, hint)


def read_settings(get: Callable[[str], str | None]) -> Settings:
    """Read the entries; raises ConfigError."""
    values: dict[str, Any] = {}
    for one in fields(Settings):
        entry = one.metadata["entry"]
        if (text := get(entry)) is None:
            continue
        try:
            values[one.name] = one.metadata["convert"](text)
        except ValueError as error:
            raise ConfigError(f"{entry} has a wrong value: {error}") from error
    return Settings(**values)
