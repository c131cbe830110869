"""Readers of the stream, as in browsers: WebSockets that read and count what they read.

    python benchmarks/stream_readers.py URL TOKEN READERS

The program prints a JSON line when all readers have their snapshot; it counts from a line on
standard input to the next one, and prints the counts by reader.
"""

from __future__ import annotations

import asyncio
import json
import sys

from tornado.httpclient import HTTPRequest
from tornado.websocket import WebSocketClientConnection, websocket_connect


class Counter:
    def __init__(self, connection: WebSocketClientConnection) -> None:
        self._connection = connection
        self.messages = self.bytes = 0

    async def one(self) -> None:
        text = await self._connection.read_message()
        assert text is not None, "the stream ended"
        self.messages += 1
        self.bytes += len(text)

    async def go_on(self) -> None:
        while True:
            await self.one()


async def line() -> str:
    return await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def main() -> None:
    url, token, count = sys.argv[1:]
    request = f"{url.replace('http', 'ws', 1)}/kiwi/api/events"
    readers = []
    for _ in range(int(count)):
        headers = {"Authorization": f"token {token}"}
        connection = await websocket_connect(HTTPRequest(request, headers=headers))
        readers.append(Counter(connection))
        await readers[-1].one()
    print(json.dumps({"snapshot_bytes": readers[-1].bytes}), flush=True)
    tasks = [asyncio.create_task(reader.go_on()) for reader in readers]
    await line()
    before = [(reader.messages, reader.bytes) for reader in readers]
    await line()
    found = [
        {"messages": reader.messages - messages, "bytes": reader.bytes - bytes_}
        for reader, (messages, bytes_) in zip(readers, before, strict=True)
    ]
    ended = sum(task.done() for task in tasks)
    print(json.dumps({"readers": found, "ended": ended}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
