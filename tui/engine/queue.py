"""Who runs and who waits: the queue's counts, and a row a request."""

from __future__ import annotations

from textual.content import Content

from ferrum_mlx.view import RequestView

from .feed import EngineFeed
from .format import milliseconds, section, short
from .sections import name_of

_GLYPHS = {
    "waiting": ("◌", "$text-warning"),
    "prefill": ("◐", "$text-warning"),
    "decode": ("●", "$text-success"),
    "preempted": ("▽", "$text-error"),
}
_HEAD = ("request", "state", "done", "tok/s", "age", "TTFT", "prompt", "cached", "output", "preempted")
_WIDTHS = (9, 13, 6, 8, 8, 10, 8, 8, 8, 10)


def queue(feed: EngineFeed, rows: int) -> list[Content]:
    """The counts, then at most `rows` requests."""
    step, view = feed.step, feed.view
    running, waiting = (step.running, step.waiting) if step else (0, 0)
    preempted = f"  preempt {step.preemptions if step else 0}"
    head = section("QUEUE", f"run {running}  wait {waiting}", preempted)
    if view is None:
        return [head]
    shown = view.requests[:rows]
    more = len(view.requests) - len(shown) + view.more_requests
    lines = [head, *map(_row, shown)]
    return [*lines, Content.styled(f"{'':9}… {more:,} more", "dim")] if more else lines


def _row(request: RequestView) -> Content:
    glyph, style = _GLYPHS[request.state]
    rate = f"{short_rate(request.tokens_per_second)}/s" if request.tokens_per_second else ""
    again = f" ▽{request.preemptions}" if request.preemptions else ""
    return Content.assemble(
        f"{name_of(request.request_id):<8} ",
        (glyph, style),
        f" {request.state:<9}{_done(request):>6}{rate:>8}",
        (f"{short(request.computed_tokens):>6}{again}", "dim"),
    )


def _done(request: RequestView) -> str:
    if request.state == "decode":
        return f"{short(request.output_tokens)}t"
    return f"{request.prefill_share:.0%}" if request.state == "prefill" else "–"


def short_rate(rate: float) -> str:
    return f"{rate:.1f}" if rate < 100 else short(rate)


def table(feed: EngineFeed) -> list[Content]:
    """Every viewed request with all that is known of it."""
    view = feed.view
    if view is None or not view.requests:
        return [Content.styled("no requests", "dim")]
    head = "".join(f"{name:<{width}}" for name, width in zip(_HEAD, _WIDTHS, strict=True))
    lines = [Content.styled(head, "dim"), *map(_cells, view.requests)]
    more = view.more_requests
    return [*lines, Content.styled(f"… {more:,} more", "dim")] if more else lines


def _cells(request: RequestView) -> Content:
    glyph, style = _GLYPHS[request.state]
    texts = (
        _done(request),
        short_rate(request.tokens_per_second) if request.tokens_per_second else "–",
        f"{request.age_s:.1f} s",
        f"{milliseconds(request.ttft_s)} ms" if request.ttft_s else "–",
        f"{request.prompt_tokens:,}",
        f"{request.cached_tokens:,}",
        f"{request.output_tokens:,}",
        f"{request.preemptions:,}",
    )
    rest = "".join(f"{text:<{width}}" for text, width in zip(texts, _WIDTHS[2:], strict=True))
    name = f"{name_of(request.request_id):<{_WIDTHS[0]}}"
    return Content.assemble(name, (glyph, style), f" {request.state:<{_WIDTHS[1] - 2}}", rest)
