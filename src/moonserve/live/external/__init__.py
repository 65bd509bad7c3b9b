"""External engines (vLLM, SGLang): which there are, how they are, and what the Conductor learns."""
