"""An OpenAI endpoint in front of a prefill and a decode server that share a store.

Each request goes to both: to prefill with a single token to write, whose answer is thrown away, and to decode, which
takes the keys and values of the prompt from the store and streams the answer. With `concurrent` dispatch both are asked
at once, and decode follows prefill; with `sequential`, decode is asked when prefill is over. If prefill fails, decode
computes the prompt by itself.
"""

import argparse
import asyncio
import contextlib
import json
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

PATHS = ("/v1/completions", "/v1/chat/completions")
LONG_CHARACTERS = 2000  # of a prompt: from here on `auto` asks both at once


class Proxy:
    """Passes requests on, and answers back as they come."""

    def __init__(self, *, prefill: str, decode: str, dispatch: str) -> None:
        self._prefill, self._decode, self._dispatch = prefill, decode, dispatch
        self._session: ClientSession | None = None
        self._prefills: set[asyncio.Task[None]] = set()
        self.num_prefilled = 0

    async def start(self, app: web.Application) -> None:
        self._session = ClientSession(timeout=ClientTimeout(total=None, sock_connect=5))

    async def stop(self, app: web.Application) -> None:
        assert self._session is not None
        await self._session.close()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prefilling = asyncio.create_task(self._fill(request.path, body))
        self._prefills.add(prefilling)
        prefilling.add_done_callback(self._prefills.discard)
        concurrent = self._dispatch == "concurrent" or (self._dispatch == "auto" and _length(body) >= LONG_CHARACTERS)
        if concurrent:
            body = body | {"kv_transfer_params": {"kvstore": "follow"}}
        else:
            await prefilling
        assert self._session is not None
        async with self._session.post(self._decode + request.path, json=body) as answer:
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    async def pass_on(self, request: web.Request) -> web.Response:
        """What the decode server says, for example of its models."""
        assert self._session is not None
        async with self._session.get(self._decode + request.path) as answer:
            return web.Response(body=await answer.read(), status=answer.status, content_type=answer.content_type)

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"prefilled": self.num_prefilled})

    async def _fill(self, path: str, body: dict[str, Any]) -> None:
        """The prefill server has computed the prompt, or has failed to, which costs time and nothing else."""
        one = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
        one |= {"max_tokens": 1, "max_completion_tokens": 1} if "chat" in path else {"max_tokens": 1}
        assert self._session is not None
        with contextlib.suppress(ClientError, TimeoutError):
            async with self._session.post(self._prefill + path, json=one) as answer:
                await answer.read()
                self.num_prefilled += answer.status == 200


def _length(body: dict[str, Any]) -> int:
    return len(json.dumps(body.get("messages") or body.get("prompt") or ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True, help="for example http://127.0.0.1:8100")
    parser.add_argument("--decode", required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--dispatch", choices=("auto", "concurrent", "sequential"), default="auto")
    arguments = parser.parse_args()
    proxy = Proxy(prefill=arguments.prefill, decode=arguments.decode, dispatch=arguments.dispatch)
    app = web.Application()
    app.on_startup.append(proxy.start)
    app.on_cleanup.append(proxy.stop)
    app.router.add_get("/health", proxy.health)
    for path in PATHS:
        app.router.add_post(path, proxy.complete)
    app.router.add_get("/v1/models", proxy.pass_on)
    web.run_app(app, host="127.0.0.1", port=arguments.port, print=None)


if __name__ == "__main__":
    main()
