"""Objects that name the attributes which a checkpoint must hold of them."""

from __future__ import annotations

from typing import Any, ClassVar


class Stateful:
    """Gives and takes back the state that its class names; a subclass may add to it.

    A tensor and another `Stateful`, or a list of either, are restored in place; anything else is
    replaced.
    """

    shared_state: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes that `state_dict` holds, without an underscore in front of them."""
    rank_state: ClassVar[tuple[str, ...]] = ()
    """Names of those that `rank_state_dict` holds, likewise."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is equal on all ranks (steps, thresholds, outer momentum)."""
        return {name: _saved(_get(self, name), "state_dict") for name in self.shared_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for name in self.shared_state:
            _restore(self, name, state[name], "load_state_dict")

    def rank_state_dict(self) -> dict[str, Any]:
        """Return the state that only this rank has (residuals)."""
        return {name: _saved(_get(self, name), "rank_state_dict") for name in self.rank_state}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `rank_state_dict` gave."""
        for name in self.rank_state:
            _restore(self, name, state[name], "load_rank_state_dict")


def _attribute(owner: object, name: str) -> str:
    return name if hasattr(owner, name) else f"_{name}"


def _get(owner: object, name: str) -> Any:
    return getattr(owner, _attribute(owner, name))


def _saved(value: Any, give: str) -> Any:
    if isinstance(value, Stateful):
        return getattr(value, give)()
    return [_saved(one, give) for one in value] if isinstance(value, list) else value


def _restore(owner: object, name: str, saved: Any, take: str) -> None:
    setattr(owner, _attribute(owner, name), _restored(_get(owner, name), saved, take))


def _restored(now: Any, saved: Any, take: str) -> Any:
    if isinstance(now, Stateful):
        getattr(now, take)(saved)
        return now
    if isinstance(now, list) and isinstance(saved, list) and len(now) == len(saved):
        return [_restored(one, value, take) for one, value in zip(now, saved, strict=True)]
    if hasattr(now, "copy_") and saved is not None:  # a tensor, perhaps on another device
        return now.copy_(saved)
    return saved
