"""`python -m ferrum_mlx.bench.readme`: write the parts of README.md that are generated.

A part stands between `<!-- name -->` and `<!-- /name -->`. A test fails when one is out of date.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ferrum_mlx.catalog import Card, cards
from ferrum_mlx.fit import catalogued_bytes

README = Path(__file__).parents[2] / "README.md"


def parts() -> dict[str, str]:
    return {"zoo": zoo(), "models": models()}


def models() -> str:
    """The catalogue as a table: what the cards say, and the memory that weights and KV take on Metal."""
    rows = [
        "| MODEL | parameters | context | variants | GB at 4K, 32K | draft | licence |",
        "|---|---|---|---|---|---|---|",
        *(_row(card) for card in cards().values()),
    ]
    return "\n" + "\n".join(rows) + "\n"


def _row(card: Card) -> str:
    of = f"{card.parameters / 1e9:.2f} B" if card.parameters else ""
    memory = ", ".join(_at(card, tokens) for tokens in (4096, 32768) if tokens <= card.context)
    name = f"`{card.alias}`" + ("" if card.verified else "*")
    cells = [name, of, f"{card.context:,}", ", ".join(card.variants), memory, card.draft, card.licence]
    return f"| {' | '.join(cells)} |"


def _at(card: Card, tokens: int) -> str:
    needed = catalogued_bytes(card, tokens)
    return f"{needed / 1e9:.1f}" if needed else "?"


def zoo() -> str:
    """The counts of the tables that the parity suites run; variants of a type are counted once."""
    from ferrum_mlx.backends.mlx import zoo_configs as mlx
    from ferrum_mlx.backends.torch import zoo_configs as torch

    packed, on_mlx = _types(mlx.PAGED), _types(mlx.PAGED) | _types(mlx.LOOPED)
    on_torch = _types(torch.EXACT) | _types(torch.BOUNDED)
    both = (on_mlx, _types(mlx.REFUSED)), (on_torch, _types(torch.REFUSED))
    rows = {
        "exact": [len(exact - refused) for exact, refused in both],
        "of these in one packed forward": [len(packed), len(on_torch - _types(torch.REFUSED))],
        "exact in some configurations, refused in others": [len(exact & refused) for exact, refused in both],
        "refused at load, by name, with the reason": [len(refused - exact) for exact, refused in both],
    }
    table = "\n".join(f"  | {what} | {of_mlx} | {of_torch} |" for what, (of_mlx, of_torch) in rows.items())
    return f"""Model types, built tiny with random weights, each against its library's own class: the same,
  with a negative control for each.

  | | MLX: of mlx-lm | torch: of transformers |
  |---|---|---|
{table}

  """


def _types(table: Mapping[str, object]) -> set[str]:
    return {name.split("/")[0] for name in table}


def rendered(text: str) -> str:
    """`text` with every part as it should be."""
    for name, part in parts().items():
        opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(opening)
        text = before + opening + part + closing + rest.partition(closing)[2]
    return text


if __name__ == "__main__":
    README.write_text(rendered(README.read_text(encoding="utf-8")), encoding="utf-8")
