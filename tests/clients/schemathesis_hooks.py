"""What schemathesis does before each request of test_fuzz_api.py; schemathesis loads this file.

The document cannot say all that a request needs to be served: which model there is, and that only
a message with calls may lack content. Nearly all made-up requests would end there.
"""

from typing import Any

import schemathesis

from tests.clients.conftest import MODEL


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: Any, kwargs: Any) -> None:
    """Only strings and null are replaced: wrong types go as they are."""
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    for field in ("messages", "input"):
        messages = body.get(field)
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and message.get("content") is None:
                message["content"] = "hi"
