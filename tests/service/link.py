"""A link between two network namespaces that is as slow, as far and as lossy as it is told to be.

It is a process that carries packets from one TUN device to another, and so needs nothing of the kernel but those. Run
as `link.py FIRST SECOND`, the names of the namespaces: their devices are `s0` (10.77.0.1) and `e0` (10.77.0.2). Each
line of its input is a quality, or `renew`: the second namespace is another, and gets a device; not a test.
"""

import collections
import contextlib
import dataclasses
import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

ENDS = (("s0", "10.77.0.1/24"), ("e0", "10.77.0.2/24"))
QUEUE_S = 0.2  # what has to wait for longer until it is sent is dropped, as by a router
_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_HEADER = 0x0001 | 0x1000


@dataclasses.dataclass(frozen=True, slots=True)
class Quality:
    """What becomes of packets, in either direction. `loss` is the share of them that is dropped."""

    delay_s: float = 0.0
    loss: float = 0.0
    bytes_per_s: float = 1e9


class Way:
    """Packets in one direction: read from one device, kept for their time, written to the other."""

    def __init__(self, source: int, target: int, *, seed: int) -> None:
        self.source = source
        self._target = target
        self._random = random.Random(seed)
        self._sent_at = 0.0  # when the last packet has left
        self._waiting: collections.deque[tuple[float, bytes]] = collections.deque()

    def take(self, quality: Quality, now: float) -> None:
        """The packets that are there are on their way, or lost."""
        with contextlib.suppress(BlockingIOError):
            while packet := os.read(self.source, 1 << 16):
                sent_at = max(now, self._sent_at) + len(packet) / quality.bytes_per_s
                if self._random.random() >= quality.loss and sent_at < now + QUEUE_S:
                    self._sent_at = sent_at
                    self._waiting.append((sent_at + quality.delay_s, packet))

    def deliver(self, now: float) -> float:
        """What is due has arrived; how long until something else is."""
        while self._waiting and self._waiting[0][0] <= now:
            _, packet = self._waiting.popleft()
            with contextlib.suppress(OSError):  # the device is down, or full
                os.write(self._target, packet)
        return self._waiting[0][0] - now if self._waiting else 1.0


def device(namespace: str, name: str, address: str) -> int:
    """A descriptor through which the packets of a new device pass, which is up."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    here = f"kv{os.getpid()}{name}"  # before it moves to its namespace
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", here.encode(), _TUN_WITHOUT_HEADER))
    for command in (
        ("link", "set", here, "netns", namespace, "name", name),
        ("-n", namespace, "address", "add", address, "dev", name),
        ("-n", namespace, "link", "set", name, "up"),
    ):
        subprocess.run(("ip", *command), check=True)
    return descriptor


def carry(ways: list[Way], renew: Callable[[], None]) -> None:
    """Packets are carried until the input ends."""
    quality = Quality()
    wait_s = 1.0
    while True:
        ready, _, _ = select.select([sys.stdin, *(way.source for way in ways)], [], [], wait_s)
        if sys.stdin in ready:
            line = sys.stdin.readline().strip()
            if not line:
                return
            if line == "renew":
                renew()
            else:
                quality = Quality(**json.loads(line))
            say("told")
        now = time.monotonic()
        for way in ways:
            if way.source in ready:
                way.take(quality, now)
        wait_s = max(0.0, min(way.deliver(now) for way in ways))


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main(namespaces: Sequence[str]) -> None:
    first, second = (device(namespace, *end) for namespace, end in zip(namespaces, ENDS, strict=True))

    def renew() -> None:
        again = device(namespaces[1], *ENDS[1])
        os.dup2(again, second)  # the old device is gone, and with it its packets
        os.close(again)

    say("ready")
    carry([Way(first, second, seed=1), Way(second, first, seed=2)], renew)


if __name__ == "__main__":
    main(sys.argv[1:])
