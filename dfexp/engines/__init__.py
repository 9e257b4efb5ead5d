"""Engines: how servers of each kind are started, probed and described. Only bare HTTP is loaded here: server processes
pass through, and need no parameters. `Engine` and `engine_for` are in `base`.
"""

from dfexp.engines.http import Readiness, get_json, get_text, probe

__all__ = ["Readiness", "get_json", "get_text", "probe"]
