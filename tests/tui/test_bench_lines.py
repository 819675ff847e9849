"""What the screen of a running benchmark says of known events."""

from __future__ import annotations

from ferrum_mlx.bench.progress import Begun, Kept, Said, Skipped
from ferrum_tui.bench import lines
from ferrum_tui.bench.board import Board
from ferrum_tui.bench.table import blocks

from .bench_events import LONG, LONG_PEER, PP, PP_PEER, TG, TG_PEER, halfway, plan, run


def board(*events: object) -> Board:
    found = Board(lambda: 0.0, lambda: "14:02:31")
    for event in events or halfway():
        found.take(event)  # type: ignore[arg-type]
    return found


def plain(found: list) -> list[str]:  # type: ignore[type-arg]
    return [line.plain.rstrip() for line in found]


def test_wide() -> None:
    full = "█" * 40
    assert plain(lines.results(board(), 116)) == [
        f"{'pp512  prefill, tok/s':<76}  TTFT ms  ours ÷ it (range)",
        f"✓ ferrum-mlx         2/2   1,250.0  {full}      375",
        # 1000/500 and 1500/250, by repetition; of medians it would be 3.33
        f"✓ mlx-lm generate    2/2     375.0  {'█' * 12:<40}    1,500  4.00 (2.00–6.00)",
        "",
        f"{'admission × 7  longest gap, ms; less is better':<76}           ours ÷ it (range)",
        f"▶ ferrum-mlx         1/2       100  {'█' * 10}",
        f"· mlx-lm generate    1/2       400  {full}           4.00 (4.00–4.00)",
        "",
        "tg128 × 2  decode, tok/s",
        f"· ferrum-mlx         1/2      40.0  {full}",
        "✖ mlx-lm generate    0/2         –",
        "",
        "✓ check 0: equal ids, [/z]",
        "≈ check 1: near-tie, [/z]",
        "≠ check 2: differs, [/z]",
        "– check 3: not checked, [/z]",
        "✖ check 4: fault, [/z]",
        "✖ absent: llama.cpp, no llama-server[1m on the PATH [y]",
        "✖ left out: tg128 × 2 on mlx-lm, it failed: OSError: [a][0m",
        "memory is read at 100.0 GB/s here; tg128 × 2 reaches 61%",
        "note: a note [x][2J",
    ]


def test_narrow_has_the_same_figures_one_below_another() -> None:
    found = plain(lines.results(board(), 36))
    assert found[:6] == [
        "pp512  prefill, tok/s",
        "✓ ferrum-mlx         2/2",
        "   1,250.0  █████████  TTFT   375 ms",
        "✓ mlx-lm generate    2/2",
        "     375.0  ██▊        TTFT 1,500 ms",
        "  ours ÷ it  4.00 (2.00–6.00)",
    ]
    assert all(len(line) <= 36 for line in found)
    assert "✖ absent: llama.cpp, no" in found
    assert "  llama-server[1m on the PATH [y]" in found


def test_head() -> None:
    half = board()
    assert plain(lines.title(half, 116)) == ["ferrum bench  Tiny [b][31m  mlx, none  2 repetitions  seed 7"]
    assert plain(lines.title(half, 30)) == ["ferrum bench  Tiny [b][31m"]
    assert plain(lines.progress(half, 116)) == [
        "▶ admission × 7, ferrum-mlx  2 of 2  since 14:02:31",
        f"{'━' * 28}{'─' * 12}  7 of 10 runs  0:00 gone  about 0:00 to go",
    ]
    half.take(Said("the answer\x1b[3m to chat 1"))
    assert plain(lines.progress(half, 30))[0] == "… the answer[3m to chat 1"
    half.stop()
    assert plain(lines.progress(half, 116))[0].startswith("■ stopping")


def test_before_anything_is_known() -> None:
    empty = Board(lambda: 0.0)
    assert plain(lines.title(empty, 80)) == ["ferrum bench"]
    assert plain(lines.progress(empty, 40)) == ["…", "nothing measured yet  0:00 gone"]
    assert lines.results(empty, 80) == []


def test_what_is_left_out_is_not_waited_for() -> None:
    half = board(plan(reps=3))
    assert (half.done, half.total) == (0, 18)
    for event in run(PP_PEER, 0, prefill_tps=1.0):
        half.take(event)
    half.take(Skipped(PP_PEER, "it failed"))
    assert (half.done, half.total) == (1, 16)


def test_the_rest_is_what_the_kept_runs_took_times_what_is_left() -> None:
    seconds = 0.0
    found = Board(lambda: seconds)
    found.take(plan(reps=3))
    assert found.rest is None
    for key, took in ((PP, 4.0), (TG, 10.0), (PP, 6.0)):
        seconds += 100  # a warm-up, or an answer that had to be found first, is no run
        found.take(Begun(key, found.count(key)))
        seconds += took
        found.take(Kept(key, found.count(key), {}))
    for key in (LONG, LONG_PEER, TG_PEER):
        found.take(Skipped(key, "never"))
    # one more of 5 s, two of 10 s, and three of a peer that nothing is known of, at 7.5 s
    assert found.rest == 1 * 5.0 + 2 * 10.0 + 3 * 7.5
    assert found.elapsed == 320.0


def test_bars_begin_at_zero() -> None:
    assert [blocks(share, 4) for share in (0.0, 0.001, 0.5, 0.53, 1.0)] == ["", "▏", "██", "██▏", "████"]
