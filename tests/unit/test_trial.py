"""The process in which metadata is tried, when it does not come up."""

import asyncio
import sys
from pathlib import Path

import pytest

from kvstore.errors import StoreUnavailable
from kvstore_server import trial
from kvstore_server.trial import Trial


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
