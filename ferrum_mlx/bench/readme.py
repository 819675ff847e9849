"""`python -m ferrum_mlx.bench.readme`: write the parts of README.md that are generated.

A part stands between `<!-- name -->` and `<!-- /name -->`. A test fails when one is out of date.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def parts() -> dict[str, str]:
    return {"zoo": zoo()}


def zoo() -> str:
    """The counts of the tables that the parity suite runs; variants of a type are counted once."""
    from ferrum_mlx.backends.mlx.zoo_configs import LOOPED, PAGED, REFUSED

    def types(names: object) -> set[str]:
        assert isinstance(names, dict)
        return {name.split("/")[0] for name in names}

    exact, refused = types(PAGED) | types(LOOPED), types(REFUSED)
    return (
        f"{len(exact)} of mlx-lm's model types, built tiny with random weights: the same, with a negative "
        f"control for each; {len(types(PAGED))} of them in one packed forward, the others in part one "
        f"sequence at a time. {len(refused - exact)} more are refused at load, by name, with the reason."
    )


def rendered(text: str) -> str:
    """`text` with every part as it should be, wrapped like the list items they stand in."""
    for name, part in parts().items():
        filled = textwrap.fill(part, 118, initial_indent=" " * 16, subsequent_indent="  ").lstrip()
        opening, closing = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(opening)
        text = before + opening + filled + closing + rest.partition(closing)[2]
    return text


if __name__ == "__main__":
    README.write_text(rendered(README.read_text(encoding="utf-8")), encoding="utf-8")
