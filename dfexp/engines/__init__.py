"""Engines: how each kind of server is started, probed, described and diagnosed. The rest of dfexp never asks which.

Bare HTTP is here; `Engine` and `engine_for` are in `engines.base`, since each server process passes through this
package and should not load the parameters.
"""

from dfexp.engines.http import Readiness, first_model, get_json, get_text, post_json, probe

__all__ = ["Readiness", "first_model", "get_json", "get_text", "post_json", "probe"]
