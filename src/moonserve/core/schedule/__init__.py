"""Where a request goes: the Conductor, its policies, cost model, admission, and its vocabulary.

`conductor` is the machine; `policies` has Algorithm 1. Nothing here calls an instance.
"""
