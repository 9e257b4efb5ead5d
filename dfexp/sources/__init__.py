"""Prompts as users have them: files and data sets, what their records mean, what is left out, how they are mixed."""

from dfexp.sources.reading import Reading
from dfexp.sources.report import render

__all__ = ["Reading", "render"]
