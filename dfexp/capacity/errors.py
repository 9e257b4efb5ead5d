"""What the capacity model raises: inputs that cannot be, and models or flags that it does not describe."""

from pydantic import ValidationError

from dfexp.errors import DfexpError


class CapacityError(DfexpError):
    """An input is impossible or not described by the model; the message names the value and the fix."""


class UnsupportedModel(CapacityError):
    """The model is recognised, but its memory layout is not modelled; the message says which part and what to do."""


class UnknownModel(CapacityError):
    """A model's name is neither a path nor in the table; the message lists the nearest names."""


class FlagsRefused(CapacityError):
    """SGLang would refuse this combination of flags when it starts; the message names the flags and the fix."""


class DoesNotFit(CapacityError):
    """No room is left for the pools. `slots`: state slots as SGLang's own message counts them, 0 or below."""

    def __init__(self, message: str, slots: int = 0) -> None:
        super().__init__(message)
        self.slots = slots


class TooLittleRoom(CapacityError):
    """Servers have much less room than the plan predicts; the message names them, with both numbers and the fix."""


def first_mistake(error: ValidationError) -> str:
    """The first wrong field of what was read, with its value."""
    item = error.errors(include_url=False)[0]
    place = ".".join(map(str, item["loc"])) or "this"
    if item["type"] == "missing":
        return f"{place} is missing"
    return f"{place} = {str(item['input'])[:80]!r}: {item['msg']}"
