"""Real vLLM behind the gateway; see the marker `vllm` and `make test-vllm`."""
