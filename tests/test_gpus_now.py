"""The GPUs of this machine through the real NVML binding, over a driver library of two made-up GPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.http_stub import Quiet, serving

NVML = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef unsigned int U;
typedef unsigned long long L;
typedef struct { U pid; L used; U instance, compute; } Process;
static int first, second;
int nvmlInitWithFlags(U flags) { return getenv("NO_DRIVER") ? 9 : 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "Driver Not Loaded"; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12080; return 0; }
int nvmlDeviceGetCount_v2(U *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(U index, void **device) { *device = index ? &second : &first; return 0; }
int nvmlDeviceGetName(void *device, char *name, U size) { strcpy(name, "NVIDIA Made Up"); return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, U size) {
    strcpy(uuid, getenv("BROKEN") ? "\\xff" : device == &first ? "GPU-a" : "GPU-b"); return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { *major = 12; *minor = 1; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, L *sizes) {
    L gib = 1;
    FILE *file = getenv("USED") ? fopen(getenv("USED"), "r") : 0;
    if (file) { fscanf(file, "%llu", &gib); fclose(file); }
    sizes[0] = 96ull << 30; sizes[2] = device == &first ? gib << 30 : 80ull << 30; sizes[1] = sizes[0] - sizes[2];
    return 0;
}
int nvmlDeviceGetMigMode(void *device, U *now, U *later) {
    if (device == &first) return 3;  /* not supported */
    *now = *later = 1; return 0;
}
int nvmlDeviceGetUtilizationRates(void *device, U *rates) { rates[0] = 97; rates[1] = 40; return 0; }
int nvmlDeviceGetPowerUsage(void *device, U *milliwatts) { *milliwatts = 351500; return device == &first ? 0 : 3; }
int nvmlDeviceGetClockInfo(void *device, U kind, U *mhz) { *mhz = kind == 1 ? 2407 : 0; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, L *bits) {
    *bits = device == &first ? 1 : 4 + 64; return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, U *count, Process *found) {
    if (device == &first) return 4;  /* no permission */
    U room = *count; *count = 2;
    if (room < 2) return 7;
    found[0].pid = atoi(getenv("SOMEBODY")); found[0].used = 79ull << 30;
    found[1].pid = 4194304; found[1].used = ~0ull;  /* a pid that no process can have; memory not told */
    return 0;
}
"""
SHOW = """
import dataclasses, json
from dfexp.hardware import gpus_now, held_bytes
held = [held_bytes(names) for names in (["0"], ["GPU-b"], ["0", "1"], ["7"])]
print(json.dumps({**dataclasses.asdict(gpus_now()), "held": held}))
"""
METER = """
import json
from dfexp.hardware import GpuMeter
meters = [GpuMeter(names) for names in (["1"], ["GPU-a", "1"], ["7"], [])]
print(json.dumps([meter.lines() for meter in meters]))
"""
DOWN = """
import sys
from pathlib import Path
from dfexp.engines.base import Server, engine_for
from dfexp.fleet import Fleet
from dfexp.fleet.record import FleetRecord, changing
from dfexp.hardware import held_bytes
from dfexp.layout import FleetFolder
from dfexp.params import LlamacppFleet
from dfexp.processes import ProcessId
folder, used = FleetFolder(Path(sys.argv[1])), sys.argv[2]
folder.logs.mkdir(parents=True)
hold = f"open({used!r}, 'w').write('70'); print('loaded', flush=True); import time; time.sleep(600)"
server = Server(name="a:1", url="http://a:1", argv=(sys.executable, "-c", hold), log=str(folder.logs / "log"),
                env={"CUDA_VISIBLE_DEVICES": "0"})
group = LlamacppFleet(engine="llamacpp")
before = held_bytes(["0"])
me = str(ProcessId.current())
record = FleetRecord(
    identity="abc", spec=group, root=folder.path, servers=(server,), launcher=me, gpu_bytes_before=before
)
fleet = Fleet(folder, engine_for(group), record)
with changing(folder):
    fleet.save_locked()
    fleet.start_locked(server)
while "loaded" not in (folder.logs / "log").read_text():
    pass
if sys.argv[3] == "freed":
    open(used, "w").write("1")
print("\\n".join(fleet.down(drain_s=0)))
"""
SAMPLE = """
import asyncio, sys
from pathlib import Path
from dfexp.engines.base import Server, engine_for
from dfexp.fleet import Fleet
from dfexp.fleet.record import FleetRecord
from dfexp.generate.events import EventLog, Guard
from dfexp.layout import FleetFolder
from dfexp.params import ExternalFleet
from dfexp.records import ServerLimits
from dfexp.sampler import Sampler
root, url = Path(sys.argv[1]), sys.argv[2]
server = Server(name="a:1", url=url, env={"CUDA_VISIBLE_DEVICES": "0,GPU-b"})
group = ExternalFleet(engine="external", urls=[url])
record = FleetRecord(identity="abc", spec=group, root=root, servers=(server,), launcher="x", gpu_bytes_before=None)
fleet, taken, enough = Fleet(FleetFolder(root), engine_for(group), record), [], asyncio.Event()
def take(sample):
    taken.append(sample)
    if len(taken) == 5:
        enough.set()
async def main():
    with EventLog(root / "events.jsonl") as events:
        sampler = Sampler(fleet=fleet, path=root / "metrics.jsonl", interval_s=0.02, now=lambda: 7.0,
                          limits=lambda name: ServerLimits(), taken=take, guard=Guard(events))
        task = asyncio.create_task(sampler.run())
        await enough.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
asyncio.run(main())
"""
GIB = 2**30


class Pages(Quiet):
    """/metrics of SGLang."""

    def do_GET(self) -> None:
        self.reply(200, (Path(__file__).parent / "data" / "metrics" / "0.5.12_hybrid_busy.prom").read_bytes())


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a driver library, compiled now."""
    folder = tmp_path_factory.mktemp("nvml")
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "a C compiler is needed, as for the package's other tools"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libnvidia-ml.so.1")]
    subprocess.run(command, input=NVML, text=True, check=True)
    return folder


def asked(library: Path, script: str = SHOW, **variables: str) -> Any:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "SOMEBODY": str(os.getpid()), **variables}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_every_fact_of_each_gpu(library: Path) -> None:
    found = asked(library)
    same = {"name": "NVIDIA Made Up", "capability": [12, 1], "total_bytes": 96 * GIB}
    idle = {"index": 0, "uuid": "GPU-a", "used_bytes": GIB, "free_bytes": 95 * GIB, "is_mig": False, "processes": []}
    assert (found["driver_cuda"], found["reason"]) == ("12.8", "")
    first, second = found["gpus"]
    assert first == same | idle
    processes = second.pop("processes")
    assert second == same | {
        "index": 1,
        "uuid": "GPU-b",
        "used_bytes": 80 * GIB,
        "free_bytes": 16 * GIB,
        "is_mig": True,
    }
    assert processes[0].endswith(f" (pid {os.getpid()}), 79.0 GiB")
    assert processes[1:] == ["pid 4194304, 0.0 GiB"]


def test_memory_in_use_is_added_up_by_index_or_uuid(library: Path) -> None:
    assert asked(library)["held"] == [GIB, 80 * GIB, 81 * GIB, 0]


def test_a_driver_that_does_not_answer_is_a_reason_and_no_error(library: Path) -> None:
    found = asked(library, NO_DRIVER="1")
    assert (found["gpus"], found["driver_cuda"], found["held"]) == ([], None, [None] * 4)
    assert found["reason"] == "the NVIDIA driver does not answer: Driver Not Loaded"


def test_a_meter_reads_the_gpus_that_it_is_for(library: Path) -> None:
    one, both, *none = asked(library, METER)
    assert none == [[], []]
    assert one[0]["at"] > 1e9
    del one[0]["at"]
    assert one[0] == {
        "gpu": 1, "uuid": "GPU-b", "utilization": 0.97, "memory_used_bytes": 80 * GIB, "memory_total_bytes": 96 * GIB,
        "sm_clock_mhz": 2407, "throttle_reasons": ["hardware thermal"], "clock_limits": ["power cap"],
    }, "what its driver does not tell is left out"  # fmt: skip
    assert [(each["gpu"], each.get("power_w")) for each in both] == [(0, 351.5), (1, None)]
    assert (both[0]["throttle_reasons"], both[0]["clock_limits"]) == ([], ["gpu idle"]), "no fault"


def test_a_meter_without_a_driver_reads_nothing(library: Path) -> None:
    assert asked(library, METER, NO_DRIVER="1") == [[], [], [], []]


@pytest.mark.parametrize("broken", [False, True])
def test_gpus_are_sampled_beside_servers_and_what_fails_with_them_is_told_once(
    library: Path, tmp_path: Path, broken: bool
) -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library)} | ({"BROKEN": "1"} if broken else {})
    with serving(Pages) as server:
        command = [sys.executable, "-c", SAMPLE, str(tmp_path), server.url]
        subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    lines, events = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "events.jsonl")
    )
    assert sum("server" in line for line in lines) >= 3
    seen = {(line["gpu"], line["uuid"], line["memory_total_bytes"]) for line in lines if "gpu" in line}
    assert seen == (set() if broken else {(0, "GPU-a", 96 * GIB), (1, "GPU-b", 96 * GIB)})
    assert [event["part"] for event in events] == ["GPUs"] * broken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fate", "words"),
    [
        ("freed", "GPU memory: 1.0 GiB in use on GPU 0, 1.0 before the launch"),
        ("kept", "GPU memory: NOT BACK: 70.0 GiB in use on GPU 0, 1.0 before the launch."),
    ],
)
def test_a_fleet_that_goes_down_says_whether_its_memory_is_back(
    library: Path, tmp_path: Path, fate: str, words: str
) -> None:
    used = tmp_path / "used"
    used.write_text("1")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "USED": str(used), "SOMEBODY": "1"}
    command = [sys.executable, "-c", DOWN, str(tmp_path / "fleet"), str(used), fate]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert words in done.stdout, done.stderr
