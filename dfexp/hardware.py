"""GPUs: kinds of them from gpus.json (memory, bandwidth, arithmetic peaks, what was measured to be reached of those),
and those that this machine has now.
"""

import contextlib
import difflib
import json
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from importlib import resources
from typing import Any

import psutil

from dfexp.errors import DfexpError

CONTEXT_MIB = 810
"""What a CUDA context and SGLang's start take before "Load weight begin"."""


class UnknownGpu(DfexpError):
    """A GPU's name is not in the table; the message lists the nearest names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that a GPU kind reaches. `provenance`: the measurement behind them; `uncertainty`: relative
    error (one sigma) to expect of a rate predicted with them.
    """

    bandwidth: float
    compute: float
    uncertainty: float
    provenance: str


UNMEASURED = Efficiency(
    bandwidth=0.75,
    compute=0.4,
    uncertainty=0.25,
    provenance="not measured on this kind of GPU: middle of those that were; calibrate with a run's own samples",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One kind of GPU: memory that the driver reports, dense peaks in FLOP/s (flops_8 equals flops_16 where FP8 brings
    nothing), and where the numbers are from.
    """

    name: str
    aliases: tuple[str, ...]
    memory_mib: int
    bandwidth_bytes_per_s: float
    flops_16: float
    flops_8: float
    source: str
    efficiency: Efficiency = UNMEASURED

    @property
    def free_gib(self) -> float:
        """Memory that is free before weights are loaded, when nothing else runs on the GPU."""
        return (self.memory_mib - CONTEXT_MIB) / 1024

    def flops(self, element_bytes: int) -> float:
        """Dense peak for weights of this many bytes per element."""
        return self.flops_8 if element_bytes == 1 else self.flops_16


def gpus() -> tuple[Gpu, ...]:
    """Every GPU of the table."""
    rows = json.loads(resources.files("dfexp").joinpath("gpus.json").read_text(encoding="utf-8"))
    for row in rows:
        row["aliases"] = tuple(row["aliases"])
        row["efficiency"] = Efficiency(**row["efficiency"]) if "efficiency" in row else UNMEASURED
    return tuple(Gpu(**row) for row in rows)


def _key(name: str) -> str:
    """A name without vendor, case and spaces."""
    plain = re.sub(r"\b(nvidia|geforce|generation|edition|server|workstation|max-q)\b", " ", name.lower())
    return re.sub(r"[^a-z0-9]", "", plain)


def find_gpu(name: str) -> Gpu:
    """The GPU of this name, spelled as people or `nvidia-smi` do. Raises UnknownGpu."""
    by_key = {_key(alias): gpu for gpu in gpus() for alias in (gpu.name, *gpu.aliases)}
    if _key(name) in by_key:
        return by_key[_key(name)]
    near = difflib.get_close_matches(_key(name), by_key, n=1, cutoff=0.75)
    hint = f"Did you mean {by_key[near[0]].name}? " if near else ""
    raise UnknownGpu(f"GPU {name!r} is not in the table. {hint}Known: {', '.join(gpu.name for gpu in gpus())}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNow:
    """One GPU of this machine as its driver sees it. `processes`: those that hold memory there, in words; a container
    hides those of others.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    used_bytes: int
    capability: tuple[int, int]
    is_mig: bool
    processes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusNow:
    """The GPUs of this machine, the newest CUDA that their driver runs (`12.8`), and why there are none."""

    gpus: tuple[GpuNow, ...] = ()
    driver_cuda: str | None = None
    reason: str = ""


def gpus_now() -> GpusNow:
    """Ask the NVIDIA driver (NVML); nothing is started on a GPU. Never raises."""
    import pynvml as nvml  # takes 60 ms, and most commands look at no GPU

    try:
        nvml.nvmlInit()
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        found = tuple(_gpu_now(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return GpusNow(reason=f"the NVIDIA driver does not answer: {error}")
    return GpusNow(
        gpus=found, driver_cuda=f"{cuda // 1000}.{cuda % 1000 // 10}", reason="" if found else "the driver has none"
    )


def _gpu_now(nvml: Any, index: int) -> GpuNow:
    device = nvml.nvmlDeviceGetHandleByIndex(index)
    memory, is_mig, processes = nvml.nvmlDeviceGetMemoryInfo(device), False, []
    with contextlib.suppress(nvml.NVMLError):  # a kind of GPU without MIG
        is_mig = nvml.nvmlDeviceGetMigMode(device)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    with contextlib.suppress(nvml.NVMLError):  # not allowed to ask
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(device)
    return GpuNow(
        index=index, uuid=nvml.nvmlDeviceGetUUID(device), name=nvml.nvmlDeviceGetName(device), is_mig=is_mig,
        total_bytes=memory.total, free_bytes=memory.free, used_bytes=memory.used,
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(device)),
        processes=tuple(f"{_program(each.pid)}, {(each.usedGpuMemory or 0) / 2**30:.1f} GiB" for each in processes),
    )  # fmt: skip


def _program(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{psutil.Process(pid).name()} (pid {pid})"
    return f"pid {pid}"


def held_bytes(names: Collection[str]) -> int | None:
    """Memory in use on these GPUs, by index or UUID as in CUDA_VISIBLE_DEVICES, together; None without a driver."""
    now = gpus_now()
    return sum(gpu.used_bytes for gpu in now.gpus if {str(gpu.index), gpu.uuid} & set(names)) if now.gpus else None


_CLOCKS = (
    *("gpu idle", "application clocks", "power cap", "hardware slowdown", "sync boost", "thermal"),
    *("hardware thermal", "power brake", "display clocks"),
)  # what the bits of a GPU's clock event reasons mean, from the lowest one on
_FAULTS = frozenset(("hardware slowdown", "thermal", "hardware thermal", "power brake"))  # the rest is as it is set up


class GpuMeter:
    """Reads GPUs through NVML, which stays open, since opening it takes longer than reading. Never raises."""

    def __init__(self, names: Collection[str]) -> None:
        """Args: names, by index or UUID as in CUDA_VISIBLE_DEVICES. Without a driver there is nothing to read."""
        self._devices: list[tuple[int, str, Any]] = []
        if not names:
            return
        import pynvml as nvml

        self._nvml: Any = nvml
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
            for index in range(nvml.nvmlDeviceGetCount()):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = nvml.nvmlDeviceGetUUID(device)
                self._devices += [(index, uuid, device)] * bool({str(index), uuid} & set(names))

    def lines(self) -> list[dict[str, Any]]:
        """What each GPU does now, as a line of metrics.jsonl; what its driver does not tell is left out.

        `gpu` is its index, `at` seconds since the Unix epoch, `utilization` (0-1) the share of the time in which
        anything ran there. Why its clocks are lower than they could be: `throttle_reasons` are faults of cooling and
        power supply; `clock_limits` are as it should be, such as "gpu idle", and the "power cap" that work runs into.
        """
        return [self._line(*device) for device in self._devices]

    def _line(self, index: int, uuid: str, device: Any) -> dict[str, Any]:
        nvml, line = self._nvml, {"gpu": index, "uuid": uuid, "at": time.time()}
        with contextlib.suppress(nvml.NVMLError):
            line["utilization"] = nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100
        with contextlib.suppress(nvml.NVMLError):
            memory = nvml.nvmlDeviceGetMemoryInfo(device)
            line |= {"memory_used_bytes": memory.used, "memory_total_bytes": memory.total}
        with contextlib.suppress(nvml.NVMLError):
            line["power_w"] = nvml.nvmlDeviceGetPowerUsage(device) / 1000
        with contextlib.suppress(nvml.NVMLError):
            line["sm_clock_mhz"] = nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)
        with contextlib.suppress(nvml.NVMLError):
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)
            said = [words for place, words in enumerate(_CLOCKS) if bits >> place & 1]
            line["throttle_reasons"] = [words for words in said if words in _FAULTS]
            line["clock_limits"] = [words for words in said if words not in _FAULTS]
        return line
