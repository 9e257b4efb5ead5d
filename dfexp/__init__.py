"""Bulk generation with a fleet of SGLang servers, driven from notebooks."""

__version__ = "0.1.0"
