"""A client that keeps a number of requests in flight at each of several simulated servers, in virtual time."""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice

from dfexp.engines.simulated.core.simulator import Event, Line, Simulator

Sizes = tuple[int, int, int]
"""Of one request in tokens: prompt, answer, and the `max_new_tokens` that is sent with it."""


def run_closed_loop(
    servers: Sequence[Simulator], requests: Iterable[Sizes], concurrency: int
) -> Iterator[tuple[int, Event | Line]]:
    """Send all requests, at most `concurrency` at a time to each server; one that ends a request gets the next at once.

    A request's id is its number. Yields what happens, in order of time, with the index of its server; a batch ends as
    a whole, so of one server events may lie a batch back. Raises PromptTooLong: a request fits no server.
    """
    source = enumerate(requests)
    for number, sizes in islice(source, concurrency * len(servers)):
        servers[number % len(servers)].submit(0.0, number, *sizes)
    ahead = [(0.0, index) for index in range(len(servers))]
    while ahead:
        at_s, index = heappop(ahead)
        for told in servers[index].advance(at_s):
            if isinstance(told, Event) and told.kind == "finished":
                for number, sizes in islice(source, 1):
                    servers[index].submit(told.at_s, number, *sizes)
            yield index, told
        next_s = servers[index].next_event_s()
        if next_s is not None:
            heappush(ahead, (next_s, index))
