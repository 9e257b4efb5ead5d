"""Training sets out of a run: conversations or messages as JSON lines, or Parquet, with a card of what is in them."""

from dfexp.export.rows import MARKS, MORE_MARKS
from dfexp.export.sets import Made, Options, export

__all__ = ["MARKS", "MORE_MARKS", "Made", "Options", "export"]
