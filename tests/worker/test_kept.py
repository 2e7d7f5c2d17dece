from __future__ import annotations

import contextlib

from sparkdl.worker.kept import KeptBetweenTasks


def test_one_value_is_kept_until_another_is_wanted_or_all_is_released() -> None:
    kept, events = KeptBetweenTasks(), []

    def make(resources: contextlib.ExitStack) -> str:
        events.append("made")
        resources.callback(events.append, "released")
        return "value"

    assert kept.get("run 1", make) == kept.get("run 1", make) == kept.value == "value"
    assert events == ["made"]
    kept.get("run 2", make)
    assert events == ["made", "released", "made"]  # so that memory holds one at a time
    kept.release()
    kept.release()
    assert kept.value is None and events[3:] == ["released"]
