"""HTTP for every process of moonserve: one server, one client, both lean enough for a gateway.

Any room of `live` may use it. It knows nothing of models, engines or OpenAI beyond the error shape.
"""
