"""What schemathesis does before each request of test_fuzz_api.py; schemathesis loads this file.

It gives requests the name of the model that is served. With a made-up one, all get a 404, and
nothing behind that is tried.
"""

from typing import Any

import schemathesis

from tests.clients.conftest import MODEL


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: Any, kwargs: Any) -> None:
    """Only a `model` that is a string is replaced: wrong types go as they are."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = MODEL
