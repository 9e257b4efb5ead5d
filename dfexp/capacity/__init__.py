"""What fits on a GPU, what binds, what to change, and what a run will cost. Pure; see docs/capacity.md."""
