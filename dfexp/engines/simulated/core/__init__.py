"""SGLang's scheduler and pools as a discrete-event model in virtual time, for versions 0.5.12 to 0.5.23.

    config = server_config(setting)                  pools and step times, from the capacity model
    simulator = Simulator(config)
    simulator.submit(0.0, "a", prompt_tokens=150, output_tokens=900, max_new_tokens=4096)
    while (at_s := simulator.next_event_s()) is not None:
        for event in simulator.advance(at_s):        first_token, finished, retracted, aborted
            ...
        for line in simulator.take_lines():          the numbers of SGLang's log lines
            ...

Times are seconds from any origin that the caller likes; they never come from a clock. `advance(until_s)` does what ends
by then. How time is cut into calls changes nothing, as long as a request is submitted before the time at which it
arrives has been passed: submit first, then ask `next_event_s` or `advance` further.

Between two events the batch stays the same, so any number of decode steps is one jump: a step's time grows linearly
with the tokens in the KV pool, and its sum over steps has a closed form. 654,676 requests take well under a minute.

`Simulator.gauges(at_s)` and `Simulator.counters` bear SGLang's own names. Gauges move when SGLang's do: at a prefill and
at every 40th decode step; 30 s after the last they are 0. `Simulator.generated(request_id)` is live.
`run_closed_loop` puts a client in front of several servers; `draw` makes its requests from a workload.

Not modelled: shared prefixes (`cache_hit_rate` is 0), mixed chunks, priorities, speculation, parallelism inside a
server, `ignore_eos` with the radix cache off, and the one or two steps by which SGLang notices late that a request ended.
"""

from dfexp.engines.simulated.core.closed_loop import Drawn, Run, draw, run_closed_loop
from dfexp.engines.simulated.core.config import Config, Roofline, Times, server_config
from dfexp.engines.simulated.core.records import Counters, Event, Line, Pool, RequestId
from dfexp.engines.simulated.core.simulator import Simulator

__all__ = [
    "Config", "Counters", "Drawn", "Event", "Line", "Pool", "RequestId", "Roofline", "Run", "Simulator", "Times", "draw",
    "run_closed_loop", "server_config",
]  # fmt: skip
