"""Simulated servers behind SGLang's HTTP surface: one process, one virtual clock, a port for each server.

`attach` is the small process that stands for one server; `__main__` is the one that simulates all servers of a folder.
In a process of one's own, for tests and benchmarks:

    async with Host(speed="max") as host:
        server = await host.add(spec)           a ServerSpec; port 0 takes a free port
        ... server.url, host.clock.now_s ...
        host.remove(server)

From `clock`, the time, over `host`, which moves it, and `server`, one server's life, to `app`, its pages. `pace` says
how long the clock waits for the client; `pages`, `text` and `faults` say what is answered.
"""
