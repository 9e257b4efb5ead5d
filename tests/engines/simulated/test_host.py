"""Several servers on one virtual clock, over HTTP, in this process."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from dfexp.engines.simulated.core import Event, Simulator, run_closed_loop
from dfexp.engines.simulated.server.clock import STOOD_S, Clock
from dfexp.engines.simulated.server.host import Host
from dfexp.engines.simulated.server.pace import AWAY_S
from dfexp.virtual_time import CLOCK, VirtualTime
from tests.engines.simulated.servers import ask, chat, get, sized, spec
from tests.shards.test_disk import files_at_most


async def test_a_client_costs_no_virtual_time() -> None:
    """What the servers do at `max` is what the pure simulation does, to the last digit."""
    chance, lanes = random.Random(1), 16
    sizes = [(chance.randint(20, 300), tokens := chance.randint(50, 900), tokens) for _ in range(300)]
    wanted = {
        told.request_id: (told.at_s, told.tokens)
        for _, told in run_closed_loop([Simulator(spec().config) for _ in range(2)], sizes, lanes)
        if isinstance(told, Event) and told.kind == "finished"
    }
    for _ in range(4):  # a machine that stalls for longer than the clock's patience lets it go on without the client
        found = await closed_loop_over_http(sizes, lanes)
        assert found.keys() == wanted.keys()
        if all(found[key] == (pytest.approx(at_s, abs=1e-6), tokens) for key, (at_s, tokens) in wanted.items()):
            return
    pytest.fail("four times the servers did otherwise than the pure simulation")


async def closed_loop_over_http(sizes: list[tuple[int, int, int]], lanes: int) -> dict[int | str, tuple[float, int]]:
    """Virtual second and tokens of each request's end, at two servers with so many requests in flight each."""
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
        assert sum(server.finished["num_requests", False] for server in servers) == len(sizes)
    return found


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


def test_a_clock_that_stood_has_stood_for_who_reads_it(tmp_path: Path) -> None:
    clock = Clock(tmp_path, "max")
    clock.move(1.0)
    clock.stand(idle=False)
    stood_at = time.time()
    time.sleep(2 * STOOD_S)
    clock.move(2.0)
    clock.close()
    told = VirtualTime.read(tmp_path / CLOCK)
    assert told.of(np.array(stood_at + STOOD_S)) == pytest.approx(1.0)


async def test_a_full_disk_ends_no_server(tmp_path: Path) -> None:
    async with Host(folder=tmp_path) as host, aiohttp.ClientSession() as session:
        server, file = await host.add(spec()), tmp_path / CLOCK
        size = file.stat().st_size
        with files_at_most(size):
            for _ in range(2):
                assert (await ask(session, server.url, chat()))[0] == 200
            assert (file.stat().st_size, host.driver.done()) == (size, False)
        assert (await ask(session, server.url, chat()))[0] == 200
        ended_s = host.clock.now_s
    told = VirtualTime.read(tmp_path / CLOCK)
    assert (told.virtual_s[1:] >= told.virtual_s[:-1]).all()
    assert told.virtual_s[-1] == ended_s


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
        async with asyncio.timeout(AWAY_S / 2):  # nobody had requests at the first one: nobody is waited for
            assert (await answer)[0] == 200


async def working(session: aiohttp.ClientSession, url: str) -> None:
    """A client of one request after the other."""
    while True:
        assert (await ask(session, url, chat(max_tokens=500, ignore_eos=True)))[0] == 200


@pytest.mark.parametrize("is_drained", [False, True])
async def test_the_clock_waits_for_the_client_of_a_server_that_is_back(is_drained: bool) -> None:
    """As after a crash, or after a change of settings, with the looks at the server that follow it."""
    long = chat(max_tokens=2000, ignore_eos=True)
    async with Host() as host, aiohttp.ClientSession() as session:
        first, other = await asyncio.gather(host.add(spec()), host.add(spec(index=1)))
        beside = asyncio.create_task(working(session, other.url))
        fed = [asyncio.create_task(ask(session, first.url, long)) for _ in range(3)]
        while len(first.jobs) < 3:
            await asyncio.sleep(0)
        if is_drained:
            assert [(await one)[0] for one in fed] == [200] * 3
        host.remove(first)
        ends = await asyncio.gather(*fed, return_exceptions=True)
        assert is_drained or all(isinstance(end, aiohttp.ClientConnectionError) for end in ends)
        back = await host.add(spec(port=first.port))
        ready_s = host.clock.now_s
        for probes, tokens in (1, 1), (6, 48):
            looks = (ask(session, back.url, chat(f"{n}", max_tokens=tokens, ignore_eos=True)) for n in range(probes))
            assert {status for status, _ in await asyncio.gather(*looks)} == {200}
        stood_s = host.clock.now_s
        assert stood_s - ready_s < 2.5, "time passes for the looks alone"
        await asyncio.wait([beside], timeout=1.0)  # the client's own time
        assert host.clock.now_s == stood_s
        answers = await asyncio.gather(*(ask(session, back.url, long) for _ in range(3)))
        assert [status for status, _ in answers] == [200] * 3
        beside.cancel()


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
            ends = await asyncio.gather(going_on, ask(session, back.url, long))
            assert [status for status, _ in ends] == [200, 200]
    assert log.read_text().rstrip().endswith("RuntimeError: simulated crash")


@pytest.mark.parametrize("at_s", [100.2, 100.3])
async def test_a_crash_happens_once_whatever_is_rounded(at_s: float, tmp_path: Path) -> None:
    """A fleet of one comes back in the moment of its crash, the second time in another process."""
    one = spec(faults=({"kind": "crash", "at_s": at_s},))
    began_s, long = 61.0, chat(max_tokens=6000, ignore_eos=True)
    assert (began_s + at_s) - began_s != at_s
    async with Host(folder=tmp_path) as host, aiohttp.ClientSession() as session:
        server = await host.add(one)
        assert host.began_s == began_s
        with pytest.raises(aiohttp.ClientConnectionError):
            await ask(session, server.url, long)
        back = await host.add(replace(one, port=server.port))
        assert (await ask(session, back.url, chat()))[0] == 200
        crashed_s = began_s + at_s
        assert crashed_s + 61.0 < host.clock.now_s
    (tmp_path / CLOCK).unlink()
    with (tmp_path / CLOCK).open("w") as file:  # as if the process had ended with its server
        file.write(json.dumps({"real_at": time.time(), "virtual_s": crashed_s}) + "\n")
    async with Host(folder=tmp_path) as host, aiohttp.ClientSession() as session:
        back = await host.add(one)
        assert host.since_s == pytest.approx(at_s + 61.0)
        assert (await ask(session, back.url, chat()))[0] == 200


async def test_sixty_four_servers_answer_at_once() -> None:
    async with Host() as host, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        servers = await asyncio.gather(*(host.add(spec(index=index)) for index in range(64)))
        answers = await asyncio.gather(
            *(ask(session, server.url, chat(f"{n}")) for server in servers for n in range(4))
        )
        assert {status for status, _ in answers} == {200}
        assert sum(server.finished["num_requests", False] for server in servers) == 256


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
