"""Prompts as users have them: files and data sets, what their records mean, what is left out, how they are mixed."""
