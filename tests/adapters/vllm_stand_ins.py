"""A request, a store and an engine's steps that are stand-ins, for tests of the connector's scheduler side."""

import threading
from types import SimpleNamespace
from typing import Any

from kvstore.errors import StoreUnavailable
from kvstore_client.adapters.vllm.options import ConnectorOptions
from kvstore_client.adapters.vllm.scheduler import SchedulerSide
from kvstore_client.breaker import BreakerState

BLOCK_TOKENS = 4


class FakeMatch:
    def __init__(self, client: "FakeClient", num_blocks: int, num_writing: int) -> None:
        self.num_blocks, self.num_writing = num_blocks, num_writing
        self._client, self._held = client, True
        client.leases += 1

    def release(self) -> None:
        self._client.leases -= self._held
        self._held = False


class FakeClient:
    """A store that holds the blocks whose hashes are in `stored`."""

    def __init__(self) -> None:
        self.stored: set[bytes] = set()
        self.writing: set[bytes] = set()
        self.leases = 0
        self.asked: list[int] = []  # how many hashes, each time
        self.away = False
        self.breaker = BreakerState.CLOSED
        self.answers = threading.Event()
        self.answers.set()

    def match(self, hashes: list[bytes], *, segments: Any, timeout_s: float) -> FakeMatch:
        self.asked.append(len(hashes))
        assert self.answers.wait(20)
        if self.away:
            raise StoreUnavailable("away")
        num_stored = next((n for n, each in enumerate(hashes) if each not in self.stored), len(hashes))
        rest = hashes[num_stored:]
        return FakeMatch(
            self, num_stored, next((n for n, each in enumerate(rest) if each not in self.writing), len(rest))
        )

    def statistics(self) -> SimpleNamespace:
        return SimpleNamespace(breaker=self.breaker)

    def close(self) -> None:
        self.answers.set()


class FakeRequest(SimpleNamespace):
    def __init__(self, name: str, num_tokens: int, *, num_hashes: int | None = None, **more: Any) -> None:
        count = num_tokens // BLOCK_TOKENS if num_hashes is None else num_hashes
        fields: dict[str, Any] = {
            "request_id": name,
            "num_tokens": num_tokens,
            "num_prompt_tokens": num_tokens,
            "num_computed_tokens": 0,
            "block_hashes": [f"{n:032}".encode() for n in range(count)],
            "kv_transfer_params": None,
            "lora_request": None,
            "skip_reading_prefix_cache": False,
        }
        super().__init__(**(fields | more))

    def __hash__(self) -> int:
        return hash(self.request_id)


class Side:
    """The side under test, with one call for each step of the engine."""

    def __init__(
        self, client: FakeClient, *, saves: bool = True, loads: bool = True, has_windows: bool = False, **options: Any
    ) -> None:
        self.client = client
        self.side = SchedulerSide(
            options=ConnectorOptions(address="unix:/none", timeout_s=20.0, **options),
            revision="r",
            block_tokens=BLOCK_TOKENS,
            has_windows=has_windows,
            saves=saves,
            loads=loads,
            open_client=lambda identity: client,  # type: ignore[arg-type,return-value]
        )
        self.tables: dict[str, tuple[list[int], ...]] = {}  # by group

    def matched(self, request: FakeRequest, local: int = 0) -> tuple[int | None, bool]:
        """The answer, once there is one."""
        while True:
            answer = self.side.num_matched_tokens(request, local)
            if answer[0] is not None or not self.client.answers.is_set():
                return answer

    def schedule(self, request: FakeRequest, external: int, num_tokens: int, *tables: list[int]) -> Any:
        """The request gets its blocks; the plan of the step that computes `num_tokens` of it."""
        self.tables[request.request_id] = tables
        self.side.allocated(request, tables, external)
        return self.step({request: num_tokens})

    def step(self, scheduled: "dict[FakeRequest, int]") -> Any:
        counts = {request.request_id: count for request, count in scheduled.items()}
        plan = self.side.plan(counts, lambda request_id: self.tables.get(request_id) if request_id in counts else None)
        for request, count in scheduled.items():
            request.num_computed_tokens += count
        return plan

    def new(self, name: str, num_tokens: int, **more: Any) -> FakeRequest:
        request = FakeRequest(name, num_tokens, **more)
        self.side.add(request)
        return request
