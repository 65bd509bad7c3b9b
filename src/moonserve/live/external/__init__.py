"""External engines (vLLM, SGLang): their descriptions, their state, and their KV events."""
