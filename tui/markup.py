"""Markdown as lines to draw: what a closed block says, before it is wrapped to a width."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from textual.content import Content
from textual.style import Style

from .table import Table

_DIM = "$foreground 55%"
_BULLETS = "•◦▪"
_BOXES = {"[ ] ": "☐ ", "[x] ": "☑ ", "[X] ": "☑ "}
_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_OPENED = ("https://", "http://", "mailto:")  # addresses that a click may open
_NONE = Content("")


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Text or a table behind prefixes: `first` before its first line, `rest` before the others."""

    content: Content | Table
    first: Content = _NONE
    rest: Content = _NONE


@dataclass(frozen=True, slots=True)
class Fence:
    """A block of code. `language` is the first word behind the fence, `depth` that of the list it is in."""

    code: str
    language: str
    depth: int = 0


Part = list[Paragraph] | Fence


@cache
def _parser() -> MarkdownIt:
    # References stay text: a cut has parted a link from its definition, which would vanish. Markdown-it
    # drops what is nested deeper than its limit; its own of 20 is no limit for what a model may write.
    return MarkdownIt("gfm-like", {"maxNesting": 100}).disable("reference")


def parts_of(text: str) -> list[Part]:
    """The blocks of a sanitized Markdown text, in order; all that is no code fence as one part.

    Line breaks within a paragraph are kept: a model's verse stays verse.
    """
    parts: list[Part] = []
    for node in SyntaxTreeNode(_parser().parse(text)).children:
        pieces = list(_block(node, _NONE, _NONE))
        if pieces and parts and isinstance(parts[-1], list) and not isinstance(pieces[0], Fence):
            parts[-1].append(Paragraph(_NONE))
        for piece in pieces:
            if isinstance(piece, Fence):
                parts.append(piece)
            elif parts and isinstance(parts[-1], list):
                parts[-1].append(piece)
            else:
                parts.append([piece])
    return parts


def code_of(text: str) -> list[str]:
    """The code blocks of a Markdown text, wherever they are in it."""
    return [token.content for token in _parser().parse(text) if token.type in ("fence", "code_block")]


def _block(
    node: SyntaxTreeNode, first: Content, rest: Content, depth: int = 0
) -> Iterator[Paragraph | Fence]:
    match node.type:
        case "heading":
            style = "bold underline $text-accent" if node.tag == "h1" else "bold $text-accent"
            yield Paragraph(_inlines(node).stylize_before(style), first, rest)
        case "bullet_list" | "ordered_list":
            yield from _list(node, first, rest, depth)
        case "blockquote":
            bar = Content.styled("▌ ", _DIM)
            yield from _blocks(node.children, first + bar, rest + bar, depth)
        case "fence" | "code_block":
            yield from _code(node, first, rest, depth)
        case "table":
            yield Paragraph(_table(node), first, rest)
        case "hr":
            yield Paragraph(Content.styled("─" * 24, _DIM), first, rest)
        case "html_block":
            yield Paragraph(Content(node.content.rstrip("\n")), first, rest)
        case _:
            yield Paragraph(_inlines(node), first, rest)


def _blocks(
    nodes: Sequence[SyntaxTreeNode], first: Content, rest: Content, depth: int
) -> Iterator[Paragraph | Fence]:
    """Blocks within a list's item or a quote, a blank line between two paragraphs."""
    before = ""
    for node in nodes:
        if before == node.type == "paragraph":
            yield Paragraph(_NONE, rest, rest)
        yield from _block(node, first, rest, depth)
        first, before = rest, node.type


def _code(node: SyntaxTreeNode, first: Content, rest: Content, depth: int) -> Iterator[Paragraph | Fence]:
    if "▌" in first.plain:  # a quote's bar goes on beside it
        for line in node.content.splitlines():
            yield Paragraph(Content.styled(line, "$text on $surface"), first, rest)
            first = rest
        return
    if first.plain.strip():  # an item that begins with it
        yield Paragraph(_NONE, first, rest)
    words = node.info.split()
    yield Fence(node.content, words[0] if words else "", depth)


def _list(node: SyntaxTreeNode, first: Content, rest: Content, depth: int) -> Iterator[Paragraph | Fence]:
    bullet = _BULLETS[min(depth, len(_BULLETS) - 1)]
    for item in node.children:
        # Numbers as they are written, not counted: a long list is cut, and parsed in pieces.
        mark = f"{item.info}{item.markup} " if node.type == "ordered_list" else f"{bullet} "
        own = first + Content.styled(mark, "$text-accent")
        indent = rest + Content(" " * len(mark))
        if item.children:
            yield from _blocks(item.children, own, indent, depth + 1)
        else:
            yield Paragraph(_NONE, own, indent)
        first = rest


def _table(node: SyntaxTreeNode) -> Table:
    rows = [[_inlines(cell) for cell in row.children] for part in node.children for row in part.children]
    heads = node.children[0].children[0].children
    return Table(rows, ["right" in str(cell.attrs.get("style", "")) for cell in heads])


def _inlines(node: SyntaxTreeNode) -> Content:
    content = Content("").join([piece for inline in node.children for piece in _pieces(inline, "")])
    parent = node.parent
    if parent is not None and parent.type == "list_item" and content.plain[:4] in _BOXES:
        return Content.styled(_BOXES[content.plain[:4]], "$text-accent") + content[4:]
    return content


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
        case "html_inline" if _BREAK.fullmatch(node.content):
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
    link = shown.stylize("underline $text-accent")
    if address.startswith(_OPENED):
        click = Style.from_meta({"@click": ("app.open_link", (address,))})
        link = link.stylize(Style(link=address) + click)
    if shown.plain.removeprefix("mailto:") == address.removeprefix("mailto:") or not address:
        return link
    return link + Content.styled(f" ({address})", _DIM)
