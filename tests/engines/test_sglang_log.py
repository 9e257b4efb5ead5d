from __future__ import annotations

import re
import time
from importlib.resources import files
from pathlib import Path

import pytest
import yaml

from dfexp.engines.sglang_log import diagnose

RECORDED = Path(__file__).resolve().parent.parent / "data" / "sglang" / "startup_failures"
LOADED = """[2026-11-02 10:00:00] server_args={'model_path': 'm', 'mem_fraction_static': 0.5, 'tp_size': 1}
[2026-11-02 10:00:01] Load weight begin. avail mem=94.80 GB
[2026-11-02 10:01:00] Load weight end. elapsed=59.02 s, type=Qwen3_5ForConditionalGeneration, avail mem=42.90 GB, mem usage=51.90 GB.
"""  # noqa: E501
POOLS = LOADED + "[2026-11-02 10:01:02] Memory pool end. avail mem=9.40 GB\n"
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.16 GiB. GPU 0 has a total capacity of 94.97 GiB of"
    " which 512.00 MiB is free. Process 4711 has 40.10 GiB memory in use. Including non-PyTorch memory, this process"
    " has 54.30 GiB memory in use.\n"
)
EXCEPTION = "[2026-11-02 10:01:05 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
SIGQUIT = "\n[2026-11-02 10:01:06] Received sigquit from a child process. It usually means the child failed.\n"
CAUGHT = (
    'Traceback (most recent call last):\n  File "sglang/srt/utils/numa_utils.py", line 40, in nodes\n'
    "PermissionError: [Errno 13] Permission denied: '/sys/devices/system/node/node0/cpumap'\n"
)
EARLY = {
    "nvcc": "UserWarning: Could not find nvcc, please set CUDA_HOME; falling back to precompiled kernels\n",
    "permission": "[2026-11-02 09:59:00] WARNING: PermissionError: [Errno 13] Permission denied: '/sys/fs/cgroup/x'\n",
    "caught": CAUGHT,
    "header": "c++ main.c\nmain.c:3:10: fatal error: infiniband/verbs.h: No such file or directory\n",
    "port": "[2026-11-02 09:59:00] Port 8998 is already in use, trying port 8999\n",
}
COMMON_OPS = """ImportError:\x20
[sgl_kernel] CRITICAL: Could not load any common_ops library!

Attempted locations:
1. Architecture-specific pattern: site-packages/sgl_kernel/sm100/common_ops.* - found files: ['common_ops.abi3.so']
2. Fallback pattern: site-packages/sgl_kernel/common_ops.* - found files: []
3. Standard Python import: common_ops - failed

GPU Info:
- Compute capability: 120

Error details from previous import attempts:
- ImportError: site-packages/sgl_kernel/sm100/common_ops.abi3.so: %s
- ModuleNotFoundError: No module named 'common_ops'
"""
GCC = (
    "/usr/bin/ld: cannot find -lcuda: No such file or directory\ncollect2: error: ld returned 1 exit status\n%s"
    "subprocess.CalledProcessError: Command '['/usr/bin/gcc', '/tmp/tmpe7/main.c', '-O3', '-shared', '-fPIC', '-o',"
    " '/tmp/tmpe7/cuda_utils.so', '-lcuda', '-I/usr/include/python3.12']' returned non-zero exit status 1."
)
WATCHDOG = (
    "[rank0]:[E1016 03:31:38.919469923 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout:"
    " WorkNCCL(SeqNum=4, OpType=BROADCAST, NumelIn=112, NumelOut=112, Timeout(ms)=600000) ran for 600011 milliseconds"
    " before timing out.\nterminate called after throwing an instance of 'c10::DistBackendError'\n"
    "Fatal Python error: Aborted\n"
)
JIT = (
    "RuntimeError: Ninja build failed. Ninja output:\n[1/4] /usr/local/cuda/bin/nvcc --std=c++17 -c page.cu -o page.o\n"
)

RECORDED_CASES = [
    ("0.5.12_context_too_long", r"context_length = 99999999 is more than the model's 8192"),
    ("0.5.12_invalid_choice", r"--attention-backend: invalid choice: 'fa9'.*fleet\.flags"),
    ("0.5.12_lfs_pointer", r"Git LFS pointer \(.*header too large\)"),
    ("0.5.12_model_without_config", r"fleet\.model.*Unrecognized model in models/empty"),
    ("0.5.12_no_gpu", r"No such GPU.*fleet\.device: cpu"),
    ("0.5.12_no_such_model", r"fleet\.model.*'models/nothing'"),
    ("0.5.12_no_weights", r"Cannot find any model weights"),
    ("0.5.12_truncated_weights", r"cut short.*Copy the files of fleet\.model again"),
    ("0.5.12_unknown_model_type", r"does not know the model qwen9_next.*fleet\.python"),
    ("0.5.12_unrecognized_argument", r"unrecognized arguments: --no-such-flag 3"),
    ("0.5.23_auto_extra_buffer_on_cpu", r"fleet\.flags\.mamba_strategy: no_buffer"),
    ("0.5.23_no_buffer_needs_disable_overlap", r"fleet\.flags\.disable_overlap_schedule: true"),
    ("0.5.23_port_in_use", r"\('127\.0\.0\.1', 30000\).*fleet\.first_port"),
    ("no_sglang", r"no SGLang.*fleet\.python"),
]
# Lines as these programs word them; not recorded here, since they need a GPU or a damaged machine.
WORDED_CASES = [
    ("sglang serve: error: ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max-bs-decode",
     r"ambiguous option.*Correct it in fleet\.flags"),
    ("AssertionError: no_buffer only supports page_size=1.", r"page_size: 1\."),
    ("AssertionError: no_buffer do not support trtllm_mha attention backend.", r"attention_backend: flashinfer"),
    ("AssertionError: Mamba extra_buffer is only supported on CUDA and MUSA and NPU devices with FLA backend",
     r"mamba_strategy: no_buffer"),
    ("AssertionError: mamba extra_buffer is not supported for NemotronHForCausalLM model",
     r"not supported for NemotronHForCausalLM\. Set fleet\.flags\.mamba_strategy: no_buffer"),
    ("ValueError: mamba extra_buffer is not compatible with --disable-radix-cache Overlap scheduling is",
     r"mamba_strategy: no_buffer"),
    ("ValueError: --mamba-radix-cache-strategy extra_buffer needs mamba state, got Qwen3ForCausalLM.",
     r"Qwen3ForCausalLM has no recurrent state\. Take out"),
    ("ValueError: Speculative decoding for Qwen3NextForCausalLM is not compatible with radix cache when using"
     " --mamba-scheduler-strategy no_buffer.To use", r"mamba_strategy: extra_buffer"),
    ("ValueError: Model architectures ['FooForCausalLM'] are not supported for now. Supported architectures: x",
     r"does not know the model \['FooForCausalLM'\]"),
    ("OSError: models/m does not appear to have a file named config.json. Checkout 'https://x' for available files.",
     r"file named config\.json\. A folder"),
    ("OSError: Can't load the configuration of 'models/m'. If you were trying to load it from", r"Can't load the conf"),
    ("OSError: We couldn't connect to 'https://hub' to load the files, and couldn't find them in the cached files.",
     r"no folder on this machine"),
    ("triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 131072, Hardware limit: 101376.",
     r"Required: 131072.*attention_backend"),
    ("NCCL WARN Error while creating shared memory segment /dev/shm/nccl-Ab1 (size 9637888), error: No space left on"
     " device (28)\nRuntimeError: NCCL error: unhandled system error", r"/dev/shm.*--shm-size"),
    ("OSError: [Errno 28] No space left on device: '/cache/x.so'", r"disk is full"),
    ("PermissionError: [Errno 13] Permission denied: '/models/m/x.json'", r"permission for '/models/m/x\.json'"),
    ("RuntimeError: The NVIDIA driver on your system is too old (found version 12020).", r"driver is older"),
    ("RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you call it before? Error 804: forward"
     " compatibility was attempted on non supported HW", r"driver is older"),
    ("UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 12020).\n"
     "RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) is available.", r"driver is older.*driver on your"),
    ("AssertionError: Torch not compiled with CUDA enabled", r"CPU build.*fleet\.device: cpu"),
    ("RuntimeError: CUDA error: invalid device ordinal", r"No such GPU \(invalid device ordinal\).*fleet\.gpus"),
    ("RuntimeError: No CUDA GPUs are available", r"fleet\.gpus"),
    ("RuntimeError: RMSNorm failed with error code no kernel image is available for execution on the device",
     r"not built for this GPU"),
    ("UserWarning: GPU with CUDA capability sm_120 is not compatible with the current PyTorch\n"
     "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
     r"not built for this GPU"),
    ("RuntimeError: SGLang only supports sm75 and above.", r"not built for this GPU"),
    ("AssertionError: FlashAttention v3 Backend requires SM>=80 and SM<=90. Please use `--attention-backend",
     r"SM>=80 and SM<=90\. Set fleet\.flags\.attention_backend: flashinfer"),
    ("ValueError: TRTLLM MLA backend is only supported on Blackwell GPUs (SM100/SM12x). Please use another.",
     r"TRTLLM MLA backend.*attention_backend"),
    ("ValueError: Invalid attention backend: fa9", r"Invalid attention backend: fa9\. Set"),
    (JIT + "c++: fatal error: Killed signal terminated program cc1plus", r"MAX_JOBS"),
    (JIT + "sh: 1: /usr/local/cuda/bin/nvcc: not found", r"no CUDA compiler.*CUDA_HOME"),
    ("RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist", r"no CUDA compiler"),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'", r"no CUDA compiler"),
    (JIT + "math.hpp:4:10: fatal error: nv/target: No such file or directory", r"CCCL header nv/target"),
    (JIT + "vec.cuh:9:10: fatal error: cuda/std/limits: No such file or directory", r"CCCL header cuda/std/limits"),
    (JIT + "page.cu:1:10: fatal error: cuda_runtime.h: No such file or directory", r"header cuda_runtime\.h is"),
    (JIT + "tensor_fill.h:42:10: fatal error: curand_kernel.h: No such file or directory", r"curand_kernel\.h"),
    ("RuntimeError: The detected CUDA version (12.4) mismatches the version that was used to compile PyTorch (13.0).",
     r"does not fit \(CUDA version \(12\.4\) mismatches"),
    (JIT + "nvcc fatal   : Unsupported gpu architecture 'compute_120a'", r"compute_120a"),
    (JIT + "page.cu(3): error: argument of type \"int\" is incompatible", r"Kernels could not be compiled"),
    (LOADED + "RuntimeError: Not enough GPU memory for hybrid (mamba/linear-attention) state cache. Computed"
     " max_mamba_cache_size=-28 (total_rest_memory=-7.96 GB, mamba_cache_per_req=146.81 MB). Try: (1)",
     r"-28 slots\) \(94\.8 GiB free before loading, 42\.9 GiB free after loading, mem_fraction_static 0\.5\)\. Raise"
     r" fleet\.flags\.mem_fraction_static above 0\.55"),
    (LOADED + "RuntimeError: Trying to create tensor with negative dimension -27: [48, -27]", r"-27 slots"),
    (LOADED + "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
     r"KV pool \(94\.8 .*Raise fleet\.flags\.mem_fraction_static above 0\.55"),
    ("RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other processes.", r"nvidia-smi"),
    (POOLS + "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has",
     r"after the pools were made \(2\.00 GiB wanted,.*Lower fleet\.flags\.mem_fraction_static"),
    (LOADED + OOM,
     r"while the pools were made \(1\.16 GiB wanted, 512\.00 MiB free, 40\.10 GiB held by another process"),
    ("[2026-11-02 10:00:01] Load weight begin. avail mem=94.80 GB\n" + OOM, r"while the weights.*tp_size"),
    ("RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)", r"NCCL_DEBUG: INFO"),
    ("DistNetworkError: The server socket has failed to listen on any local network address. port: 30100, useIpv6:"
     " false, code: -98, name: EADDRINUSE, message: address already in use",
     r"internal port.*\(port: 30100\); it is not the one of fleet\.first_port\. Start it again"),
    ("RuntimeError: The server socket has failed to listen on any local network address. The server socket has"
     " failed to bind to [::]:44796 (errno: 98 - Address already in use).", r"internal port.*\(\[::\]:44796\)"),
    ("zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:32765')", r"\(tcp://127\.0\.0\.1:32765\)"),
    ("zmq.error.ZMQError: Address already in use (addr='ipc:///tmp/a1')", r"internal port.*\(ipc:///tmp/a1\)"),
    ("zmq.error.ZMQError: Address already in use", r"\(ZMQError: Address already in use\)"),
    ("ValueError: nccl_port at 30100 is not available in 30 seconds.", r"internal port.*\(nccl_port at 30100\)"),
    ("OSError: [Errno 98] Address already in use", r"server's port: \[Errno 98\] Address already in use\. Stop"),
    (COMMON_OPS % "undefined symbol: _ZNK3c106SymInt6sym_neERKS0_", r"not fit this torch.*common_ops\.abi3\.so"),
    ("ModuleNotFoundError: No module named 'sglang.srt.layers.x'", r"lacks the module sglang\.srt\.layers\.x,"),
    ("ModuleNotFoundError: No module named 'flashinfer'", r"lacks the module flashinfer,"),
    ("/opt/env/bin/python: No module named sglang.launch_server", r"lacks the module sglang\.launch_server,"),
    (GCC % EXCEPTION, r"driver's library \(cannot find -lcuda\).*LIBRARY_PATH"),
    (JIT + "/usr/bin/ld: cannot find -lcuda: No such file or directory\ncollect2: error: ld returned 1 exit status\n"
     "ninja: build stopped: subcommand failed.", r"driver's library"),
    ("/tmp/tmpe7/main.c:5:10: fatal error: Python.h: No such file or directory\n" + GCC.partition("%s")[2],
     r"headers of Python \(Python\.h\).*python3-dev"),
    (WATCHDOG, r"waited in vain.*\(Watchdog caught collective operation timeout.*NCCL_DEBUG: INFO"),
    ("Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f48 (most recent call first):\n"
     '  File "sglang/srt/layers/rotary.py", line 351 in forward',
     r"crashed in compiled code \(Fatal Python error: Segmentation fault\)"),
    ("Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f48 (most recent call first):\n"
     '  File "sglang/srt/distributed/device_communicators/pynccl_wrapper.py", line 351 in ncclCommInitRank',
     r"cannot talk to each other \(ncclCommInitRank\)"),
    ("Fatal Python error: Aborted", r"compiled code \(Fatal Python error: Aborted\)"),
    ("[2026-11-02 10:01:06] Subprocess scheduler_0 (pid=7) crashed with exit code -11. Triggering SIGQUIT for cleanup",
     r"compiled code \(exit code -11\)"),
    ("RuntimeError: Rank 0 scheduler died during initialization (exit code: -6). If exit code is -9 (SIGKILL), a"
     " common cause is the OS OOM killer.", r"compiled code \(exit code: -6\)"),
    ("[2026-11-02 10:01:06] Rank 0 scheduler is dead. Please check if there are relevant logs.\n"
     "[2026-11-02 10:01:06] Exit code: -9", r"ended a process \(Exit code: -9\)"),
    ("[2026-11-02 10:01:06] Scheduler or DataParallelController 7 terminated with -11", r"\(terminated with -11\)"),
    ("RuntimeError: Rank 0 scheduler died during initialization (exit code: -7).", r"/dev/shm.*exit code: -7"),
    ("OSError: [Errno 12] Cannot allocate memory", r"memory was full.*fleet\.stagger_s"),
    ("OSError: [Errno 24] Too many open files", r"ulimit -n"),
    ("ImportError: libnuma.so.1: cannot open shared object file: No such file or directory", r"library libnuma\.so\.1"),
    ("RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a"
     " common cause is the OS OOM killer.", r"dmesg.*fleet\.stagger_s"),
    ("[2026-11-02 10:00:01] Load weight begin. avail mem=94.80 GB\nKilled\n", r"ended a process \(Killed\)"),
    ("[2026-11-02 10:30:01] SIGTERM received. signum=None frame=None. Draining requests", r"fleet\.start_timeout_s"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "says"), RECORDED_CASES)
def test_the_cause_of_a_recorded_failure_is_found(name: str, says: str) -> None:
    assert re.search(says, diagnose((RECORDED / f"{name}.log").read_text(encoding="utf-8")))


@pytest.mark.parametrize(("log", "says"), WORDED_CASES)
def test_the_cause_is_found_above_what_it_leads_to(log: str, says: str) -> None:
    after = (
        "\n[2026-11-02 10:02:00] Received sigquit from a child process. It usually means the child failed.\n"
        "Traceback (most recent call last):\nRuntimeError: Rank 0 scheduler died during initialization (exit code: 1)."
    )
    assert re.search(says, diagnose(log))
    assert diagnose(log + after) == diagnose(log)
    assert diagnose("[2026-11-02 10:00:00] INFO\n" * 50 + log) == diagnose(log)


def test_every_recorded_log_and_every_cause_has_its_test() -> None:
    assert {path.stem for path in RECORDED.iterdir()} == {name for name, _ in RECORDED_CASES}
    logs = [(RECORDED / f"{name}.log").read_text(encoding="utf-8") for name, _ in RECORDED_CASES]
    logs += [log for log, _ in WORDED_CASES]
    table = yaml.safe_load(files("dfexp.engines").joinpath("sglang_causes.yaml").read_text(encoding="utf-8"))
    said = [diagnose(log) for log in logs]
    for cause in table["causes"] + table["endings"]:
        words = re.sub(r"\\\{(?:\d|memory|least|most)\\\}", ".*", re.escape(cause["say"]))
        for name, text in table["words"].items():
            words = words.replace(re.escape(f"{{{name}}}"), re.escape(text))
        assert any(re.fullmatch(words, one) for one in said), cause["say"]


@pytest.mark.parametrize("early", EARLY)
@pytest.mark.parametrize(
    ("end", "says"),
    [
        (EXCEPTION + OOM + SIGQUIT, "Out of GPU memory while the pools were made"),
        (
            EXCEPTION + "AssertionError: window 3 is odd\n" + SIGQUIT,
            "stopped with: AssertionError: window 3 is odd. Where",
        ),
        ("Traceback (most recent call last):\n" + OOM, "Out of GPU memory while the pools were made"),
        ("Fatal Python error: Segmentation fault\n", "crashed in compiled code"),
        ("Killed\n", "The system ended a process (Killed)"),
        ("[2026-11-02 10:09:00] SIGTERM received. signum=None frame=None. Draining requests", "stopped from outside"),
        ("", "ends without an error"),
    ],
)
def test_what_was_only_logged_on_the_way_is_no_cause(early: str, end: str, says: str) -> None:
    assert says in diagnose(EARLY[early] + LOADED + end)


def test_an_early_complaint_right_before_the_error_that_ended_the_server_is_no_cause() -> None:
    assert "AssertionError: window" in diagnose(LOADED + CAUGHT + EXCEPTION + "AssertionError: window\n" + SIGQUIT)
    for early in EARLY.values():
        assert "Out of GPU memory" in diagnose(LOADED + early + "Traceback (most recent call last):\n" + OOM)


def test_the_first_ranks_error_counts_not_what_it_does_to_the_others() -> None:
    others = (
        "[2026-11-02 10:01:05 TP1] Load weight end. elapsed=59.02 s, avail mem=42.90 GB, mem usage=51.90 GB.\n"
        + EXCEPTION.replace("TP0", "TP1")
        + "RuntimeError: NCCL error: remote process exited or there was a network error\n"
        + SIGQUIT
        + "RuntimeError: Rank 1 scheduler died during initialization (exit code: -9).\n"
    )
    assert "Out of GPU memory" in diagnose(LOADED + EXCEPTION + OOM + others)
    assert "AssertionError: window" in diagnose(LOADED + EXCEPTION + "AssertionError: window\n" + others)


def test_an_error_of_several_lines_is_quoted_with_the_first_of_them() -> None:
    said = diagnose(LOADED + EXCEPTION + COMMON_OPS % "wrong ELF class" + SIGQUIT)
    assert "ImportError: [sgl_kernel] CRITICAL: Could not load any common_ops library! Attempted locations" in said


def test_an_error_that_ends_a_sentence_gets_no_second_full_stop() -> None:
    said = diagnose("ValueError: mode must be one of (auto, custom).\n")
    assert "(auto, custom). Where" in said
    assert ".." not in said


def test_an_unknown_failure_is_quoted_from_its_last_first_hand_error() -> None:
    log = (
        "KeyError: 'early'\nTraceback (most recent call last):\n"
        "AssertionError: mamba_track_interval 256 must be divisible by page_size 3\nEOFError\n"
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: 1)."
    )
    said = diagnose(log)
    assert "AssertionError: mamba_track_interval 256 must be divisible by page_size 3" in said
    assert "fleet.flags" in said


@pytest.mark.parametrize("log", ["", "[2026-11-02 10:00:01] Load weight begin. avail mem=94.80 GB\n"])
def test_a_log_that_just_ends_suggests_the_systems_memory(log: str) -> None:
    assert "dmesg" in diagnose(log)


def test_what_a_healthy_start_prints_is_no_cause() -> None:
    healthy = (RECORDED / "0.5.23_port_in_use.log").read_text(encoding="utf-8")
    healthy = "\n".join(line for line in healthy.split("\n") if "already in use" not in line)
    assert "ends without an error" in diagnose(healthy)


@pytest.mark.parametrize(
    "secret",
    ["api_key='hunter2hunter2'", "'api_key': 'hunter2hunter2'", "Authorization: Bearer hunter2hunter2",
     "token=hunter2hunter2", "https://me:hunter2hunter2@hub/x"],
)  # fmt: skip
def test_no_secret_is_repeated(secret: str) -> None:
    for log in (f"ValueError: wrong arguments ({secret})", f"launch: error: unrecognized arguments: {secret}"):
        assert "hunter2" not in diagnose(log)


_DECODE = "[2026-11-02 10:00:01] Decode batch, #running-req: 16, port 3, CUDA graph: True, " + "x" * 400 + "\n"
_LOAD_END = LOADED.split("\n")[2] + "\n"


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("Load weight end\nMemory pool end\n" + _DECODE * 16_000, "ends without an error"),
        (LOADED + (_LOAD_END + _DECODE) * 3_000, "ends without an error"),
        (_LOAD_END * 60_000 + OOM, "while the pools were made"),
        (LOADED + EXCEPTION + ("  File shared memory nvcc port 3, " * 6 + "\n") * 40_000 + "KeyError: 'x'", "KeyError"),
        (("x" * 3990 + "\n") * 2_000, "ends without an error"),
        (LOADED + EXCEPTION + "shared memory /dev/shm nvcc " * 300_000 + "\nKeyError: 'x'", "KeyError"),
    ],
)  # fmt: skip
def test_eight_megabytes_of_log_are_read_in_two_seconds(log: str, says: str) -> None:
    started = time.process_time()
    assert says in diagnose(log)
    assert time.process_time() - started < 2
