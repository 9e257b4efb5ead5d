"""The process of one embedded server: `python -m dfexp.engines.llamacpp_server CONFIG.json`.

On SIGTERM it waits until no request is in flight, and ends. It imports nothing of dfexp but the bare HTTP.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from dfexp.engines.http import get_json
from dfexp.errors import RequestError

_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}


def main() -> NoReturn:
    """Serve until told to stop, then leave by `os._exit`: destroying the server hangs while requests are in flight."""
    config = json.loads(Path(sys.argv[1]).read_bytes())
    # Blocked before the server makes its threads, which inherit it: the signal can only arrive at sigwait below.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        server = _start(config)
    except Exception as error:  # the log is the only place where the reason can be told
        print(f"dfexp: the server did not start: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        # An ordinary exit: llama.cpp writes its log from a thread, and os._exit would lose its last lines, the reason.
        signal.alarm(20)
        sys.exit(1)
    signal.sigwait(_STOP_SIGNALS)
    _drain(server.listening_address, config["key"], config["drain_s"])
    os._exit(0)


def _start(config: Mapping[str, Any]) -> Any:
    """Load the model and listen. Raises ImportError without xllamacpp, RuntimeError with the reason in the log."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias = config["model"], {config["alias"]}
    params.hostnames, params.port, params.api_keys = [config["host"]], config["port"], [config["key"]]
    params.n_parallel, params.n_ctx = config["slots"], config["context_length"] * config["slots"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = config["threads"]
    # A waiting request holds an HTTP thread: with too few of them the metrics would wait behind the queue.
    params.n_threads_http = 2 * config["slots"] + 16
    params.endpoint_metrics, params.endpoint_slots, params.ui, params.offline = True, True, False, True
    params.verbosity = 2  # warnings and errors: six lines a request would fill the disk in a long run
    params.fit_params = False  # it would shrink the context silently
    params.cache_ram_mib = 0  # prompts share no prefix; the cache grows to gigabytes
    return xllamacpp.Server(params)


def _drain(address: str, key: str, limit_s: float) -> None:
    """Wait until no slot has worked twice in a row, so that waiting requests had their turn and the answer has left."""
    end, idle = time.monotonic() + limit_s, 0
    while idle < 2 and time.monotonic() < end:
        time.sleep(0.1)
        with contextlib.suppress(RequestError):
            idle = 0 if any(slot["is_processing"] for slot in get_json(f"{address}/slots", key=key)) else idle + 1


if __name__ == "__main__":
    main()
