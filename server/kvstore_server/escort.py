"""The courier of a daemon, a process of its own (commands/courier.py): started with it, and again whenever it ends."""

import asyncio
import contextlib
import json
import sys
from typing import Final

import structlog

from kvstore_server.access import ALL_TENANTS
from kvstore_server.config import Settings

log = structlog.get_logger()

RESTART_S: Final = 1.0


async def keep_courier(address: str, settings: Settings) -> None:
    """Runs until cancelled, and then it is gone. It goes with this process, too, however that ends."""
    tokens = [token for token, tenants in settings.tokens.items() if ALL_TENANTS in tenants]
    told = {
        "address": address,
        "node": settings.node_id,
        "token": tokens[0] if tokens else "",
        "log_format": settings.log_format,
        "log_level": settings.log_level,
    }
    while True:
        command = [sys.executable, "-m", "kvstore_server.commands.courier"]
        process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(told).encode() + b"\n")
            await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        log.warning("the courier ended: blocks are copied again once it is back", code=process.returncode)
        await asyncio.sleep(RESTART_S)
