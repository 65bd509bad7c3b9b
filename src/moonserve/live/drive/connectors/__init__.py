"""One module per connector: the parameters by which KV gets from prefill to decode."""
