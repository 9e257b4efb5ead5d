"""How many prompts of each source, and in which order."""

from collections.abc import Sequence
from math import floor

import numpy as np
import numpy.typing as npt

from dfexp.params_prompts import SourcePart


def wanted_of(sources: Sequence[SourcePart], limit: int | None) -> list[int | None]:
    """How many prompts each source is to give, as far as that is known before they are read; None: not yet."""
    wanted = [each.count for each in sources]
    weights = [each.weight or 0.0 for each in sources]
    if limit is None or not any(weights):
        return wanted
    room = max(0, limit - sum(count or 0 for count in wanted))
    parts = [room * weight / sum(weights) for weight in weights]
    lacking = room - sum(map(floor, parts))
    by_rest = sorted((n for n, weight in enumerate(weights) if weight), key=lambda n: floor(parts[n]) - parts[n])
    more = set(by_rest[:lacking])
    return [floor(parts[n]) + (n in more) if weight else wanted[n] for n, weight in enumerate(weights)]


def taken_of(sources: Sequence[SourcePart], wanted: Sequence[int | None], available: Sequence[int]) -> list[int]:
    """How many each gives. Without a limit the first weighted source that runs out ends all of them.

    What a source lacks of what is wanted is not made up for by others. A weighted source that has nothing counts not.
    """
    pairs = list(zip(sources, wanted, available, strict=True))
    open_ones = [there / each.weight for each, asked, there in pairs if each.weight and asked is None and there]
    scale = min(open_ones, default=0.0) * (1 + 1e-12)  # so that 3 x (7 / 3) is 7
    found = [
        asked if asked is not None else floor(scale * each.weight) if each.weight else there
        for each, asked, there in pairs
    ]
    return [min(asked, there) for asked, there in zip(found, available, strict=True)]


def mixed(keys: Sequence[Sequence[float]], taken: Sequence[int], random: Sequence[bool]) -> npt.NDArray[np.int64]:
    """The order of a mixture: positions in all prompts, source after source.

    Any beginning of it has the shares of the whole, within one prompt of each source.

    Args: keys, a random number for each prompt of each source; taken, how many of each; random, whether those with the
    lowest numbers are taken, in the order of these, and not the first ones.
    """
    positions, places, base = [], [], 0
    for numbers, take, is_random in zip(keys, taken, random, strict=True):
        order = np.argsort(np.asarray(numbers), kind="stable") if is_random else np.arange(len(numbers))
        positions.append(base + order[:take])
        places.append((np.arange(take) + 0.5) / max(1, take))
        base += len(numbers)
    return np.concatenate(positions)[np.argsort(np.concatenate(places), kind="stable")].astype(np.int64)
