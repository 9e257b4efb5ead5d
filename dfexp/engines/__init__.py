"""Engines: how servers are started, asked and described. Only bare HTTP here: server processes need nothing more."""

from dfexp.engines.http import Readiness, get_json, get_text, probe

__all__ = ["Readiness", "get_json", "get_text", "probe"]
