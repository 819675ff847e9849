"""Greedy ids of SmolLM2 by mlx-lm itself, stored in smollm2_golden.json.

`python tests/parity/golden.py` makes the file anew (several minutes on a CPU: mlx-lm's stock route);
a slow test does the same and compares.
"""

from __future__ import annotations

import json
from pathlib import Path

from ferrum_mlx.catalog import ResolvedModel

FILE = Path(__file__).with_name("smollm2_golden.json")
NEW_TOKENS = 64
PROMPTS = [
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Count from 1 to 20, separated by commas.",
    "def fibonacci(n):\n    # complete this Python function\n",
    "Translate to Spanish: The weather is beautiful today, and we are going to the beach.",
    "List three differences between a list and a tuple in Python, as bullet points.",
    "Who wrote Romeo and Juliet? Answer in one sentence, then name two other plays.",
    "12 + 30 = ? Explain step by step.",
    "Summarize in one line: " + "The quick brown fox jumps over the lazy dog while the sun sets. " * 12,
    "写一句关于春天的话。 And say it in English too. 🌸",
]


def reference(resolved: ResolvedModel, indices: list[int]) -> dict[str, list[list[int]]]:
    """Prompt ids and the NEW_TOKENS greedy ids behind them, by mlx-lm's generate_step in float32."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    from ferrum_mlx.backends.mlx.loader import load_model
    from ferrum_mlx.tokenizer import load_tokenizer

    mx.set_default_device(mx.cpu)
    model, _ = load_model(resolved)
    tokenizer = load_tokenizer(resolved)
    prompts = [tokenizer.encode_chat([{"role": "user", "content": PROMPTS[i]}]) for i in indices]
    outputs = []
    for prompt in prompts:
        steps = generate_step(mx.array(prompt), model, max_tokens=NEW_TOKENS)
        outputs.append([int(token) for token, _ in steps])
    return {"prompts": prompts, "outputs": outputs}


def stored() -> dict[str, list[list[int]]]:
    return json.loads(FILE.read_text())


if __name__ == "__main__":
    from ferrum_mlx import hub

    made = reference(hub.resolve("", progress=True), list(range(len(PROMPTS))))
    FILE.write_text(json.dumps(made) + "\n")
