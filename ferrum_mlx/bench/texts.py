"""Texts to answer: two that are mostly copied, which speculation is good at, and ten free questions."""

from __future__ import annotations

REPORT = """\
The harbour of Lindholm lies on the northern side of a narrow bay, sheltered from the west wind by a row of
low granite hills. For most of its history it was a fishing village with some forty houses, a wooden church
and a single pier. In the spring of 1874 a company from the capital bought the land behind the pier and
built a shipyard there, and within ten years the village had become a small town. The yard made wooden
schooners at first, later iron steamers, and at its best time it gave work to six hundred people. A railway
reached the town in 1891. It carried timber to the yard in the morning and workers back to the inland
villages in the evening. When the yard closed in 1932, the railway went on for another twenty years with
two trains a day, and then it was taken up and the rails were sold. Today the old station is a library.
The pier has been repaired with stone, and the ferry to the islands leaves from it four times a day in
summer and once a day in winter. Visitors come for the quiet, for the smoked herring that is sold from a
blue hut next to the church, and for the small museum in the former drawing office of the yard, where the
plans of every ship are kept in flat wooden drawers. The museum is open from Tuesday to Sunday."""

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
