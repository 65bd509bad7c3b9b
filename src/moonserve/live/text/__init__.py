"""Text to tokens and back: tokenizer, chat template, incremental detokeniser, stop strings.

For the gateway; the worker uses the stop matcher too. No torch, no network, no event loop here.
"""
