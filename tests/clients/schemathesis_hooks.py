"""What schemathesis does before each request of test_fuzz_api.py; schemathesis loads this file.

The document cannot say all that a request needs to be served: which model there is, that only a
message with calls may lack content, and how long a decision takes. Nearly all made-up requests
would end there.
"""

from typing import Any

import schemathesis

from tests.clients.conftest import MODEL


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: Any, kwargs: Any) -> None:
    """Only values that conform are replaced: wrong ones go as they are."""
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    if body.get("n") in range(5, 33):
        body["n"] = 4  # 32 long answers take seconds
    ttl_s = body.get("ttl_s")
    if isinstance(ttl_s, float | int) and 0 < ttl_s < 1:
        body["ttl_s"] = 1.0  # a reservation that ends before it is decided is a 504
    for field in ("messages", "input"):
        messages = body.get(field)
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and message.get("content") is None:
                message["content"] = "hi"
