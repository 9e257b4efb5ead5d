"""Whether a server that says it is well answers with sense: a broken batch gives HTTP 200, green health and garbage."""

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dfexp.engines.http import get_json
from dfexp.errors import BadAnswer, RateLimited, RequestError
from dfexp.quality import garbage

_QUESTIONS = """Name three rivers in Europe.
Write a Python function that adds two numbers.
Why is the sky blue? Answer in two sentences.
What is 17 times 23? Show the steps.
Translate into French: the train leaves at noon.
Tell a very short story about a lighthouse.""".splitlines()


def check(
    url: str, key: str, model: str, *, sampling: Mapping[str, Any] | None = None, timeout_s: float = 120.0
) -> list[str]:
    """Reasons not to trust a server's answers; empty when there are none.

    Args:
        url: base URL, without /v1.
        key: API key, "" for none.
        model: name to send.
        sampling: fields of the request's body, as the run sends them (temperature, chat_template_kwargs ...).
        timeout_s: for each whole answer of up to 48 tokens.

    The questions go out at the same time, since some faults only show in a batch. Errors are reasons, but for a server
    that is too busy; odd answers are one when most of them are. Never raises for what a server does.

    """
    fields = {name: value for name, value in (sampling or {}).items() if name != "stop"}
    fields |= {"model": model, "max_tokens": 48}
    bodies = [{**fields, "messages": [{"role": "user", "content": question}]} for question in _QUESTIONS]
    with ThreadPoolExecutor(len(bodies)) as pool:
        found = list(pool.map(lambda body: _ask(url, key, body, timeout_s), bodies))
    answers = [one for one in found if not isinstance(one, RequestError)]
    odd = [one for one in answers if one is not None]
    failed = Counter(str(one) for one in found if isinstance(one, RequestError) and not isinstance(one, RateLimited))
    reasons = [f"{count} of {len(found)} requests at once failed: {words}" for words, count in failed.items()]
    if not answers and not failed:
        reasons.append(f"all {len(found)} requests at once were turned away as too many")
    if 2 * len(odd) > len(answers):
        reasons.append(f"{len(odd)} of {len(answers)} answers at once are garbage: {'; '.join(dict.fromkeys(odd))}")
    return reasons


def _ask(url: str, key: str, body: Mapping[str, Any], timeout_s: float) -> str | RequestError | None:
    """Why the answer to one question is garbage, None if it is not. A thought that was split off is part of it."""
    try:
        reply = get_json(f"{url}/v1/chat/completions", key=key, timeout_s=timeout_s, body=body)
        message, usage = reply["choices"][0]["message"], reply.get("usage") or {}
        text = "".join(str(message.get(part) or "") for part in ("reasoning_content", "reasoning", "content"))
        return garbage(text, usage.get("completion_tokens")) or (None if text.strip() else "no text")
    except RequestError as error:
        return error
    except (TypeError, KeyError, IndexError, AttributeError):
        return BadAnswer("HTTP 200 without a chat completion")
