"""SGLang's scheduler and pools as a discrete-event model in virtual time, for versions 0.5.12 to 0.5.23.

    simulator = Simulator(Config.of(setting))        pools and times, from the capacity model
    simulator.submit(0.0, "a", 150, 900, 4096)       tokens of prompt and answer, max_new_tokens
    while (at_s := simulator.next_event_s()) is not None:
        for told in simulator.advance(at_s):         Event: first_token, finished, retracted, aborted
            ...                                      Line: the numbers of one of SGLang's log lines, and all gauges

Times are seconds from any origin that the caller likes; they never come from a clock. `advance(until_s)` does what ends
by then. How time is cut into calls changes nothing, as long as a request is submitted before the time at which it
arrives has been passed: submit first, then ask `next_event_s` or `advance` further.

Between two events the batch stays the same, so any number of decode steps is one jump: a step's time grows linearly
with the tokens in the KV pool, and its sum over steps has a closed form.

`gauges(at_s)` and `counters` bear SGLang's own names, without `sglang:`. Gauges move when SGLang's do: at a prefill and
at every 40th decode step; 30 s after the last they are 0. `generated(request_id)` and `pending_tokens()` are live.
Faults: `slow` sets a factor on all times, and nothing moves while `hung` is set. `run_closed_loop` puts a client in
front of several servers.

SGLang aborts a request that does not fit the KV pool even alone; `max_new` is lowered at submission so that there is
none.

Log lines are those of real servers of 0.5.12 and 0.5.23, line by line: tests/sglang/test_simulated_fidelity.py. A
server that overlaps writes each line when the next batch has begun, so there gauges of pools and queue are one batch
ahead of these.

Not modelled: shared prefixes (`cache_hit_rate` is 0), the prompt that may still be cached when a request comes back
after a retraction, the token that a server which overlaps computes once more after one, mixed chunks, priorities,
speculation, parallelism inside a server, `ignore_eos` (for which more is reserved), and eager steps beyond the largest
CUDA graph being slower.
"""

from dfexp.engines.simulated.core.closed_loop import Sizes, run_closed_loop
from dfexp.engines.simulated.core.machine import Config
from dfexp.engines.simulated.core.simulator import DECODED, PREFILLED, Event, Line, RequestId, Simulator

__all__ = ["DECODED", "PREFILLED", "Config", "Event", "Line", "RequestId", "Simulator", "Sizes", "run_closed_loop"]
