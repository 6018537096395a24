"""A process that tries a client's metadata before the daemon's own agent takes it in, and may die of it.

UCX does not check an address that it is given: one changed byte can end the process (docs/adr/0016). So metadata is
taken in here first, and one byte read through it. That also tells whether the client can be reached at all.
"""

import asyncio
import contextlib
import json
import secrets
import struct
import sys
import time
from dataclasses import astuple
from typing import Final

import numpy as np

from kvstore.errors import InvalidRequest, KVStoreError, StoreUnavailable, error_of
from kvstore.transport.memory import address_of
from kvstore.transport.ucx import Agent, Op
from kvstore.types import Memory
from kvstore_server.values import RemoteRegion

START_TIMEOUT_S: Final = 20.0
REACH_TIMEOUT_S: Final = 3.0  # for one byte
_SLEEP_S: Final = 1e-3


class Trial:
    """The process, started again when it died. One trial at a time."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """The process runs, and its agent is ready. Raises: StoreUnavailable, if that takes too long."""
        command = [sys.executable, "-m", "kvstore_server.trial", self._device]
        pipe = asyncio.subprocess.PIPE
        self._process = process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        assert process.stdout is not None
        try:
            await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            await self.stop()
            raise StoreUnavailable(f"ucx on {self._device}: not ready within {START_TIMEOUT_S:g} s") from None

    async def stop(self) -> None:
        """The process is gone."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def of(self, name: str, metadata: bytes, region: RemoteRegion) -> None:
        """The metadata can be taken in, and the region be reached through it.

        Raises: InvalidRequest, if it is none, or breaks who takes it in; StoreUnavailable, if nothing comes.
        """
        async with self._turn:
            if self._process is None or self._process.returncode is not None:
                await self.start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            what = {"name": name, "region": astuple(region)}
            head = json.dumps(what).encode()
            try:
                process.stdin.write(struct.pack("<II", len(head), len(metadata)) + head + metadata)
                line = await asyncio.wait_for(process.stdout.readline(), 2 * REACH_TIMEOUT_S)
            except (TimeoutError, ConnectionError):
                line = b""
            if not line or json.loads(line).get("stuck"):
                await self.stop()  # if it is stuck, its memory may still be written to
        if not line:
            raise InvalidRequest(
                f"metadata of region {region.number}: expected that of an agent, got bytes that end a process which "
                "takes them in; send what the agent says"
            )
        answer = json.loads(line)
        if answer["code"]:
            raise error_of(answer["code"], answer["message"])


def _try(agent: Agent, scratch: int, name: str, metadata: bytes, region: RemoteRegion) -> dict[str, object]:
    """What came of it: a status code, a message, and whether the byte may still come."""
    try:
        agent.add_peer(
            name,
            metadata,
            address=region.address,
            size_bytes=region.size_bytes,
            device_id=region.number,
            memory=region.memory,
        )
        one = np.ones(1, np.int64)
        reading = agent.begin(
            Op.READ,
            name,
            local=one * scratch,
            remote=one * region.address,
            sizes=one,
            device_id=region.number,
            memory=region.memory,
        )
        deadline = time.monotonic() + REACH_TIMEOUT_S
        while not reading.poll():
            if time.monotonic() > deadline:
                message = (
                    f"region {region.number}: expected to reach this client on {agent.device}, nothing came within "
                    f"{REACH_TIMEOUT_S:g} s; open its ports to the daemon, or name another ucx_device on either side"
                )
                return {"code": StoreUnavailable.code, "message": message, "stuck": True}
            time.sleep(_SLEEP_S)
        reading.release()
    except KVStoreError as error:
        return {"code": error.code, "message": str(error)}
    finally:
        agent.remove_peer(name)
    return {"code": 0}


def main(device: str) -> None:
    """Trials, one after the other, until standard input ends."""
    agent = Agent(secrets.token_hex(16), device=device, num_pollers=1)
    scratch = np.zeros(1, np.uint8)
    agent.register(address_of(scratch), scratch.size)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while len(sizes := sys.stdin.buffer.read(8)) == 8:
        head, metadata = (sys.stdin.buffer.read(size) for size in struct.unpack("<II", sizes))
        what = json.loads(head)
        number, address, size_bytes, memory = what["region"]
        region = RemoteRegion(number, address, size_bytes, Memory(memory))
        outcome = _try(agent, address_of(scratch), what["name"], metadata, region)
        sys.stdout.write(json.dumps(outcome) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
