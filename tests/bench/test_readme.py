from __future__ import annotations

from ferrum_mlx.bench import readme


def test_generated_parts_are_up_to_date() -> None:
    text = readme.README.read_text(encoding="utf-8")
    assert all(f"<!-- {name} -->" in text for name in readme.parts())
    assert readme.rendered(text) == text, "run python -m ferrum_mlx.bench.readme"


def test_a_stale_part_is_noticed() -> None:
    text = readme.README.read_text(encoding="utf-8")
    stale = text.replace("| exact | ", "| exact | 1")
    assert stale != text
    assert readme.rendered(stale) == text
