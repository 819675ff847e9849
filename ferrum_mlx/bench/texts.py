"""Texts to answer: two that are mostly copied, which speculation is good at, and ten free questions."""

from __future__ import annotations

from ferrum_mlx.verify.texts import REPORT

_CODE = """\
def read_orders(path):
    orders = []
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            name, amount, price = line.split(";")
            orders.append({"name": name, "amount": int(amount), "price": float(price)})
    return orders


def total_of(orders):
    total = 0.0
    for order in orders:
        total += order["amount"] * order["price"]
    return total


def print_orders(orders):
    for order in orders:
        print(order["name"], order["amount"], order["price"])
    print("total", total_of(orders))"""

TEXTS: dict[str, tuple[str, ...]] = {
    "edit": (
        'Rewrite the following text word for word, with two changes: write "Nordholm" instead of '
        f'"Lindholm", and "red hut" instead of "blue hut".\n\n{REPORT}',
    ),
    "code": (
        "Rename the variable `orders` to `entries` everywhere in this code, change nothing else, and give "
        f"me the whole code.\n\n```python\n{_CODE}\n```",
    ),
    "chat": (
        "Why is the sky blue?",
        "Give me three tips for learning a new language.",
        "Write a short poem about winter in the mountains.",
        "How does a refrigerator keep food cold?",
        "What should I pack for a weekend at the sea?",
        "Explain what a prime number is, with an example.",
        "Tell me a short story about a clever fox.",
        "What are the advantages of riding a bicycle to work?",
        "How do I bake a simple loaf of bread?",
        "Who was Marie Curie, and what did she discover?",
    ),
}
