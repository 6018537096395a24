"""The demo's processes: started, listened to with deadlines, and ended by their handles."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, Final

from kvstore_server.commands.demo.model import DemoFailed
from kvstore_server.commands.demo.way import SHARED_MEMORY, Way
from kvstore_server.commands.demo.worker import Answer, Request
from kvstore_server.config import ENVIRONMENT_PREFIX

READY_S: Final = 240.0  # torch and a model have to be read from disk
STEP_S: Final = 240.0
END_S: Final = 5.0
# The engines and the daemon share this machine's cores: a thread that waits for another must not spin on one.
ENVIRONMENT: Final = {"OMP_WAIT_POLICY": "PASSIVE"}
# The disk's reserve and capacity are small, so that a temporary folder has room; more than memory fits on it.
DAEMON_FLAGS: Final = ("--cpu-capacity", "1GiB", "--disk-capacity", "2GiB", "--disk-reserve", "64MiB")
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Child:
    """A process and its events. Its errors go to a file, of which the end is shown if it fails."""

    def __init__(
        self,
        name: str,
        module: str,
        *arguments: str,
        prefix: Sequence[str],  # a command that runs it elsewhere
        log: IO[str],
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self._log = log
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C goes to the demo alone, which then ends its processes in order
        )
        self._listener = threading.Thread(target=self._listen, name=f"demo-{name}", daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Request) -> None:
        """The request is on its way. Raises: DemoFailed, if the process has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(asdict(request)) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def expect(self, event: str, *, timeout_s: float = STEP_S) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The next event of this kind, and those before it. Raises: DemoFailed, if it does not come."""
        before: list[dict[str, Any]] = []
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                got = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise DemoFailed(f"{self.name}: nothing heard of {event!r} within {timeout_s:.0f} s") from None
            if got is None:
                raise self._ended()
            if got["event"] == event:
                return got, before
            before.append(got)

    def answer(self) -> tuple[Answer, list[dict[str, Any]]]:
        """What the request led to, and the events on the way."""
        done, events = self.expect("done")
        return Answer(**{key: value for key, value in done.items() if key not in ("event", "at_s")}), events

    def check(self) -> None:
        """Raises: DemoFailed, if the process has ended."""
        if self._process.poll() is not None:
            raise self._ended()

    def failed(self, reason: str) -> DemoFailed:
        """What to raise for this reason: it shows the end of the process' log."""
        lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()[-12:]
        return DemoFailed("\n  ".join([f"{self.name}: {reason}", *lines]))

    def kill(self) -> None:
        """The process is gone, at once, and had no chance to tidy up (SIGKILL)."""
        self._process.kill()
        self._process.wait()
        self.end()

    def end(self) -> None:
        """The process is gone: asked first, then killed. Idempotent."""
        process = self._process
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._listener.join(END_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        self._log.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._events.put(json.loads(line))
        self._events.put(None)

    def _ended(self) -> DemoFailed:
        return self.failed(f"the process ended with status {self._process.wait(END_S)}")


class Children:
    """The processes of one run: a daemon with a disk tier in a private folder, and engines that use it.

    All that they leave behind, also those that are killed, is in that folder.
    """

    def __init__(
        self, folder: Path, model: Path, *, daemon_flags: Sequence[str] = DAEMON_FLAGS, way: Way = SHARED_MEMORY
    ) -> None:
        self.folder = folder
        self._way = way
        self.address = f"unix:{folder / 'kvstore.sock'}"
        self._model = model
        self._daemon_flags = (*way.daemon_flags, *daemon_flags)
        self._all: list[Child] = []
        # Settings of a daemon that the user runs are not for this one.
        users = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        self._environment = ENVIRONMENT | users | {"TMPDIR": str(folder)}

    def start_daemon(self) -> Child:
        """On the same socket and disk directory each time; it may not listen yet."""
        socket = self.address.removeprefix("unix:")
        arguments = ("serve", "--unix-socket", socket, "--disk-path", str(self.folder / "disk"), *self._daemon_flags)
        return self._start("daemon", "kvstore_server.cli", *arguments, prefix=self._way.to_daemon)

    def start_engine(self, name: str) -> Child:
        """Not ready yet: expect its event `ready`."""
        address = self._way.address or self.address
        ours = ("--model", str(self._model), "--address", address, "--name", name)
        arguments = (*ours, "--transport", self._way.transport)
        return self._start(name, "kvstore_server.commands.demo.worker", *arguments, prefix=self._way.to_engines)

    def end(self) -> None:
        """All of them are gone, the engines before the daemon."""
        while self._all:
            self._all.pop().end()

    def _start(self, name: str, module: str, *arguments: str, prefix: Sequence[str]) -> Child:
        log = (self.folder / f"{name.replace(' ', '-')}.log").open("a")
        child = Child(name, module, *arguments, prefix=prefix, log=log, environment=self._environment)
        self._all.append(child)
        return child


@contextmanager
def ended_in_order() -> Iterator[None]:
    """A signal unwinds the stack, as Ctrl-C does, so that `finally` clauses end what was started.

    Only the first one: those that follow must not keep these clauses from their work.
    """

    def unwind(number: int, frame: object) -> None:
        let_nothing_interrupt()
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # as nohup asks for
                signal.signal(number, unwind)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def let_nothing_interrupt() -> None:
    """Signals do nothing until `ended_in_order` is left. What is done meanwhile must end by itself."""
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            signal.signal(number, lambda number, frame: None)  # SIG_IGN complains of one that is already under way
