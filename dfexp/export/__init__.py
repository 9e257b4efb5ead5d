"""Training sets out of a run: conversations or messages as JSON lines, or Parquet, with a card of what is in them."""

from dfexp.export.sets import Made, Options, export

__all__ = ["Made", "Options", "export"]
