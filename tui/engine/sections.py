"""The readings of an engine as lines of text, one function a section; the panel and the screen share them."""

from __future__ import annotations

from textual.content import Content

from ferrum_mlx.plain import size
from ferrum_mlx.sanitize import sanitize

from .chart import chart
from .feed import EngineFeed
from .format import LABEL, Part, bar, fit, milliseconds, section, short
from .kvmap import blocks_a_cell, count_all, legend, map_lines

_INDENT = " " * LABEL
_PROGRESS = 5  # cells


def speed(feed: EngineFeed, rows: int, width: int) -> list[Content]:
    now = section(
        "NOW", ("tok/s ", "dim"), (f"{feed.now_tps:6.1f}", "bold $text-accent"), ("   avg ", "dim")
    ) + Content(f"{feed.history.average_tps:.1f}")
    return [now, *chart(feed.history.decode_rates, width, rows)]


def latency(feed: EngineFeed, width: int) -> list[Content]:
    ttft, itl = feed.ttft, feed.itl
    first: list[list[Part]] = [[("no token yet", "dim")]]
    if ttft is not None:
        first = _times(("last", ttft.last), ("p50", ttft.p50), ("p99", ttft.p99))
    gaps: list[list[Part]] = [[("no gap yet", "dim")]]
    if itl is not None:
        gaps = _times(("p50", itl.p50), ("p99", itl.p99), ("max", itl.max))
    room = width - LABEL
    return [section("TTFT", fit(first, room)), section("ITL", fit(gaps, room)), _prefill(feed)]


def _times(*times: tuple[str, float]) -> list[list[Part]]:
    """Names and seconds; the first one has its unit."""
    units = [" ms", *[""] * len(times)]
    return [
        [(f"{name} ", "dim"), (f"{milliseconds(seconds)}{unit}", "")]
        for (name, seconds), unit in zip(times, units, strict=False)
    ]


def _prefill(feed: EngineFeed) -> Content:
    rate = feed.prefill_tps
    line = section("PREFILL", f"{rate:,.0f}" if rate else "–", (" tok/s", "dim"))
    for request in feed.view.requests if feed.view else ():
        if request.state == "prefill":
            share = request.prefill_share
            full = round(share * _PROGRESS)
            name = f"  #{name_of(request.request_id)} {share:.0%} "
            return line + Content.assemble(name, ("▰" * full, "$accent"), ("▱" * (_PROGRESS - full), "dim"))
    return line


def kv_pool(feed: EngineFeed, rows: int, width: int) -> list[Content]:
    ready, view = feed.ready, feed.view
    if ready is None:
        return []
    head = f"{ready.kv.total_blocks:,} blk × {ready.kv.block_size} tok"
    if view is None:
        return [section("KV POOL", head)]
    counts = count_all(view.kv)
    a_cell = blocks_a_cell(counts.total, width * rows)
    return [
        section("KV POOL", head, f"   {counts.share_in_use:.0%}", (" in use", "dim")),
        *map_lines(view.kv, width, rows),
        *legend(counts, a_cell, width),
    ]


def prefix(feed: EngineFeed) -> list[Content]:
    ready, totals = feed.ready, feed.totals
    if ready is not None and not ready.capabilities.prefix_cache:
        return [section("PREFIX", ("off", "dim"))]
    if not totals.admitted_tokens:
        return [section("PREFIX", ("no prompt yet", "dim"))]
    share = totals.cached_tokens / totals.admitted_tokens
    of = f"  ({totals.cached_tokens:,}/{totals.admitted_tokens:,} reused)"
    return [section("PREFIX", ("hit ", "dim"), f"{share:.0%}", (" tok", "dim"), (of, "dim"))]


def speculation(feed: EngineFeed) -> list[Content]:
    """How many guesses of a verify come true, their share, who guesses; or why nothing is guessed."""
    ready = feed.ready
    stats = feed.step.speculation if feed.step else None
    if ready is not None and not ready.speculation:
        return [section("SPEC", (_why_off(feed), "dim"))]
    if stats is None or not stats.verifies:
        name = ready.speculation if ready else ""
        lines = [section("SPEC", ("no guess yet  ", "dim"), sanitize(name))]
    else:
        accepted, drafted = stats.accepted / stats.verifies, stats.drafted / stats.verifies
        lines = [
            section(
                "SPEC",
                ("accept ", "dim"),
                f"{accepted:.1f}/{drafted:.1f}",
                ("  α ", "dim"),
                f"{stats.acceptance_rate:.2f}",
                (f"  {sanitize(stats.name)}", "dim"),
            )
        ]
    if stats is not None and stats.why:
        lines.append(Content.styled(f"{_INDENT}no guesses: {sanitize(stats.why)}", "dim"))
    return lines


def adapters(feed: EngineFeed) -> list[Content]:
    """How many requests go through each, where any are loaded."""
    if feed.step is None or not feed.step.lora.enabled:
        return []
    active = feed.step.lora.active.items()
    return [section("LORA", "  ".join(f"{sanitize(name)} {count}" for name, count in active))]


def _why_off(feed: EngineFeed) -> str:
    assert feed.ready is not None
    if feed.client.config.speculative == "off":
        return "off (--speculative)"
    if not feed.ready.capabilities.speculative_decoding:
        return "off: this model carries a state, which no wrong guess can leave"
    return "off: see the notes of the load"


def memory(feed: EngineFeed, width: int) -> list[Content]:
    ready, view = feed.ready, feed.view
    if ready is None:
        return []
    needs, limit = ready.memory, ready.memory_limit_bytes
    pool: list[Part | str] = [(f"KV {ready.info.kv_dtype or 'pool'}  ", "dim"), size(needs.kv_pool_bytes)]
    lines = [section("MEMORY", ("weights  ", "dim"), size(needs.parameter_bytes))]
    if view is not None:
        share = count_all(view.kv).share_in_use
        pool.append((f"  ({size(round(share * needs.kv_pool_bytes))} in use)", "dim"))
    lines.append(Content.assemble(_INDENT, *pool))
    held = view.memory_bytes if view is not None else needs.parameter_bytes + needs.kv_pool_bytes
    if limit:
        said = f" {held / limit:.0%} of {size(limit)}"
        gauge = bar(held / limit, max(4, width - LABEL - len(said)))
        lines.append(Content.assemble(_INDENT, gauge, said))
    else:
        peak = f", peak {size(view.peak_memory_bytes)}" if view is not None else ""
        lines.append(Content.assemble(_INDENT, ("held     ", "dim"), size(held), (peak, "dim")))
    return lines


def off(feed: EngineFeed) -> list[Content]:
    """Fast paths that are off, each with its reason."""
    reasons = feed.ready.capabilities.off if feed.ready else ()
    return [section("OFF" if i == 0 else "", (sanitize(why), "dim")) for i, why in enumerate(reasons)]


def model(feed: EngineFeed) -> list[Content]:
    """Facts of the load."""
    ready = feed.ready
    if ready is None:
        return []
    info = ready.info
    heads = (
        f"{info.num_layers} layers, {info.num_heads} heads, {info.num_kv_heads} KV heads of {info.head_dim}"
    )
    facts = (
        ("MODEL", f"{info.model_id}  {info.model_type}, {short(info.num_parameters)} parameters"),
        (
            "",
            heads,
        ),
        ("", f"context {ready.max_model_len:,} tokens, vocabulary {info.vocab_size:,}"),
        ("", f"{info.dtype}, quantization {info.quantization}, licence {info.licence}"),
        ("DEVICE", f"{info.device}  {ready.backend}: {ready.backend_reason}"),
        *(("NOTES" if i == 0 else "", note) for i, note in enumerate(ready.notes)),
    )
    return [section(name, sanitize(fact)) for name, fact in facts]


def name_of(request_id: str) -> str:
    """A request's name in a few cells."""
    clean = sanitize(request_id).replace("\n", " ").replace("\t", " ")
    return clean if len(clean) <= 8 else f"{clean[:7]}…"


def absence(feed: EngineFeed) -> list[Content]:
    """In place of readings."""
    death = feed.client.death
    if death is None:
        return [Content.styled("the engine is loading", "dim")]
    return [Content.assemble(("✖ ", "$text-error"), "no engine"), Content.styled(sanitize(str(death)), "dim")]
