"""What is odd about the answers: how many are of each kind, what the export does with them, and a few of each."""

from collections import Counter
from math import inf

from dfexp.params import QualityGroup
from dfexp.quality import KNOWN, REPETITIVE, by_length, marks, usual_lengths
from dfexp.report.data import RunData
from dfexp.tables import Table

_UNSEEN = ("odd_turns", "earlier_answers", "tools")  # but in whole rows, so in the sample alone
_EACH, _HEAD, _TAIL = 3, 100, 60  # rows that are shown of a kind, characters of an answer's beginning and of its end


def quality(data: RunData, group: QualityGroup) -> tuple[Table, Table]:
    """Answers by kind under these thresholds, and a few rows of each kind.

    What flags and tokens say is counted over all rows, everything over those drawn, judged by their texts as the export
    judges all. A row without a flag, made by an older dfexp, shows as a difference of the two.
    """
    limits, tokens = group.thresholds, data.rows["completion_tokens"]
    usual = usual_lengths(tokens, limits.sigmas)
    thinking = (data.run["spec"].get("generation") or {}).get("enable_thinking") is True
    whole = {row["index"]: row for row in (*data.drawn, *data.kept)}
    farthest = {row["index"]: row for row in (*reversed(data.kept), *data.drawn)}  # the longest and the shortest first
    found = {index: marks(row, limits, thinking=thinking, usual=usual) for index, row in whole.items()}
    drawn, total = [found[row["index"]] for row in data.drawn], len(data.rows)
    sample = Counter(mark for each in drawn for mark in each)
    lengths = by_length(tokens, limits, usual)
    counts = Counter({name: int(holds.sum()) for name, holds in lengths.items()})
    for flags, rows in data.rows["flags"].value_counts().items():
        counts.update({flag: int(rows) for flag in str(flags).split(",") if flag})
    unseen = (*_UNSEEN, "repetitive")[: None if limits.repeated != REPETITIVE else -1]
    kinds = [mark for mark in dict.fromkeys((*KNOWN, *sorted(counts))) if counts[mark] or sample[mark]]
    lines = [
        {"kind": mark, "rows": None if mark in unseen else counts[mark],
         "share": None if mark in unseen else counts[mark] / total, f"in {len(drawn):,} judged anew": sample[mark],
         "what it is": KNOWN.get(mark, "told by the run"), "export": "rejects" if mark in limits.rejected else "takes"}
        for mark in kinds
    ]  # fmt: skip
    good, clean = sum(not each & limits.rejected for each in drawn), [mark for mark in KNOWN if mark not in kinds]
    note = (
        "Rows: of all, by the flags they were written with and by their tokens. Judged anew: some drawn at random, as"
    )
    note += f" the export judges all; it would take {good:,} of these {len(drawn):,}. A row can be of several kinds."
    bounds = f" length_outlier: not within {usual[0]:,.0f} to {usual[1]:,.0f} tokens." * (usual[1] < inf)
    note += f"{bounds} Not found: {', '.join(clean)}."
    note += " Thresholds: the quality group of the parameter file, or options of dfexp export."
    shown = [
        {"kind": mark, "index": index, "server": row["server"], "finish reason": row["finish_reason"],
         "tokens": row["completion_tokens"], "answer": _excerpt(row["text"])}
        for mark, rows in ((mark, farthest if mark in lengths else whole) for mark in kinds)
        for index, row in [(i, row) for i, row in rows.items() if mark in found[i]][:_EACH]
    ]  # fmt: skip
    told = "Beginning and end of each answer. Drawn at random, but for lengths: there they are the farthest."
    return (Table(name="quality", title="Quality of the answers", rows=lines, note=note),
            Table(name="flagged", title="Rows of each kind", rows=shown, note=told))  # fmt: skip


def _excerpt(text: str) -> str:
    """Beginning and end on one line, without characters that a page cannot show."""
    said = " ".join(text.split())
    return repr(said if len(said) <= _HEAD + _TAIL + 3 else f"{said[:_HEAD]} … {said[-_TAIL:]}")[1:-1]
