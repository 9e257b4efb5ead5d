"""Simulated SGLang servers. `core` is the pure model in virtual time: no clock, no sockets, no randomness."""
