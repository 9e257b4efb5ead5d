"""What one completion costs the client, beside bare aiohttp and openai on the same work.

    python benchmarks/client_overhead.py [--rows 4000] [--only WORD] [--memory 5000 50000] [--profile FILE]

The client has one core, a server that answers after 5 ms has another. The generating process runs as it always does:
journal with fsync, done-set, status file, watches. CPU of a row is marginal, (big run - small run) / extra rows, so
that imports and the start do not count. Ratios within one run mean more than times: the machine decides those.
Linux only, with at least two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

DELAY_S = 0.005
WORDS = ("the", "state", "of", "model\u2019s", "pool", "grows", "when", "\u03b1", "is", '"so"', "\\frac{1}{2}\n")

Case = tuple[str, int, int, int]
"""Client, requests in flight, servers, tokens of an answer."""

CASES: tuple[Case, ...] = (
    ("bare aiohttp", 128, 1, 300),
    ("openai, aiohttp", 128, 1, 300),
    ("openai, httpx", 128, 1, 300),
    ("dfexp", 128, 1, 300),
    ("dfexp", 512, 8, 300),
    ("dfexp", 1024, 1, 300),
    ("dfexp", 1024, 16, 300),
    ("bare aiohttp", 1024, 16, 300),
    ("bare aiohttp", 1024, 16, 2660),
    ("openai, aiohttp", 1024, 16, 2660),
    ("dfexp", 128, 1, 2660),
    ("dfexp", 1024, 16, 2660),
)


def answer(tokens: int) -> bytes:
    """A chat completion of so many tokens, about 4 bytes each, as a whole HTTP response."""
    choose, text = random.Random(1), ""
    while len(text) < 4 * tokens:
        text += choose.choice(WORDS) + " "
    body = json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "matched_stop": 1,
                }
            ],
            "usage": {"prompt_tokens": 20, "completion_tokens": tokens, "total_tokens": 20 + tokens},
            "metadata": {"weight_version": "default"},
        },
        ensure_ascii=False,
    )
    return response("200 OK", body.encode())


def response(status: str, body: bytes) -> bytes:
    """An HTTP response with a JSON body."""
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class Server(asyncio.Protocol):
    """The least that can answer: one connection; whatever is posted gets the same answer after `DELAY_S`."""

    def __init__(self, reply: bytes) -> None:
        self.reply, self.data = reply, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer a request once it is whole."""
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        if not found:
            return
        length = int((head.lower().partition(b"content-length:")[2] or b"0").split(b"\r\n", 1)[0])
        if len(body) < length:
            return
        self.data = body[length:]
        if head.startswith(b"POST"):
            asyncio.get_running_loop().call_later(DELAY_S, self.write, self.reply)
        elif head.startswith(b"GET /v1/models"):
            self.write(response("200 OK", b'{"object": "list", "data": [{"id": "m", "max_model_len": 8192}]}'))
        else:
            self.write(response("404 Not Found", b'{"message": "no such page"}'))

    def write(self, data: bytes) -> None:
        """Send, unless the client has gone."""
        if not self.transport.is_closing():
            self.transport.write(data)


async def serve(servers: int, tokens: int) -> None:
    """Serve on so many free ports until killed; prints them."""
    loop, reply = asyncio.get_running_loop(), answer(tokens)
    bound = [await loop.create_server(lambda: Server(reply), "127.0.0.1", 0, backlog=2048) for _ in range(servers)]
    print(*(each.sockets[0].getsockname()[1] for each in bound), flush=True)
    await asyncio.gather(*(each.serve_forever() for each in bound))


@contextlib.contextmanager
def serving(servers: int, tokens: int, core: int) -> Iterator[list[str]]:
    """URLs of servers in a process of their own on their own core."""
    command = [sys.executable, __file__, "--serve", str(servers), str(tokens), str(core)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield [f"http://127.0.0.1:{port}" for port in process.stdout.readline().split()]
        finally:
            process.kill()


def messages(index: int) -> list[dict[str, str]]:
    """A prompt of a hundred tokens."""
    return [{"role": "user", "content": f"Question {index}: " + "why is the state pool small? " * 14}]


def hwm_mib() -> float:
    """The most memory that this process has used so far."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024


def cpu_s() -> float:
    """CPU time of this process and of its children, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


async def spread(ask: Callable[[int], Awaitable[str]], rows: int, in_flight: int) -> None:
    """Ask for all rows with so many in flight."""
    left = iter(range(rows))

    async def work() -> None:
        for index in left:
            if not await ask(index):
                raise RuntimeError("an empty answer")

    await asyncio.gather(*(work() for _ in range(in_flight)))


async def plain(client: str, urls: list[str], rows: int, in_flight: int) -> None:
    """The same requests without dfexp: ask and take the text, nothing else."""
    if client == "bare aiohttp":
        import aiohttp

        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def post(index: int) -> str:
                body = {"model": "m", "messages": messages(index), "max_tokens": 4096}
                async with session.post(f"{urls[index % len(urls)]}/v1/chat/completions", json=body) as reply:
                    return str((await reply.json())["choices"][0]["message"]["content"])

            await spread(post, rows, in_flight)
        return
    import openai

    make = openai.DefaultAioHttpClient if client == "openai, aiohttp" else openai.DefaultAsyncHttpxClient
    limits = openai.DEFAULT_CONNECTION_LIMITS.__class__(max_connections=4096, max_keepalive_connections=4096)
    clients = [
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, http_client=make(limits=limits))
        for url in urls
    ]

    async def create(index: int) -> str:
        asked: Any = messages(index)
        reply = await clients[index % len(clients)].chat.completions.create(model="m", messages=asked, max_tokens=4096)
        return reply.choices[0].message.content or ""

    await spread(create, rows, in_flight)
    for each in clients:
        await each.close()


def prepared(root: Path, urls: list[str], rows: int, in_flight: int) -> Any:
    """A run over these servers that only has to be started; its folder."""
    from dfexp import fleet, generate, params

    with (root / "prompts.jsonl").open("w") as file:
        file.writelines(json.dumps({"messages": messages(index)}) + "\n" for index in range(rows))
    tree = {
        "run": "r",
        "fleet": {"engine": "external", "urls": urls},
        "prompts": {"path": "prompts.jsonl"},
        "generation": {"max_tokens": 4096, "concurrency": in_flight // len(urls), "seed": 1, "temperature": 0.6},
    }
    spec = params.validate(tree, "benchmark")
    the_fleet, _ = fleet.up(spec, root)
    the_fleet.wait_ready(30.0)
    folder = generate.prepare(spec, root)
    (folder.path / "control").mkdir(exist_ok=True)
    return folder


def one(client: str, urls: list[str], rows: int, in_flight: int, folder: str) -> None:
    """In a process of its own: do the rows; prints CPU seconds since the imports, MiB after them, and MiB at most."""
    if client == "dfexp":
        from dfexp.generate.process import main as generate_main
    else:
        import openai  # noqa: F401 (brings aiohttp along)
    imports, began = hwm_mib(), cpu_s()
    if client == "dfexp":
        code = generate_main(["--folder", folder, "--root", str(Path(folder).parents[1])])
        if code:
            raise SystemExit(f"the run ended with {code}")
    else:
        asyncio.run(plain(client, urls, rows, in_flight))
    print(cpu_s() - began, imports, hwm_mib())


def measured(client: str, urls: list[str], rows: int, in_flight: int, *, profile: str = "") -> tuple[float, ...]:
    """CPU seconds, MiB after the imports and MiB at most, of a process that does so many rows."""
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        root = Path(scratch).resolve()
        folder = str(prepared(root, urls, rows, in_flight).path) if client == "dfexp" else ""
        job = (client, " ".join(urls), str(rows), str(in_flight), folder, profile)
        done = subprocess.run([sys.executable, __file__, "--one", *job], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        return tuple(map(float, done.stdout.split()[-3:]))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4000, help="rows of a big run; a small one has a quarter")
    parser.add_argument("--only", default="", help="clients whose name has this word")
    parser.add_argument("--memory", type=int, nargs="*", default=[5_000, 50_000], help="prompts of the runs for memory")
    parser.add_argument("--profile", default="", help="write a cProfile of dfexp with 128 in flight to this file")
    parser.add_argument("--serve", nargs=3, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=6, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if asked.serve:
        os.sched_setaffinity(0, {asked.serve[2]})
        asyncio.run(serve(*asked.serve[:2]))
    elif asked.one:
        client, urls, rows, in_flight, folder, profile = asked.one
        job = (client, urls.split(), int(rows), int(in_flight), folder)
        if profile:
            profiler = cProfile.Profile()
            profiler.runcall(one, *job)
            profiler.dump_stats(profile)
        else:
            one(*job)
    else:
        if len(cores) < 2:
            raise SystemExit("two cores are needed: one for the client, one for the server")
        os.sched_setaffinity(0, {cores[0]})
        tables(asked, cores[1])


def tables(asked: argparse.Namespace, core: int) -> None:
    """Measure and print, with the client on the core of this process and the servers on `core`."""
    if asked.profile:
        with serving(1, 300, core) as urls:
            measured("dfexp", urls, asked.rows, 128, profile=asked.profile)
        return
    print(f"{'client':18}{'in flight':>10}{'servers':>9}{'tokens':>8}{'CPU a row':>12}", flush=True)
    for client, in_flight, servers, tokens in CASES:
        if asked.only in client:
            with serving(servers, tokens, core) as urls:
                small, big = (measured(client, urls, rows, in_flight)[0] for rows in (asked.rows // 4, asked.rows))
            row_ms = (big - small) / (asked.rows - asked.rows // 4) * 1000
            print(f"{client:18}{in_flight:>10}{servers:>9}{tokens:>8}{row_ms:>9.2f} ms", flush=True)
    for rows in asked.memory:
        with serving(8, 300, core) as urls:
            _, imports, peak = measured("dfexp", urls, rows, 1024)
            print(f"{rows:>8} prompts, 1024 in flight: {peak - imports:.0f} MiB over the {imports:.0f} MiB of imports")


if __name__ == "__main__":
    main()
