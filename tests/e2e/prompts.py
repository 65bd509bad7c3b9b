"""The twenty fixed prompts of the equality tests: chat, code, other scripts, emoji, short and long.

Names are stable: results are recorded by name. The chat prompts are already rendered in ChatML,
the template of the shipped model; LONG renders to a little over 3,000 of its tokens.
"""


def _chat(text: str, system: str = "You are a helpful AI assistant named SmolLM.") -> str:
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )


LONG = _chat(
    "Here is the ship's log. Summarise it.\n"
    + "\n".join(
        f"Day {day}: wind {7 + day * 5 % 23} knots from the {('north', 'east', 'west')[day % 3]}, "
        f"we made {40 + day * 17 % 90} miles, and saw {day * 3 % 11} whales before the evening."
        for day in range(1, 97)
    )
)

PROMPTS: list[tuple[str, str]] = [
    ("chat-capital", _chat("What is the capital of France?")),
    ("chat-gravity", _chat("Explain gravity to a child in three sentences.")),
    ("chat-list", _chat("List five fruits that are red.")),
    ("chat-pirate", _chat("Where is the treasure?", "You talk like a pirate.")),
    ("chat-arithmetic", _chat("What is 127 + 358? Show your steps.")),
    (
        "chat-turns",
        _chat("Name a river.")
        + "The Danube.<|im_end|>\n<|im_start|>user\nWhich cities lie on it?<|im_end|>\n"
        + "<|im_start|>assistant\n",
    ),
    ("code-python", "def fibonacci(n: int) -> int:\n    "),
    ("code-sql", "-- all customers without an order in 2024\nSELECT c.name\nFROM customers c\n"),
    ("code-c", "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0; i < 10; i++)\n\t\t"),
    ("code-json", '{"name": "moonserve", "roles": ["gateway", "prefill", "decode"], "ports": {'),
    ("chinese-story", "从前有一座山,山里有一座庙,庙里有一个老和尚"),
    ("chinese-chat", _chat("请用中文介绍一下月亮。")),
    ("japanese", "昔々あるところに、おじいさんとおばあさんが"),
    ("emoji", "🌙🚀✨ Tonight the moon is 🌕 and the cat 🐈‍⬛ says"),
    ("emoji-chat", _chat("Answer only with emoji: 🍎+🍌=? 👩‍🚀🇫🇷")),
    ("digits", "3.14159265358979323846264338327950288419716939937510 2024-02-29 1,000,000"),
    ("one-token", "Once"),
    ("whitespace", "a\t\tb   c\n\n\n   d \r\n e"),
    (
        "story",
        "It was the last night of the harvest, and the lanterns along the quay had all been lit but"
        " one. The old keeper climbed the stairs, counted the boats, counted them again, and",
    ),
    ("long-log", LONG),
]
