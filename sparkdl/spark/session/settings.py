"""The Spark configuration entries of sparkdl, and their defaults.

Operational settings are entries ``spark.sparkdl.*`` of the session rather than Params: they
belong to a cluster, not to a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparkdl.errors import ConfigError

CHANNEL_MODES = ("auto", "driver", "workers")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time-outs and addresses. Read with `read_settings`."""

    heartbeat_timeout_seconds: float = 60.0
    """``spark.sparkdl.heartbeatTimeout``: silence after which a worker counts as hung, if its
    process does not use the CPU either."""
    start_timeout_seconds: float = 120.0
    """``spark.sparkdl.startTimeout``: longest wait for executors to register, and for the other
    workers once one has started."""
    queue_timeout_seconds: float = 3600.0
    """``spark.sparkdl.queueTimeout``: longest wait for slots that other jobs hold, and for other
    executors after a loss."""
    collective_timeout_seconds: float = 600.0
    """``spark.sparkdl.collectiveTimeout``: longest wait for the peers in one collective."""
    channel: str = "auto"
    """``spark.sparkdl.channel``: ``driver`` and ``workers`` say who hosts the channel; ``auto``
    is the driver, unless executors cannot reach it."""
    channel_port: int = 0
    """``spark.sparkdl.channel.port``: port of the driver's channel; 0 takes a free one."""
    allow_unencrypted: bool = False
    """``spark.sparkdl.allowUnencrypted``: train although Spark encrypts its own traffic and
    files, while the gang's collectives are plain TCP and the spool is plain files."""
    trusted_packages: tuple[str, ...] = ()
    """``spark.sparkdl.trustedPackages``: packages whose code saved models may name, with commas
    between; see `serialization.trust`."""

    def __post_init__(self) -> None:
        if self.channel not in CHANNEL_MODES:
            raise ConfigError(
                f"spark.sparkdl.channel must be one of {CHANNEL_MODES}; received {self.channel!r}"
            )
        for field in ("heartbeat", "start", "queue", "collective"):
            seconds = getattr(self, f"{field}_timeout_seconds")
            if not seconds > 0:
                raise ConfigError(
                    f"spark.sparkdl.{field}Timeout must be a positive number of seconds; "
                    f"received {seconds:g}"
                )
        if not 0 <= self.channel_port < 2**16:
            raise ConfigError(
                f"spark.sparkdl.channel.port must be a port number, or 0 for any; "
                f"received {self.channel_port}"
            )


def _boolean(text: str) -> bool:
    values = {"true": True, "false": False}
    if text.strip().lower() not in values:
        raise ValueError(f"{text!r}; write true or false")
    return values[text.strip().lower()]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


_ENTRIES: dict[str, tuple[str, Callable[[str], object]]] = {
    "heartbeat_timeout_seconds": ("heartbeatTimeout", float),
    "start_timeout_seconds": ("startTimeout", float),
    "queue_timeout_seconds": ("queueTimeout", float),
    "collective_timeout_seconds": ("collectiveTimeout", float),
    "channel": ("channel", str),
    "channel_port": ("channel.port", int),
    "allow_unencrypted": ("allowUnencrypted", _boolean),
    "trusted_packages": ("trustedPackages", _names),
}


def read_settings(get: Callable[[str], str | None]) -> Settings:
    """Read the entries; raises ConfigError."""
    values: dict[str, object] = {}
    for field, (entry, convert) in _ENTRIES.items():
        text = get(f"spark.sparkdl.{entry}")
        if text is None:
            continue
        try:
            values[field] = convert(text)
        except ValueError as error:
            raise ConfigError(f"spark.sparkdl.{entry} has a wrong value: {error}") from error
    return Settings(**values)  # type: ignore[arg-type] # converted by the table above
