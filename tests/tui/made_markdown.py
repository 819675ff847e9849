"""Markdown such as models write it, and such as nobody would: for hypothesis.

No raw HTML, which may run on behind a cut; a fence that is indented ends, as far as lists go.
"""

from __future__ import annotations

from hypothesis import strategies as st

LINES = (
    *(
        "",
        "",
        "text",
        "a  ",
        "  indented",
        "    code",
        "\ttab",
        "**bold",
        "bold** *it*",
        "`` ` `` odd",
        "===",
    ),
    *(
        "- item",
        "- ",
        "-",
        "* star",
        "+ plus",
        "*",
        "1. one",
        "1. ",
        "2) two",
        "10. ten",
        "  - sub",
        "   - below",
    ),
    *("```", "```py", "~~~", "````", "```x``` is inline code", "~~~~ x`y", "- ```py"),
    *("# head", "> q", ">", "> ```", "---", "* * *", "| a | b |", "|---|---|", "[a]: http://x.y"),
    *("```md\n    ```\n```", "   ```sh\n   ls\n   ```", "  ~~~\n  ls\n  ~~~"),
)
text = st.lists(st.sampled_from(LINES), max_size=14).map("\n".join)
