"""The OpenAI API: it checks requests and writes replies. `live/drive` makes the calls."""
