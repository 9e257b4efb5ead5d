"""Servers that start one after the other, and servers that get other settings one by one."""

import os
import signal
from pathlib import Path

import pytest

from dfexp.errors import EngineStartError, FleetError
from dfexp.fleet import attach, up
from tests.fleet.conftest import READY_S, marked, spec_of, wait_for


def test_servers_wait_for_one_another(launch):
    fleet = launch(wait=False, servers=3, stagger_s=1000.0)
    assert [server.pid is not None for server in fleet.servers] == [True, False, False]
    details = [status.detail for status in fleet.status()]
    assert details[1:] == ["not started yet"] * 2
    assert fleet.status()[1].state == "starting"


def starts(fleet) -> list[int]:
    """When the servers were started, in kernel ticks of 10 ms."""
    return [int(server.process_started.rpartition("-")[2]) for server in fleet.servers]


def test_the_next_one_starts_once_the_one_before_serves(launch):
    fleet = launch(servers=2, stagger_s=1000.0)
    assert all(status.state == "ready" for status in fleet.status())
    first, second = starts(fleet)
    assert second > first


def test_or_once_its_time_is_over(launch):
    fleet = launch(wait=False, servers=2, stagger_s=0.5)
    os.kill(fleet.servers[0].pid, signal.SIGSTOP)
    with pytest.raises(EngineStartError, match="did not become ready"):
        fleet.wait_ready(3.0)
    assert "starting server" in Path(fleet.servers[1].log).read_text()


def test_a_staggered_launch_whose_launcher_went_away_is_finished_by_the_next(launch, tmp_path):
    launch(wait=False, servers=2, stagger_s=0.5)
    again, started = up(spec_of("one", servers=2, stagger_s=0.5), tmp_path)
    assert not started
    again.wait_ready(READY_S)
    assert len(marked(again.identity)) == 2


def test_a_canary_goes_first_and_must_answer_with_text(launch):
    fleet = launch(servers=2, canary_first=True, max_running_requests=6, context_length=256)
    assert [status.state for status in fleet.status()] == ["ready", "ready"]
    first, second = starts(fleet)
    assert second > first


def test_one_server_gets_other_settings_and_keeps_its_address(launch):
    fleet = launch(servers=2)
    names = [server.name for server in fleet.servers]
    other = fleet.group.model_copy(update={"max_running_requests": 3})
    before = fleet.servers
    fleet.reconfigure(names[1], other)
    wait_for(lambda: fleet.status()[1].state == "ready")
    assert [server.name for server in fleet.servers] == names
    assert [fleet.limits(name).max_running_requests for name in names] == [1, 3]
    assert (fleet.servers[0], fleet.servers[1].pid != before[1].pid) == (before[0], True)
    assert "settings other than the fleet's" in fleet.status()[1].detail

    seen_by_others = attach(fleet.folder)
    assert [seen_by_others.settings(name).max_running_requests for name in names] == [1, 3]
    seen_by_others.restart(names[1])  # a crash on the way: the server comes back with its own settings
    wait_for(lambda: fleet.status()[1].state == "ready")
    assert fleet.limits(names[1]).max_running_requests == 3


def test_once_all_have_changed_the_fleet_is_of_the_new_parameters(launch, tmp_path):
    fleet = launch()
    other = fleet.group.model_copy(update={"max_running_requests": 2})
    fleet.reconfigure(fleet.servers[0].name, other)
    fleet.settle(other)
    fleet.wait_ready(READY_S)
    again, started = up(spec_of("one", max_running_requests=2), tmp_path)
    assert (started, again.group.max_running_requests) == (False, 2)
    assert again.servers[0].settings is None
    with pytest.raises(FleetError, match=r"fleet\.max_running_requests is 2, asked for is 1"):
        up(spec_of("one"), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"servers": 2}, r"fleet\.servers is 1 and would become 2"),
        ({"model": "other.gguf"}, r"fleet\.model is None and would become 'other\.gguf'"),
        ({"context_length": 10**9}, r"the model was trained for"),
    ],
)
def test_a_change_that_cannot_be_leaves_the_server_alone(launch, change, message):
    fleet = launch()
    before = fleet.servers
    with pytest.raises(FleetError, match=message):
        fleet.reconfigure(before[0].name, fleet.group.model_copy(update=change))
    assert fleet.servers == before
    assert fleet.status()[0].state == "ready"
