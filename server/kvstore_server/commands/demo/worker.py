"""One engine process of the demo: it loads the model, then answers requests, one JSON line each.

A request has the fields of `Request`. Events go to stdout, one JSON line each, with `event` and `at_s` (of
the monotonic clock): ready, saved and loaded (with `layer`), done (with the fields of `Answer`). The
process ends with its stdin.
"""

import argparse
import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

from kvstore_client import ClientOptions, connect
from kvstore_server.commands.demo.handbook import FIRST_QUESTION, HANDBOOK, INSTRUCTION

READY_TIMEOUT_S = 30.0
SAVE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to prefill, and how."""

    question: str
    prompt_tokens: int  # with the first question; the handbook is cut or repeated to fill it
    use_store: bool  # False: compute everything, save nothing
    follow: bool = False
    num_new_tokens: int = 0  # 0: prefill only


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of it. Times are of the machine's monotonic clock."""

    num_tokens: int
    num_loaded_tokens: int
    num_followed_blocks: int
    num_saved_blocks: int
    block_tokens: int
    block_bytes: int
    num_layers: int
    begin_s: float  # the prompt's ids are there
    first_token_s: float  # the first new token is known
    text: str
    problem: str  # why a load was given up; empty: it was not


class Engine:
    """A model, its tokenizer, and the store behind it."""

    def __init__(self, folder: str, address: str, name: str, transport: Literal["shm", "ucx"]) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from kvstore_client.adapters.transformers import PrefixCache, revision_digest, spec_for

        torch.manual_seed(0)
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        # float32, because rounding differs with the shape of a chunk, and near ties would flip in less.
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            self._model(torch.ones(1, 8, dtype=torch.long))
        spec = spec_for(self._model, revision=revision_digest(folder))
        self._client = connect(address, spec, options=ClientOptions(name=f"demo/{name}", transport=transport))
        self._client.wait_ready(READY_TIMEOUT_S)
        self._prefixes = PrefixCache(self._client, self._model)

    def prompt(self, question: str, prompt_tokens: int) -> Any:
        """`[1, tokens]`: instruction, handbook, question; equal for all questions up to the question."""
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        before, after = map(encode, self._around_handbook(FIRST_QUESTION))
        room = max(0, prompt_tokens - len(before) - len(after))
        handbook = encode(HANDBOOK)
        handbook = (handbook * (1 + room // len(handbook)))[:room]
        ids = before + handbook + encode(self._around_handbook(question)[1])
        return self._torch.tensor([ids])

    def answer(self, request: Request, tell: Any) -> Answer:
        ids = self.prompt(request.question, request.prompt_tokens)
        begin_s = time.monotonic()
        if request.use_store:
            prefill = self._prefixes.prefill(
                ids,
                follow=request.follow,
                on_loaded=lambda layer: tell("loaded", layer=layer),
                on_saved=lambda layer: tell("saved", layer=layer),
            )
            logits, cache = prefill.logits, prefill.cache
        else:
            prefill = None
            logits, cache = self._cold(ids)
        token = int(logits.argmax())
        first_token_s = time.monotonic()
        text = self._decode(token, cache, request.num_new_tokens)
        spec = self._client.spec
        return Answer(
            num_tokens=ids.shape[1],
            num_loaded_tokens=prefill.num_loaded_tokens if prefill else 0,
            num_followed_blocks=prefill.num_followed_blocks if prefill else 0,
            num_saved_blocks=prefill.saving.result(SAVE_TIMEOUT_S) if prefill else 0,
            block_tokens=spec.block_tokens,
            block_bytes=spec.block_bytes,
            num_layers=spec.layers,
            begin_s=begin_s,
            first_token_s=first_token_s,
            text=text,
            problem=str(prefill.load_error or "") if prefill else "",
        )

    def close(self) -> None:
        self._prefixes.close()
        self._client.close()

    def _around_handbook(self, question: str) -> tuple[str, str]:
        mark = "[HANDBOOK]"
        text = f"{INSTRUCTION}{mark}\n\nQuestion: {question}"
        if getattr(self._tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": text}]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        else:
            text = f"{self._tokenizer.bos_token or ''}{text}\nAnswer:"
        before, _, after = text.partition(mark)
        return before, after

    def _cold(self, ids: Any) -> tuple[Any, Any]:
        """Without any of kvstore's code, so that it is a reference."""
        with self._torch.no_grad():
            out = self._model(ids, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1], out.past_key_values

    def _decode(self, token: int, cache: Any, num_tokens: int) -> str:
        """Greedy, up to `num_tokens` or the end of the text."""
        told: list[int] = []
        end = self._model.generation_config.eos_token_id
        ends = {end} if isinstance(end, int) else set(end or ())
        while len(told) < num_tokens and token not in ends:
            told.append(token)
            with self._torch.no_grad():
                ids = self._torch.tensor([[token]])
                token = int(self._model(ids, past_key_values=cache, use_cache=True).logits[:, -1].argmax())
        text: str = self._tokenizer.decode(told, skip_special_tokens=True)
        return text.strip()


def main() -> None:
    options = argparse.ArgumentParser()
    for name in ("--model", "--address", "--name", "--transport"):
        options.add_argument(name, required=True)
    chosen = options.parse_args()
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else is printed is not an event
    lock = threading.Lock()

    def tell(event: str, **fields: object) -> None:
        with lock:
            events.write(json.dumps({"event": event, "at_s": time.monotonic(), **fields}) + "\n")

    engine = Engine(chosen.model, chosen.address, chosen.name, chosen.transport)
    try:
        tell("ready")
        for line in sys.stdin:
            answer = engine.answer(Request(**json.loads(line)), tell)
            tell("done", **asdict(answer))
    finally:
        engine.close()


if __name__ == "__main__":
    main()
