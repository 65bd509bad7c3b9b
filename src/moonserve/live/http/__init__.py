"""HTTP for every process of moonserve: one server and one client, both fast enough for a gateway.

Any room of `live` may use it. It knows nothing about models or engines; of OpenAI's API it knows
only the shape of errors.
"""
