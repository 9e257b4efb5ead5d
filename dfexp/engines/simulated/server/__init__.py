"""Simulated servers behind SGLang's HTTP surface: one process, one virtual clock, a port for each server."""
