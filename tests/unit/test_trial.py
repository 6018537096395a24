"""The process in which metadata is tried, when it does not come up."""

import asyncio
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.errors import StoreUnavailable
from kvstore.types import Memory
from kvstore_server import trial
from kvstore_server.trial import Trial
from kvstore_server.values import RemoteRegion


def test_a_process_that_does_not_come_up_is_an_error_in_time_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers: B8."""
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec cat\n")
    silent.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(silent))
    monkeypatch.setattr(trial, "START_TIMEOUT_S", 0.05)

    async def test() -> None:
        started = Trial("lo")
        with pytest.raises(StoreUnavailable, match="not ready within"):
            await started.start()
        assert started._process is None

    asyncio.run(test())


class _Agent:
    """Takes everything in, and notes what it is told of the memory: device id, and kind."""

    device = "lo"

    def __init__(self) -> None:
        self.told: list[tuple[int, Memory]] = []

    def add_peer(self, *_: object, device_id: int, memory: Memory, **__: object) -> None:
        self.told.append((device_id, memory))

    def begin(self, *_: object, device_id: int, memory: Memory, **__: object) -> Any:
        self.told.append((device_id, memory))
        return self

    def poll(self) -> bool:
        return True

    def release(self) -> None:
        pass

    def remove_peer(self, _: str) -> None:
        pass


@pytest.mark.parametrize("memory", Memory)
def test_memory_is_tried_as_what_it_is(memory: Memory) -> None:
    agent = _Agent()
    region = RemoteRegion(7, address=4096, size_bytes=64, memory=memory)
    assert trial._try(cast(Any, agent), 4096, "name", b"", region) == {"code": 0}
    assert agent.told == [(7, memory)] * 2
