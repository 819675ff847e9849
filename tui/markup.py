"""Markdown as lines to draw: what a closed block says, before it is wrapped to a width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from textual.content import Content
from textual.style import Style

_DIM = "$foreground 55%"
_BULLETS = "•◦▪"
_NONE = Content("")


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Text that wraps behind its prefixes: `first` before its first line, `rest` before the others.

    A table's line or a line of code does not wrap.
    """

    content: Content
    first: Content = _NONE
    rest: Content = _NONE
    wraps: bool = True


@dataclass(frozen=True, slots=True)
class Fence:
    """A block of code. `language` is the first word behind the fence."""

    code: str
    language: str


Part = list[Paragraph] | Fence


@cache
def _parser() -> MarkdownIt:
    return MarkdownIt("gfm-like")


def parts_of(text: str) -> list[Part]:
    """The blocks of a sanitized Markdown text, in order; all that is no code fence as one part.

    Line breaks within a paragraph are kept: a model's verse stays verse.
    """
    parts: list[Part] = []
    for node in SyntaxTreeNode(_parser().parse(text)).children:
        if node.type in ("fence", "code_block"):
            parts.append(Fence(node.content, node.info.split()[0] if node.info.split() else ""))
            continue
        paragraphs = list(_block(node, _NONE, _NONE))
        if parts and isinstance(parts[-1], list):
            parts[-1] += [Paragraph(_NONE), *paragraphs]
        else:
            parts.append(paragraphs)
    return parts


def _block(node: SyntaxTreeNode, first: Content, rest: Content, depth: int = 0) -> Iterator[Paragraph]:
    match node.type:
        case "heading":
            style = "bold underline $accent" if node.tag == "h1" else "bold $accent"
            yield Paragraph(_inlines(node).stylize_before(style), first, rest)
        case "bullet_list" | "ordered_list":
            yield from _list(node, first, rest, depth)
        case "blockquote":
            bar = Content.styled("▌ ", _DIM)
            yield from _blocks(node.children, first + bar, rest + bar, depth)
        case "fence" | "code_block":  # within a list or a quote
            for line in node.content.splitlines():
                yield Paragraph(Content.styled(line, "$text on $surface"), first, rest, wraps=False)
                first = rest
        case "table":
            yield from _table(node, first, rest)
        case "hr":
            yield Paragraph(Content.styled("─" * 24, _DIM), first, rest, wraps=False)
        case "html_block":
            yield Paragraph(Content(node.content.rstrip("\n")), first, rest)
        case _:
            yield Paragraph(_inlines(node), first, rest)


def _blocks(
    nodes: Sequence[SyntaxTreeNode], first: Content, rest: Content, depth: int
) -> Iterator[Paragraph]:
    """Blocks within a list's item or a quote, a blank line between two paragraphs."""
    before = ""
    for node in nodes:
        if before == node.type == "paragraph":
            yield Paragraph(_NONE, rest, rest)
        yield from _block(node, first, rest, depth)
        first, before = rest, node.type


def _list(node: SyntaxTreeNode, first: Content, rest: Content, depth: int) -> Iterator[Paragraph]:
    number = int(node.attrs.get("start", 1)) if node.type == "ordered_list" else None
    for item in node.children:
        if number is None:
            mark = f"{_BULLETS[min(depth, len(_BULLETS) - 1)]} "
        else:
            mark, number = f"{number}. ", number + 1
        own = first + Content.styled(mark, "$accent")
        indent = rest + Content(" " * len(mark))
        if item.children:
            yield from _blocks(item.children, own, indent, depth + 1)
        else:
            yield Paragraph(_NONE, own, indent)
        first = rest


def _table(node: SyntaxTreeNode, first: Content, rest: Content) -> Iterator[Paragraph]:
    rows = [[_inlines(cell) for cell in row.children] for part in node.children for row in part.children]
    rights = ["right" in str(cell.attrs.get("style", "")) for cell in node.children[0].children[0].children]
    widths = [max(cell.cell_length for cell in column) for column in zip_longest(*rows, fillvalue=_NONE)]
    gap = Content("  ")
    for number, row in enumerate(rows):
        cells = [
            (cell.pad_left if right else cell.pad_right)(width - cell.cell_length)
            for cell, width, right in zip(row, widths, rights, strict=False)
        ]
        line = gap.join(cells)
        yield Paragraph(line.stylize_before("bold") if number == 0 else line, first, rest, wraps=False)
        first = rest
        if number == 0:
            rule = "  ".join("─" * width for width in widths)
            yield Paragraph(Content.styled(rule, _DIM), first, rest, wraps=False)


def _inlines(node: SyntaxTreeNode) -> Content:
    pieces = [piece for inline in node.children for piece in _pieces(inline, "")]
    return Content("").join(pieces)


_STYLES = {"strong": "bold", "em": "italic", "s": "strike"}


def _pieces(node: SyntaxTreeNode, style: str) -> Iterator[Content]:
    match node.type:
        case "inline" | "root":
            for child in node.children:
                yield from _pieces(child, style)
        case "strong" | "em" | "s":
            for child in node.children:
                yield from _pieces(child, f"{style} {_STYLES[node.type]}".strip())
        case "code_inline":
            yield Content.styled(node.content, f"{style} $text-accent on $surface".strip())
        case "softbreak" | "hardbreak":
            yield Content("\n")
        case "link":
            shown = Content("").join([piece for child in node.children for piece in _pieces(child, style)])
            yield _link(shown, str(node.attrs.get("href", "")))
        case "image":
            yield _link(Content(f"[{node.content or 'image'}]"), str(node.attrs.get("src", "")))
        case _:
            yield Content.styled(node.content, style) if style else Content(node.content)


def _link(shown: Content, address: str) -> Content:
    """Text that opens its address at a click; the address is seen where the text is another."""
    click = Style.from_meta({"@click": ("app.open_link", (address,))})
    link = shown.stylize("underline $accent").stylize(Style(link=address) + click)
    if shown.plain.removeprefix("mailto:") == address.removeprefix("mailto:") or not address:
        return link
    return link + Content.styled(f" ({address})", _DIM)
