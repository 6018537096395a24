"""The demo's four scenes, and what must be true of them: cold, hand-over, next session, after kill -9."""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from kvstore.transport.ucx import why_unavailable
from kvstore_server.commands.demo.handbook import FIRST_QUESTION, LAST_QUESTION, NEXT_QUESTION
from kvstore_server.commands.demo.model import DemoFailed, check_packages, prepare
from kvstore_server.commands.demo.processes import READY_S, Child, Children, ended_in_order, let_nothing_interrupt
from kvstore_server.commands.demo.report import as_document, as_text
from kvstore_server.commands.demo.restart import START_S, Restart, ask, kill_and_restart
from kvstore_server.commands.demo.way import HOSTS, way_by
from kvstore_server.commands.demo.worker import Answer, Request
from kvstore_server.commands.hosts import Hosts

NEW_TOKENS: Final = 24
MIN_PROMPT_TOKENS: Final = 128
AFTER_KILL: Final = "(d) after kill -9"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One answer, and the cold one that its text must equal."""

    name: str
    where: str  # which processes took part
    question: str
    answer: Answer
    reference: Answer
    begin_s: float  # when the prompt was there, in whichever process had it first
    num_from_disk: int = 0  # of its blocks, those that the daemon read from disk for it

    @property
    def is_cold(self) -> bool:
        """Computed without the store, for others to be compared with."""
        return self.answer is self.reference

    @property
    def first_token_s(self) -> float:
        """Seconds from the prompt to the first new token."""
        return self.answer.first_token_s - self.begin_s

    @property
    def cold_first_token_s(self) -> float:
        """The same of the cold one."""
        return self.reference.first_token_s - self.reference.begin_s

    @property
    def num_blocks(self) -> int:
        """Blocks that came from the store."""
        return self.answer.num_loaded_tokens // self.answer.block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """When each layer was handed over by prefill and had by decode: seconds since prefill began, by layer."""

    saved_s: list[float]
    loaded_s: list[float]

    @property
    def num_early(self) -> int:
        """Layers that decode had before prefill handed over its last."""
        return sum(at < self.saved_s[-1] for at in self.loaded_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """The whole run."""

    scenes: list[Scene]
    hand_over: HandOver
    restart: Restart
    way: str  # by which bytes went between engines and daemon
    total_s: float

    @property
    def after_kill(self) -> Scene:
        """The one whose blocks were only on disk."""
        return next(scene for scene in self.scenes if scene.name == AFTER_KILL)


def run_demo(model_path: str | None, prompt_tokens: int, as_json: bool, transport: str) -> int:
    """The exit status: 0 if every text is the cold one's and the store was used, 1 if not, 130 after Ctrl-C.

    The report goes to stdout, progress to stderr. Every process started has ended, and nothing is left but
    the model in the user's cache folder.
    """
    progress = _Progress()
    try:
        with ended_in_order():
            show = _run(model_path, prompt_tokens, transport, progress)
            progress.end()
            click.echo(as_document(show) if as_json else as_text(show))
            _judge(show)
    except DemoFailed as failure:
        progress.end()
        click.echo(f"kvstore demo: {failure}", err=True)
        return 1
    except KeyboardInterrupt:
        progress.end()
        click.echo("kvstore demo: interrupted; everything it started has ended", err=True)
        return 130
    return 0


def _run(model_path: str | None, prompt_tokens: int, transport: str, progress: Callable[[str], None]) -> Show:
    if transport == "ucx" and (why_not := why_unavailable()):
        raise DemoFailed(why_not)
    if prompt_tokens < MIN_PROMPT_TOKENS:
        raise DemoFailed(f"prompt tokens: expected at least {MIN_PROMPT_TOKENS}, got {prompt_tokens}; ask for more")
    begin_s = time.monotonic()
    check_packages()
    model = prepare(model_path, progress=progress)
    hosts = Hosts(f"kvstore-demo-{os.getpid()}", *HOSTS)
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-") as folder, ExitStack() as ending:
        ending.callback(hosts.remove)
        way = way_by(transport, hosts)
        progress(f"bytes go by {way.says}")
        children = Children(Path(folder), model, way=way)
        ending.callback(children.end)
        ending.callback(progress, "ending the processes")
        ending.callback(let_nothing_interrupt)
        scenes, hand_over, restart = _play(children, prompt_tokens, progress)
    total_s = time.monotonic() - begin_s
    return Show(scenes=scenes, hand_over=hand_over, restart=restart, way=way.says, total_s=total_s)


def _play(
    children: Children, prompt_tokens: int, progress: Callable[[str], None]
) -> tuple[list[Scene], HandOver, Restart]:
    progress("starting the daemon, prefill and decode")
    daemon = children.start_daemon()
    prefill, decode = children.start_engine("prefill"), children.start_engine("decode")
    for engine in (decode, prefill):
        engine.expect("ready", timeout_s=READY_S)
    daemon.check()

    cold = Request(question=FIRST_QUESTION, prompt_tokens=prompt_tokens, use_store=False, num_new_tokens=NEW_TOKENS)
    progress("(a) cold: decode computes everything")
    reference = _cold(decode, cold)
    scenes = [_scene("(a) cold", "decode", cold, reference, reference)]

    progress("(b) hand-over: decode follows the layers that prefill computes")
    given, taken, hand_over = _hand_over(prefill, decode, cold)
    scenes.append(_scene("(b) hand-over", "prefill, decode", cold, taken, reference, begin_s=given.begin_s))
    prefill.end()

    progress("(c) next session: a new process, the same handbook, another question")
    other = replace(cold, question=NEXT_QUESTION)
    warm = _new_process(children, "next session", other)
    progress("(c) the same prompt, cold")
    again = _cold(decode, other)
    scenes.append(_scene("(c) next session", "a new process", other, warm, again))
    scenes.append(_scene("    the same, cold", "decode", other, again, again))

    progress("(d) after kill -9: the daemon is killed when all is on disk, and started again")
    restart, daemon = kill_and_restart(children, daemon)
    progress("(d) a new process, the same handbook, a third question")
    last = replace(cold, question=LAST_QUESTION)
    warm = _new_process(children, "after kill", last)
    num_from_disk = ask(children, daemon, timeout_s=START_S).counters.blocks_risen
    progress("(d) the same prompt, cold")
    again = _cold(decode, last)
    after = _scene(AFTER_KILL, "a new process", last, warm, again)
    scenes.append(replace(after, num_from_disk=num_from_disk))
    scenes.append(_scene("    the same, cold", "decode", last, again, again))
    return scenes, hand_over, restart


def _hand_over(prefill: Child, decode: Child, cold: Request) -> tuple[Answer, Answer, HandOver]:
    """Prefill's answer, decode's, and the layers between them."""
    prefill.ask(replace(cold, use_store=True, num_new_tokens=0))
    first, _ = prefill.expect("saved")
    decode.ask(replace(cold, use_store=True, follow=True))
    given, saved = prefill.answer()
    taken, loaded = decode.answer()
    times = HandOver(
        saved_s=_times("saved", [first, *saved], given.begin_s),
        loaded_s=_times("loaded", loaded, given.begin_s),
    )
    return given, taken, times


def _new_process(children: Children, name: str, request: Request) -> Answer:
    """The answer of an engine that was started for it, and has ended."""
    engine = children.start_engine(name)
    engine.expect("ready", timeout_s=READY_S)
    engine.ask(replace(request, use_store=True))
    answer, _ = engine.answer()
    engine.end()
    return answer


def _cold(engine: Child, request: Request) -> Answer:
    engine.ask(request)
    answer, _ = engine.answer()
    return answer


def _scene(
    name: str, where: str, request: Request, answer: Answer, reference: Answer, begin_s: float | None = None
) -> Scene:
    return Scene(
        name=name,
        where=where,
        question=request.question,
        answer=answer,
        reference=reference,
        begin_s=answer.begin_s if begin_s is None else begin_s,
    )


def _times(kind: str, events: list[dict[str, Any]], begin_s: float) -> list[float]:
    found = {event["layer"]: event["at_s"] - begin_s for event in events if event["event"] == kind}
    return [found[layer] for layer in sorted(found)]


def _judge(show: Show) -> None:
    """Raises: DemoFailed, naming each scene that did not show what it should."""
    faults = []
    for scene in show.scenes:
        if scene.answer.text != scene.reference.text:
            wanted, got = scene.reference.text, scene.answer.text
            faults.append(f"{scene.name.strip()}: expected the cold text {wanted!r}, got {got!r}")
        if not scene.is_cold and not scene.num_blocks:
            reason = scene.answer.problem or "the store had none"
            faults.append(f"{scene.name}: expected blocks from the store, got none ({reason})")
    restart, after = show.restart, show.after_kill
    if restart.num_restored != restart.num_written:
        faults.append(f"{after.name}: expected {restart.num_written} blocks found again, got {restart.num_restored}")
    if after.num_from_disk < after.num_blocks:
        faults.append(f"{after.name}: expected {after.num_blocks} blocks from disk, got {after.num_from_disk}")
    if faults:
        raise DemoFailed("; ".join(faults))


class _Progress:
    """Lines on stderr; on a terminal, each in place of the one before."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = ""

    def __call__(self, line: str) -> None:
        if self._terminal:
            click.echo(f"\r\x1b[K{line}", err=True, nl=False)
        elif line.partition(":")[0] != self._last.partition(":")[0]:  # a counter's first line only
            click.echo(line, err=True)
        self._last = line

    def end(self) -> None:
        if self._terminal and self._last:
            click.echo("\r\x1b[K", err=True, nl=False)
            self._last = ""
