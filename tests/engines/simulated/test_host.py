"""Several servers on one virtual clock, over HTTP, in this process."""

from __future__ import annotations

import asyncio
import json
import random
import time
from itertools import chain, islice
from pathlib import Path

import aiohttp
import pytest

from dfexp.engines.simulated.core import Event, Simulator, run_closed_loop
from dfexp.engines.simulated.server.host import Host
from dfexp.virtual_time import CLOCK, VirtualTime
from tests.engines.simulated.servers import ask, chat, get, sized, spec


async def test_a_client_costs_no_virtual_time() -> None:
    """What the servers do at `max` is what the pure simulation does, to the last digit."""
    chance, lanes = random.Random(1), 16
    sizes = [(chance.randint(20, 300), tokens := chance.randint(50, 900), tokens) for _ in range(300)]
    wanted = {
        told.request_id: (told.at_s, told.tokens)
        for _, told in run_closed_loop([Simulator(spec().config) for _ in range(2)], sizes, lanes)
        if isinstance(told, Event) and told.kind == "finished"
    }
    found: dict[int | str, tuple[float, int]] = {}
    async with Host() as host, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        servers = [await host.add(spec(index=index)) for index in range(2)]
        begin_s, numbers = host.clock.now_s, iter(range(len(sizes)))

        async def lane(url: str, first: int) -> None:
            for number in chain([first], numbers):
                prompt, tokens, _ = sizes[number]
                status, page = await ask(session, url, sized(number, prompt, tokens))
                assert (status, page["usage"]["prompt_tokens"]) == (200, prompt)
                found[number] = host.clock.now_s - begin_s, page["usage"]["completion_tokens"]

        async with asyncio.TaskGroup() as group:
            for number in list(islice(numbers, 2 * lanes)):
                group.create_task(lane(servers[number % 2].url, number))
        assert host.completed == len(sizes)
    assert found.keys() == wanted.keys()
    for number, (at_s, tokens) in wanted.items():
        assert found[int(number)] == (pytest.approx(at_s, abs=1e-6), tokens)


@pytest.mark.parametrize("speed", [1.0, 50.0])
async def test_time_goes_at_the_speed_that_was_asked_for(speed: float, tmp_path: Path) -> None:
    async with Host(speed=speed, folder=tmp_path) as host, aiohttp.ClientSession() as session:
        server = await host.add(spec(load_s=0.2 * speed, tokens=4 * speed))
        begin, begin_s = time.monotonic(), host.clock.now_s
        await ask(session, server.url, chat())
        virtual_s, real_s = host.clock.now_s - begin_s, time.monotonic() - begin
    assert virtual_s > 0.02 * speed
    assert real_s >= virtual_s / speed * 0.999, "an answer never comes early"
    told = VirtualTime.read(tmp_path / CLOCK)
    assert told.virtual_s[-1] - told.virtual_s[0] <= (told.real_at[-1] - told.real_at[0]) * speed + 1e-3


async def test_an_idle_clock_stands() -> None:
    async with Host(speed=1000.0) as host, aiohttp.ClientSession() as session:
        server = await host.add(spec())
        assert (await get(session, f"{server.url}/ping"))[0] == 200
        assert host.clock.now_s == host.clock.now_s


async def test_the_clock_goes_on_where_it_stood(tmp_path: Path) -> None:
    async with Host(folder=tmp_path) as host:
        await host.add(spec())
        ended_s, zero_at = host.clock.now_s, host.clock.zero_at
    assert ended_s > 60
    with (tmp_path / CLOCK).open("ab") as file:
        file.write(b'{"real_at": 17')  # as a killed process leaves it
    async with Host(folder=tmp_path) as host:
        assert (host.clock.now_s, host.clock.zero_at) == (ended_s, pytest.approx(zero_at, abs=1e-5))
        await host.add(spec())
        assert host.clock.now_s > ended_s + 60
    told = VirtualTime.read(tmp_path / CLOCK)
    assert (told.real_at[1:] >= told.real_at[:-1]).all()
    assert (told.virtual_s[1:] >= told.virtual_s[:-1]).all()
    assert told.of(told.real_at[0]) == 0
    assert told.virtual_s[-1] > ended_s + 60


async def test_the_clock_waits_for_a_server_that_comes_back() -> None:
    async with Host() as host, aiohttp.ClientSession() as session:
        first, other = await asyncio.gather(host.add(spec()), host.add(spec(index=1)))
        host.remove(first)
        answer = asyncio.create_task(ask(session, other.url, chat()))
        await get(session, f"{other.url}/ping")
        stood_s = host.clock.now_s
        await get(session, f"{other.url}/ping")
        assert (host.clock.now_s, answer.done()) == (stood_s, False)
        back = await host.add(spec(port=first.port))
        assert back.url == first.url
        assert (await answer)[0] == 200


async def test_a_scheduled_crash_cuts_its_server_and_no_other(tmp_path: Path) -> None:
    log, long = tmp_path / "log", chat(max_tokens=6000, ignore_eos=True)
    crash = {"kind": "crash", "server": 0, "at_s": 139.0}
    with log.open("wb") as file:
        async with Host() as host, aiohttp.ClientSession() as session:
            first, other = await asyncio.gather(
                host.add(spec(servers=2, faults=(crash,)), None, file.fileno()),
                host.add(spec(index=1, servers=2, faults=(crash,))),
            )
            going_on = asyncio.create_task(ask(session, other.url, long))
            with pytest.raises(aiohttp.ClientConnectionError):
                await ask(session, first.url, long)
            assert (host.began_s, host.clock.now_s, host.servers) == (61.0, 200.0, {other})
            with pytest.raises(aiohttp.ClientConnectorError):
                await get(session, f"{first.url}/ping")
            back = await host.add(spec(port=first.port, servers=2, faults=(crash,)))  # which is not hit again
            assert [(await each)[0] for each in (going_on, ask(session, back.url, long))] == [200, 200]
    assert log.read_text().rstrip().endswith("RuntimeError: simulated crash")


async def test_sixty_four_servers_answer_at_once() -> None:
    async with Host() as host, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        servers = await asyncio.gather(*(host.add(spec(index=index)) for index in range(64)))
        answers = await asyncio.gather(
            *(ask(session, server.url, chat(f"{n}")) for server in servers for n in range(4))
        )
        assert {status for status, _ in answers} == {200}
        assert host.completed == 256


async def test_the_log_is_written_in_virtual_time(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        async with Host() as host, aiohttp.ClientSession() as session:
            server = await host.add(spec(load_s=7200.0), None, file.fileno())
            await ask(session, server.url, chat())
    lines = log.read_text().splitlines()
    hours = {line[1:14] for line in lines}
    assert len(hours) >= 2
    assert any("Decode batch" in line for line in lines)
    assert json.dumps(lines).count("fired up and ready to roll") == 1
