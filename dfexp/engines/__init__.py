"""Engines: how each kind of server is started, probed, described and diagnosed. The rest of dfexp never asks which."""

from dfexp.engines.base import Engine, ServerPlan, engine_for
from dfexp.engines.http import Readiness, first_model, get_json, get_text, post_json, probe

__all__ = [
    "Engine",
    "Readiness",
    "ServerPlan",
    "engine_for",
    "first_model",
    "get_json",
    "get_text",
    "post_json",
    "probe",
]
